"""What each number means, once, computed over all requests of a cell together.

=========  ==================================================================================================
start      when the request's last byte was handed to the kernel (open loop: when it was *scheduled*)
TTFT       start → first event with non-empty text on any channel
TTFA       start → first event with non-empty *answer* text (differs for models that reason first)
n          ``usage.completion_tokens`` where the server says it, else the number of text events
TPOT       (last token event − first token event) / (n − tokens of the first one); none below one token
gap        between consecutive token events of a request; ITL = gap / tokens of the later event
E2E        start → last event that carries text or a finish reason
blended    n / E2E, in tokens per second. The prefill is in it: it is not the decode rate, 1 / TPOT
=========  ==================================================================================================

A *token event* carries text, or, where the server counts as it goes, raises ``completion_tokens`` (a token
whose text is withheld inside a UTF-8 character, an end-of-sequence token). Where the server counts only at
the end, and exactly one token more than there are texts, the empty finish chunk is the end-of-sequence token,
so that both ways of counting give the same times; a total that exceeds the texts otherwise is spread evenly.
A role chunk, any other empty finish chunk, a usage-only chunk and ``[DONE]`` are no token events.

An event is *merged* when its read completed a later event too. The kernel's stamp is then the later one's:
the event came after the previous read's stamp and no later than this one. Gaps with a merged end are kept out
of percentiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONTINUOUS = "continuous_usage"
USAGE = "usage"
EVENTS = "events"


@dataclass(frozen=True, slots=True)
class Events:
    """All events of a cell in one row each, ordered by request, then by position in its stream.

    ``earliest_ns`` is the stamp of the read before the event's own (the start for the first read): the lower
    end of the interval in which a merged event came. ``counted`` is the running ``completion_tokens``, -1
    where not said.
    """

    request: Ints
    arrival_ns: Ints
    earliest_ns: Ints
    answer: Sequence[str]
    reasoning: Sequence[str]
    counted: Ints
    has_choices: Bools
    finished: Bools
    later: Bools

    def speaks(self, channel: Sequence[str]) -> Bools:
        """Whether each event carries text on the channel, ``answer`` or ``reasoning``."""
        return np.fromiter(map(len, channel), np.int64, len(channel)) > 0


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a cell. Per request (length R) and per token event (length E); NaN where there is none.

    ``row`` gives each token event's row in ``Events``, ``position`` its place within the request, from 0.
    """

    ttft_ms: Floats
    ttft_low_ms: Floats
    ttfa_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats
    blended_tok_s: Floats
    end_ns: Ints
    output_tokens: Ints
    token_source: list[str]
    first_merged: Bools
    row: Ints
    position: Ints
    tokens: Ints


