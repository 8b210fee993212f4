"""``perfbook load --on ray --workers K``: the same client on several nodes, started at one instant, on one clock.

Each node's CLOCK_MONOTONIC is held against this machine's by round trips before and after the cell. Of the quickest one
the node's answer lies somewhere between question and answer: the middle is the offset, half of it the error. Times are
shifted to this machine's clock before the tables are merged; the error is recorded with each worker, and no difference
between workers that is smaller means anything. Gaps and TTFT are of one worker's clock each: the offset does not enter
them.
"""

from __future__ import annotations

import os
import platform
import queue
import threading
import time
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from perfbook.errors import BadInput, MeasurementFailed, PerfbookError
from perfbook.nodes.connect import connect
from perfbook.stream import hostload, workers
from perfbook.stream.client import Progress, Schedule
from perfbook.stream.hostload import HostLoad
from perfbook.stream.workers import Job, Measured, Part

_PINGS = 40
_AHEAD_NS = 200_000_000  # the start is told so long before it comes


class Hand:
    """A client on a node; becomes a Ray actor with a thread for its work and one for questions."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._start: queue.Queue[int] = queue.Queue(1)
        self._state = (0, 0.0)
        self._reason: str | None = None

    def where(self) -> str:
        """The node's name."""
        return platform.node()

    def clock_ns(self) -> int:
        """This node's CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def ready(self) -> None:
        """Return when every connection stands."""
        self._ready.wait()

    def go(self, start_ns: int) -> None:
        """Begin at this instant of this node's clock."""
        self._start.put(start_ns)

    def state(self) -> tuple[int, float]:
        """Requests finished, and for how many seconds no stream has got a byte."""
        return self._state

    def give_up(self, reason: str) -> None:
        """End the cell: what is out is failed with this reason."""
        self._reason = reason

    def run(self, job: Job, schedule: Schedule) -> tuple[Measured, HostLoad, int]:
        """Connect, wait for the start, measure; with who else used this node, and its cores."""
        self._state, self._reason = (0, 0.0), None

        def start() -> int:
            self._ready.set()
            return self._start.get()

        def heard(done: int, after_s: float, silent_s: float) -> str | None:
            self._state = (done, silent_s)
            return self._reason

        try:
            with hostload.Watch(job.endpoint.host, job.endpoint.port) as host:
                measured = workers.run(job, replace(schedule, start_at_ns=start), heard)
            return measured, host.seen, os.cpu_count() or 1
        finally:
            self._ready.set()
            self._ready = threading.Event()


class Hands:
    """Workers on a cluster, in the form that ``perfbook.stream.load.measure`` takes."""

    def __init__(self, ray: Any, count: int) -> None:
        self.ray = ray
        actor = ray.remote(Hand).options(num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=4)
        self.hands = [actor.remote() for _ in range(count)]

    def __call__(self, job: Job, schedule: Schedule, processes: int, progress: Progress | None = None) -> Measured:
        """As :func:`perfbook.stream.workers.run_all`, a worker per node."""
        ray, hands = self.ray, self.hands[: min(processes, schedule.concurrency)]
        before = [self._offset(hand) for hand in hands]
        parts = workers.split(job, schedule, len(hands))
        running = [hand.run.remote(*part) for hand, part in zip(hands, parts, strict=True)]
        try:
            ray.get([hand.ready.remote() for hand in hands])
            start_ns = time.monotonic_ns() + _AHEAD_NS
            ray.get([hand.go.remote(start_ns + offset) for hand, (offset, _) in zip(hands, before, strict=True)])
            began, left = time.monotonic(), running
            while left:
                _, left = ray.wait(left, num_returns=len(left), timeout=1.0)
                if progress is not None and left:
                    states = ray.get([hand.state.remote() for hand in hands])
                    done, silent_s = sum(one[0] for one in states), min(one[1] for one in states)
                    reason = progress(done, time.monotonic() - began, silent_s)
                    for hand in hands if reason is not None else ():
                        hand.give_up.remote(reason)
            measured = ray.get(running)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, PerfbookError) else MeasurementFailed(str(error)) from None
        except ray.exceptions.RayError as error:
            raise MeasurementFailed(f"a worker was lost during the cell ({type(error).__name__})") from None
        after = [self._offset(hand) for hand in hands]
        said = []
        for hand, own, (part, seen, cores), first, last in zip(hands, parts, measured, before, after, strict=True):
            error_ns = max(first[1], last[1]) + abs(last[0] - first[0])
            shifted = _shift(part, (first[0] + last[0]) // 2)
            where, streams = ray.get(hand.where.remote()), own[1].concurrency
            said.append(Part(where, streams, shifted, seen, cores, error_ns / 1e6))
        return replace(workers.join([part.measured for part in said]), parts=tuple(said))

    def _offset(self, hand: Any) -> tuple[int, int]:
        """The node's clock minus this machine's, and its error, in ns."""
        best: tuple[int, int] | None = None
        for _ in range(_PINGS):
            asked = time.monotonic_ns()
            there = self.ray.get(hand.clock_ns.remote())
            answered = time.monotonic_ns()
            if best is None or answered - asked < 2 * best[1]:
                best = (there - (asked + answered) // 2, (answered - asked + 1) // 2)
        assert best is not None
        return best


def _shift(part: Measured, offset_ns: int) -> Measured:
    """The tables on this machine's clock."""
    return replace(part, requests=_moved(part.requests, offset_ns), events=_moved(part.events, offset_ns))


def _moved(table: pa.Table, offset_ns: int) -> pa.Table:
    for at, field in enumerate(table.schema):
        if field.name.endswith("_ns"):
            table = table.set_column(at, field, pc.subtract(table[field.name], pa.scalar(offset_ns, pa.int64())))
    return table


def hands_on(address: str, count: int) -> Hands:
    """``count`` workers on the cluster; errors as in :func:`perfbook.nodes.connect.connect`.

    They, and the connection, end with this process.
    """
    ray = connect(address)
    cores = sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
    if cores < count:
        ray.shutdown()
        raise BadInput(f"{count} workers: the cluster offers {cores:g} cores, and each worker takes one")
    return Hands(ray, count)
