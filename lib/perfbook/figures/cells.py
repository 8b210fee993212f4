"""What figures read from sweep cells (the JSON of ``perfbook load``): one place that knows their keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from perfbook import units

Cells = Sequence[Mapping[str, Any]]
Points = dict[int, list[float]]


def throughput_tok_s(cell: Mapping[str, Any]) -> float | None:
    """Output tokens per second of the plateau; of the whole cell where not all streams ran together."""
    plateau = _finite(cell.get("output_tok_s_plateau"))
    return plateau if plateau is not None else _finite(cell.get("output_tok_s"))


def statistic(cell: Mapping[str, Any], key: str, which: str) -> float | None:
    """One statistic of a distribution, such as ``ttft_ms`` and ``p99``."""
    values = cell.get(key)
    return _finite(values.get(which)) if isinstance(values, Mapping) else None


def per_user_tok_s(cell: Mapping[str, Any]) -> float | None:
    """Tokens per second that one user sees once tokens flow: 1000 / mean TPOT in ms."""
    tpot_ms = statistic(cell, "tpot_ms", "mean")
    return 1000.0 / tpot_ms if tpot_ms else None


def valid(cell: Mapping[str, Any]) -> bool:
    """Whether nothing speaks against the cell; a cell without a verdict counts as valid."""
    validity = cell.get("validity")
    return not isinstance(validity, Mapping) or validity.get("verdict", "valid") == "valid"


def doubts(cells: Cells) -> str:
    """`` 3 of 18 cells are suspect or invalid.``, to end a caption; empty when nothing speaks against any."""
    doubtful = sum(not valid(cell) for cell in cells)
    return f" {doubtful} of {len(cells)} cells are suspect or invalid." if doubtful else ""


def by_concurrency(cells: Cells, values: Sequence[float | None]) -> Points:
    """Concurrency → the values of its repeats, ascending; cells without a value are left out."""
    points: Points = {}
    for cell, value in zip(cells, values, strict=True):
        if value is not None:
            points.setdefault(int(cell["concurrency"]), []).append(value)
    return dict(sorted(points.items()))


def medians(points: Points) -> tuple[list[int], list[float]]:
    """Concurrencies and the median of each one's repeats."""
    return list(points), [median(values) for values in points.values()]


def range_text(points: Points, unit: str) -> str:
    """Where a curve starts and ends: ``80.1 tok/s at 1 to 1536 tok/s at 256``."""
    x, y = medians(points)
    if not x:
        return "not measured"
    ends = [f"{units.quantity(y[i], unit)} at {x[i]}" for i in ((0, -1) if len(x) > 1 else (0,))]
    return " to ".join(ends)


def _finite(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None
