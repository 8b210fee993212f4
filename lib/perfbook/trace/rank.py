"""One rank's trace reduced to what the breakdown needs: per step the times, per step and kernel the sums."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perfbook.errors import BadInput
from perfbook.trace.columns import Columns, IntArray, Trace, narrow
from perfbook.trace.damage import without_damage
from perfbook.trace.events import GENERIC
from perfbook.trace.intervals import Union
from perfbook.trace.kernels import COMMUNICATION, Rule, classify
from perfbook.trace.memory import return_free_memory
from perfbook.trace.nsys import is_sqlite, read_nsys
from perfbook.trace.read import read_trace
from perfbook.trace.selftime import containers, host_operators, self_times
from perfbook.trace.steps import Segmentation, Step, find_steps
from perfbook.trace.steptimes import StepTimes, step_times

_LAUNCH = re.compile(r"launch(?!hostfunc)", re.I)
_ENOUGH_LAUNCHES = 0.95
_ENOUGH_KERNELS = 0.9
_STRAY = 0.05


@dataclass(frozen=True, slots=True)
class Sums:
    """Summed durations and calls by step and name: parallel arrays; step -1 is what belongs to no step."""

    step: IntArray
    name: IntArray
    dur_ns: IntArray
    calls: IntArray
    outermost_calls: IntArray


@dataclass(frozen=True, slots=True)
class Calls:
    """Every communication call in order of start: its step, name, payload and duration."""

    step: IntArray
    name: IntArray
    message_bytes: IntArray
    dur_ns: IntArray


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank's trace says; see the parts for units.

    ``device`` is "gpu", or "cpu" for a trace of the host alone, in which busy means traced operators. ``launch_share``
    is the share of launches whose kernels are recorded; None where no launch is.
    """

    label: str
    rank: int | None
    world_size: int | None
    device: str
    events: int
    gpu_events: int
    how: str
    names: tuple[str, ...]
    categories: tuple[str, ...]
    steps: tuple[Step, ...]
    step_base_ns: int
    times: StepTimes
    sums: Sums
    calls: Calls
    span_ns: int
    busy_ns: int
    launch_share: float | None
    idle_reliable: bool
    warnings: tuple[str, ...]


def summarise_file(path: Path, rules: Sequence[Rule] = ()) -> list[RankTrace]:
    """Read a trace file and reduce it; an Nsight Systems export may hold several ranks."""
    traces = read_file(path)
    return [summarise(traces.pop(0), rules) for _ in range(len(traces))]  # popped, so that each can be freed in time


def read_file(path: Path) -> list[Trace]:
    """The traces in a file of either kind."""
    return read_nsys(path) if is_sqlite(path) else [read_trace(path)]


def attempt(path: Path, rules: Sequence[Rule] = ()) -> list[RankTrace] | BadInput:
    """What :func:`summarise_file` returns, or why the file is no trace."""
    try:
        return summarise_file(path, rules)
    except BadInput as why:
        return why


