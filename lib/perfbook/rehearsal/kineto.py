"""Traces with a known law, written as torch.profiler writes them: what a reader says of them can be checked exactly.

A law is a sequence of engine steps, each a sequence of kernels with their durations. Kernels follow one another on the
main stream; one on another stream runs beside the main kernels that follow, and the step ends when all have ended. A
collective takes its transfer time plus, on each rank, the time that rank waits for the last one to arrive.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAIN_STREAM = 7
LAUNCH_LATENCY_NS = 3_000
_BASE_NS = 1_767_189_312_000_000_000
_HOST_PID = 4000
_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a step.

    Attributes
    ----------
    name, dur_ns : on every rank.
    gap_ns : pause on the main stream before it.
    stream : other than the main one: it runs beside the main kernels that follow.
    message_bytes : payload, for a collective launched eagerly; a graph replay does not record it.
    wait_ns : per rank, added to the duration; empty for none.
    recorded_ns : what the trace says instead of the true duration, to model a damaged record; None for the truth.
    """

    name: str
    dur_ns: int
    gap_ns: int = 0
    stream: int = MAIN_STREAM
    message_bytes: int | None = None
    wait_ns: tuple[int, ...] = ()
    recorded_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StepLaw:
    """One engine step: its annotation, its kernels, whether one graph launch starts them all, the pause after it."""

    annotation: str
    kernels: tuple[Kernel, ...]
    graph: bool = True
    pause_ns: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A kernel on one rank's timeline; ``step`` is the index of its step."""

    kernel: Kernel
    step: int
    start_ns: int
    dur_ns: int


def decode_annotation(requests: int) -> str:
    """vLLM's annotation of a decode step."""
    return f"execute_context_0(0)_generation_{requests}({requests})"


def prefill_annotation(requests: int, tokens: int) -> str:
    """vLLM's annotation of a prefill step."""
    return f"execute_context_{requests}({tokens})_generation_0(0)"


def place(steps: Sequence[StepLaw], rank: int = 0, start_ns: int = 10_000_000) -> list[Placed]:
    """Where each kernel lies on a rank's timeline."""
    placed = []
    now = start_ns
    for index, step in enumerate(steps):
        free: dict[int, int] = {}
        for kernel in step.kernels:
            dur = kernel.dur_ns + (kernel.wait_ns[rank] if kernel.wait_ns else 0)
            now += kernel.gap_ns
            start = max(now, free.get(kernel.stream, now))
            placed.append(Placed(kernel, index, start, dur))
            free[kernel.stream] = start + dur
            if kernel.stream == MAIN_STREAM:
                now += dur
        now = max([now, *free.values()]) + step.pause_ns
    return placed


def write_profile(
    folder: Path,
    steps: Sequence[StepLaw],
    *,
    ranks: int = 1,
    host_events: int = 0,
    pretty: bool = False,
    metadata_last: bool = False,
) -> list[Path]:
    """Write one trace per rank, named as vLLM names them.

    Parameters
    ----------
    folder : must exist.
    host_events : operators, Python frames and flows per kernel beside what the law asks for, as a real trace has them.
    pretty : broken into lines as Kineto does it, instead of compact.
    metadata_last : ``distributedInfo`` after the events.
    """
    paths = []
    for rank in range(ranks):
        path = folder / f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{_BASE_NS}.pt.trace.json.gz"
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as out:
            for text in trace_text(steps, rank, ranks, host_events, pretty, metadata_last):
                out.write(text)
        paths.append(path)
    return paths


def trace_text(
    steps: Sequence[StepLaw],
    rank: int = 0,
    ranks: int = 1,
    host_events: int = 0,
    pretty: bool = False,
    metadata_last: bool = False,
) -> Iterator[str]:
    """The text of one rank's trace, in pieces."""
    distributed = {"backend": "nccl", "rank": rank, "world_size": ranks}
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Rehearsal GPU", "numSms": 132}]}
    info = f'"distributedInfo": {json.dumps(distributed)}, "baseTimeNanoseconds": {_BASE_NS}'
    yield json.dumps(head)[:-1] + ("" if metadata_last else f", {info}") + ', "traceEvents": ['
    separator = ""
    for event in _events(steps, rank, host_events):
        yield separator + (_pretty(event) if pretty else event)
        separator = ",\n" if pretty else ", "
    yield "]" + (f", {info}" if metadata_last else "") + ', "traceName": "rehearsal.json"}'


