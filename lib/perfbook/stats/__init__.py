"""Statistics of benchmarks: intervals, verdicts, steady state, the knee and its cause, attribution. All pure.

Every function takes data and returns a frozen dataclass with ``to_json()`` and, where a person reads it, a
``sentence``. Randomness is seeded by the caller. One number per sampling unit: a launch for anything that
needed a relaunch, a repeat for a cell, a request within one launch.
"""

from perfbook.stats.attribution import (
    Attribution,
    Generation,
    Part,
    attribute_gap,
)
from perfbook.stats.intervals import (
    Percentile,
    bootstrap,
    mean_interval,
    median_interval,
    percentile,
    show_all,
)
from perfbook.stats.knee import Knee, SloLimit, find_knee, find_slo_limit
from perfbook.stats.limits import CellLoad, Limit, Limitation, what_limits
from perfbook.stats.position import PositionFit, Totals, fit_position, fit_totals
from perfbook.stats.result import Estimate, Result

__all__ = [
    "Attribution",
    "CellLoad",
    "Estimate",
    "Generation",
    "Knee",
    "Limit",
    "Limitation",
    "Part",
    "Percentile",
    "PositionFit",
    "Result",
    "SloLimit",
    "Totals",
    "attribute_gap",
    "bootstrap",
    "find_knee",
    "find_slo_limit",
    "fit_position",
    "fit_totals",
    "mean_interval",
    "median_interval",
    "percentile",
    "show_all",
    "what_limits",
]
