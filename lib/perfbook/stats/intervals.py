"""Intervals: for a median, a mean, a percentile, and by resampling for anything else.

The unit that is sampled decides what an interval means. Requests of one launch say how well this launch is
known; only several launches say what another launch would give. Pass one number per sampling unit, or to
:func:`bootstrap` one array per unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as sp

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.result import Estimate, Floats, Result, check_confidence, samples

FEW = 10
"""Below this many samples every point is shown beside the summary."""


def median_interval(values: Iterable[float], unit: str = "", *, confidence: float = 0.95) -> Estimate:
    """Return the median with its order-statistic interval, which assumes nothing about the distribution.

    Its ends are two of the samples, chosen by the binomial distribution of how many lie below the median
    (Conover, Practical Nonparametric Statistics, 3.2; `scipy.stats.quantile_test`), so the coverage is at
    least `confidence`. With fewer than six samples 95 % cannot be reached: the interval is then the range,
    whose exact coverage 1 − 2^(1−n) stands in ``confidence``. One sample has no interval.
    """
    check_confidence(confidence)
    data = samples(values)
    n = data.size
    low, high = _quantile_bounds(data, 0.5, confidence)
    method = "order statistics"
    if n > 1 and (low is None or high is None):
        low, high, confidence, method = float(data.min()), float(data.max()), 1 - 2.0 ** (1 - n), "range"
    return Estimate(float(np.median(data)), low, high, unit, n, confidence, method if n > 1 else "one sample")


def mean_interval(values: Iterable[float], unit: str = "", *, confidence: float = 0.95) -> Estimate:
    """Return the mean with Student's t interval: for the few repeats of a cell, taken as roughly normal."""
    check_confidence(confidence)
    data = samples(values)
    n, mean = data.size, float(data.mean())
    if n == 1:
        return Estimate(mean, None, None, unit, 1, confidence, "one sample")
    half = float(sp.t.ppf((1 + confidence) / 2, n - 1) * data.std(ddof=1) / math.sqrt(n))
    return Estimate(mean, mean - half, mean + half, unit, n, confidence, "Student t")


@dataclass(frozen=True)
class Percentile(Result):
    """A percentile and whether the samples can carry it.

    Attributes
    ----------
    pct : float
        Which percentile, 99 for p99.
    estimate : Estimate
        Value and order-statistic interval; a side that the samples cannot bound is None.
    needed_n : int
        The fewest samples that bound both sides at this confidence.
    """

    pct: float
    estimate: Estimate
    needed_n: int

    @property
    def supported(self) -> bool:
        """Whether there are enough samples for an interval with two ends."""
        return self.estimate.n >= self.needed_n

    @property
    def mark(self) -> str:
        """What to print beside an unsupported percentile; empty where it is supported."""
        if self.supported:
            return ""
        return f"p{self.pct:g} from {self.estimate.n} samples; {self.needed_n} are needed to bound it"

    def __str__(self) -> str:
        """The estimate, followed by the mark where there is one."""
        return f"{self.estimate} ({self.mark})" if self.mark else str(self.estimate)


def percentile(values: Iterable[float], pct: float, unit: str = "", *, confidence: float = 0.95) -> Percentile:
    """Return a percentile (linear interpolation) with its order-statistic interval and the samples it needs.

    Raises
    ------
    BadInput
        When `pct` is not strictly between 0 and 100.
    """
    check_confidence(confidence)
    if not 0 < pct < 100:
        raise BadInput(f"percentile: {pct:g} is not between 0 and 100")
    data = samples(values)
    low, high = _quantile_bounds(data, pct / 100, confidence)
    estimate = Estimate(float(np.percentile(data, pct)), low, high, unit, data.size, confidence, "order statistics")
    # The largest sample bounds the quantile q from above unless all n lie below it: q^n must be at most α/2.
    needed = math.ceil(math.log((1 - confidence) / 2) / math.log(max(pct, 100 - pct) / 100))
    return Percentile(float(pct), estimate, needed)


def bootstrap(
    sampled: Sequence[float] | Sequence[Sequence[float]] | Sequence[Floats],
    statistic: Callable[[Floats], float] = np.median,
    unit: str = "",
    *,
    seed: int,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Estimate:
    """Return any statistic with its percentile bootstrap interval (Efron 1979), the same for the same seed.

    `sampled` has one entry per sampling unit: a number, or all the values of one launch (or request), which
    are drawn together and pooled, because values of one launch are not independent repeats. Constant data
    give a point; one unit gives no interval. With fewer than about ten units the interval is too narrow:
    prefer :func:`median_interval` or :func:`mean_interval` there.

    Raises
    ------
    BadInput
        When there is no sampling unit, or one of them is empty or not finite.
    """
    check_confidence(confidence)
    pools = [samples(np.atleast_1d(np.asarray(one, dtype=np.float64)), "bootstrap") for one in sampled]
    if not pools:
        raise BadInput("bootstrap: needs at least one sampling unit")
    value, n = float(statistic(np.concatenate(pools))), len(pools)
    if n == 1:
        return Estimate(value, None, None, unit, 1, confidence, "one sample")
    draws = np.random.default_rng(seed).integers(0, n, size=(resamples, n))
    replicates = [float(statistic(np.concatenate([pools[i] for i in draw]))) for draw in draws]
    tail = (1 - confidence) / 2
    low, high = (float(end) for end in np.quantile(replicates, [tail, 1 - tail]))
    return Estimate(value, low, high, unit, n, confidence, f"bootstrap over {n} units, seed {seed}")


def show_all(values: Iterable[float], unit: str = "") -> str | None:
    """Return every point as text where there are fewer than ten, to be shown and not summed up; else None."""
    data = samples(values)
    if data.size >= FEW:
        return None
    return f"{', '.join(units.number(float(x)) for x in data)} {units.label(unit)}".rstrip()


def _quantile_bounds(data: Floats, q: float, confidence: float) -> tuple[float | None, float | None]:
    low, high = np.asarray(sp.quantile_test(data, q=0.0, p=q).confidence_interval(confidence), dtype=float)
    return units.finite(float(low)), units.finite(float(high))
