"""The shape of a sample: outliers and two modes. What is found is reported; nothing here removes a sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perfbook import units
from perfbook.stats.result import Floats, Result, samples

ALPHA = 0.01
"""Chance of a false alarm of one check: every cell gets several, so it is stricter than a verdict's."""
FEWEST = 8
"""Samples below which no check of shape or order says anything."""
MATERIAL_PCT = 1.0
"""Smallest step, drift or distance of modes that is worth a word, in per cent of the median."""
SIMULATIONS = 4000
LARGEST_SIMULATED = 512
"""Samples up to which a null distribution is simulated; larger samples use this one's (it hardly changes)."""
SEED = 20240229


@dataclass(frozen=True)
class Outliers(Result):
    """Samples far from the rest, reported and kept.

    Attributes
    ----------
    indices : tuple of int
        Their positions in the order of measurement.
    values : tuple of float
        Their values.
    first : bool
        Whether the first sample is one: warm-up, more often than chance.
    n : int
        Samples.
    """

    indices: tuple[int, ...]
    values: tuple[float, ...]
    first: bool
    n: int

    @property
    def sentence(self) -> str:
        """The report in words."""
        if not self.indices:
            return "No outliers."
        listed = ", ".join(units.number(value) for value in self.values[:5])
        more = f" and {len(self.values) - 5} more" if len(self.values) > 5 else ""
        first = " The first sample is one of them: was warm-up over?" if self.first else ""
        return f"{len(self.indices)} of {self.n} samples are outliers ({listed}{more}); they are kept.{first}"


def find_outliers(values: Iterable[float], *, cut: float = 3.5) -> Outliers:
    """Report samples whose modified z score 0.6745·|x − median| / MAD exceeds `cut` (Iglewicz & Hoaglin
    1993).

    Where more than half of the samples are equal (MAD = 0) the mean absolute deviation takes its place, as
    the same source has it. Fewer than four samples have no outliers.
    """
    data = samples(values)
    distance = np.abs(data - np.median(data))
    scale = float(np.median(distance)) / 0.6745 or float(distance.mean()) * 1.253314
    far = np.flatnonzero(distance > cut * scale) if data.size >= 4 and scale > 0 else np.array([], dtype=int)
    return Outliers(tuple(int(i) for i in far), tuple(float(data[i]) for i in far), bool(0 in far), int(data.size))


@dataclass(frozen=True)
class Modes(Result):
    """Whether the samples have two modes, so that their median may stand for neither.

    Attributes
    ----------
    detected : bool or None
        None: too few samples to tell.
    centres : tuple of float
        Median of the lower and of the upper group; empty where there is one mode.
    counts : tuple of int
        Samples in each.
    p : float or None
        Chance of a folding ratio this small in samples with one mode.
    n : int
        Samples.
    """

    detected: bool | None
    centres: tuple[float, ...]
    counts: tuple[int, ...]
    p: float | None
    n: int

    @property
    def sentence(self) -> str:
        """The check's result in words."""
        if self.detected is None:
            return f"Modes unknown: {self.n} samples, {FEWEST} are needed."
        if not self.detected:
            return "One mode."
        low, high = (units.number(centre) for centre in self.centres)
        return (
            f"Two modes, near {low} ({self.counts[0]} samples) and {high} ({self.counts[1]}): "
            "the median may stand for neither."
        )


def find_modes(values: Iterable[float], *, material_pct: float = MATERIAL_PCT) -> Modes:
    """Test samples for two modes by folding (Siffer, Fouque, Termier & Largouët, KDD 2018).

    Folded at the point that reflects one half onto the other, two modes fall together: the variance of |x −
    s| is less than a quarter of the variance, its value for the uniform distribution, whose simulated samples
    give p. A group of one sample, or of less than a tenth, is an outlier and not a mode; groups closer than
    `material_pct` of the median are one.
    """
    data = samples(values)
    n = data.size
    if n < FEWEST:
        return Modes(None, (), (), None, n)
    if np.ptp(data) == 0:
        return Modes(False, (), (), None, n)
    ratio, pivot = _fold(data[None, :])
    p = exceedance(_unfolded_null(min(n, LARGEST_SIMULATED)), -float(ratio[0]))
    upper = data > pivot[0]
    counts = (int(n - upper.sum()), int(upper.sum()))
    if p > ALPHA or min(counts) < max(2, n / 10):
        return Modes(False, (), (), p, n)
    centres = (float(np.median(data[~upper])), float(np.median(data[upper])))
    if centres[1] - centres[0] < material_pct / 100 * abs(float(np.median(data))):
        return Modes(False, (), (), p, n)
    return Modes(True, centres, counts, p, n)


def _fold(rows: Floats) -> tuple[Floats, Floats]:
    """Folding ratio and pivot of each row."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    variance = np.mean(centred**2, axis=1)
    pivot = np.mean(centred**3, axis=1) / (2 * variance)
    folded = np.abs(centred - pivot[:, None])
    return 4 * folded.var(axis=1) / variance, pivot + rows.mean(axis=1)


@lru_cache(maxsize=256)
def _unfolded_null(n: int) -> Floats:
    """Negative folding ratios of uniform samples, so that a small ratio is a large value, sorted."""
    return np.sort(-_fold(np.random.default_rng(SEED).random((SIMULATIONS, n)))[0])


def exceedance(null: Floats, value: float) -> float:
    """Share of the sorted null values that are at least `value`, never 0 (Davison & Hinkley's + 1)."""
    return float((null.size - np.searchsorted(null, value, side="left") + 1) / (null.size + 1))
