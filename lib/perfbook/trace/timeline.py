"""One step as it ran: every kernel on its stream, or every operator on its thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfbook.trace.columns import Columns, Trace
from perfbook.trace.damage import without_damage
from perfbook.trace.kernels import Rule, classify
from perfbook.trace.rank import read_file
from perfbook.trace.selftime import containers, host_operators
from perfbook.trace.steps import Segmentation, find_steps


@dataclass(frozen=True, slots=True)
class Bar:
    """Work on one stream (``stream 7``) or thread (``thread 1``), in ms from the step's start."""

    name: str
    category: str
    stream: str
    start_ms: float
    duration_ms: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One step: its annotation, rank, length up to its last work, and the work in order of start.

    ``device`` is "gpu", or "cpu" where the bars are host operators, each without what runs inside it.
    """

    name: str
    rank: int | None
    device: str
    duration_ms: float
    bars: tuple[Bar, ...]


def one_step(path: Path, phase: str, rules: Sequence[Rule] = ()) -> StepTimeline | None:
    """The step of median length of a phase, in one rank's trace file; None where it holds no such step.

    Parameters
    ----------
    path : a trace file; of an Nsight Systems export with several processes the first is shown.
    phase : "decode", "prefill", "mixed", or "all" for any step.

    Raises
    ------
    BadInput
        The file is no trace.
    """
    trace = read_file(path)[0]
    gpu, _ = without_damage(trace.gpu, trace.window_ns)
    if not len(gpu):
        trace = replace(trace, ops=host_operators(trace))
    seg = find_steps(trace, gpu)
    events = gpu if len(gpu) else trace.ops
    spans = {i: span for i in _eligible(seg, phase) if (span := _span(events, seg, i)) is not None}
    if not spans:
        return None
    by_length = sorted(spans, key=lambda i: spans[i][1] - spans[i][0])
    chosen = by_length[(len(by_length) - 1) // 2]
    start_ns, end_ns = spans[chosen]
    mine = events.take(np.flatnonzero(seg.owner == chosen))
    segments = _whole(mine) if len(gpu) else _innermost(mine, containers(trace.names).tolist())
    lanes = _lane_names(trace, mine, len(gpu) > 0)
    category = {int(name): classify(trace.names[name], rules) for name in np.unique(mine.name)}
    bars = tuple(
        Bar(
            trace.names[name := int(mine.name[i])],
            category[name],
            lanes[int(mine.lane[i])],
            (begin - start_ns) / 1e6,
            (end - begin) / 1e6,
        )
        for i, begin, end in segments
    )
    device = "gpu" if len(gpu) else "cpu"
    return StepTimeline(seg.steps[chosen].name, trace.rank, device, (end_ns - start_ns) / 1e6, bars)


def _eligible(seg: Segmentation, phase: str) -> list[int]:
    return [i for i, s in enumerate(seg.steps) if not s.set_aside and phase in ("all", s.phase)]


def _span(events: Columns, seg: Segmentation, step: int) -> tuple[int, int] | None:
    mine = seg.owner == step
    return (int(events.start_ns[mine].min()), int(events.end_ns[mine].max())) if mine.any() else None


def _whole(events: Columns) -> Iterator[tuple[int, int, int]]:
    """Position, start and end of each event."""
    yield from zip(range(len(events)), events.start_ns.tolist(), events.end_ns.tolist(), strict=True)


def _innermost(ops: Columns, container: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Position, start and end of each stretch of time in which an operator runs itself and nothing inside it does."""
    starts, ends, names = ops.start_ns.tolist(), ops.end_ns.tolist(), ops.name.tolist()
    found: list[tuple[int, int, int]] = []
    for lane in np.unique(ops.lane):
        running: list[int] = []
        now = 0
        for i in [*np.flatnonzero(ops.lane == lane).tolist(), None]:
            until = starts[i] if i is not None else max(ends)
            while running and now < until:
                top = running[-1]
                stop = min(ends[top], until)
                if stop > now and not container[names[top]]:
                    found.append((top, now, stop))
                now = max(now, stop)
                if ends[top] <= now:
                    running.pop()
            now = until
            if i is not None:
                running.append(i)
    return sorted(found, key=lambda one: one[1])


def _lane_names(trace: Trace, events: Columns, on_gpu: bool) -> dict[int, str]:
    """What the lanes are called: streams by their number, threads in order of appearance."""
    lanes = list(dict.fromkeys(events.lane.tolist()))
    if not on_gpu:
        return {lane: f"thread {i}" for i, lane in enumerate(lanes, 1)}
    ids = {lane: trace.lanes[lane].split("/") for lane in lanes}
    several = len({device for device, _ in ids.values()}) > 1
    return {
        lane: f"stream {stream}" + (f" of device {device}" if several else "") for lane, (device, stream) in ids.items()
    }
