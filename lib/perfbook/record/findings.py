"""Findings: a claim, the evidence, the computed verdict, and what follows from it.

The sentences are data (``findings.toml``); a notebook only decides which finding holds and fills in its numbers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from perfbook.record import jsonl
from perfbook.record.run import ATTEMPT, Run, now_utc

SEVERITIES = ("problem", "warning", "info", "good")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes
    ----------
    id : str
        Name of the rule, with the subject where a rule can hold more than once.
    severity : str
        ``problem``, ``warning``, ``info`` or ``good``.
    title, evidence, next_step : str
        The claim; the numbers it rests on, with units and sample sizes; what to try.
    verdict : str
        The computed verdict in the words of the statistics that made it; empty where there is none to make.
    records : tuple of str
        Ids of the records that hold the evidence.
    """

    id: str
    notebook: str
    severity: str
    title: str
    evidence: str
    verdict: str
    next_step: str
    records: tuple[str, ...]


@cache
def rules() -> dict[str, dict[str, str]]:
    """The table of rules: name → severity, title, next_step."""
    return tomllib.loads(files(__package__).joinpath("findings.toml").read_text(encoding="utf-8"))


def make(
    rule: str,
    notebook: str,
    *,
    evidence: str,
    verdict: str = "",
    records: Sequence[str] = (),
    subject: str = "",
    **values: Any,
) -> Finding:
    """Fill a rule's sentences.

    ``subject`` tells several findings of one rule apart (a target's name, say). A placeholder without a value is a
    programming error and raises KeyError.
    """
    texts = rules()[rule]
    severity = texts["severity"].format_map(values)
    if severity not in SEVERITIES:
        raise ValueError(f"finding {rule}: severity {severity!r} is none of {SEVERITIES}")
    return Finding(
        id=f"{rule}:{subject}" if subject else rule,
        notebook=notebook,
        severity=severity,
        title=texts["title"].format_map(values),
        evidence=evidence,
        verdict=verdict,
        next_step=texts["next_step"].format_map(values),
        records=tuple(records),
    )


def record(run: Run, finding: Finding) -> None:
    """Append a finding to the run's ``findings.jsonl``."""
    attempts = [r["id"] for r in run.history() if r.get("kind") == ATTEMPT and r["notebook"] == finding.notebook]
    jsonl.append(
        run.path / "findings.jsonl",
        {"time": now_utc(), "attempt": attempts[-1] if attempts else "", **asdict(finding)},
    )


def current(run: Run) -> list[dict[str, Any]]:
    """Findings in force, gravest first: those of each notebook's latest attempt, the latest of each id."""
    latest = {r["notebook"]: r["id"] for r in run.history() if r.get("kind") == ATTEMPT}
    found: dict[str, dict[str, Any]] = {}
    for value in jsonl.read(run.path / "findings.jsonl"):
        if value.get("attempt") == latest.get(value.get("notebook", ""), "") and value.get("severity") in SEVERITIES:
            found[value["id"]] = value
    return sorted(found.values(), key=lambda value: SEVERITIES.index(value["severity"]))
