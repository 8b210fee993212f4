"""Where a sweep over concurrency stops paying: the knee, and the last concurrency that meets the SLO.

Both are stated rules and not fits: the smallest concurrency with at least 95 % of the best throughput, and
the last one before the SLO is first missed. (A geometric knee finder moves with the scale of the axis.)
Repeats of a cell give the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.result import Floats, Result, check_confidence, samples

SHARE_OF_BEST = 0.95
STILL_RISING = 0.5
"""Growth of throughput per growth of concurrency (both as logarithms) above which a curve still rises."""
NO_PLATEAU = "no plateau in range"
_RESAMPLES = 2000


@dataclass(frozen=True)
class Knee(Result):
    """The knee of throughput over concurrency.

    Attributes
    ----------
    concurrency : int or None
        Smallest concurrency with `share` of the best throughput; None: no plateau in range.
    low, high : int or None
        Interval from the repeats. `low` None: no cell has repeats. `high` None: they leave open whether there
        is a plateau at all.
    best_concurrency : int
        Where throughput was highest.
    best_tok_s, last_tok_s : float
        Median throughput there, and at the highest concurrency.
    share : float
        The rule's fraction of the best.
    no_plateau_share : float or None
        Fraction of resamples without a plateau.
    repeats : int
        Fewest repeats of any cell.
    cells : int
        Concurrencies measured.
    """

    concurrency: int | None
    low: int | None
    high: int | None
    best_concurrency: int
    best_tok_s: float
    last_tok_s: float
    share: float
    no_plateau_share: float | None
    repeats: int
    cells: int
    confidence: float

    @property
    def collapses(self) -> bool:
        """Whether throughput at the highest concurrency has fallen below `share` of the best."""
        return self.last_tok_s < self.share * self.best_tok_s

    @property
    def sentence(self) -> str:
        """The knee in words, its interval and how far to trust it."""
        best = f"{units.quantity(self.best_tok_s, 'tok_s')} at {self.best_concurrency}"
        if self.cells == 1:
            return f"Whether there is a plateau is unknown: only one concurrency was measured ({best})."
        if self.concurrency is None:
            return f"{NO_PLATEAU.capitalize()}: throughput still rises at the end ({best})."
        text = f"{100 * self.share:g} % of the best ({best}) is reached at concurrency {self.concurrency}"
        if self.low is not None:
            text += f" [{self.low}, {'beyond the range' if self.high is None else self.high}]"
        else:
            text += ", one run per cell, so without an interval"
        if self.collapses:
            text += f"; at the end it has fallen to {units.quantity(self.last_tok_s, 'tok_s')}"
        return text + "."


def find_knee(
    throughput_tok_s: Mapping[int, Sequence[float]],
    *,
    seed: int,
    share: float = SHARE_OF_BEST,
    confidence: float = 0.95,
) -> Knee:
    """Return the smallest concurrency whose median throughput is at least `share` of the best.

    There is no plateau in range when that is the highest concurrency measured, or when throughput from there
    to the best still grows with more than the square root of concurrency (two neighbouring concurrencies are
    within 5 % of each other on any curve). The interval is a percentile bootstrap over the repeats within
    each cell; constant repeats give a point, a single repeat per cell none.

    Parameters
    ----------
    throughput_tok_s : mapping
        Concurrency → output tokens per second, one number per repeat.

    Raises
    ------
    BadInput
        Without cells, or with a throughput that is not above zero.
    """
    check_confidence(confidence)
    cells = {c: samples(throughput_tok_s[c], f"throughput at {c}", positive=True) for c in sorted(throughput_tok_s)}
    if not cells or min(cells) < 1:
        raise BadInput("knee: needs at least one cell, with concurrencies from 1 up")
    concurrency = np.array(list(cells))
    medians = np.array([[float(np.median(runs)) for runs in cells.values()]])
    index = int(_knee_index(concurrency, medians, share)[0])
    repeats = min(runs.size for runs in cells.values())
    low: int | None = None
    high: int | None = None
    no_plateau_share: float | None = None
    if repeats > 1:
        rng = np.random.default_rng(seed)
        drawn = np.column_stack(
            [
                np.median(runs[rng.integers(0, runs.size, size=(_RESAMPLES, runs.size))], axis=1)
                for runs in cells.values()
            ]
        )
        found = np.sort(_knee_index(concurrency, drawn, share))
        tail = (1 - confidence) / 2
        first, last = (int(end) for end in np.quantile(found, [tail, 1 - tail], method="nearest"))
        no_plateau_share = float(np.mean(found == len(cells)))
        low = int(concurrency[min(first, len(cells) - 1)])
        high = int(concurrency[last]) if last < len(cells) else None
    best = int(np.argmax(medians[0]))
    return Knee(
        concurrency=int(concurrency[index]) if index < len(cells) else None,
        low=low,
        high=high,
        best_concurrency=int(concurrency[best]),
        best_tok_s=float(medians[0, best]),
        last_tok_s=float(medians[0, -1]),
        share=share,
        no_plateau_share=no_plateau_share,
        repeats=repeats,
        cells=len(cells),
        confidence=confidence,
    )


def _knee_index(concurrency: Floats, throughput: Floats, share: float) -> Floats:
    """Index of the knee in each row; one past the end where there is no plateau."""
    best = throughput.argmax(axis=1)
    rows = np.arange(len(throughput))
    index = (throughput >= share * throughput.max(axis=1, keepdims=True)).argmax(axis=1)
    end = len(concurrency)
    log_c = np.log(concurrency)
    steps = log_c[best] - log_c[index]
    rise = np.log(throughput[rows, best]) - np.log(throughput[rows, index])
    rising = (index == end - 1) | ((best == end - 1) & (rise > STILL_RISING * steps) & (steps > 0))
    return np.where(rising, end, index)


@dataclass(frozen=True)
class SloLimit(Result):
    """The last concurrency that meets the SLO.

    Attributes
    ----------
    concurrency : int or None
        The last one before the majority of repeats first misses it; None: not even the lowest meets it.
    low, high : int or None
        The last one up to which every repeat meets it, and up to which any does.
    reached_end : bool
        Whether the highest concurrency still meets it, so that the limit lies beyond the range.
    meets_again : tuple of int
        Concurrencies above the limit that meet it all the same: a sign of noise.
    """

    concurrency: int | None
    low: int | None
    high: int | None
    reached_end: bool
    meets_again: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """The limit in words."""
        if self.concurrency is None:
            if self.meets_again:
                again = ", ".join(map(str, self.meets_again))
                return f"The SLO is missed at the lowest concurrency, yet met at {again}: these cells give no limit."
            text = "The SLO is missed at every concurrency measured"
            return f"{text}, though some repeats meet it up to {self.high}." if self.high else f"{text}."
        if self.reached_end:
            return f"The SLO is met up to {self.concurrency}, the highest concurrency measured."
        text = f"The SLO is met up to concurrency {self.concurrency}"
        if (self.low, self.high) != (self.concurrency, self.concurrency):
            text += f" (by every repeat up to {self.low or 'none'}, by some up to {self.high})"
        if self.meets_again:
            text += f"; it is met again at {', '.join(map(str, self.meets_again))}"
        return text + "."


def find_slo_limit(met: Mapping[int, Sequence[bool]]) -> SloLimit:
    """Return the last concurrency that meets an SLO, from whether each repeat of each cell met it.

    A cell meets it when more than half of its repeats do. What "meeting" is (p95 TTFT under a limit, a
    goodput share) is the caller's; deciding it per repeat is what gives the interval, without assuming a
    distribution.

    Raises
    ------
    BadInput
        Without cells, or with a cell without repeats.
    """
    cells = {c: list(met[c]) for c in sorted(met)}
    if not cells or not all(cells.values()):
        raise BadInput("SLO: needs at least one cell, and at least one repeat in each")

    def last(meets: list[bool]) -> int | None:
        first_miss = meets.index(False) if False in meets else len(meets)
        return list(cells)[first_miss - 1] if first_miss else None

    majority = [2 * sum(runs) > len(runs) for runs in cells.values()]
    limit = last(majority)
    return SloLimit(
        concurrency=limit,
        low=last([all(runs) for runs in cells.values()]),
        high=last([any(runs) for runs in cells.values()]),
        reached_end=all(majority),
        meets_again=tuple(c for c, ok in zip(cells, majority, strict=True) if ok and c > (limit or 0)),
    )
