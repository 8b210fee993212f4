"""The first error of a log: what went wrong, not what went wrong because of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def first_error(source: str | Sequence[Line]) -> RootError | None:
    """The first error in a log that explains itself; None when the log holds none.

    An exception counts before a bare message, a cause before its consequence: of the block of lines that one
    process wrote about the failure, the first exception is taken, and the front end's "see root cause above"
    never is.
    """
    lines = (
        [parse_line(number, raw) for number, raw in enumerate(split_lines(source), 1)]
        if isinstance(source, str)
        else list(source)
    )
    plain: Line | None = None
    for index, line in enumerate(lines):
        if line.level in _BAD:
            found = _exception_in(lines, index, logged=True)
            if found is not None:
                return _error(lines, found, line)
            if plain is None and not line.text.startswith(_SECONDARY):
                plain = line
        elif line.text.startswith(_TRACEBACK) and not line.level:
            found = _exception_in(lines, index, logged=False)
            if found is not None:
                return _error(lines, found, line)
        elif not line.level and _ARGPARSE.match(line.text):
            return _error(lines, index, line)
    return None if plain is None else _error(lines, plain.number - lines[0].number, plain)


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
