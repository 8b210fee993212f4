"""Lines of a vLLM log: without colours and progress-bar rewrites, taken apart into who, level, message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perfbook.errors import BadInput

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")
_RANKS = r"(?:TP|PP|DP|EP|PCP|DCP|ETP)\d+"
_WHO = (
    rf"\((?P<process>[A-Za-z][\w-]*?)(?P<rank>(?:[ _]{_RANKS})*)\s+"
    r"(?:rank=(?P<number>\d+)\s+)?pid=\d+(?:, ip=[\d.]+)?\)\s*"
)
_PREFIX = re.compile(
    rf"(?:{_WHO})?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? \[?[^\]\[\s]+:\d+\] ?"
)
_WHO_ONLY = re.compile(rf"{_WHO}")
_TIME = re.compile(r" \d\d-\d\d \d\d:")
#: What journald, docker compose and the like put in front is at most this long.
_FOREIGN_PREFIX = 120
_PREFIXES = _FOREIGN_PREFIX + 160
#: Of a line longer than this only the beginning is read: banners have some thousand characters.
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes
    ----------
    number : int
        From 1.
    process, rank : str
        Such as ``EngineCore`` and ``TP3``; empty when the line does not say.
    level : str
        ``INFO``, ``ERROR``, …; empty for text that did not come through the logger.
    time : str
        Month-day and time of day as logged; empty likewise.
    text : str
        The message.
    """

    number: int
    process: str
    rank: str
    level: str
    time: str
    text: str


def clean(line: str) -> str:
    """Without escape sequences and what a carriage return has overwritten."""
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    line = line.rstrip("\r\n")
    return line.rsplit("\r", 1)[-1] if "\r" in line else line


def split_lines(text: str) -> list[str]:
    """Physical lines; only newlines separate, so that numbers agree with an editor's."""
    return text.split("\n")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file, one at a time, however large it is; bytes that are no UTF-8 are replaced.

    Raises
    ------
    BadInput
        It cannot be read, or is a device.
    """
    try:
        if path.is_char_device() or path.is_block_device():
            raise BadInput(f"{path}: a device, not a log")
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            rest = False
            while piece := file.readline(_LONGEST):
                if not rest:
                    yield piece
                rest = not piece.endswith("\n")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None


def parse_line(number: int, raw: str) -> Line:
    """Take one line apart; whatever it holds."""
    text = clean(raw)
    found = _PREFIX.match(text, 0, _PREFIXES)
    if found is None and _TIME.search(text, 0, _PREFIXES):
        found = _PREFIX.search(text, 0, _PREFIXES)
    if found is not None and found.start() <= _FOREIGN_PREFIX:
        return Line(number, found["process"] or "", _rank(found), found["level"], found["time"], text[found.end() :])
    found = _WHO_ONLY.match(text, 0, _PREFIXES)
    if found is not None:
        return Line(number, found["process"], _rank(found), "", "", text[found.end() :])
    return Line(number, "", "", "", "", text)


def _rank(found: re.Match[str]) -> str:
    """TP0_EP0 → ``TP0 EP0``; versions that number their workers instead say ``rank 3``."""
    named = (found["rank"] or "").replace("_", " ").strip()
    return named or (f"rank {found['number']}" if found["number"] else "")
