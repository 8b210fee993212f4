"""Lines of a vLLM log: without colours and progress-bar rewrites, taken apart into who, level, message."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
#: What journald, docker compose and the like put in front is at most this long.
_FOREIGN_PREFIX = 120


@dataclass(frozen=True)
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
    return _ANSI.sub("", line).rstrip("\r\n").rsplit("\r", 1)[-1]


def split_lines(text: str) -> list[str]:
    """Physical lines; only newlines separate, so that numbers agree with an editor's."""
    return text.split("\n")


def parse_line(number: int, raw: str) -> Line:
    """Take one line apart; whatever it holds."""
    text = clean(raw)
    found = _PREFIX.search(text, 0, _FOREIGN_PREFIX + 160)
    if found is not None and found.start() <= _FOREIGN_PREFIX:
        return Line(number, found["process"] or "", _rank(found), found["level"], found["time"], text[found.end() :])
    found = _WHO_ONLY.match(text)
    if found is not None:
        return Line(number, found["process"], _rank(found), "", "", text[found.end() :])
    return Line(number, "", "", "", "", text)


def _rank(found: re.Match[str]) -> str:
    """TP0_EP0 → ``TP0 EP0``; versions that number their workers instead say ``rank 3``."""
    named = (found["rank"] or "").replace("_", " ").strip()
    return named or (f"rank {found['number']}" if found["number"] else "")
