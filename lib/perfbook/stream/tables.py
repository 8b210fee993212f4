"""A recording → the cell's two tables: one row per request, one row per token event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from perfbook.stream import clock, response, timing
from perfbook.stream.client import Recording
from perfbook.stream.record import Recorded, no_gc

REQUESTS = pa.schema(
    [
        ("cell", pa.string()),
        ("request", pa.int64()),
        ("ok", pa.bool_()),
        ("error", pa.string()),
        ("detail", pa.string()),
        ("status", pa.int64()),
        ("scheduled_ns", pa.int64()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("client_queue_ms", pa.float64()),
        ("ttft_ms", pa.float64()),
        ("ttft_low_ms", pa.float64()),
        ("ttfa_ms", pa.float64()),
        ("tpot_ms", pa.float64()),
        ("e2e_ms", pa.float64()),
        ("blended_tok_s", pa.float64()),
        ("output_tokens", pa.int64()),
        ("output_tokens_asked", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("prompt_tokens_asked", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("token_source", pa.string()),
        ("text", pa.string()),
        ("reasoning_text", pa.string()),
        ("first_merged", pa.bool_()),
        ("clock", pa.string()),
    ]
)

EVENTS = pa.schema(
    [
        ("cell", pa.string()),
        ("request", pa.int64()),
        ("index", pa.int64()),
        ("arrival_ns", pa.int64()),
        ("earliest_ns", pa.int64()),
        ("tokens", pa.int64()),
        ("text", pa.string()),
        ("merged", pa.bool_()),
    ]
)


_POOL = pa.system_memory_pool()
"""Arrow's own pool touches several times the memory that it hands out: measured, more CPU than all else here."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked for: tokens of its prompt (before the chat template; None: unknown) and of its
    answer.
    """

    prompt_tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Tables:
    """The two tables, and how late the client was: user-space minus kernel time of each read, in ms (empty:
    no kernel times). ``clock_step_ms`` is what the wall clock jumped by during the cell.
    """

    requests: pa.Table
    events: pa.Table
    lag_ms: timing.Floats
    clock_step_ms: float
    held_bytes: int


class _Columns:
    """All events of the cell in growing columns."""

    def __init__(self) -> None:
        self.request = array("q")
        self.arrival = array("q")
        self.earliest = array("q")
        self.counted = array("q")
        self.has_choices = bytearray()
        self.finished = bytearray()
        self.later = bytearray()
        self.answer: list[str] = []
        self.reasoning: list[str] = []

    def add(self, at: int, parsed: response.Parsed, stamps: timing.Ints, start_ns: int) -> None:
        read = parsed.read
        if not len(read):
            return
        self.request.frombytes(np.full(len(read), at, np.int64).tobytes())
        self.arrival.frombytes(stamps[read].tobytes())
        self.earliest.frombytes(np.where(read > 0, stamps[read - 1], start_ns).tobytes())
        self.counted.extend(parsed.counted)
        self.has_choices += bytes(parsed.has_choices)
        self.finished += bytes(parsed.finished)
        self.later += parsed.later.tobytes()
        self.answer += parsed.answer
        self.reasoning += parsed.reasoning

    def events(self) -> timing.Events:
        def ints(column: array[int]) -> timing.Ints:
            return np.frombuffer(column, np.int64) if len(column) else np.zeros(0, np.int64)

        def bools(column: bytearray) -> timing.Bools:
            return np.frombuffer(column, np.bool_)

        return timing.Events(
            ints(self.request),
            ints(self.arrival),
            ints(self.earliest),
            self.answer,
            self.reasoning,
            ints(self.counted),
            bools(self.has_choices),
            bools(self.finished),
            bools(self.later),
        )


@no_gc()
def tabulate(recording: Recording, asked: Sequence[Asked], cell: str) -> Tables:
    """Parse and time every response of a recording; ``asked[i]`` belongs to request ``i``.

    Latencies count from the scheduled start where there is one, so that waiting inside the client shows.
    """
    records = recording.responses
    step_ns = recording.offset_after_ns - recording.offset_before_ns
    stepped = abs(step_ns) > clock.STEP_NS
    columns = _Columns()
    parsed: list[response.Parsed] = []
    clocks: list[str] = []
    lags: list[timing.Ints] = []
    held = 0
    for at, rec in enumerate(records):
        held += rec.held_bytes
        user = np.frombuffer(rec.user_ns, np.int64) if len(rec.user_ns) else np.zeros(0, np.int64)
        kernel = clock.kernel_ns(rec.stamps, recording.offset_before_ns)
        stamped = (kernel >= 0) & (not stepped)
        lags.append((user - kernel)[stamped])
        clocks.append("kernel" if len(stamped) and stamped.all() else "user")
        one = _parse(rec, recording.spool.read(rec))
        parsed.append(one)
        columns.add(at, one, np.where(stamped, kernel, user), rec.start_ns)
        rec.blocks = []
    recording.spool.close()
    start = np.array([r.start_ns for r in records], np.int64)
    origin = np.array([r.due_ns if r.due_ns >= 0 else r.start_ns for r in records], np.int64)
    events = columns.events()
    counts = np.array([-1 if p.completion_tokens is None else p.completion_tokens for p in parsed], np.int64)
    times = timing.measure_times(events, origin, counts)
    return Tables(
        _requests(records, parsed, times, start, clocks, asked, cell),
        _events(records, times, events, cell),
        np.concatenate(lags) / 1e6 if lags else np.zeros(0),
        step_ns / 1e6 if stepped else 0.0,
        held,
    )


def _parse(rec: Recorded, raw: bytes | bytearray) -> response.Parsed:
    if not rec.size:
        one = response.Parsed()
        if rec.error is not None:
            one.fail(rec.error, rec.detail)
        one.fail("incomplete", "the server closed the connection before it answered")
        return one
    one = response.parse(raw, rec.ends, closed=rec.closed)
    if rec.error is not None:  # what ended the transport explains what is missing from the bytes
        if one.error not in ("stream_error", "bad_event", "oversized"):
            one.error = None
        one.fail(rec.error, rec.detail)
    return one


def _requests(
    records: list[Recorded],
    parsed: list[response.Parsed],
    times: timing.Times,
    start: timing.Ints,
    clocks: list[str],
    asked: Sequence[Asked],
    cell: str,
) -> pa.Table:
    due = [r.due_ns if r.due_ns >= 0 else None for r in records]
    end = [int(e) if e >= 0 else r.finished_ns for e, r in zip(times.end_ns, records, strict=True)]
    data = {
        "cell": [cell] * len(records),
        "request": [r.index for r in records],
        "ok": [p.error is None for p in parsed],
        "error": [p.error for p in parsed],
        "detail": [p.detail or None for p in parsed],
        "status": [p.status for p in parsed],
        "scheduled_ns": due,
        "start_ns": [s if s >= 0 else None for s in start.tolist()],
        "end_ns": end,
        "client_queue_ms": [None if r.due_ns < 0 or r.start_ns < 0 else (r.start_ns - r.due_ns) / 1e6 for r in records],
        "ttft_ms": _nullable(times.ttft_ms),
        "ttft_low_ms": _nullable(times.ttft_low_ms),
        "ttfa_ms": _nullable(times.ttfa_ms),
        "tpot_ms": _nullable(times.tpot_ms),
        "e2e_ms": _nullable(times.e2e_ms),
        "blended_tok_s": _nullable(times.blended_tok_s),
        "output_tokens": times.output_tokens,
        "output_tokens_asked": [asked[r.index].output_tokens for r in records],
        "prompt_tokens": [p.prompt_tokens for p in parsed],
        "prompt_tokens_asked": [asked[r.index].prompt_tokens for r in records],
        "cached_tokens": [p.cached_tokens for p in parsed],
        "finish_reason": [p.finish_reason for p in parsed],
        "token_source": times.token_source,
        "text": ["".join(p.answer) for p in parsed],
        "reasoning_text": ["".join(p.reasoning) for p in parsed],
        "first_merged": times.first_merged,
        "clock": clocks,
    }
    return pa.table(data, schema=REQUESTS)


def _events(records: list[Recorded], times: timing.Times, events: timing.Events, cell: str) -> pa.Table:
    row = times.row
    index = np.array([r.index for r in records], np.int64)
    return pa.table(
        {
            "cell": pa.repeat(cell, len(row), memory_pool=_POOL),
            "request": index[events.request[row]],
            "index": times.position,
            "arrival_ns": events.arrival_ns[row],
            "earliest_ns": np.where(events.later, events.earliest_ns, events.arrival_ns)[row],
            "tokens": times.tokens,
            "text": _texts(events, row),
            "merged": events.later[row],
        },
        schema=EVENTS,
    )


def _texts(events: timing.Events, rows: timing.Ints) -> pa.Array:
    """Reasoning and answer of those events."""
    answers = pa.array(events.answer, pa.string(), memory_pool=_POOL)
    if any(events.reasoning):
        reasonings = pa.array(events.reasoning, pa.string(), memory_pool=_POOL)
        answers = pc.binary_join_element_wise(reasonings, answers, "", memory_pool=_POOL)
    return pc.take(answers, pa.array(rows), memory_pool=_POOL)


def _nullable(values: timing.Floats) -> pa.Array:
    return pa.array(values, from_pandas=True)
