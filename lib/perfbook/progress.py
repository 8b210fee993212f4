"""One live line while something takes long: in a terminal, in a running notebook, and not at all elsewhere.

A saved notebook keeps one final line, without the widgets and carriage returns that other bars leave behind.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from perfbook import units

FILE_VARIABLE = "PERFBOOK_PROGRESS_FILE"
"""Environment variable: a file that always holds the current line."""


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


class _File:
    """For who watches from outside: an unattended run shows what its notebook is doing."""

    every_s = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path

    def show(self, text: str) -> None:
        with suppress(OSError):  # a full disk must not end a measurement for the sake of its progress line
            self._path.write_text(text, encoding="utf-8")

    def end(self, text: str) -> None:
        self.show("")


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
        self._lines = _choose(stream if stream is not None else sys.stderr)
        self._started = time.monotonic()
        self._shown = -float("inf")

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        for line in self._lines:
            line.show(self._what)
        return self

    def __call__(self, text: str) -> None:
        """Same as :meth:`update`, for whoever takes a plain callable."""
        self.update(text)

    def update(self, text: str) -> None:
        """Say what happens now; more often than a reader can follow, it is only kept."""
        self._text = " ".join(text.split())
        now = time.monotonic()
        if self._lines and now - self._shown >= max(line.every_s for line in self._lines):
            self._shown = now
            for line in self._lines:
                line.show(f"{self._what} · {units.duration(round(now - self._started, 1))} · {self._text}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took = units.duration(time.monotonic() - self._started)
        last = f" · {self._text}" if self._text and kind is not None else ""  # what was going on when it broke
        for line in self._lines:
            line.end(f"{self._what}: {'done in' if kind is None else 'stopped after'} {took}{last}")


def _choose(stream: TextIO) -> list[_Line]:
    """The notebook when a kernel runs us, else the terminal when there is one; a file where somebody asked for it."""
    lines: list[_Line] = []
    ipython = sys.modules.get("IPython")  # not imported: then we are in no notebook, and need not wait for it
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        lines.append(_Notebook())
    elif stream.isatty():
        lines.append(_Terminal(stream))
    if followed := os.environ.get(FILE_VARIABLE):
        lines.append(_File(Path(followed)))
    return lines
