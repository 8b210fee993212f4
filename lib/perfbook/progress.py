"""One live line while something takes long: in a terminal, in a running notebook, and not at all elsewhere.

A saved notebook keeps one final line, without the widgets and carriage returns that other bars leave behind.
"""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from perfbook import units


class _Line(Protocol):
    """Where the line is shown."""

    every_s: float

    def show(self, text: str) -> None:
        """Replace what stands there."""

    def end(self, text: str) -> None:
        """Leave the final line."""


class _Terminal:
    every_s = 0.1

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r\x1b[2K{text[:width]}")
        self._stream.flush()

    def end(self, text: str) -> None:
        self._stream.write(f"\r\x1b[2K{text}\n")
        self._stream.flush()


class _Notebook:
    every_s = 0.25

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import DisplayHandle

        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = DisplayHandle()  # type: ignore[no-untyped-call]
            self._handle.display(bundle, raw=True)
        else:
            self._handle.update(bundle, raw=True)

    def end(self, text: str) -> None:
        self.show(text)


class _Nowhere:
    every_s = float("inf")

    def show(self, text: str) -> None:
        pass

    def end(self, text: str) -> None:
        pass


class Progress:
    """A live line for the time of a ``with`` block; call it (or :meth:`update`) with what happens now.

    Parameters
    ----------
    what : str
        What is under way, such as ``loading``.
    stream : text file, optional
        Where a terminal's line goes; default standard error. Nothing is written unless it is a terminal.

    Examples
    --------
    >>> with Progress("loading") as progress:
    ...     progress("shard 3 of 62")
    """

    def __init__(self, what: str, *, stream: TextIO | None = None) -> None:
        self._what = what
        self._text = ""
        self._line: _Line = _choose(stream if stream is not None else sys.stderr)
        self._started = time.monotonic()
        self._shown = -float("inf")

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._line.show(self._what)
        return self

    def __call__(self, text: str) -> None:
        """Same as :meth:`update`, for whoever takes a plain callable."""
        self.update(text)

    def update(self, text: str) -> None:
        """Say what happens now; more often than a reader can follow, it is only kept."""
        self._text = " ".join(text.split())
        now = time.monotonic()
        if now - self._shown >= self._line.every_s:
            self._shown = now
            self._line.show(f"{self._what} · {units.duration(round(now - self._started, 1))} · {self._text}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took = units.duration(time.monotonic() - self._started)
        last = f" · {self._text}" if self._text else ""
        self._line.end(f"{self._what}: {'done in' if kind is None else 'stopped after'} {took}{last}")


def _choose(stream: TextIO) -> _Line:
    """The notebook when a kernel runs us, else the terminal when there is one."""
    ipython = sys.modules.get("IPython")  # not imported: then we are in no notebook, and need not wait for it
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        return _Notebook()
    return _Terminal(stream) if stream.isatty() else _Nowhere()
