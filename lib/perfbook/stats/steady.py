"""Is the run steady? Warm-up and drift, looked for in the order of measurement.

Both checks are rank-based, so that an outlier is neither. They assume independent samples: requests that
overlap in time are correlated, and then the checks err towards finding something.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import stats as sp

from perfbook import units
from perfbook.stats.result import Floats, Result, samples
from perfbook.stats.shape import (
    ALPHA,
    FEWEST,
    LARGEST_SIMULATED,
    MATERIAL_PCT,
    SEED,
    SIMULATIONS,
    exceedance,
    find_outliers,
)


@dataclass(frozen=True)
class Drift(Result):
    """Whether samples rise or fall over the order in which they were taken.

    Attributes
    ----------
    detected : bool or None
        None: too few samples to tell.
    change_pct : float
        From the first to the last sample along the Theil–Sen line, in per cent of the median.
    p : float or None
        Two-sided p of Kendall's τ against the order (Mann 1945).
    n : int
        Samples.
    """

    detected: bool | None
    change_pct: float
    p: float | None
    n: int

    @property
    def sentence(self) -> str:
        """The check's result in words."""
        if self.detected is None:
            return f"Drift unknown: {self.n} samples, {FEWEST} are needed."
        if not self.detected:
            return "No drift detected."
        return f"Drift of {units.percent(self.change_pct, sign=True)} over {self.n} samples."


def find_drift(values: Iterable[float], *, material_pct: float = MATERIAL_PCT) -> Drift:
    """Test samples, in the order of measurement, for a monotone trend that is also at least `material_pct`
    large.

    Kendall's test of the values against their order, and the Theil–Sen slope (over the medians of 512 blocks
    where there are more samples).
    """
    data = samples(values)
    n, level = data.size, float(np.median(data))
    blocks = np.array_split(np.arange(n), min(n, LARGEST_SIMULATED))
    places = [float(block.mean()) for block in blocks]
    medians = [float(np.median(data[block])) for block in blocks]
    slope = float(sp.theilslopes(medians, places)[0]) if n > 1 else 0.0
    change_pct = 100 * slope * (n - 1) / abs(level) if level else 0.0
    if n < FEWEST:
        return Drift(None, change_pct, None, n)
    p = units.finite(float(sp.kendalltau(np.arange(n), data).pvalue))
    # τ is undefined on constant data, which do not drift.
    return Drift(p is not None and p <= ALPHA and abs(change_pct) >= material_pct, change_pct, p, n)


@dataclass(frozen=True)
class WarmUp(Result):
    """Whether the samples are already steady when they begin.

    Attributes
    ----------
    over : bool or None
        False: a break in the first third, or a first sample that is an outlier. None: too few samples to
        tell.
    steady_from : int
        Index of the first sample after the break; 0 where there is none.
    before, after : float or None
        Median before and after the break.
    p : float or None
        Chance of a break this clear in samples without one.
    n : int
        Samples.
    """

    over: bool | None
    steady_from: int
    before: float | None
    after: float | None
    p: float | None
    n: int

    @property
    def sentence(self) -> str:
        """The check's result in words."""
        if self.over is None:
            return f"Steady state unknown: {self.n} samples, {FEWEST} are needed."
        if self.over:
            return "Steady from the first sample."
        assert self.before is not None
        assert self.after is not None
        if self.steady_from == 1:
            before, after = units.number(self.before), units.number(self.after)
            return f"The first of {self.n} samples stands apart: {before}, against a median of {after} of the rest."
        return (
            f"Warm-up was not over: the first {self.steady_from} of {self.n} samples have a median of "
            f"{units.number(self.before)}, the rest of {units.number(self.after)}."
        )


def find_warm_up(values: Iterable[float], *, material_pct: float = MATERIAL_PCT) -> WarmUp:
    """Look for a break in the level within the first third of the samples, in the order of measurement.

    The break is where the standardised Mann-Whitney statistic of "before" against "after" is largest (after
    Pettitt 1979); its p is counted in simulated orders of as many samples. Ranks cannot tell a single first
    sample, so that one counts when it is an outlier and the farthest of all. A break is reported only if the
    level moves by `material_pct` or more.
    """
    data = samples(values)
    n = data.size
    if n < FEWEST:
        return WarmUp(None, 0, None, None, None, n)
    scores = _break_scores(sp.rankdata(data)[None, :])[0]
    at = int(np.argmax(scores)) + 1
    p = exceedance(_break_null(min(n, LARGEST_SIMULATED)), float(scores[at - 1]))
    clear = p <= ALPHA
    farthest = int(np.argmax(np.abs(data - np.median(data))))
    if not clear and farthest == 0 and find_outliers(data).first:
        at, clear = 1, True
    before, after = float(np.median(data[:at])), float(np.median(data[at:]))
    if clear and 3 * at <= n and abs(before - after) >= material_pct / 100 * abs(after):
        return WarmUp(False, at, before, after, p, n)
    return WarmUp(True, 0, None, None, p, n)


def _break_scores(ranks: Floats) -> Floats:
    """|z| of the rank sum of the first k samples against the rest, for k = 1 … n − 1, in each row."""
    n = ranks.shape[1]
    k = np.arange(1, n)
    excess: Floats = np.cumsum(ranks - (n + 1) / 2, axis=1)[:, :-1]
    return np.asarray(np.abs(excess) / np.sqrt(k * (n - k) * (n + 1) / 12), dtype=np.float64)


@lru_cache(maxsize=256)
def _break_null(n: int) -> Floats:
    rng = np.random.default_rng(SEED)
    orders = rng.permuted(np.tile(np.arange(1.0, n + 1), (SIMULATIONS, 1)), axis=1)
    return np.sort(_break_scores(orders).max(axis=1))
