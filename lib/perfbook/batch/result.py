"""How a variant of a campaign went."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from perfbook.batch.execute import Outcome
from perfbook.record.run import Run


@dataclass
class Result:
    """How one variant went."""

    variant: str
    run: Run | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    error: str = ""
    report: Path | None = None

    @property
    def complete(self) -> bool:
        """Every notebook completed, in this run or (resumed) before."""
        return not self.error and all(outcome.status == "completed" for outcome in self.outcomes.values())
