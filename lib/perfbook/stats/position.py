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
        Requests (the sampling units) and gaps between tokens that went in.
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
    gaps_ms: Sequence[Sequence[float]] | Sequence[Floats],
    *,
    first_position: int = 1,
    confidence: float = 0.95,
) -> PositionFit:
    """Fit decode time against position by least squares over the gaps of several requests.

    `gaps_ms` holds, per request, the times between consecutive tokens in ms; the first of them is at
    `first_position` (1: the step that produced the second token). Least squares and not a robust line,
    because the fit has to account for the whole time: a stall belongs to the sum. The requests are
    the sampling units (gaps of one request are not independent): the intervals are Student's with the
    delete-one-request jackknife error (Tukey 1958), and one request has none.

    Raises
    ------
    BadInput
        When no request has two gaps, or a gap is not a number.
    """
    check_confidence(confidence)
    ys = [samples(one, "gaps_ms") for one in gaps_ms if len(one)]
    if not ys or max(y.size for y in ys) < 2:
        raise BadInput("gaps_ms: a line needs a request with at least two gaps (three output tokens)")
    # Per request: count, Σx, Σy, Σx², Σxy. A resample is then a weighted sum, not another pass over the gaps.
    rows = []
    for y in ys:
        x = np.arange(first_position, first_position + y.size, dtype=np.float64)
        rows.append([y.size, x.sum(), y.sum(), x @ x, x @ y])
    sums = np.array(rows)
    start, slope = _line(sums.sum(axis=0, keepdims=True))
    n = len(ys)
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
        gaps=int(sums[:, 0].sum()),
        first_position=first_position,
        last_position=first_position + max(y.size for y in ys) - 1,
    )


def _line(sums: Floats) -> tuple[Floats, Floats]:
    """Intercept (ms) and slope (µs per position) of each row of (count, Σx, Σy, Σx², Σxy)."""
    n, x, y, xx, xy = sums.T
    spread = n * xx - x * x
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(spread > 0, (n * xy - x * y) / spread, np.nan)
    return (y - slope * x) / n, 1000 * slope


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