def measure_times(events: Events, start_ns: Ints, completion_tokens: Ints) -> Times:
    """Apply the definitions above.

    Parameters
    ----------
    events : Events
        E' rows over R requests.
    start_ns : array of int64, shape (R,)
        The instant that latencies count from.
    completion_tokens : array of int64, shape (R,)
        The last ``usage.completion_tokens`` of each response, -1 where it gave none.
    """
    count = len(start_ns)
    has_answer = events.speaks(events.answer)
    has_text = has_answer | events.speaks(events.reasoning)
    is_token, tokens, source = _tokens(events, has_text, completion_tokens)
    row = np.flatnonzero(is_token)
    request, arrival, tokens = events.request[row], events.arrival_ns[row], tokens[row]

    n = np.zeros(count, np.int64)
    np.add.at(n, request, tokens)
    n = np.where(completion_tokens >= 0, completion_tokens, n)

    first, last = _first(request, count), _last(request, count)
    has_tokens = first >= 0
    first_at, last_at = arrival[first[has_tokens]], arrival[last[has_tokens]]
    after_first = (n[has_tokens] - tokens[first[has_tokens]]).astype(np.float64)
    tpot = np.full(count, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot[has_tokens] = np.where(after_first >= 1, (last_at - first_at) / 1e6 / after_first, np.nan)

    text_row = _first_row(has_text, events.request, count)
    answer_row = _first_row(has_answer, events.request, count)
    end_row = _last_row(has_text | events.finished, events.request, count)
    e2e = _since(events.arrival_ns, end_row, start_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        blended = np.where((e2e > 0) & (n > 0), n / (e2e / 1e3), np.nan)

    new = np.ones(len(row), np.bool_)
    new[1:] = request[1:] != request[:-1]
    starts = np.flatnonzero(new)
    position = np.arange(len(row)) - np.repeat(starts, np.diff(np.append(starts, len(row))))
    return Times(
        ttft_ms=_since(events.arrival_ns, text_row, start_ns),
        ttft_low_ms=_since(np.where(events.later, events.earliest_ns, events.arrival_ns), text_row, start_ns),
        ttfa_ms=_since(events.arrival_ns, answer_row, start_ns),
        tpot_ms=tpot,
        e2e_ms=e2e,
        blended_tok_s=blended,
        end_ns=np.where(end_row >= 0, _take(events.arrival_ns, end_row), -1),
        output_tokens=n,
        token_source=source,
        first_merged=np.where(text_row >= 0, _take(events.later, text_row), False).astype(np.bool_),
        row=row,
        position=position,
        tokens=tokens,
    )


@dataclass(frozen=True, slots=True)
class Gaps:
    """Per token event: the time since the event before it in its request (NaN for the first), in ms.

    ``clean`` is true where both ends of the gap have a time of their own. ``merged_share`` is the share of
    token events that shared their read with a later token event: a late client. A tail of usage or ``[DONE]``
    read together with the last token does not count there; it is the server's habit.
    """

    gap_ms: Floats
    itl_ms: Floats
    clean: Bools
    merged_share: float


def gaps(request: Ints, arrival_ns: Ints, tokens: Ints, merged: Bools) -> Gaps:
    """Gaps and ITL of a token table ordered by request, then position; all arrays of shape (E,)."""
    size = len(request)
    same = np.zeros(size, np.bool_)
    same[1:] = request[1:] == request[:-1]
    gap = np.full(size, np.nan)
    gap[1:] = np.where(same[1:], np.diff(arrival_ns) / 1e6, np.nan)
    clean = same & ~merged
    clean[1:] &= ~merged[:-1]
    itl = np.full(size, np.nan)
    np.divide(gap, tokens, out=itl, where=tokens >= 1)
    with_token = merged[:-1] & same[1:] & (arrival_ns[1:] == arrival_ns[:-1])
    return Gaps(gap, itl, clean, float(with_token.sum() / size) if size else 0.0)


def _tokens(events: Events, has_text: Bools, completion_tokens: Ints) -> tuple[Bools, Ints, list[str]]:
    """Which events are token events, how many tokens each, and where each request's count comes from."""
    request, counted = events.request, events.counted
    count = len(completion_tokens)
    told = completion_tokens >= 0
    silent = np.zeros(count, np.bool_)
    silent[request[has_text & (counted < 0)]] = True
    continuous = told & ~silent

    # Running maximum within each request, by lifting every request above the one before it.
    lift = request * (int(counted.max(initial=0)) + 1)
    so_far = np.maximum.accumulate(np.maximum(counted, 0) + lift) - lift
    before = np.zeros_like(so_far)
    before[1:] = np.where(request[1:] == request[:-1], so_far[:-1], 0)
    grown = so_far - before

    by_count = continuous[request]
    is_token = has_text | (by_count & events.has_choices & (grown > 0))
    tokens = np.where(by_count, grown, 1)
    for r in np.flatnonzero(told & silent):
        rows = _rows_of(request, int(r), has_text)
        n = int(completion_tokens[r])
        if n == len(rows) + 1 and (stop := _textless_stop(events, int(r), int(rows[-1]))) is not None:
            is_token[stop] = True
            tokens[rows] = 1
        else:
            tokens[rows] = _spread(n, len(rows))
    source = [CONTINUOUS if c else USAGE if t else EVENTS for c, t in zip(continuous, told, strict=True)]
    return is_token, tokens, source


def _rows_of(request: Ints, r: int, mask: Bools) -> Ints:
    low, high = (int(i) for i in np.searchsorted(request, [r, r + 1]))
    return np.flatnonzero(mask[low:high]) + low


def _textless_stop(events: Events, r: int, last_text: int) -> int | None:
    """Row of the empty finish chunk after a request's last text: where its end-of-sequence token arrived."""
    for row in range(last_text + 1, len(events.request)):
        if events.request[row] != r:
            break
        if events.finished[row]:
            return row
    return None


def _spread(n: int, events: int) -> Ints:
    """Divide a total that came only at the end over its events as evenly as integers allow."""
    edges: Ints = np.rint(np.linspace(0, n, events + 1)).astype(np.int64)
    return edges[1:] - edges[:-1]


def _first(request: Ints, count: int) -> Ints:
    """Where each request's rows begin, -1 where it has none; ``request`` ascends."""
    begin, end = edges(request, count)
    return np.where(end > begin, begin, -1)


def _last(request: Ints, count: int) -> Ints:
    begin, end = edges(request, count)
    return np.where(end > begin, end - 1, -1)


def edges(request: Ints, count: int) -> tuple[Ints, Ints]:
    """First row of each of ``count`` requests and the row after its last, in an ascending column."""
    every = np.arange(count)
    return np.searchsorted(request, every, "left"), np.searchsorted(request, every, "right")


def _first_row(mask: Bools, request: Ints, count: int) -> Ints:
    rows = np.flatnonzero(mask)
    at = _first(request[rows], count)
    return np.where(at >= 0, _take(rows, at), -1)


def _last_row(mask: Bools, request: Ints, count: int) -> Ints:
    rows = np.flatnonzero(mask)
    at = _last(request[rows], count)
    return np.where(at >= 0, _take(rows, at), -1)


def _take(values: NDArray[np.generic], at: Ints) -> Ints:
    """``values[at]`` where an index of -1 means none and its value is not used."""
    if not len(values):
        return np.zeros(len(at), np.int64)
    taken: Ints = values[np.maximum(at, 0)].astype(np.int64)
    return taken


def _since(arrival_ns: Ints, row: Ints, start_ns: Ints) -> Floats:
    return np.where(row >= 0, (_take(arrival_ns, row) - start_ns) / 1e6, np.nan)


def distribution(values: Floats) -> dict[str, float | None]:
    """Mean, percentiles (linear interpolation) and extremes of the finite values; nulls when there are
    none.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "min", "max"))
    p50, p90, p95, p99 = (float(p) for p in np.percentile(finite, (50, 90, 95, 99)))
    return {
        "mean": float(finite.mean()),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "min": float(finite.min()),
        "max": float(finite.max()),
    }


def plateau(start_ns: Ints, end_ns: Ints, concurrency: int) -> tuple[int, int] | None:
    """The window in which all C streams of a closed loop have a request outstanding.

    From the C-th start until the first stream ends with nothing left to send, which is the end number N − C +
    1 of N. The moment in which a stream passes from one request to its next belongs to it.

    Returns
    -------
    (int, int) or None
        Nanoseconds; None when fewer than C requests ran or the window is empty.
    """
    if concurrency < 1 or len(start_ns) < concurrency:
        return None
    opened = int(np.partition(start_ns, concurrency - 1)[concurrency - 1])
    closed = int(np.partition(end_ns, len(end_ns) - concurrency)[len(end_ns) - concurrency])
    return (opened, closed) if closed > opened else None
