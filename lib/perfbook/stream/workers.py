"""Running a job: in this process, or spread over worker processes that share one clock and one start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from perfbook.stream import client, tables
from perfbook.stream.cell import Costs
from perfbook.stream.client import Deadlines, Endpoint, Schedule
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
    """The tables of a job and what it cost."""

    requests: pa.Table
    events: pa.Table
    costs: Costs


def run(job: Job, schedule: Schedule, progress: Callable[[int, float], None] | None = None) -> Measured:
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
