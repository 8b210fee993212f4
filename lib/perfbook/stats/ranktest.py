"""The Mann-Whitney test, exact with ties and within blocks, and the Hodges–Lehmann shift that belongs to it.

The statistic counts the pairs (one launch of each side, of the same block) in which the candidate's value is
above the baseline's, ties as a half. Under the null hypothesis every assignment of a block's values to the
two sides is equally likely, so its distribution is found by counting assignments (Mann & Whitney 1947; the
sum over blocks is van Elteren's idea, 1960, with equal weights). `scipy.stats.mannwhitneyu` is exact only
without ties and knows no blocks; without either the two agree. It is a test of whether one side tends to be
larger, not of medians.

The shift is the median of all pairwise differences (Hodges & Lehmann 1963), its interval two of the ordered
differences, chosen by the same distribution (Moses; Hollander & Wolfe, 4.3), so interval and test agree. Both
are taken on logarithms: a change in per cent that does not depend on which side is called the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from scipy import stats as sp

from perfbook.stats.result import Floats

Block: TypeAlias = tuple[Floats, Floats]
"""Baseline values and candidate values that were measured side by side."""

_EXACT_UP_TO = 60
"""Values per block up to which assignments are counted; above, the normal approximation is as good."""


@dataclass(frozen=True)
class RankTest:
    """What the test says about two sides.

    Attributes
    ----------
    p : float
        Two-sided probability of a statistic at least this far out, if the sides do not differ.
    smallest_p : float
        The p of complete separation: the best that these numbers of launches can reach.
    shift_pct : float
        Hodges–Lehmann shift of the candidate, in per cent of the baseline.
    low_pct, high_pct : float or None
        Its interval; None where so few values cannot bound it.
    """

    p: float
    smallest_p: float
    shift_pct: float
    low_pct: float | None
    high_pct: float | None


def rank_test(blocks: Sequence[Block], confidence: float) -> RankTest:
    """Test two sides for a difference, comparing within blocks only.

    Values must be above zero; every block needs both sides. One block is the ordinary Mann-Whitney test.
    """
    sizes = tuple((base.size, cand.size) for base, cand in blocks)
    differences = np.concatenate([np.log(cand[:, None] / base[None, :]).ravel() for base, cand in blocks])
    differences.sort()
    # Ties are decided on the values: rounding in a logarithm must not break one.
    twice_u = sum(_twice_u(base, cand) for base, cand in blocks)
    untied = tuple(tuple(range(1, a + b + 1)) for a, b in sizes)
    ranks = tuple(_dense_ranks(base, cand) for base, cand in blocks)
    low = high = None
    k = _lower_tail_count(sizes, untied, (1 - confidence) / 2)
    if k > 0:
        low, high = _percent(differences[k - 1]), _percent(differences[-k])
    return RankTest(
        p=_p_value(sizes, ranks, twice_u),
        smallest_p=_p_value(sizes, untied, 0),
        shift_pct=_percent(float(np.median(differences))),
        low_pct=low,
        high_pct=high,
    )


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(float(log_ratio))


def _twice_u(base: Floats, cand: Floats) -> int:
    above = cand[:, None] > base[None, :]
    equal = cand[:, None] == base[None, :]
    return int(2 * above.sum() + equal.sum())


def _dense_ranks(base: Floats, cand: Floats) -> tuple[int, ...]:
    """Sorted dense ranks: only which values are tied matters, so equal patterns share a distribution."""
    _, dense = np.unique(np.concatenate([base, cand]), return_inverse=True)
    return tuple(int(rank) for rank in np.sort(dense) + 1)


_Sizes: TypeAlias = tuple[tuple[int, int], ...]
_Ranks: TypeAlias = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def _p_value(sizes: _Sizes, ranks: _Ranks, twice_u: int) -> float:
    if _is_exact(sizes):
        null = _null(sizes, ranks)
        tail = min(null[: twice_u + 1].sum(), null[twice_u:].sum())
        return min(1.0, 2 * float(tail))
    mean, sd = _moments(sizes, ranks)
    if sd == 0:
        return 1.0
    return min(1.0, 2 * float(sp.norm.sf(max(abs(twice_u / 2 - mean) - 0.5, 0.0) / sd)))


@lru_cache(maxsize=1024)
def _lower_tail_count(sizes: _Sizes, ranks: _Ranks, tail: float) -> int:
    """Largest k with P(U ≤ k − 1) ≤ tail: the interval starts at the k-th ordered difference."""
    if _is_exact(sizes):
        whole = np.cumsum(_null(sizes, ranks)[::2])
        return int(np.searchsorted(whole, tail * (1 + 1e-12), side="right"))
    mean, sd = _moments(sizes, ranks)
    return max(0, math.floor(mean - 0.5 + float(sp.norm.ppf(tail)) * sd) + 1)


def _is_exact(sizes: _Sizes) -> bool:
    return max(a + b for a, b in sizes) <= _EXACT_UP_TO and len(sizes) <= _EXACT_UP_TO


@lru_cache(maxsize=1024)
def _null(sizes: _Sizes, ranks: _Ranks) -> Floats:
    """Probabilities of twice the statistic, 0 … 2·Σ(a·b): blocks are independent, so they convolve."""
    null: Floats = np.ones(1)
    for (base, cand), block in zip(sizes, ranks, strict=True):
        null = np.asarray(np.convolve(null, _block_null(base, cand, block)), dtype=np.float64)
    return null


@lru_cache(maxsize=1024)
def _block_null(base: int, cand: int, ranks: tuple[int, ...]) -> Floats:
    """Count, value by value, the ways to choose the candidate's ranks that give each rank sum."""
    doubled = _doubled_midranks(ranks)
    ways = np.zeros((cand + 1, int(doubled.sum()) + 1))
    ways[0, 0] = 1
    for rank in doubled:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    lowest = cand * (cand + 1)
    counts = ways[cand, lowest : lowest + 2 * base * cand + 1]
    return np.asarray(counts / counts.sum(), dtype=np.float64)


def _doubled_midranks(ranks: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(2 * sp.rankdata(ranks), dtype=np.int64)


def _moments(sizes: _Sizes, ranks: _Ranks) -> tuple[float, float]:
    """Mean and standard deviation of the statistic (ties included: the ranks' own variance)."""
    mean = sum(a * b / 2 for a, b in sizes)
    variance = 0.0
    for (a, b), block in zip(sizes, ranks, strict=True):
        variance += a * b / (a + b) * float(np.var(_doubled_midranks(block) / 2, ddof=1))
    return mean, math.sqrt(variance)
