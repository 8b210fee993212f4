"""One cell: a fixed load on a server, measured. The call behind ``perfbook load`` and the sweep.

Errors are told apart by class: ``refused``, ``connect_timeout``, ``connection``, ``tls`` and ``reset`` come
from the transport; ``first_byte_timeout``, ``stall`` and ``total_timeout`` from the deadlines;
``given_up`` from who watches the server;
``http_<status>``, ``bad_http``, ``not_streamed``, ``stream_error`` (an error object inside a 200 stream),
``bad_event``, ``oversized`` and ``incomplete`` (no ``[DONE]``) from what the server sent. A failed request is
never repeated.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from perfbook.errors import BadInput, ServerFailed
from perfbook.stream import hostload, validity, workers
from perfbook.stream.cell import Cell, summarise, with_reasons
from perfbook.stream.client import Deadlines, Endpoint, Progress, Schedule
from perfbook.stream.reconcile import Metrics, reconcile, settled
from perfbook.stream.tables import REQUESTS, Asked
from perfbook.stream.workers import Job, Measured, Part
from perfbook.stream.workload import Prompt, RequestShape

__all__ = ["Cell", "Deadlines", "Endpoint", "measure"]

Spread = Callable[[Job, Schedule, int, Progress], Measured]
"""Runs a job over so many workers: :func:`perfbook.stream.workers.run_all`, or the same on a cluster."""
MUTE_S = 5.0
"""From here on the progress line says that the server sends nothing; a long prefill does not, either."""


def measure(
    endpoint: Endpoint,
    prompts: Sequence[Prompt],
    shape: RequestShape,
    *,
    concurrency: int,
    requests: int,
    warmup: int = 1,
    rate_per_s: float | None = None,
    arrivals: Literal["poisson", "constant"] = "poisson",
    seconds: float | None = None,
    precision: float | None = None,
    seed: int = 0,
    deadlines: Deadlines | None = None,
    metrics: Metrics | None = None,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[float], str | None] | None = None,
    cell: str = "",
    processes: int = 1,
    kernel_times: bool = True,
    spread: Spread = workers.run_all,
) -> Cell:
    """Put a load on the server and measure every token of it.

    Parameters
    ----------
    endpoint : Endpoint
    prompts : sequence of Prompt
        Used in order, measured requests first, then the warm-up; give ``requests + warmup`` of them to use
        none twice. Fewer are used in turn.
    shape : RequestShape
    concurrency : int
        Closed loop: streams that each send their next request when the last one ended. Open loop: the most
        requests outstanding.
    requests : int
        Measured requests at most.
    warmup : int
        Requests sent and finished before the cell; reported apart.
    rate_per_s : float, optional
        Open loop: requests per second offered, whatever the server does. Latencies then count from the
        schedule.
    arrivals : {"poisson", "constant"}
        Distances of the open loop's schedule.
    seconds : float, optional
        Start no request later than this after the start.
    precision : float, optional
        Start no more once the mean duration of a request is known to this fraction (half-width of its 95 %
        interval over the mean, at least 10 requests).
    seed : int
        For the schedule.
    deadlines : Deadlines, optional
    metrics : callable, optional
        Returns the server's counters under vLLM's names without the ``vllm:`` prefix, or None. Called before
        and after the cell, never during it.
    progress : callable, optional
        Called with one line about once a second.
    watch : callable, optional
        Called about once a second with the seconds since any stream got a byte; a text ends the cell, which is then
        invalid, and is the reason (``details["ended"]``). Must return at once: it runs beside the timing.
    cell : str
        Name of the cell in its tables; the concurrency when empty.
    processes : int
        Client workers, each with its share of the streams.
    kernel_times : bool
        False forces user-space receive times.
    spread : callable
        How the workers are run: as processes of this machine, or elsewhere.

    Returns
    -------
    Cell
        Also when every request failed; ``Cell.measured`` tells.

    Raises
    ------
    BadInput
        Impossible arguments.
    ServerFailed
        The host name cannot be resolved, or the watch ended the warm-up.
    """
    _check(prompts, concurrency, requests, warmup, rate_per_s, processes)
    name = cell or f"c{concurrency}"
    notes: list[str] = []
    limits = deadlines or Deadlines()

    def job(shape: RequestShape, first: int, count: int) -> Job:
        chosen = [prompts[(first + i) % len(prompts)] for i in range(count)]
        asked = [Asked(p.tokens_asked, p.output_tokens or shape.output_tokens) for p in chosen]
        sent = [endpoint.request(shape.body(endpoint, p)) for p in chosen]
        return Job(endpoint, sent, asked, limits, name, kernel_times)

    ended: list[str] = []
    place = f"{endpoint.host}:{endpoint.port}"
    patience = f"waiting up to {limits.first_byte_s:g} s for a first byte, {limits.stall_s:g} s for the next"

    def heard(done: int, after_s: float, silent_s: float, what: str = f"{requests} requests") -> str | None:
        if progress is not None:
            mute = f", no byte from {place} for {silent_s:.0f} s, {patience}" if silent_s >= MUTE_S else ""
            progress(f"{name}: {done} of {what} after {after_s:.1f} s{mute}")
        reason = watch(silent_s) if watch is not None else None
        ended.extend([] if reason is None or ended else [reason])
        return reason

    def warmed(shape: RequestShape) -> pa.Table:
        hear = partial(heard, what=f"{warmup} warm-up requests")
        sent = workers.run(job(shape, requests, warmup), Schedule(min(warmup, concurrency)), hear).requests
        if ended:
            raise ServerFailed(ended[0])
        return sent

    warm, shape = _warm_up(warmed, shape, notes) if warmup else (REQUESTS.empty_table(), shape)
    before = settled(metrics)
    due = _schedule(rate_per_s, arrivals, requests, seed) if rate_per_s is not None else None
    schedule = Schedule(concurrency, due, seconds, _Precision(precision) if precision is not None else None)

    with hostload.Watch(endpoint.host, endpoint.port) as host:
        measured = spread(job(shape, 0, requests), schedule, processes, heard)
    expected = int(measured.requests["output_tokens"].to_numpy().sum())
    after = settled(metrics, before, expected)
    summary = summarise(measured.requests, measured.events, concurrency, measured.costs)
    rows = reconcile(measured.requests, before, after)
    cores = os.cpu_count() or 1
    evidence = validity.gather(summary, measured.requests, measured.costs, before, after, host.seen, cores)
    summary["validity"] = validity.judge(evidence).as_dict()
    details = _details(measured, evidence, notes) | {"ended": ended[0] if ended else None}
    details["workers"] = [_worker(part) for part in measured.parts]
    made = Cell(name, summary, measured.requests, measured.events, warm, details, rows)
    for number, worker in enumerate(details["workers"], 1):
        made = with_reasons(made, worker["verdict"], [f"worker {number}: {why}" for why in worker["reasons"]])
    return with_reasons(made, "invalid", ended) if ended else made


def _check(
    prompts: Sequence[Prompt],
    concurrency: int,
    requests: int,
    warmup: int,
    rate: float | None,
    processes: int,
) -> None:
    for name, value, least in (
        ("concurrency", concurrency, 1),
        ("requests", requests, 1),
        ("warmup", warmup, 0),
        ("processes", processes, 1),
        ("number of prompts", len(prompts), 1),
    ):
        if value < least:
            raise BadInput(f"{name} is {value}; it must be at least {least}")
    if rate is not None and not 0 < rate < 1e6:
        raise BadInput(f"rate_per_s is {rate}; it must lie above 0 requests per second")


def _warm_up(
    run: Callable[[RequestShape], pa.Table], shape: RequestShape, notes: list[str]
) -> tuple[pa.Table, RequestShape]:
    """Run the warm-up; a server that refuses vLLM's own fields is asked again without, and that is noted."""
    first: pa.Table | None = None
    for plainer, without in shape.ladder():
        warm = run(plainer)
        first = warm if first is None else first
        if not {"http_400", "http_422"} & set(warm["error"].to_pylist()):
            if without:
                notes.append(f"the server refused {without}; measured without")
            return warm, plainer
    return first, shape


