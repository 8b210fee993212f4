"""Measure the cells of a sweep, block after block, and what the server says of each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from perfbook import stats
from perfbook.desk import Desk
from perfbook.errors import ServerFailed
from perfbook.figures.cells import throughput_tok_s
from perfbook.params import Slo, Sweep
from perfbook.study import doubts

NOTEBOOK = "04_sweep"
SERVER_FAILED, BUDGET_SPENT, PRECISE = "the server failed", "the time budget was spent", "known precisely enough"


def measure(desk: Desk, progress: Callable[[str], None]) -> None:
    """Measure every cell, block after block; one record per cell, and one that says what was skipped and why.

    Every cell gets prompts of its own, distinct from their first cache block on. No cell begins once the time budget is
    spent; a repeat is left out where the throughput is known precisely enough. When the server dies the sweep ends
    there, and what was measured stays.

    Raises
    ------
    ServerFailed
        The server died before any cell was measured.
    """
    plan = desk.variant.sweep
    began, skipped, measured = time.monotonic(), [], 0
    ended: ServerFailed | None = None
    rates: dict[int, list[float]] = {}
    with desk.measuring():
        for order, (repeat, concurrency) in enumerate(_schedule(plan, desk.variant.workload.seed)):
            spent = time.monotonic() - began
            why = ""
            if ended:
                why = SERVER_FAILED
            elif plan.time_budget_s is not None and spent > plan.time_budget_s:
                why = BUDGET_SPENT
            elif plan.precision_pct is not None and precise(rates.get(concurrency, ()), plan.precision_pct):
                why = PRECISE
            if not why:
                progress(f"block {repeat + 1} of {plan.repeats}, {concurrency} streams")
                try:
                    summary = _measure_cell(desk, order, repeat, concurrency, progress)
                except ServerFailed as error:
                    why, ended = SERVER_FAILED, error
                else:
                    measured += 1
                    rate = throughput_tok_s(summary)
                    if rate is not None and doubts.usable([summary]):
                        rates.setdefault(concurrency, []).append(rate)
            if why:
                skipped.append({"concurrency": concurrency, "repeat": repeat, "why": why})
    desk.record(
        "sweep_skipped", {"cells": skipped, "time_budget_s": plan.time_budget_s, "ended": str(ended) if ended else None}
    )
    if ended and not measured:
        raise ended


def precise(rates_tok_s: Sequence[float], precision_pct: float) -> bool:
    """Whether repeats agree so well that more would tell nothing: half the 95 % interval of their mean (pure)."""
    if len(rates_tok_s) < 3:
        return False
    half_width_pct = stats.mean_interval(rates_tok_s, "tok_s").half_width_pct
    return half_width_pct is not None and half_width_pct <= precision_pct


def _schedule(plan: Sweep, seed: int) -> Iterator[tuple[int, int]]:
    """Repeat and concurrency of each cell. The first block ascends: each cell is warm for the next, and an early end
    leaves a usable curve; the others are shuffled."""
    shuffle = random.Random(seed)
    for repeat in range(plan.repeats):
        block = plan.concurrency if repeat == 0 else shuffle.sample(plan.concurrency, len(plan.concurrency))
        yield from ((repeat, concurrency) for concurrency in block)


def _measure_cell(
    desk: Desk, order: int, repeat: int, concurrency: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    plan = desk.variant.sweep
    count, key = concurrency * plan.requests_per_stream, f"{concurrency}/{repeat}"
    prompts = desk.prompts(plan.prompt_tokens, count + 1, desk.variant.workload.seed + 1000 * order)
    cell = desk.measure(
        prompts,
        desk.shape(plan.output_tokens),
        key=key,
        concurrency=concurrency,
        requests=count,
        warmup=1,
        progress=progress,
    )
    values = {
        "order": order,
        "repeat": repeat,
        "server": server_side(cell.reconciliation, cell.summary["duration_s"]),
        "goodput": within_slo(cell.requests.to_pylist(), plan.slo),
        "reconciliation": cell.reconciliation,
    }
    desk.record_cell("sweep_cell", cell, values, key=key)
    return cell.summary


def server_side(reconciliation: Sequence[Mapping[str, Any]], duration_s: float | None) -> dict[str, float | None]:
    """The server's own view of a cell, from what its counters and histograms saw (pure).

    Requests running and waiting are time averages by Little's law: the seconds that all requests together spent in
    a state, over the length of the cell. That needs no polling, which would load the process that streams.

    Returns
    -------
    dict
        ``running, waiting`` (requests), ``queue_ms`` (mean per request), ``preemptions``; None where the server did
        not say.
    """
    said = {row["quantity"]: row["server"] for row in reconciliation}
    queue_ms, e2e_ms, count = said.get("queue mean"), said.get("E2E mean"), said.get("requests finished")

    def on_average(spent_ms: float | None) -> float | None:
        return spent_ms / 1e3 * count / duration_s if spent_ms is not None and count and duration_s else None

    return {
        "running": on_average(e2e_ms - queue_ms) if e2e_ms is not None and queue_ms is not None else None,
        "waiting": on_average(queue_ms),
        "queue_ms": queue_ms,
        "preemptions": said.get("preemptions"),
    }


def within_slo(requests: Sequence[Mapping[str, Any]], slo: Slo) -> dict[str, Any] | None:
    """Requests that met every limit of the SLO; None when there is none. A failed request meets nothing."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return None
    met = [request for request in requests if request["ok"] and _meets(request, slo)]
    return {"met": len(met), "of": len(requests), "share": len(met) / len(requests) if requests else None}


def _meets(request: Mapping[str, Any], slo: Slo) -> bool:
    limits = ((slo.ttft_ms, request["ttft_ms"]), (slo.tpot_ms, request["tpot_ms"]))
    return all(limit is None or (value is not None and value <= limit) for limit, value in limits)
