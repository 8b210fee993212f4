"""What the preflight finds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "skipped"]


@dataclass(frozen=True)
class Problem:
    """Something that would fail, could mislead, or cannot be checked here.

    Attributes
    ----------
    level : str
        ``error``: the launch would fail or not do what was asked; ``warning``: worth knowing; ``skipped``:
        not checked.
    what, where, why, do : str
        What is wrong, the key or place, the reason, and what to do about it.
    """

    level: Level
    what: str
    where: str
    why: str
    do: str

    def __str__(self) -> str:
        """One line."""
        return " ".join(f"{self.where}: {self.what}; {self.why}; {self.do}".split())


def render_text(problems: Sequence[Problem]) -> str:
    """The list for a terminal of 80 columns."""
    if not problems:
        return "nothing found: the launch should work\n"
    lines = []
    for problem in problems:
        lines += textwrap.wrap(f"{problem.level:<8} {problem.what}", 80, subsequent_indent=" " * 9)
        for label, text in (("where", problem.where), ("why", problem.why), ("do", problem.do)):
            lines += textwrap.wrap(f"{'':<9}{label + ':':<7}{text}", 80, subsequent_indent=" " * 16)
    counts = {level: sum(one.level == level for one in problems) for level in ("error", "warning", "skipped")}
    lines.append(f"{counts['error']} errors, {counts['warning']} warnings, {counts['skipped']} not checked")
    return "\n".join(lines) + "\n"
