"""Running a job: in this process, or spread over worker processes that share one clock and one start."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import perfbook
from perfbook.errors import MeasurementFailed
from perfbook.stream import client, tables
from perfbook.stream.cell import Costs
from perfbook.stream.client import Deadlines, Endpoint, Progress, Schedule
from perfbook.stream.hostload import HostLoad
from perfbook.stream.tables import Asked


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a client process needs: finished request bytes and when to send them."""

    endpoint: Endpoint
    requests: Sequence[bytes]
    asked: Sequence[Asked]
    deadlines: Deadlines
    cell: str
    kernel_times: bool = True
    spool_bytes: int = client.SPOOL_BYTES


@dataclass(frozen=True, slots=True)
class Measured:
    """The tables of a job and what it cost; ``parts`` where it was spread over other machines."""

    requests: pa.Table
    events: pa.Table
    costs: Costs
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One machine's share of a job: its streams, what it measured, who else used its cores, and how well its clock is
    known on ours.
    """

    host: str
    streams: int
    measured: Measured
    load: HostLoad
    cores: int
    clock_error_ms: float


def run(job: Job, schedule: Schedule, progress: Progress | None = None) -> Measured:
    """Run the job in this process and thread."""
    waited = _waited_ns()
    recording = client.record(
        job.endpoint,
        job.requests,
        schedule,
        deadlines=job.deadlines,
        progress=progress,
        kernel_times=job.kernel_times,
        spool_bytes=job.spool_bytes,
    )
    waited = _waited_ns() - waited if waited >= 0 else -1
    spilled = recording.spool.spilled_bytes
    made = tables.tabulate(recording, job.asked, job.cell)
    cpu_ns = time.process_time_ns() - recording.process_cpu_begin_ns
    costs = Costs(
        cpu_ns,
        recording.hot_cpu_ns,
        recording.other_cpu_ns,
        recording.end_ns - recording.begin_ns,
        waited,
        made.lag_ms,
        made.clock_step_ms,
        made.held_bytes,
        spilled,
        recording.connect_failures,
    )
    return Measured(made.requests, made.events, costs)


def _waited_ns() -> int:
    """How long this thread has been ready to run without a CPU (proc(5), schedstat); -1 where unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def run_all(job: Job, schedule: Schedule, processes: int, progress: Progress | None = None) -> Measured:
    """Run the job over several processes, each with its share of streams and requests; they start
    together.
    """
    count = min(processes, schedule.concurrency)
    if count == 1:
        return run(job, schedule, progress)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for part, own in split(job, schedule, count):
            child = _spawn()
            children.append(child)
            _send(child, (part, own.concurrency, own.due_ns, own.seconds, own.enough))
        for child in children:
            _expect(child, "ready")
        start_ns = time.monotonic_ns() + 20_000_000
        for child in children:
            _send(child, start_ns)
        parts = _collect(children, progress)
    finally:
        for child in children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
    return join(parts)


def split(job: Job, schedule: Schedule, count: int) -> list[tuple[Job, Schedule]]:
    """Every ``count``-th request and a fair share of the streams, for each of ``count`` workers."""
    parts = []
    for k in range(count):
        share = range(k, len(job.requests), count)
        part = replace(job, requests=[job.requests[i] for i in share], asked=[job.asked[i] for i in share])
        due = None if schedule.due_ns is None else [schedule.due_ns[i] for i in share]
        streams = schedule.concurrency // count + (k < schedule.concurrency % count)
        parts.append((part, replace(schedule, concurrency=streams, due_ns=due)))
    return parts


def _spawn() -> subprocess.Popen[bytes]:
    paths = [str(Path(perfbook.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "perfbook.stream.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
    )


def _send(child: subprocess.Popen[bytes], message: object) -> None:
    assert child.stdin is not None
    try:
        pickle.dump(message, child.stdin)
        child.stdin.flush()
    except BrokenPipeError:
        raise MeasurementFailed("a client process ended before its work began; see its message above") from None


def _receive(child: subprocess.Popen[bytes]) -> tuple[Any, ...]:
    assert child.stdout is not None
    try:
        message: tuple[Any, ...] = pickle.load(child.stdout)
    except EOFError:
        raise MeasurementFailed("a client process ended without a result; see its message above") from None
    if message[0] == "failed":
        raise message[1]
    return message


def _expect(child: subprocess.Popen[bytes], kind: str) -> tuple[Any, ...]:
    while (message := _receive(child))[0] != kind:
        pass
    return message


def _collect(children: list[subprocess.Popen[bytes]], progress: Progress | None) -> list[Measured]:
    results: dict[int, Measured] = {}
    finished, silent = dict.fromkeys(range(len(children)), 0), dict.fromkeys(range(len(children)), 0.0)
    pipes = {child.stdout: k for k, child in enumerate(children) if child.stdout is not None}
    while len(results) < len(children):
        ready, _, _ = select.select([pipe for pipe, k in pipes.items() if k not in results], [], [])
        for pipe in ready:
            k = pipes[pipe]
            message = _receive(children[k])
            if message[0] == "done":
                results[k] = message[1]
                silent.pop(k)
            elif progress is not None:
                _, finished[k], after_s, silent[k] = message
                reason = progress(sum(finished.values()), after_s, min(silent.values()))
                for other in silent if reason is not None else ():
                    with suppress(MeasurementFailed):  # it may have ended just now
                        _send(children[other], reason)
    return [results[k] for k in range(len(children))]


def join(parts: Sequence[Measured]) -> Measured:
    """One measurement from those of the workers, in the order of :func:`split`; requests get their numbers back."""

    def joined(tables: list[pa.Table], order: list[tuple[str, str]]) -> pa.Table:
        renumbered = []
        for k, table in enumerate(tables):
            numbers = pa.array(k + len(tables) * table["request"].to_numpy())
            at = table.schema.get_field_index("request")
            renumbered.append(table.set_column(at, table.schema.field(at), numbers))
        return pa.concat_tables(renumbered).sort_by(order).combine_chunks()

    costs = [part.costs for part in parts]
    return Measured(
        joined([part.requests for part in parts], [("request", "ascending")]),
        joined([part.events for part in parts], [("request", "ascending"), ("index", "ascending")]),
        Costs(
            sum(c.cpu_ns for c in costs),
            sum(c.hot_cpu_ns for c in costs),
            sum(c.other_cpu_ns for c in costs),
            sum(c.loop_ns for c in costs),
            -1 if any(c.waited_ns < 0 for c in costs) else sum(c.waited_ns for c in costs),
            np.concatenate([c.lag_ms for c in costs]),
            max((c.clock_step_ms for c in costs), key=abs),
            sum(c.held_bytes for c in costs),
            sum(c.spilled_bytes for c in costs),
            sum(c.connect_failures for c in costs),
        ),
    )
