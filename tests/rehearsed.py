"""A campaign run as a rehearsal through the command line, and how a number is held against its tolerance."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from perfbook import paths
from perfbook.record import jsonl

#: Not detected, or (stronger) shown to be below the minimum effect of 2 %.
NO_DIFFERENCE = ("no difference detected", "equivalent within 2 %")


class Campaign:
    """A finished rehearsal: its folder, summary and records."""

    def __init__(self, folder: Path, variant: str | Path, settings: Sequence[str], *words: str) -> None:
        file = paths.params() / f"{variant}.yaml" if isinstance(variant, str) else variant
        command = [sys.executable, "-m", "perfbook", "run", str(file), "--rehearse", *words]
        command += [word for value in settings for word in ("--set", value)]
        environment = {"PERFBOOK_OUTPUTS": str(folder / "outputs"), "PERFBOOK_LOCK": str(folder / "lock")}
        self.done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=1500, check=False
        )
        self.path = next((folder / "outputs" / file.stem).glob("2*"))
        self.summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        self.records = jsonl.read(self.path / "records.jsonl")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


def busy(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What cells say about other processes and starvation."""
    reasons = [reason for cell in cells for reason in cell["validity"]["reasons"]]
    return [reason for reason in reasons if "other processes" in reason or "starved" in reason]


def holds(value: float, low: float, high: float, cells: Sequence[Mapping[str, Any]]) -> None:
    """The value lies within its tolerance, or this machine was too busy to say."""
    if not low <= value <= high and (reasons := busy(cells)):
        pytest.skip(f"{value:.4g} is not within {low:g} to {high:g}, but {reasons[0]}")
    assert low <= value <= high
