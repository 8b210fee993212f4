"""Decode time against position in the output: what every further token of context costs.

The step before output token i (i = 1 … N − 1) is taken to last a + b·i: `a` is the decode time of an empty
output, `b` what each token of context adds to it (more KV cache to read). A whole generation of N tokens then
takes

    T(N) = TTFT + a·(N − 1) + b·N(N − 1)/2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as sp

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.result import Estimate, Floats, Result, check_confidence, samples


@dataclass(frozen=True)
class PositionFit(Result):
    """TPOT as a straight line over the token's position in the output.

    Attributes
    ----------
    start : Estimate
        Decode time at position 0, in ms.
    slope : Estimate
        What each position adds, in µs per token.
    requests, gaps : int
        Requests (the sampling units) and gaps between events that went in.
    first_position, last_position : int
        The range fitted; outside it the line is a guess.
    """

    start: Estimate
    slope: Estimate
    requests: int
    gaps: int
    first_position: int
    last_position: int

    def at_ms(self, position: float) -> float:
        """Return the fitted decode time of a position, in ms."""
        assert self.start.value is not None
        assert self.slope.value is not None
        return self.start.value + self.slope.value * position / 1000


def fit_position(
    gaps_ms: Sequence[Sequence[float] | Floats],
    tokens: Sequence[Sequence[int]] | None = None,
    *,
    first_position: int = 1,
    confidence: float = 0.95,
) -> PositionFit:
    """Fit decode time against position by least squares over the gaps of several requests.

    `gaps_ms` holds, per request, the times between consecutive events in ms; `tokens` how many tokens the
    event that ends each gap carried, left out where all carried one. The first gap's token is at
    `first_position` (1: the prefill yielded one token). A gap of m tokens is the sum of m steps, a·m + b·Σ
    position.

    Least squares and not a robust line, because the fit has to account for the whole time: a stall belongs to
    the sum. The requests are the sampling units (gaps of one request are not independent): the intervals are
    Student's with the delete-one-request jackknife error (Tukey 1958), and one request has none.

    Raises
    ------
    BadInput
        When no request has two gaps, a gap is not a number, or `tokens` does not match the gaps.
    """
    check_confidence(confidence)
    if tokens is not None and [len(one) for one in tokens] != [len(one) for one in gaps_ms]:
        raise BadInput("tokens: needs one count for every gap of every request")
    rows, ends = [], []
    for index, gaps in enumerate(gaps_ms):
        if not len(gaps):
            continue
        y = samples(gaps, "gaps_ms")
        m = np.ones(y.size) if tokens is None else samples(tokens[index], "tokens", positive=True)
        first = first_position + np.concatenate([[0.0], np.cumsum(m)[:-1]])
        x = m * first + m * (m - 1) / 2
        # Sufficient sums, so that leaving a request out is a subtraction and not another pass over the gaps.
        rows.append([m @ m, m @ x, m @ y, x @ x, x @ y, y.size])
        ends.append(int(first[-1] + m[-1] - 1))
    if not rows or max(row[-1] for row in rows) < 2:
        raise BadInput("gaps_ms: a line needs a request with at least two gaps (three output tokens)")
    sums = np.array(rows)
    start, slope = _line(sums.sum(axis=0, keepdims=True))
    n = len(rows)
    bounds: list[tuple[float | None, float | None]] = [(None, None), (None, None)]
    method = "one request"
    if n > 1:
        t = float(sp.t.ppf((1 + confidence) / 2, n - 1))
        without_one = _line(sums.sum(axis=0) - sums)
        bounds = [_jackknife(*line, t) for line in zip((start, slope), without_one, strict=True)]
        method = f"least squares, jackknife over {n} requests"
    return PositionFit(
        Estimate(float(start[0]), *bounds[0], "ms", n, confidence, method),
        Estimate(float(slope[0]), *bounds[1], "us_per_token", n, confidence, method),
        requests=n,
        gaps=int(sums[:, -1].sum()),
        first_position=first_position,
        last_position=max(ends),
    )


def _line(sums: Floats) -> tuple[Floats, Floats]:
    """Start (ms) and slope (µs per position) of each row of (Σm², Σmx, Σmy, Σx², Σxy, …)."""
    mm, mx, my, xx, xy = sums.T[:5]
    spread = mm * xx - mx * mx
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 0, (mm * xy - mx * my) / spread, np.nan)
        return (my - slope * mx) / mm, 1000 * slope


def _jackknife(full: Floats, without_one: Floats, t: float) -> tuple[float | None, float | None]:
    """Student interval from the delete-one replicates; unknown where leaving one out leaves no line."""
    n = without_one.size
    error = np.sqrt((n - 1) / n * np.sum((without_one - without_one.mean()) ** 2))
    return units.finite(float(full[0] - t * error)), units.finite(float(full[0] + t * error))


@dataclass(frozen=True)
class Totals(Result):
    """What whole-request times alone say: TTFT and first decode time in ms, slope in µs per token."""

    ttft_ms: float
    start_ms: float
    slope_us_per_token: float


def fit_totals(points: Iterable[tuple[int, float]]) -> Totals:
    """Fit (output tokens, total seconds) pairs of one prompt, where nothing finer was timed.

    Least squares of T = TTFT + a·(N − 1) + b·N(N − 1)/2; with three lengths the solution is exact, so it
    cannot be wrong by its own lights. Prefer :func:`fit_position` on timed tokens.

    Raises
    ------
    BadInput
        With fewer than three different lengths.
    """
    pairs = list(points)
    tokens = samples((n for n, _ in pairs), "output tokens", positive=True)
    total_s = samples((t for _, t in pairs), "total_s", positive=True)
    if np.unique(tokens).size < 3:
        raise BadInput("total times: three different output lengths are needed to tell prefill, rate and slope")
    design = np.column_stack([np.ones_like(tokens), tokens - 1, tokens * (tokens - 1) / 2])
    ttft, start, slope = np.linalg.lstsq(design, total_s)[0]
    return Totals(1e3 * float(ttft), 1e3 * float(start), 1e6 * float(slope))
