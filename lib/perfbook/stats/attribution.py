"""Why one generation is slower per token than another: the gap between two blended rates, split into causes.

A generation of N tokens takes

    T(N) = TTFT + a·(N − 1) + b·N(N − 1)/2 + warm-up

(:mod:`perfbook.stats.position`). Both rates N/T are *blended*; between two lengths with k = N_long / N_short
the time gap

    T(N_long) − k · T(N_short)

is a sum of one term per cause, and so, exactly, is the gap between the two rates. A prefill that both share
has a *negative* share on the longer one, where it is spread over more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.result import Estimate, Result

PREFILL = "prefill"
SLOPE = "context slope"
WARM_UP = "warm-up"
FIRST_TOKEN = "first token"
REMAINDER = "remainder"


@dataclass(frozen=True)
class Generation:
    """One of the two things compared: a mean request of `tokens` output tokens.

    Attributes
    ----------
    tokens : int
        Output tokens.
    total_s : float
        Wall-clock seconds of the whole request.
    prefill_s : float
        Time to the first token, in seconds.
    warm_up_s : float
        Seconds of `total_s` known to be warm-up (0 when a warm-up request came before).
    """

    tokens: int
    total_s: float
    prefill_s: float
    warm_up_s: float = 0.0

    @property
    def blended_tok_s(self) -> float:
        """Tokens over total time."""
        return self.tokens / self.total_s


@dataclass(frozen=True)
class Part(Result):
    """One cause's share of the gap: in seconds of the longer generation, and in tok/s of the rate."""

    cause: str
    seconds: float
    tok_s: float
    low_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True)
class Attribution(Result):
    """A gap between two blended rates, split into causes that sum to it.

    Attributes
    ----------
    gap_s : float
        T(long) − k · T(short), k the ratio of the lengths; above zero: the longer one is slower per token.
    gap_tok_s : float
        Rate of the longer minus rate of the shorter generation.
    ratio : float
        k.
    parts : tuple of Part
        Prefill, context slope, warm-up, (first token,) remainder.
    """

    gap_s: float
    gap_tok_s: float
    ratio: float
    parts: tuple[Part, ...]

    def __getitem__(self, cause: str) -> Part:
        """Return the part of a cause by its name; KeyError where it is not among the parts."""
        return {part.cause: part for part in self.parts}[cause]

    @property
    def sentence(self) -> str:
        """The largest cause, and how much is left unexplained."""
        causes = [part for part in self.parts if part.cause != REMAINDER]
        top = max(causes, key=lambda part: abs(part.seconds))
        rest = self[REMAINDER].seconds
        gap, share, left = (units.quantity(x, "s", sign=True) for x in (self.gap_s, top.seconds, rest))
        return f"Of {gap}, {top.cause} accounts for {share}; {left} is unexplained."


def attribute_gap(
    short: Generation,
    long: Generation,
    *,
    slope: Estimate | float,
    start_ms: float | None = None,
) -> Attribution:
    """Split the gap between two generations' blended rates into causes.

    With k = long.tokens / short.tokens and each term with its sign: prefill P_long − k·P_short; context slope
    b·(N_long² − k·N_short²)/2; warm-up W_long − k·W_short; the remainder is what is left, so the parts sum to
    the gap. Where `start_ms` (decode time at position 0) is given, the k − 1 decode steps that the shorter
    generation saves because its prefill already yields a token are a part of their own ("first token") and
    not left in the remainder.

    Parameters
    ----------
    short, long : Generation
        Same prompt, same settings, different output lengths.
    slope : Estimate or float
        Growth of decode time in µs per token, as :func:`fit_position` gives it; its interval carries over.
    start_ms : float, optional
        Decode time at position 0 in ms.

    Raises
    ------
    BadInput
        When `long` is not longer than `short`, or a time is not above zero.
    """
    if not 0 < short.tokens < long.tokens:
        raise BadInput(f"attribution: {short.tokens} and {long.tokens} tokens: the first must be the shorter")
    if min(short.total_s, long.total_s) <= 0:
        raise BadInput("attribution: total_s must be above zero for both generations")
    k = long.tokens / short.tokens
    b = slope if isinstance(slope, Estimate) else Estimate(float(slope), unit="us_per_token")
    if b.value is None:
        raise BadInput("attribution: the slope is unknown; fit it first with fit_position")
    gap_s = long.total_s - k * short.total_s
    # N_long/T_long − N_short/T_short = −N_long · gap / (T_long · k·T_short): linear in the gap, so every part
    # has its own exact share of the rate.
    per_second = -long.tokens / (long.total_s * k * short.total_s)
    reach = (long.tokens**2 - k * short.tokens**2) / 2 / 1e6

    terms: dict[str, float] = {
        PREFILL: long.prefill_s - k * short.prefill_s,
        SLOPE: b.value * reach,
        WARM_UP: long.warm_up_s - k * short.warm_up_s,
    }
    if start_ms is not None:
        terms[FIRST_TOKEN] = (k - 1) * start_ms / 1e3
    known = sum(terms.values())
    terms[REMAINDER] = gap_s - known
    ends: dict[str, tuple[float, float]] = {}
    if b.low is not None and b.high is not None:
        ends[SLOPE] = (b.low * reach, b.high * reach)
        others = gap_s - (known - terms[SLOPE])
        ends[REMAINDER] = (others - b.high * reach, others - b.low * reach)
    parts = tuple(
        Part(cause, seconds, seconds * per_second, *ends.get(cause, (None, None))) for cause, seconds in terms.items()
    )
    return Attribution(gap_s, long.blended_tok_s - short.blended_tok_s, k, parts)
