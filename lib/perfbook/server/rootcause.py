"""The first error of a log: what went wrong, not what went wrong because of it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfbook.server.lines import Line, parse_line, split_lines

_EXCEPTION = re.compile(
    r"^(?P<kind>(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout))(?:: (?P<text>.*))?$"
)
_ARGPARSE = re.compile(r"^[\w.\-/ ]+: error: (?P<text>.+)$")
_TRACEBACK = "Traceback (most recent call last):"
_BAD = frozenset({"ERROR", "CRITICAL"})
#: Names the reader of a log cares less about than the error behind them.
_SECONDARY = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "Worker proc",
    "WorkerProc initialization failed",
)
_AROUND = 3
_BLOCK = 400
#: Complaints without an exception after which no exception is looked for any more.
_TRIES = 2000


@dataclass(frozen=True)
class RootError:
    """The first error.

    Attributes
    ----------
    line : int
        Line number in the log, from 1.
    message : str
        The exception with its text, or the logged message; one line.
    process, rank : str
        Who said it (``Worker``, ``TP3``); empty when the line does not say.
    context : tuple of str
        The lines around it.
    """

    line: int
    message: str
    process: str
    rank: str
    context: tuple[str, ...]


def first_error(source: str | Iterable[Line]) -> RootError | None:
    """The first error in a log that explains itself; None when the log holds none.

    An exception counts before a bare message, a cause before its consequence: of the block of lines that one
    process wrote about the failure, the first exception is taken, and the front end's "see root cause above"
    never is.
    """
    search = Search()
    lines = (
        (parse_line(number, raw) for number, raw in enumerate(split_lines(source), 1))
        if isinstance(source, str)
        else source
    )
    for line in lines:
        search.feed(line)
    return search.result()


class Search:
    """The search for the first error, fed line by line; holds a few hundred lines, however long the log is."""

    def __init__(self) -> None:
        self._window: deque[Line] = deque()
        self._at = 0  # the line of the window that is looked at next
        self._tried = 0
        self._plain: RootError | None = None
        self._found: RootError | None = None

    def feed(self, line: Line) -> None:
        """One more line."""
        if self._found is not None:
            return
        self._window.append(line)
        if len(self._window) > _AROUND + _BLOCK + _AROUND:
            self._look()

    def result(self) -> RootError | None:
        """The first error of all that was fed."""
        while self._found is None and self._at < len(self._window):
            self._look()
        return self._found or self._plain

    def _look(self) -> None:
        """Judge one line by what follows it, and forget what lies too far back."""
        line = self._window[self._at]
        bad = line.level in _BAD
        traceback = not line.level and line.text.startswith(_TRACEBACK)
        if (bad or traceback) and self._tried < _TRIES:
            self._tried += 1
            lines = list(self._window)
            index = _exception_in(lines, self._at, logged=bad)
            if index is not None:
                self._found = _error(lines, index, line)
            elif bad and self._plain is None and not line.text.startswith(_SECONDARY):
                self._plain = _error(lines, self._at, line)
        elif not line.level and _ARGPARSE.match(line.text):
            self._found = _error(list(self._window), self._at, line)
        if self._at < _AROUND:
            self._at += 1
        else:
            self._window.popleft()


def _exception_in(lines: Sequence[Line], start: int, *, logged: bool) -> int | None:
    """Index of the first exception in the block of one process that begins here, consequences passed over."""
    first = lines[start]
    inside = not logged
    for index in range(start, min(start + _BLOCK, len(lines))):
        line = lines[index]
        if logged:
            if line.level not in _BAD or (line.process, line.rank) != (first.process, first.rank):
                if line.level and (line.process, line.rank) == (first.process, first.rank):
                    return None  # the same process went on with something else
                continue
        elif line.level:
            continue  # another process's line in between
        if line.text.startswith(_TRACEBACK):
            inside = True
        found = _EXCEPTION.match(line.text) if inside else None
        if found is not None and not (found["text"] or "").startswith(_SECONDARY):
            return index
    return None


def _error(lines: Sequence[Line], index: int, speaker: Line) -> RootError:
    line = lines[index]
    usage = _ARGPARSE.match(line.text) if not line.level else None
    message = usage["text"] if usage else line.text.strip()
    following = lines[index + 1].text if index + 1 < len(lines) else ""
    if re.search(r"\d+ validation errors? for \w+$", message) and following.startswith("  "):
        message = f"{message}: {following.strip().partition(' [type=')[0]}"
    around = lines[max(0, index - _AROUND) : index + _AROUND + 1]
    return RootError(
        line.number,
        " ".join(message.split())[:600],
        line.process or speaker.process,
        line.rank or speaker.rank,
        tuple(one.text[:300] for one in around),
    )
