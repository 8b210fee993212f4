"""Ctrl-C while a server starts or stops: counted, and acted upon at the next safe point."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Counts SIGINT while active, instead of raising it wherever the program happens to be.

    The first one asks for an orderly end, the second for a quick one. Outside the main thread signals cannot
    be caught, and nothing changes.
    """

    def __init__(self) -> None:
        self.count = 0
        self._previous: Any = None
        self._active = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous if self._previous is not None else signal.SIG_DFL)
            self._active = False

    def raise_if_any(self) -> None:
        """Raise the interrupt that was held back."""
        if self.count:
            raise KeyboardInterrupt

    def hurry(self) -> bool:
        """Whether it was asked for more than once."""
        return self.count > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