def _schedule(rate_per_s: float, arrivals: str, count: int, seed: int) -> list[int]:
    """Start times in ns: constant distances, or exponential ones (a Poisson process)."""
    rng = random.Random(seed)
    due, at = [], 0.0
    for _ in range(count):
        due.append(int(at * 1e9))
        at += rng.expovariate(rate_per_s) if arrivals == "poisson" else 1 / rate_per_s
    return due


class _Precision:
    """True once the mean of the durations seen is known to a relative 95 % half-width."""

    def __init__(self, wanted: float) -> None:
        if not 0 < wanted < 1:
            raise BadInput(f"precision is {wanted}; give a fraction between 0 and 1, such as 0.02")
        self.wanted = wanted
        self.seen: list[int] = []

    def __call__(self, duration_ns: int) -> bool:
        self.seen.append(duration_ns)
        n = len(self.seen)
        if n < 10:
            return False
        half_width = 1.96 * statistics.stdev(self.seen) / n**0.5
        return bool(half_width <= self.wanted * statistics.fmean(self.seen))


def _worker(part: Part) -> dict[str, Any]:
    """One machine's share, judged by itself."""
    own = part.measured
    summary = summarise(own.requests, own.events, part.streams, own.costs)
    evidence = validity.gather(summary, own.requests, own.costs, None, None, part.load, part.cores)
    return {
        "host": part.host,
        "streams": part.streams,
        "requests": summary["requests"],
        "ok": summary["ok"],
        "output_tokens": summary["output_tokens"],
        "clock_error_ms": part.clock_error_ms,
        "lag_p99_ms": evidence.lag_p99_ms,
        "foreign_cores": evidence.foreign_cores,
        **validity.judge(evidence).as_dict(),
    }


def _details(measured: Measured, evidence: validity.Evidence, notes: list[str]) -> dict[str, Any]:
    costs = measured.costs
    tokens = int(measured.requests["output_tokens"].to_numpy().sum())
    return {
        "lag_ms": {"p50": evidence.lag_p50_ms, "p99": evidence.lag_p99_ms, "max": evidence.lag_max_ms},
        "hot_path_busy_share": evidence.busy_share,
        "waiting_for_cpu_share": evidence.waiting_share,
        "client_bytes_per_token": costs.held_bytes / tokens if tokens else None,
        "spilled_bytes": costs.spilled_bytes,
        "clock_step_ms": costs.clock_step_ms,
        "connect_failures": costs.connect_failures,
        "foreign_cores": evidence.foreign_cores,
        "throttled": evidence.throttled,
        "notes": notes,
    }
