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
from perfbook.stats.knee import NO_PLATEAU, Knee, SloLimit, find_knee, find_slo_limit
from perfbook.stats.limits import CellLoad, Limit, Limitation, what_limits
from perfbook.stats.little import LittlesLaw, littles_law
from perfbook.stats.position import PositionFit, Totals, fit_position, fit_totals
from perfbook.stats.result import Estimate, Result
from perfbook.stats.shape import Modes, Outliers, find_modes, find_outliers
from perfbook.stats.steady import Drift, WarmUp, find_drift, find_warm_up
from perfbook.stats.verdict import MINIMUM_EFFECT_PCT, Label, Verdict, compare, compare_all, holm

__all__ = [
    "MINIMUM_EFFECT_PCT",
    "NO_PLATEAU",
    "Attribution",
    "CellLoad",
    "Drift",
    "Estimate",
    "Generation",
    "Knee",
    "Label",
    "Limit",
    "Limitation",
    "LittlesLaw",
    "Modes",
    "Outliers",
    "Part",
    "Percentile",
    "PositionFit",
    "Result",
    "SloLimit",
    "Totals",
    "Verdict",
    "WarmUp",
    "attribute_gap",
    "bootstrap",
    "compare",
    "compare_all",
    "find_drift",
    "find_knee",
    "find_modes",
    "find_outliers",
    "find_slo_limit",
    "find_warm_up",
    "fit_position",
    "fit_totals",
    "holm",
    "littles_law",
    "mean_interval",
    "median_interval",
    "percentile",
    "show_all",
    "what_limits",
]
