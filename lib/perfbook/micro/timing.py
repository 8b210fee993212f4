"""Timing inside a measuring process: wall time on a CPU, a CUDA graph between events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_LEAST_S = 0.02  # a repeat's length: long against the clock and one interrupt
_MOST_CALLS = 2000
_ENOUGH_S = 0.4  # on a machine that is busy otherwise, fewer repeats than asked for, but never less than three
_FEWEST = 3


def repeats_us(
    work: Callable[[], object],
    *,
    device: str,
    repeats: int,
    agree: Callable[[float], float] = lambda value: value,
) -> list[float]:
    """Time of one call of `work` in µs, per repeat, after warming up.

    `agree` makes ranks choose the same numbers of calls and repeats: it gets this process's estimate and returns the
    common one. The work must be capturable on a GPU.
    """
    return _graph_us(work, repeats, agree) if device == "cuda" else _wall_us(work, repeats, agree)


def _calls(each_s: float) -> int:
    return max(1, min(_MOST_CALLS, round(_LEAST_S / max(each_s, 1e-9))))


def _wall_us(work: Callable[[], object], repeats: int, agree: Callable[[float], float]) -> list[float]:
    for _ in range(2):  # the first call allocates
        began = time.perf_counter()
        work()
        each_s = time.perf_counter() - began
    calls = _calls(agree(each_s))
    found: list[float] = []
    whole = time.perf_counter()
    # Asking before each repeat makes ranks begin together, too.
    while agree(time.perf_counter() - whole) < _ENOUGH_S or len(found) < _FEWEST:
        if len(found) == repeats:
            break
        began = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - began) / calls * 1e6)
    return found


def _graph_us(work: Callable[[], object], repeats: int, agree: Callable[[float], float]) -> list[float]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    stream.synchronize()
    began = time.perf_counter()
    with torch.cuda.stream(stream):
        for _ in range(10):
            work()
    stream.synchronize()
    calls = min(200, _calls(agree((time.perf_counter() - began) / 10)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            work()
    found = []
    for repeat in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        agree(0.0)  # ranks begin together
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
        if repeat:  # the first replay uploads the graph
            found.append(start.elapsed_time(end) / calls * 1e3)
    return found
