"""Engine steps: where one ends and the next begins, what kind it is, and which device event belongs to which.

vLLM wraps each model execution in an annotation on the host that says how many requests are in prefill (context) and
decode (generation). Device work is dealt to steps by the launch that started it, never by time: the kernels of a
graph replay may all run after the annotation has closed. A step owns everything launched from the start of its
annotation to the start of the next, so that sampling and draft models count where they belong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfbook.trace.columns import UNKNOWN, Columns, IntArray, Trace, blocks, narrow
from perfbook.trace.repeats import repeated_starts, replayed_starts

PHASES = ("decode", "prefill", "mixed")

_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)(?:\(([^)]*)\))?_generation_(\d+)(?:\(([^)]*)\))?")
_VLLM_OLD = re.compile(r"execute_new_(\d+)_cached_(\d+)")
_SGLANG = re.compile(r"step\[(\w+)(?: bs=(\d+))?(?: toks=(\d+))?")
_PLAIN = re.compile(r"^execute_(\d+)")
_TRAINING = re.compile(r"^ProfilerStep#?\*?\d*")
_COMPILES = re.compile(
    r"dynamo_timed|compile_inner|compile_fx|CompiledArtifact|moduleload|libraryload|begincapture|graphinstantiate", re.I
)
_SGLANG_PHASES = {
    "DECODE": "decode",
    "TARGET_VERIFY": "decode",
    "EXTEND": "prefill",
    "PREFILL": "prefill",
    "MIXED": "mixed",
}
_NO_LAUNCH = -2
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step of one rank.

    Attributes
    ----------
    name : the annotation.
    start_ns, end_ns : of the annotation, on the host.
    phase : "decode" (no context tokens), "prefill" (no generation), "mixed", or None where the name does not say.
    requests, tokens : in the batch; None where the name does not say.
    set_aside : why the step does not count for its phase; None when it does.
    """

    name: str
    start_ns: int
    end_ns: int
    phase: str | None = None
    requests: int | None = None
    tokens: int | None = None
    set_aside: str | None = None


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The steps of a trace and who owns what.

    Attributes
    ----------
    how : "annotations", "repeats" (a pattern of kernels, or replays of a graph) or "one step".
    steps : in order.
    owner : per device event the index of its step, -1 for none; per host operator in a trace without device events.
    launch_ns : per device event the start of its launch, ``UNKNOWN`` where no launch is recorded.
    warnings : what is not as it should be.
    """

    how: str
    steps: tuple[Step, ...]
    owner: IntArray
    launch_ns: IntArray
    warnings: tuple[str, ...]


def read_name(name: str) -> tuple[str | None, int | None, int | None] | None:
    """Phase, requests and tokens that an annotation states; None when it marks no engine step."""
    if found := _VLLM.search(name):
        context, generation = int(found[1]), int(found[3])
        sizes = [_NUMBER.search(found[i] or "") for i in (2, 4)]
        tokens = sum(int(s[0]) for s in sizes if s) if all(sizes) else None
        return _phase(context, generation), context + generation, tokens
    if found := _VLLM_OLD.search(name):
        new, cached = int(found[1]), int(found[2])
        return _phase(new, cached), new + cached, None
    if found := _SGLANG.search(name):
        return _SGLANG_PHASES.get(found[1]), _whole(found[2]), _whole(found[3])
    if found := _PLAIN.search(name):
        return None, int(found[1]), None
    return None


def _whole(digits: str | None) -> int | None:
    return int(digits) if digits else None


def _phase(context: int, generation: int) -> str | None:
    if context and generation:
        return "mixed"
    return "prefill" if context else "decode" if generation else None


def find_steps(trace: Trace, gpu: Columns) -> Segmentation:
    """Deal a trace's events to engine steps.

    Parameters
    ----------
    trace : as read.
    gpu : its device events in order of start, without damage; empty for a trace of the host alone.
    """
    steps = _annotated(trace)
    launch = _launch_times(trace.launches, gpu)
    warnings: list[str] = []
    if steps and len(gpu) and not (launch != UNKNOWN).any():
        warnings.append("no launch is recorded for any device event: annotations cannot be used")
        steps = []
    if steps:
        starts = np.array([s.start_ns for s in steps], np.int64)
        if not len(gpu):
            owner: IntArray = np.searchsorted(starts, trace.ops.start_ns, "right") - 1
        else:
            owner = np.searchsorted(starts, launch, "right") - 1
            owner[launch == UNKNOWN] = _NO_LAUNCH
            owner = _between_neighbours(gpu, narrow(owner))
        return Segmentation("annotations", _judged(steps, trace, owner, warnings), owner, launch, tuple(warnings))
    events = gpu if len(gpu) else trace.ops
    positions = replayed_starts(gpu, _graph_launches(trace)) if len(gpu) else None
    found_by = "the replays of a graph"
    if len(gpu) and positions is None:
        positions, found_by = repeated_starts(gpu), "the repeating sequence of kernels"
    if positions is not None:
        times = gpu.start_ns[positions]
        owner = np.searchsorted(times, gpu.start_ns, "right") - 1
        ends = [*times[1:].tolist(), int(gpu.end_ns.max())]
        steps = [Step(f"repeat {i}", int(a), int(b)) for i, (a, b) in enumerate(zip(times, ends, strict=True))]
        warnings.append(f"no step annotations: {len(steps)} steps found by {found_by}")
        return Segmentation("repeats", tuple(steps), owner, launch, tuple(warnings))
    if len(events):
        warnings.append("no step annotations and no repeating sequence: the whole trace is taken as one step")
        steps = [Step("whole trace", int(events.start_ns[0]), int(events.end_ns.max()))]
    return Segmentation("one step", tuple(steps), np.zeros(len(events), np.int64), launch, tuple(warnings))


def _graph_launches(trace: Trace) -> IntArray:
    """Correlations of the launches of graphs."""
    launches = np.array(["GraphLaunch" in name for name in trace.names], bool)
    return trace.launches.correlation[launches[trace.launches.name]] if len(trace.launches) else np.zeros(0, np.int64)


def _annotated(trace: Trace) -> list[Step]:
    """Steps from the engine's annotations, or else a training loop's; what lies inside another is no step."""
    marks = trace.annotations
    said = [read_name(name) for name in trace.names]
    engine = np.array([s is not None for s in said], bool)
    training = np.array([bool(_TRAINING.match(name)) for name in trace.names], bool)
    for wanted in (engine, training):
        if not len(marks) or not wanted[marks.name].any():
            continue
        steps: list[Step] = []
        for i in np.flatnonzero(wanted[marks.name]):
            start, name = int(marks.start_ns[i]), int(marks.name[i])
            end = start + int(marks.dur_ns[i])
            if steps and start < steps[-1].end_ns and end <= steps[-1].end_ns:
                continue
            phase, requests, tokens = said[name] or (None, None, None)
            steps.append(Step(trace.names[name], start, end, phase, requests, tokens))
        return steps
    return []


def _launch_times(launches: Columns, gpu: Columns) -> IntArray:
    """Start of the host call that launched each device event."""
    times = np.full(len(gpu), UNKNOWN, np.int64)
    if not len(launches) or not len(gpu):
        return times
    keys, starts = launches.correlation, launches.start_ns
    if bool((keys[1:] < keys[:-1]).any()):  # several threads launch
        order = narrow(np.argsort(keys, kind="stable"))
        keys, starts = keys[order], starts[order]
    for block in blocks(len(gpu)):
        wanted = gpu.correlation[block]
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        hit = (keys[at] == wanted) & (wanted != UNKNOWN)
        times[block][hit] = starts[at[hit]]
    return times


def _between_neighbours(gpu: Columns, owner: IntArray) -> IntArray:
    """Give an event without a launch to the step of its neighbours on the stream where both agree."""
    for lane in np.unique(gpu.lane[owner == _NO_LAUNCH]):
        here = np.flatnonzero(gpu.lane == lane)
        known = owner[here] != _NO_LAUNCH
        if not known.any():
            continue
        index = np.arange(len(here))
        before = np.maximum.accumulate(np.where(known, index, -1))
        after = np.minimum.accumulate(np.where(known, index, len(here))[::-1])[::-1]
        inside = ~known & (before >= 0) & (after < len(here))
        left, right = owner[here[before[inside]]], owner[here[after[inside]]]
        owner[here[inside]] = np.where(left == right, left, -1)
    owner[owner == _NO_LAUNCH] = -1
    return owner


def _judged(steps: Sequence[Step], trace: Trace, owner: IntArray, warnings: list[str]) -> tuple[Step, ...]:
    """Set aside the first step, steps that compile or load code, a last step that is cut off, and empty ones."""
    reasons: list[str | None] = [None] * len(steps)
    starts = np.array([s.start_ns for s in steps], np.int64)
    counts = np.bincount(owner[owner >= 0], minlength=len(steps))
    if len(steps) > 1:
        reasons[0] = "first profiled step: start-up skew"
        peers = [counts[i] for i, s in enumerate(steps[:-1]) if s.name == steps[-1].name]
        if peers and counts[-1] < 0.9 * float(np.median(peers)):
            reasons[-1] = "recorded in part: the recording ends inside it"
    compiles = np.array([bool(_COMPILES.search(name)) for name in trace.names], bool)
    for events in (trace.launches, trace.annotations, trace.ops):
        for i in np.flatnonzero(compiles[events.name]) if len(events) else ():
            step = int(np.searchsorted(starts, events.start_ns[i], "right")) - 1
            if step >= 0:
                reasons[step] = f"compiles or loads code: {trace.names[events.name[i]][:60]}"
    for i in np.flatnonzero(counts == 0):
        reasons[i] = "nothing recorded for it"
    for phase in PHASES:
        mine = [i for i, s in enumerate(steps) if s.phase == phase and counts[i]]
        if mine and all(reasons[i] for i in mine):
            warnings.append(f"every {phase} step would be set aside ({reasons[mine[0]]}): all are kept")
            for i in mine:
                reasons[i] = None
    reasons = [reason if step.phase else None for step, reason in zip(steps, reasons, strict=True)]
    return tuple(replace(step, set_aside=reason) for step, reason in zip(steps, reasons, strict=True))
