"""A measured cell: its tables, its summary, and what else is known about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from perfbook.stream import timing


@dataclass(frozen=True, slots=True)
class Costs:
    """What the client itself did during a cell.

    ``cpu_ns`` is process CPU from the first send to the finished tables, ``hot_cpu_ns`` the receiving thread
    alone, ``other_cpu_ns`` the process's other threads meanwhile. ``lag_ms`` is user-space minus kernel time
    of every read. ``waited_ns`` is how long the receiving thread was ready to run and got no CPU (-1 where
    the system does not say). ``held_bytes`` is the most that the record held in memory, ``spilled_bytes``
    what went to the temporary file."""

    cpu_ns: int
    hot_cpu_ns: int
    other_cpu_ns: int
    loop_ns: int
    waited_ns: int
    lag_ms: timing.Floats
    clock_step_ms: float
    held_bytes: int
    spilled_bytes: int
    connect_failures: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one server, measured.

    Attributes
    ----------
    name : str
    summary : dict
        Plain numbers, None where there is none; the entry of ``perfbook load --json``.
    requests, events : pyarrow.Table
        One row per request; one row per token event (``perfbook.stream.tables``). Times are CLOCK_MONOTONIC
        ns.
    warmup : pyarrow.Table
        The warm-up requests, same columns as ``requests``; never part of the summary.
    details : dict
        Client lag, memory, scheduling, and what was changed on the way (``notes``).
    reconciliation : list of dict
        Client against server, one row per quantity; empty when the server gave no metrics.
    """

    name: str
    summary: dict[str, Any]
    requests: pa.Table
    events: pa.Table
    warmup: pa.Table
    details: dict[str, Any] = field(default_factory=dict)
    reconciliation: list[dict[str, Any]] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether at least one request succeeded."""
        return bool(self.summary["ok"])


def summarise(requests: pa.Table, events: pa.Table, concurrency: int, costs: Costs) -> dict[str, Any]:
    """Reduce the two tables to the summary of a cell, without its verdict.

    Latencies, tokens and rates are of successful requests only. ``output_tok_s`` is their tokens over the
    whole window (first start to last end); ``output_tok_s_plateau`` counts tokens that arrived while all
    streams had a request outstanding, in an open loop while requests were being offered. ``window`` is
    "steady" when that plateau saw at least one request per stream begin and end besides the first and last
    wave, else "burst".
    """
    ok = _column(requests, "ok", False).astype(bool)
    good = requests.filter(pa.array(ok))
    start, end = _column(requests, "start_ns", -1), _column(requests, "end_ns", -1)
    sent = start >= 0
    duration_ns = int(end[sent].max() - start[sent].min()) if sent.any() else 0
    output = int(pc.sum(good["output_tokens"]).as_py() or 0)
    prompt = pc.sum(good["prompt_tokens"]).as_py()
    all_tokens = int(pc.sum(requests["output_tokens"]).as_py() or 0)

    request = _column(events, "request", -1)
    of_good = np.isin(request, _column(good, "request", -1))
    arrival = _column(events, "arrival_ns", -1)[of_good]
    tokens = _column(events, "tokens", 0)[of_good]
    merged = _column(events, "merged", False).astype(bool)[of_good]
    gaps = timing.gaps(request[of_good], arrival, tokens, merged)

    open_loop = requests["scheduled_ns"].null_count < len(requests)
    window = _offered(start[sent]) if open_loop else timing.plateau(start[sent], end[sent], concurrency)
    plateau_s = (window[1] - window[0]) / 1e9 if window else None
    in_plateau = int(tokens[(arrival > window[0]) & (arrival <= window[1])].sum()) if window else 0
    inside = int(((start > window[0]) & (end <= window[1])).sum()) if window else 0
    failures = Counter(e for e in requests["error"].to_pylist() if e is not None)
    clocks = set(good["clock"].to_pylist())
    sources = set(good["token_source"].to_pylist())
    return {
        "concurrency": concurrency,
        "requests": len(requests),
        "ok": len(good),
        "failed": len(requests) - len(good),
        "errors": dict(sorted(failures.items())),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "token_source": sources.pop() if len(sources) == 1 else "mixed" if sources else None,
        "duration_s": duration_ns / 1e9,
        "plateau_s": plateau_s,
        "window": "steady" if inside >= concurrency else "burst",
        "output_tok_s": _over(output, duration_ns / 1e9),
        "output_tok_s_plateau": _over(in_plateau, plateau_s or 0.0),
        "request_s": _over(len(good), duration_ns / 1e9),
        "ttft_ms": timing.distribution(_column(good, "ttft_ms", np.nan)),
        "ttfa_ms": timing.distribution(_column(good, "ttfa_ms", np.nan)),
        "tpot_ms": timing.distribution(_column(good, "tpot_ms", np.nan)),
        "itl_ms": timing.distribution(gaps.itl_ms[gaps.clean]),
        "gap_ms": timing.distribution(gaps.gap_ms[gaps.clean]),
        "e2e_ms": timing.distribution(_column(good, "e2e_ms", np.nan)),
        "clock": "kernel" if clocks == {"kernel"} else "user",
        "merged_share": gaps.merged_share,
        "client_cpu_us_per_token": _over(costs.cpu_ns / 1e3, all_tokens),
        "hot_path_cpu_us_per_token": _over(costs.hot_cpu_ns / 1e3, all_tokens),
        "validity": {"verdict": "valid", "reasons": []},
    }


def _offered(start: timing.Ints) -> tuple[int, int] | None:
    return (int(start.min()), int(start.max())) if len(start) > 1 else None


def _over(value: float, by: float) -> float | None:
    return value / by if by > 0 else None


def _column(table: pa.Table, name: str, missing: float) -> Any:
    """The column as a numpy array, nulls replaced."""
    return pc.fill_null(table[name], pa.scalar(missing, table[name].type)).to_numpy()


def with_reasons(cell: Cell, verdict: str, reasons: list[str]) -> Cell:
    """The same cell with further reasons (throttling seen by telemetry, a noise floor); the worse verdict
    stays.
    """
    order = ("valid", "suspect", "invalid")
    held: Mapping[str, Any] = cell.summary["validity"]
    worse = max(held["verdict"], verdict, key=order.index)
    merged = {"verdict": worse, "reasons": [*held["reasons"], *reasons]}
    return Cell(
        cell.name,
        {**cell.summary, "validity": merged},
        cell.requests,
        cell.events,
        cell.warmup,
        cell.details,
        cell.reconciliation,
    )