def summarise(trace: Trace, rules: Sequence[Rule] = ()) -> RankTrace:
    """Reduce a trace: classify, deal to steps, add up."""
    gpu_events = len(trace.gpu)
    all_categories = [classify(name, rules) for name in trace.names]
    gpu, warnings = without_damage(trace.gpu, trace.window_ns)
    on_gpu = len(gpu) > 0
    if not on_gpu:
        trace = replace(trace, ops=host_operators(trace))
    seg = find_steps(trace, gpu)
    share = _launch_share(trace, gpu)
    trace = replace(trace, launches=Columns.empty(), gpu=Columns.empty())
    return_free_memory()
    events = gpu if on_gpu else trace.ops
    owner = narrow(seg.owner)
    self_ns: IntArray = events.dur_ns
    outermost = np.ones(len(events), bool)
    if not on_gpu and len(events):
        self_ns, outermost = self_times(events, all_categories)
        working = ~containers(trace.names)[events.name]
        events, owner = events.take(working), owner[working]
        self_ns, outermost = self_ns[working], outermost[working]
    communication = np.array([c in COMMUNICATION for c in all_categories], bool)
    copies = np.array([c in ("memcpy", "memset") for c in all_categories], bool)
    reliable = on_gpu and share is not None and share >= _ENOUGH_LAUNCHES
    if on_gpu and share is None:
        warnings.append("no launches recorded: where the idle time comes from cannot be told")
    elif on_gpu and not reliable:
        warnings.append(
            f"only {100 * (share or 0):.0f} % of the launches have kernels in the trace: idle time is unreliable"
        )
    if on_gpu:
        warnings += _doubts(trace, gpu, seg, all_categories)
    if partial := _partly_recorded(seg):
        reliable = False
        warnings.append(f"{partial} steps have far fewer kernels than others of their kind: idle time is unreliable")
    if not on_gpu and len(events):
        warnings.append("no device events: self time of host operators; idle means not traced")
    used = np.unique(events.name)
    position = np.zeros(len(trace.names), np.int64)
    position[used] = np.arange(len(used))
    names = narrow(position)[events.name]
    is_call = communication[events.name] & outermost
    return RankTrace(
        label=trace.label,
        rank=trace.rank,
        world_size=trace.world_size,
        device="gpu" if on_gpu else "cpu",
        events=trace.events,
        gpu_events=gpu_events,
        how=seg.how,
        names=tuple(trace.names[i] for i in used),
        categories=tuple(all_categories[i] for i in used),
        steps=seg.steps,
        step_base_ns=trace.base_ns,
        times=step_times(events, owner, seg, communication[events.name], copies[events.name]),
        sums=_sums(owner, names, self_ns, outermost, len(used)),
        calls=Calls(owner[is_call], names[is_call], events.message_bytes[is_call], self_ns[is_call]),
        span_ns=int(events.end_ns.max() - events.start_ns[0]) if len(events) else 0,
        busy_ns=Union(events.start_ns, events.dur_ns).total_ns,
        launch_share=share,
        idle_reliable=reliable,
        warnings=(*trace.warnings, *warnings, *seg.warnings),
    )


def _doubts(trace: Trace, gpu: Columns, seg: Segmentation, categories: Sequence[str]) -> Iterator[str]:
    """What of a device's events is counted on an assumption, or in no step."""
    unsaid = [
        n for n, c in zip(trace.names, categories, strict=True) if GENERIC in n and "[" not in n and c == "send_recv"
    ]
    if unsaid:
        yield f"{unsaid[0][:40]} serves any collective: counted as send_recv, but its kind is not said"
    devices = {trace.lanes[i].split("/")[0] for i in np.unique(gpu.lane)}
    if len(devices) > 1:
        yield f"work of {len(devices)} devices in one file: counted as one rank, all devices added up"
    stray = int(gpu.dur_ns[seg.owner < 0].sum(dtype=np.int64)) / max(1, int(gpu.dur_ns.sum(dtype=np.int64)))
    if stray > _STRAY:
        why = "its launches are not recorded, or precede all steps"
        yield f"{100 * stray:.0f} % of the device time belongs to no step: {why}"


def _launch_share(trace: Trace, gpu: Columns) -> float | None:
    """Share of kernel and graph launches that have device events; None where no launch is recorded."""
    starts = np.array([bool(_LAUNCH.search(name)) for name in trace.names], bool)
    if not len(trace.launches) or not starts[trace.launches.name].any():
        return None
    ids = trace.launches.correlation[starts[trace.launches.name]]
    return float(np.isin(ids, gpu.correlation).mean())


def _partly_recorded(seg: Segmentation) -> int:
    """How many steps have far fewer events than the other steps of the same name."""
    if seg.how != "annotations":
        return 0
    counts = np.bincount(seg.owner[seg.owner >= 0], minlength=len(seg.steps))
    by_name: dict[str, list[int]] = {}
    for i, step in enumerate(seg.steps):
        if step.set_aside is None:
            by_name.setdefault(step.name, []).append(int(counts[i]))
    return sum(sum(n < _ENOUGH_KERNELS * max(group) for n in group) for group in by_name.values())


def _sums(owner: IntArray, names: IntArray, dur_ns: IntArray, outermost: IntArray, width: int) -> Sums:
    """Durations and calls added up by step and name."""
    if not len(owner):
        return Sums(*(np.zeros(0, np.int64) for _ in range(5)))
    key = owner.astype(np.int64)
    key += 1
    key *= width
    key += names
    calls = np.bincount(key)
    keys = np.flatnonzero(calls)
    dur, outer = (np.bincount(key, weights=w)[keys].astype(np.int64) for w in (dur_ns, outermost))
    return Sums(keys // width - 1, keys % width, dur, calls[keys], outer)
