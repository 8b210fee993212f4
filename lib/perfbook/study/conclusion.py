"""08: what follows from all of it? Targets held against records, findings gravest first.

Nothing is measured here, and nothing is typed: every sentence comes from a record, and names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfbook.desk import Desk, Verdict
from perfbook.errors import OutOfOrder
from perfbook.params import Targets
from perfbook.record import findings, summary
from perfbook.report.table import Table
from perfbook.units import label, quantity


@dataclass(frozen=True)
class Target:
    """A target held against what was measured; ``met`` None: not measured."""

    name: str
    target: float
    unit: str
    at_least: bool
    value: float | None
    notebook: str

    @property
    def met(self) -> bool | None:
        """Whether the measured median is on the right side."""
        if self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def sentence(self) -> str:
        """``single-stream decode rate at least 40 tok/s (measured 80.1 tok/s)``."""
        side = "at least" if self.at_least else "at most"
        measured = f"measured {quantity(self.value, self.unit)}" if self.value is not None else "not measured"
        return f"{self.name} {side} {_round(self.target)} {label(self.unit)} ({measured})"


def hold_targets(targets: Targets, measured: Mapping[str, Any]) -> list[Target]:
    """Hold every target that was set against ``summary.json`` values (pure)."""
    single, sweep = measured.get("single_stream") or {}, measured.get("sweep") or {}
    decode, best = single.get("decode_tok_s"), sweep.get("best_tok_s")
    ttft, tpot, stream = single.get("ttft_ms"), single.get("tpot_ms"), "03_single_stream"
    rows = (
        ("single-stream decode rate", targets.single_stream_tok_s, "tok_s", True, decode, stream),
        ("single-stream TTFT", targets.ttft_ms, "ms", False, ttft, stream),
        ("single-stream TPOT", targets.tpot_ms, "ms", False, tpot, stream),
        ("best throughput", targets.best_tok_s, "tok_s", True, best, "04_sweep"),
    )
    return [
        Target(name, float(target), unit, at_least, value, notebook)
        for name, target, unit, at_least, value, notebook in rows
        if target is not None
    ]


def _round(target: float) -> str:
    """A target as it was set: 40, not 40.0."""
    return f"{target:g}"


def judge(desk: Desk) -> list[Target]:
    """Record which targets are met."""
    measured = summary.summarise(desk.run)
    if measured["single_stream"] is None and measured["sweep"] is None:
        raise OutOfOrder(f"{desk.run.name} has no measured rate yet: run 03_single_stream or 04_sweep first")
    targets = hold_targets(desk.variant.targets, measured)
    record = desk.record(
        "targets",
        {
            "targets": [
                {
                    "name": t.name,
                    "target": t.target,
                    "unit": t.unit,
                    "at_least": t.at_least,
                    "value": t.value,
                    "met": t.met,
                }
                for t in targets
            ]
        },
    )
    for target in targets:
        rule = {True: "target_met", False: "target_missed", None: "target_unknown"}[target.met]
        desk.find(
            rule,
            subject=target.name,
            target=target.sentence,
            where=target.notebook,
            next_step=f"See {target.notebook} and the findings below for what limits it.",
            evidence=f"{target.notebook}: {quantity(target.value, target.unit)}",
            records=[record],
        )
    return targets


def target_table(targets: list[Target]) -> Table | str:
    """Targets, met or not."""
    if not targets:
        return "The parameter file sets no targets."
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [
        (
            t.name,
            f"{'≥' if t.at_least else '≤'} {_round(t.target)} {label(t.unit)}",
            quantity(t.value, t.unit),
            words[t.met],
            t.notebook,
        )
        for t in targets
    ]
    return Table(["target", "limit", "measured", "verdict", "from"], rows, caption="Targets of this variant")


def finding_table(desk: Desk) -> Table:
    """All findings in force, gravest first."""
    rows = [
        (f["severity"], f["title"], f["evidence"], f["next_step"], f["notebook"]) for f in findings.current(desk.run)
    ]
    return Table(["severity", "finding", "evidence", "try next", "from"], rows, caption="Findings, gravest first")


def conclude(desk: Desk, targets: list[Target]) -> Verdict:
    """Targets, bottleneck, and whether the numbers can be trusted."""
    measured = summary.summarise(desk.run)
    met, known = sum(t.met is True for t in targets), [t for t in targets if t.met is not None]
    parts = [f"{met} of {len(targets)} targets met" if targets else "no targets set"]
    if len(known) < len(targets):
        parts.append(f"{len(targets) - len(known)} not measured")
    for regime, sentence in (measured["bottleneck"] or {}).items():
        parts.append(f"at {regime}: {sentence.rstrip('.')}")
    trust = {
        "verified": "the answers were verified first",
        "wrong": "THE ANSWERS ARE WRONG: no rate here counts",
    }
    parts.append(trust.get(measured["answers"], "the answers were not checked (02_verify has not run)"))
    sentence = "; ".join(parts)
    return desk.conclude(sentence[:1].upper() + sentence[1:] + ".")
