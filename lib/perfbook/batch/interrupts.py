"""Ctrl-C and SIGTERM during a campaign: heard once for certain, and not again while cleaning up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_INSIST_S = 10.0  # longer than the kernel of a notebook takes to end when it is asked to
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Raises KeyboardInterrupt in the main thread, again and again until it is acknowledged.

    Once is not enough: an interrupt that strikes inside a callback of an event loop or a finaliser is printed and
    forgotten by Python, and the notebook would go on for hours.
    """

    def __init__(self) -> None:
        self._acknowledged = threading.Event()
        self._insisting: threading.Thread | None = None

    def acknowledge(self) -> None:
        """The interrupt has arrived where it is dealt with."""
        self._acknowledged.set()

    def heard(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._insisting is None:
            main = threading.get_ident()
            self._insisting = threading.Thread(target=self._insist, args=(main,), daemon=True)
            self._insisting.start()
        if not self._acknowledged.is_set():
            raise KeyboardInterrupt

    def _insist(self, main: int) -> None:
        while not self._acknowledged.wait(_INSIST_S):
            signal.pthread_kill(main, signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """SIGTERM ends a campaign as Ctrl-C does: server stopped, report written."""
    interrupts = Interrupts()
    with _handled(interrupts.heard):
        try:
            yield interrupts
        finally:
            interrupts.acknowledge()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Stopping is bounded in time and must not be cut short by a second Ctrl-C."""
    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
