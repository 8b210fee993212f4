"""The client's figures against the server's own counters, row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from perfbook.errors import PerfbookError

Counters = Mapping[str, float]
Metrics = Callable[[], Counters | None]

_POLL_S = 0.15
_POLLS = 20


def settled(metrics: Metrics | None, before: Counters | None = None, expected: int | None = None) -> Counters | None:
    """Read the counters until two readings agree, and contain the expected tokens if any are.

    vLLM counts a token when its step is done, which may be after the client has it. Gives up after three
    seconds and returns the last reading; None when there are no counters.
    """
    if metrics is None:
        return None
    last: Counters | None = None
    for _ in range(_POLLS):
        now = _read(metrics)
        if now is None:
            return None
        count = now.get("generation_tokens_total")
        if count is None:
            return now
        still = last is not None and last.get("generation_tokens_total") == count
        enough = before is None or expected is None or count - before.get("generation_tokens_total", 0.0) >= expected
        if still and enough and not now.get("num_requests_running"):
            return now
        last = now
        time.sleep(_POLL_S)
    return last


def _read(metrics: Metrics) -> Counters | None:
    try:
        return metrics()
    except (PerfbookError, OSError):
        return None


def delta(before: Counters | None, after: Counters | None, name: str) -> float | None:
    """Growth of a counter over the cell; None when a reading is missing or the server restarted between
    them.
    """
    if before is None or after is None or name not in before or name not in after:
        return None
    grown = after[name] - before[name]
    return grown if grown >= 0 else None


def mean_ms(before: Counters | None, after: Counters | None, histogram: str) -> float | None:
    """Mean of a histogram's observations during the cell, in ms."""
    total = delta(before, after, f"{histogram}_seconds_sum")
    count = delta(before, after, f"{histogram}_seconds_count")
    return total / count * 1e3 if total is not None and count else None


def reconcile(cell: pa.Table, before: Counters | None, after: Counters | None) -> list[dict[str, Any]]:
    """Compare a cell's request table with the counters' growth.

    Returns one row per quantity that both sides know, and the server's queue time for reading the TTFT
    difference: ``quantity``, ``unit``, ``client``, ``server``, ``difference`` (client minus server) and
    ``meaning``. Empty without counters.
    """
    if before is None or after is None:
        return []
    rows: list[dict[str, Any]] = []

    def row(quantity: str, unit: str, client: float | None, server: float | None, meaning: str) -> None:
        if server is not None:
            difference = None if client is None else client - server
            rows.append(
                {
                    "quantity": quantity,
                    "unit": unit,
                    "client": client,
                    "server": server,
                    "difference": difference,
                    "meaning": meaning,
                }
            )

    ok = np.array(cell["ok"].to_pylist(), bool)

    def values(name: str, where: Any = None) -> Any:
        column = np.array([np.nan if v is None else v for v in cell[name].to_pylist()], float)
        column = column if where is None else column[where]
        return column[np.isfinite(column)]

    def mean(found: Any) -> float | None:
        return float(found.mean()) if len(found) else None

    # The server knows nothing of a schedule: its latencies start when the request reaches it.
    queue = np.array([v or 0.0 for v in cell["client_queue_ms"].to_pylist()], float)
    since_start = {name: np.array([np.nan if v is None else v for v in cell[name].to_pylist()], float) - queue
                   for name in ("ttft_ms", "e2e_ms")}  # fmt: skip
    ttft = since_start["ttft_ms"][ok & np.isfinite(since_start["ttft_ms"])]
    e2e = since_start["e2e_ms"][ok & np.isfinite(since_start["e2e_ms"])]

    def grown(name: str) -> float | None:
        return delta(before, after, name)

    row("output tokens", "tokens", float(values("output_tokens").sum()), grown("generation_tokens_total"),
        "equal, unless somebody else used the server or requests failed")  # fmt: skip
    row("prompt tokens", "tokens", float(values("prompt_tokens").sum()), grown("prompt_tokens_total"),
        "equal, unless somebody else used the server or requests failed")  # fmt: skip
    row("requests finished", "requests", float(ok.sum()), grown("request_success_total"),
        "equal, unless somebody else used the server")  # fmt: skip
    row("TTFT mean", "ms", mean(ttft), mean_ms(before, after, "time_to_first_token"),
        "the difference is HTTP handling and the way there and back")  # fmt: skip
    row("E2E mean", "ms", mean(e2e), mean_ms(before, after, "e2e_request_latency"),
        "the difference is HTTP handling and the way there and back")  # fmt: skip
    row("queue mean", "ms", None, mean_ms(before, after, "request_queue_time"),
        "part of the TTFT: waiting for a place in the batch")  # fmt: skip
    row("prefix-cache hits", "tokens", None, grown("prefix_cache_hits_total"),
        "prompt tokens that were not computed")  # fmt: skip
    row("preemptions", "requests", None, grown("num_preemptions_total"),
        "requests thrown out of the KV cache and computed again")  # fmt: skip
    return rows