def _pretty(event: str) -> str:
    return json.dumps(json.loads(event), indent=2).replace("\n", "\n  ")


def _events(steps: Sequence[StepLaw], rank: int, host_events: int) -> Iterator[str]:
    """Annotations, launches and kernels as JSON text."""
    correlation = 0
    by_step: dict[int, list[Placed]] = {}
    for item in place(steps, rank):
        by_step.setdefault(item.step, []).append(item)
    for index, items in by_step.items():
        step = steps[index]
        first = items[0].start_ns - LAUNCH_LATENCY_NS
        opens, closes = first - 1000, (first if step.graph else items[-1].start_ns - LAUNCH_LATENCY_NS) + 1000
        yield _event("user_annotation", step.annotation, opens, closes - opens, _HOST_PID, _HOST_PID, "")
        if step.graph:
            correlation += 1
            yield _launch("cudaGraphLaunch", first, correlation)
        for item in items:
            if not step.graph:
                correlation += 1
                yield _launch("cudaLaunchKernel", item.start_ns - LAUNCH_LATENCY_NS, correlation)
            yield _kernel(item, correlation, step.graph)
            yield from _host_events(item, correlation, host_events)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _event(category: str, name: str, start_ns: int, dur_ns: int, pid: int, tid: int, args: str) -> str:
    return (
        f'{{"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid}, '
        f'"ts": {_us(start_ns)}, "dur": {_us(dur_ns)}, "args": {{{args}}}}}'
    )


def _launch(call: str, start_ns: int, correlation: int) -> str:
    args = f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}'
    return _event("cuda_runtime", call, start_ns, 2_000, _HOST_PID, _HOST_PID, args)


def _kernel(item: Placed, correlation: int, graph: bool) -> str:
    kernel = item.kernel
    args = (
        f'"queued": 0, "device": 0, "context": 1, "stream": {kernel.stream}, "correlation": {correlation}, '
        '"registers per thread": 32, "shared memory": 0, "blocks per SM": 1, "warps per SM": 8, '
        '"grid": [132, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 12'
    )
    if kernel.message_bytes is not None and not graph:
        elements = kernel.message_bytes // _ELEMENT_BYTES
        args += f', "Collective name": "allreduce", "In msg nelems": {elements}, "dtype": "BFloat16"'
    category = "gpu_memcpy" if kernel.name.startswith("Memcpy") else "kernel"
    dur_ns = item.dur_ns if kernel.recorded_ns is None else kernel.recorded_ns
    return _event(category, kernel.name, item.start_ns, dur_ns, 0, kernel.stream, args)


def _host_events(item: Placed, correlation: int, count: int) -> Iterator[str]:
    """What else a recording with shapes and stacks holds: flows, operators, Python frames."""
    start = item.start_ns - LAUNCH_LATENCY_NS
    for i in range(count):
        kind = i % 3
        if kind == 0:
            args = (
                f'"External id": {correlation}, "Record function id": 0, "Concrete Inputs": ["", "", "-1", "False"], '
                '"Input type": ["c10::BFloat16", "long int", "Scalar", "Scalar"], "Input Strides": [[1024, 1], '
                f'[559, 1], [], []], "Input Dims": [[151936, 1024], [16, 559], [], []], "Ev Idx": {correlation + i}'
            )
            yield _event("cpu_op", "aten::addmm", start, 900, _HOST_PID, _HOST_PID, args)
        elif kind == 1:
            args = f'"Python parent id": {correlation}, "Python id": {correlation + i}, "Ev Idx": {correlation}'
            name = "vllm/model_executor/layers/linear.py(470): forward"
            yield _event("python_function", name, start, 950, _HOST_PID, _HOST_PID, args)
        else:
            yield (
                f'{{"ph": "s", "id": {correlation}, "pid": {_HOST_PID}, "tid": {_HOST_PID}, "ts": {_us(start)}, '
                '"cat": "ac2g", "name": "ac2g"}'
            )
