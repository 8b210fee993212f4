"""Verdicts of every side against the baseline's, and the schema of ``perfbook compare --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from perfbook import stats
from perfbook.stats.result import plain
from perfbook.study import noise
from perfbook.study.compare.runs import Measured, read_runs
from perfbook.units import label

SCHEMA = 1
NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Row:
    """One metric of one side against the baseline.

    ``why``: why they cannot be compared (``verdict`` None), or why a difference may not be called real.
    """

    metric: str
    unit: str
    better: Literal["lower", "higher"]
    side: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    verdict: stats.Verdict | None
    why: str = ""

    @property
    def label(self) -> str:
        """The verdict in words."""
        if self.verdict is None:
            return NOT_COMPARABLE
        return noise.WITHIN_NOISE if self.why else self.verdict.text

    @property
    def sentence(self) -> str:
        """The verdict with its numbers, or why there is none."""
        if self.verdict is None:
            return self.why
        return f"{self.verdict.sentence}; but {self.why}" if self.why else self.verdict.sentence


@dataclass(frozen=True)
class Comparison:
    """Everything that was compared.

    Attributes
    ----------
    sides : dict
        Side → names of its runs, baseline first.
    rows : tuple of Row
    differences : tuple of str
        What differs beside the side itself, in sentences.
    changes : dict
        Side → how its server differs from the baseline's.
    """

    sides: Mapping[str, tuple[str, ...]]
    rows: tuple[Row, ...]
    differences: tuple[str, ...]
    changes: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The schema of ``perfbook compare --json``.

        ``{"schema": 1, "baseline": side, "sides": {side: {"runs": [name], "changes": text}}, "differences": [sentence],
        "metrics": [{"metric", "unit", "better", "side", "baseline": [x], "candidate": [x], "label", "effect_pct",
        "low_pct", "high_pct", "adjusted_p", "comparisons", "why"}]}``: one number per run in ``baseline`` and
        ``candidate``, in the metric's unit; ``effect_pct`` in the metric's own direction; numbers are null where the
        label is ``not comparable``.
        """
        return {
            "schema": SCHEMA,
            "baseline": next(iter(self.sides)),
            "sides": {
                side: {"runs": list(runs), "changes": self.changes.get(side, "")} for side, runs in self.sides.items()
            },
            "differences": list(self.differences),
            "metrics": [_row_json(row) for row in self.rows],
        }


def compare_runs(names: Sequence[str | Path]) -> Comparison:
    """Compare runs given by folder or by variant, the baseline first; errors as in :func:`read_runs`."""
    return compare_measured(*read_runs(names))


def compare_measured(runs: Sequence[Measured], changes: Mapping[str, str] | None = None) -> Comparison:
    """Verdicts of every side against the first run's (pure).

    Times and rates are two families of comparisons; each gets half of the chance of a false alarm.
    """
    sides: dict[str, list[Measured]] = {}
    for run in runs:
        sides.setdefault(run.side, []).append(run)
    baseline, *others = sides
    rows: list[Row] = []
    metrics = dict.fromkeys(metric for run in runs for metric in run.metrics)
    for better in ("lower", "higher"):
        family = [metric for metric in metrics if _better(metric) == better]
        pending = [_row(metric, side, sides[baseline], sides[side]) for metric in family for side in others]
        pairs = {f"{row.metric}|{row.side}": (row.baseline, row.candidate) for row in pending if not row.why}
        judged = stats.compare_all(pairs, better=better, alpha=0.025) if pairs else {}
        for row in pending:
            verdict = judged.get(f"{row.metric}|{row.side}")
            refused = _within_noise(row, verdict, [*sides[baseline], *sides[row.side]])
            rows.append(replace(row, verdict=verdict, why=row.why or refused))
    names = {side: tuple(run.name for run in group) for side, group in sides.items()}
    return Comparison(names, tuple(rows), tuple(_differences(runs)), dict(changes or {}))


def _within_noise(row: Row, verdict: stats.Verdict | None, runs: Sequence[Measured]) -> str:
    """Why a difference that the statistics call real may still be the client's; empty where it cannot."""
    real = verdict is not None and verdict.label in (stats.Label.FASTER, stats.Label.SLOWER)
    if not real or row.unit != "ms":
        return ""
    effect_ms = median(row.candidate) - median(row.baseline)
    records = [record for run in runs for record in run.null_runs]
    return noise.refusal(records, effect_ms, "ttft" if row.metric == "ttft_ms" else "gap")


def _differences(runs: Sequence[Measured]) -> list[str]:
    found = []
    for what in dict.fromkeys(key for run in runs for key in run.about):
        values = {run.about.get(what, "unknown") for run in runs}
        if len(values) > 1:
            found.append(f"{what} differs: {', '.join(sorted(values))}")
        elif what == "answers" and values != {"verified"}:
            found.append(f"the answers are {', '.join(values)} in every run")
        elif what == "rehearsed" and values == {"yes"}:
            found.append("every run is a rehearsal: nothing was measured on this hardware")
    return found


def _row(metric: str, side: str, base: Sequence[Measured], other: Sequence[Measured]) -> Row:
    asked = {run.asked[metric] for run in (*base, *other) if metric in run.asked}
    before = tuple(run.metrics[metric] for run in base if metric in run.metrics)
    after = tuple(run.metrics[metric] for run in other if metric in run.metrics)
    why = ""
    if not before or not after:
        why = f"not measured by {'the baseline' if not before else side}"
    elif len(asked) > 1:
        why = "the runs were asked for different work (prompt, lengths or options of the workload)"
    return Row(metric, "ms" if metric.endswith("_ms") else "tok_s", _better(metric), side, before, after, None, why)


def _better(metric: str) -> Literal["lower", "higher"]:
    return "lower" if metric.endswith("_ms") else "higher"


def _row_json(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    return {
        "metric": row.metric,
        "unit": label(row.unit),
        "better": row.better,
        "side": row.side,
        "baseline": plain(row.baseline),
        "candidate": plain(row.candidate),
        "label": row.label,
        "effect_pct": verdict.effect_pct if verdict else None,
        "low_pct": verdict.low_pct if verdict else None,
        "high_pct": verdict.high_pct if verdict else None,
        "adjusted_p": verdict.adjusted_p if verdict else None,
        "comparisons": verdict.comparisons if verdict else None,
        "why": row.why,
    }
