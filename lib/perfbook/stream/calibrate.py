"""The null run: how much of a number is the client.

A server with a known schedule is started on loopback, the client measures it like any other, and every
arrival is held against the moment at which its token was sent. What is left is the client's noise floor at
that concurrency and rate; an effect smaller than that is not the server's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import requests

import perfbook
from perfbook.errors import MeasurementFailed
from perfbook.stream import timing
from perfbook.stream.cell import Cell
from perfbook.stream.client import Deadlines, Endpoint
from perfbook.stream.load import measure
from perfbook.stream.workload import RequestShape, exact_prompts

SEND_SLACK_MS = 0.005
"""How much earlier than its send time an event may seem to arrive: the clocks' offset is known to about
this.
"""


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The client's own error at one load, in ms. Errors are measured minus true; ``p99`` is of their size.

    ``arrival``, ``ttft`` and ``gap`` hold ``mean``, ``p99`` and ``max``; merged events count in none of them
    except ``ttft``. ``outside_interval`` counts merged events whose true time lay outside the interval given
    for them (must be 0). ``server_late_p99_ms`` is the ground-truth server's lateness against its own
    schedule."""

    concurrency: int
    tick_ms: float
    tok_s: float
    tokens: int
    arrival_error_ms: dict[str, float]
    ttft_error_ms: dict[str, float]
    gap_error_ms: dict[str, float]
    merged_share: float
    outside_interval: int
    server_late_p99_ms: float | None
    clock: str
    relayed: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def refuses(self, effect_ms: float, of: Literal["ttft", "gap"]) -> str | None:
        """Why an effect on a mean TTFT or gap may not be called real; None when the client cannot explain
        it.
        """
        error = self.ttft_error_ms if of == "ttft" else self.gap_error_ms
        floor = max(abs(error["mean"]), error["p99"])
        if abs(effect_ms) > floor:
            return None
        return f"an effect of {effect_ms:.3f} ms is within the client's own noise of {floor:.3f} ms ({of}, null run)"


def null_run(
    concurrency: int,
    *,
    tick_ms: float = 10.0,
    first_ms: float = 5.0,
    tokens: int = 100,
    waves: int = 1,
    relay: bool = False,
    processes: int = 1,
    kernel_times: bool = True,
    server_cpus: set[int] | None = None,
) -> NoiseFloor:
    """Measure a known schedule at this load.

    Parameters
    ----------
    concurrency : int
    tick_ms : float
        Distance of two tokens of a stream.
    first_ms : float
        Least distance from a request to its first token.
    tokens : int
        Tokens per request.
    waves : int
        Requests per stream.
    relay : bool
        Go through the relay that splits, merges and delays segments.
    processes : int
        Client processes.
    kernel_times : bool
        False: how good user-space times would be.
    server_cpus : set of int, optional
        Pin the ground-truth server to these CPUs.

    Raises
    ------
    MeasurementFailed
        When the null server did not start, or requests to it failed.
    """
    count = concurrency * waves
    with tempfile.TemporaryDirectory(prefix="perfbook-null-") as folder:
        log = Path(folder) / "truth.npy"
        with replay(tick_ms, first_ms, log if relay else None, server_cpus) as (port, server_port):
            endpoint = Endpoint(f"http://127.0.0.1:{port}", "replay")
            prompts = exact_prompts(None, 16, min(count, 256), seed=1)
            cell = measure(
                endpoint,
                prompts,
                RequestShape(tokens),
                concurrency=concurrency,
                requests=count,
                deadlines=Deadlines(first_byte_s=30, stall_s=30),
                processes=processes,
                kernel_times=kernel_times,
                cell="null",
            )
            truth = requests.get(f"http://127.0.0.1:{server_port}/replay/truth", timeout=10).json()
        sent = np.load(log) if relay else None
    if cell.summary["failed"]:
        raise MeasurementFailed(f"null run: requests to the null server failed: {cell.summary['errors']}")
    return floor(cell, truth, sent, tick_ms)


def floor(cell: Cell, truth: dict[str, Any], relayed: timing.Ints | None, tick_ms: float) -> NoiseFloor:
    """Hold every arrival of a null cell against its truth.

    ``relayed`` maps each token's own stamp to the time its event was completed, shape (T, 2); without it the
    stamp is the truth.
    """
    events = cell.events
    sent = np.array([int(text) for text in events["text"].to_pylist()], np.int64)
    if relayed is not None:
        order = np.argsort(relayed[:, 0])
        sent = relayed[order[np.searchsorted(relayed[order, 0], sent)], 1]
    request, index = events["request"].to_numpy(), events["index"].to_numpy()
    arrival, earliest = events["arrival_ns"].to_numpy(), events["earliest_ns"].to_numpy()
    merged = events["merged"].to_numpy(zero_copy_only=False).astype(bool)
    error = (arrival - sent) / 1e6
    found = timing.gaps(request, arrival, events["tokens"].to_numpy(), merged)
    true = timing.gaps(request, sent, events["tokens"].to_numpy(), merged)
    slack = SEND_SLACK_MS * 1e6
    outside = merged & ((sent > arrival + slack) | (sent < earliest - slack))
    return NoiseFloor(
        concurrency=cell.summary["concurrency"],
        tick_ms=tick_ms,
        tok_s=cell.summary["output_tok_s"] or 0.0,
        tokens=len(sent),
        arrival_error_ms=_errors(error[~merged]),
        ttft_error_ms=_errors(error[index == 0]),
        gap_error_ms=_errors((found.gap_ms - true.gap_ms)[found.clean]),
        merged_share=found.merged_share,
        outside_interval=int(outside.sum()),
        server_late_p99_ms=truth["late_ms"]["p99"],
        clock=cell.summary["clock"],
        relayed=relayed is not None,
    )


def _errors(error: timing.Floats) -> dict[str, float]:
    if not len(error):
        raise MeasurementFailed("null run: no event had a time of its own; the client was starved of CPU")
    size = np.abs(error)
    return {"mean": float(error.mean()), "p99": float(np.percentile(size, 99)), "max": float(size.max())}


@contextmanager
def replay(
    tick_ms: float, first_ms: float, relay_log: Path | None = None, cpus: set[int] | None = None
) -> Iterator[tuple[int, int]]:
    """Run the ground-truth server, and the relay before it if a log is given; yield (port to use, its own
    port).
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        server, own_port = _start("replay", ["--tick-ms", str(tick_ms), "--first-ms", str(first_ms)], cpus)
        processes.append(server)
        port = own_port
        if relay_log is not None:
            relay, port = _start("replay_relay", ["--to", str(own_port), "--log", str(relay_log)], cpus)
            processes.insert(0, relay)
        yield port, own_port
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _start(module: str, arguments: list[str], cpus: set[int] | None) -> tuple[subprocess.Popen[bytes], int]:
    paths = [str(Path(perfbook.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", f"perfbook.rehearsal.{module}", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
    )
    if cpus:
        os.sched_setaffinity(process.pid, cpus)
    out: IO[bytes] | None = process.stdout
    line = out.readline() if out is not None else b""
    if not line:
        process.wait()
        raise MeasurementFailed(f"null run: the {module} server ended with {process.returncode}; see its message above")
    return process, int(json.loads(line)["port"])
