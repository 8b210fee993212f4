"""08: what follows from all of it? Targets held against records, findings gravest first.

Nothing is measured here, and nothing is typed: every sentence comes from a record, and names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfbook.desk import Desk, Verdict
from perfbook.errors import OutOfOrder
from perfbook.figures.cells import throughput_tok_s
from perfbook.params import Targets
from perfbook.record import findings, summary
from perfbook.report.table import Note, Table
from perfbook.study import doubts
from perfbook.units import interval, label

SURE = 0.95
"""Coverage from which an interval decides; the range of fewer than six values has less."""
_RULES = {
    "met": "target_met",
    "met, indicative": "target_met",
    "missed": "target_missed",
    "missed, indicative": "target_missed",
    "undecided": "target_undecided",
    "not measured": "target_unknown",
}


Ends = tuple[float | None, float | None, float | None]
"""Low, high, and the coverage of that interval."""


@dataclass(frozen=True)
class Target:
    """A target held against what was measured.

    ``low``, ``high``: the measured value's interval where it has one; ``confidence`` its coverage, as a fraction.
    """

    name: str
    target: float
    unit: str
    at_least: bool
    value: float | None
    notebook: str
    low: float | None = None
    high: float | None = None
    confidence: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the measured median is on the right side; None: not measured."""
        return None if self.value is None else self._holds(self.value)

    @property
    def decided(self) -> bool | None:
        """Whether the whole interval lies on the median's side; None where there is no interval."""
        if self.low is None or self.high is None or self.met is None:
            return None
        return self._holds(self.low) == self._holds(self.high) == self.met

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, ``undecided`` (the interval reaches both sides) or ``not measured``.

        ``met, indicative`` and ``missed, indicative`` where too few values speak for a 95 % interval.
        """
        if self.met is None:
            return "not measured"
        if self.decided is False:
            return "undecided"
        said = "met" if self.met else "missed"
        sure = self.decided and self.confidence is not None and self.confidence >= SURE
        return said if sure else f"{said}, indicative"

    def _holds(self, value: float) -> bool:
        return value >= self.target if self.at_least else value <= self.target

    @property
    def measured(self) -> str:
        """``80.1 tok/s [78.0, 81.2]``."""
        return interval(self.value, self.low, self.high, self.unit)

    @property
    def sentence(self) -> str:
        """``single-stream decode rate at least 40 tok/s (measured 80.1 tok/s)``."""
        side = "at least" if self.at_least else "at most"
        measured = f"measured {self.measured}" if self.value is not None else "not measured"
        few = "; too few values for a 95 % interval" if self.verdict.endswith("indicative") else ""
        return f"{self.name} {side} {_round(self.target)} {label(self.unit)} ({measured}{few})"


def hold_targets(targets: Targets, measured: Mapping[str, Any]) -> list[Target]:
    """Hold every target that was set against ``summary.json`` values (pure)."""
    single, sweep = measured.get("single_stream") or {}, measured.get("sweep") or {}
    decode, best = single.get("decode_tok_s"), sweep.get("best_tok_s")
    ttft, tpot, stream = single.get("ttft_ms"), single.get("tpot_ms"), "03_single_stream"
    estimates = single.get("estimates") or {}

    def ends(name: str, unit: str) -> Ends:
        estimate = estimates.get(name) or {}
        return estimate.get(f"low_{unit}"), estimate.get(f"high_{unit}"), estimate.get("confidence")

    rows = (
        (
            "single-stream decode rate",
            targets.single_stream_tok_s,
            "tok_s",
            True,
            decode,
            stream,
            ends("decode", "tok_s"),
        ),
        ("single-stream TTFT", targets.ttft_ms, "ms", False, ttft, stream, ends("ttft", "ms")),
        ("single-stream TPOT", targets.tpot_ms, "ms", False, tpot, stream, ends("tpot", "ms")),
        ("best throughput", targets.best_tok_s, "tok_s", True, best, "04_sweep", _repeats(sweep)),
    )
    return [
        Target(name, float(target), unit, at_least, value, notebook, *ends)
        for name, target, unit, at_least, value, notebook, ends in rows
        if target is not None
    ]


def _repeats(sweep: Mapping[str, Any]) -> Ends:
    """Lowest and highest repeat of the best concurrency: what to expect, with the coverage of a range."""
    cells = [c for c in doubts.usable(sweep.get("cells") or []) if c["concurrency"] == sweep.get("best_concurrency")]
    rates = [rate for cell in cells if (rate := throughput_tok_s(cell)) is not None]
    return (min(rates), max(rates), 1 - 2.0 ** (1 - len(rates))) if len(rates) > 1 else (None, None, None)


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
                    "low": t.low,
                    "high": t.high,
                    "verdict": t.verdict,
                }
                for t in targets
            ]
        },
    )
    for target in targets:
        rule = _RULES[target.verdict]
        desk.find(
            rule,
            subject=target.name,
            target=target.sentence,
            where=target.notebook,
            next_step=f"See {target.notebook} and the findings below for what limits it.",
            evidence=f"{target.notebook}: {target.measured}.{_doubt(target.notebook, measured)}",
            records=[record],
        )
    return targets


def target_table(targets: list[Target]) -> Table | Note:
    """Targets, met or not."""
    if not targets:
        return Note("The parameter file sets no targets.")
    rows = [
        (
            t.name,
            f"{'≥' if t.at_least else '≤'} {_round(t.target)} {label(t.unit)}",
            t.measured,
            t.verdict,
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
    verdicts = [t.verdict for t in targets]
    met = [word for word in verdicts if word.startswith("met")]
    parts = [f"{len(met)} of {len(targets)} targets met" if targets else "no targets set"]
    if any(word.endswith("indicative") for word in met):
        parts[0] += f" ({met.count('met, indicative')} of them indicatively)"
    parts += [f"{verdicts.count(word)} {word}" for word in ("undecided", "not measured") if word in verdicts]
    for regime, sentence in (measured["bottleneck"] or {}).items():
        parts.append(f"at {regime}: {sentence.partition(f' {doubts.MARK}')[0].rstrip('.')}")
    trust = {
        "verified": "the answers were verified first",
        "wrong": "THE ANSWERS ARE WRONG: no rate here counts",
    }
    parts.append(trust.get(measured["answers"], "the answers were not checked (02_verify has not run)"))
    doubtful = [text for notebook in ("03_single_stream", "04_sweep") if (text := _doubt(notebook, measured))]
    sentence = "; ".join(parts)
    return desk.conclude(sentence[:1].upper() + sentence[1:] + "." + "".join(doubtful))


def _doubt(notebook: str, measured: Mapping[str, Any]) -> str:
    """What speaks against a notebook's cells, as a sentence to follow a claim."""
    if notebook == "04_sweep":
        return doubts.sentence((measured.get("sweep") or {}).get("cells") or [], "cells of 04_sweep")
    single = measured.get("single_stream") or {}
    count = single.get("not_valid")
    return (
        f" {doubts.MARK}: {count} of {single['requests']} requests of {notebook} are suspect or invalid."
        if count
        else ""
    )
