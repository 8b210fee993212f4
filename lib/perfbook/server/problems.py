"""What the preflight finds."""

from __future__ import annotations

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
        return f"{self.where}: {self.what}; {self.why}; {self.do}"
