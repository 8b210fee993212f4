"""A comparison in tables, in one sentence, and as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from statistics import median

from perfbook import stats
from perfbook.report.table import Column, Note, Table
from perfbook.study.compare.verdicts import NOT_COMPARABLE, Comparison
from perfbook.units import percent, quantity

_WIDTH = 80
_NAMES = {"ttft_ms": "TTFT of one stream", "tpot_ms": "TPOT of one stream"}


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
            row.verdict.effect_pct if row.verdict else None, row.label, row.sentence,
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
        if row.verdict is not None and not row.why and row.verdict.label in (stats.Label.FASTER, stats.Label.SLOWER):
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
        said = row.sentence if row.verdict else f"{NOT_COMPARABLE}: {row.why}"
        lines += [
            "",
            *textwrap.wrap(head, _WIDTH),
            *textwrap.wrap(said, _WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
    return "\n".join(lines) + "\n"


def name_of(metric: str) -> str:
    """A metric as people read it: ``throughput at 8``."""
    return _NAMES.get(metric) or metric.replace("tok_s at", "throughput at")


def _middle(values: Sequence[float], unit: str) -> str:
    return quantity(median(values), unit) if values else "not measured"
