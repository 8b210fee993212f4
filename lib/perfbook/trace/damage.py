"""Durations that cannot be: a profiler sometimes writes an end that lies far behind the truth.

On one stream work runs in order, so an event that is still running while many later ones start and end there has a
wrong end. A short overlap is no damage: with programmatic dependent launch a kernel starts while the one before it
drains. And on some devices one stream number stands for several queues, where overlap is the rule: there nothing is
judged.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfbook.trace.columns import Columns

_OVERRUN_EVENTS = 3
_OVERRUN_EVENTS_CERTAIN = 50
_TIMES_USUAL = 10
_IN_ORDER_SHARE = 0.01
_FAR_NS = 3600 * 10**9
_AFTER_END_NS = 10**9


def without_damage(gpu: Columns, window_ns: tuple[int, int] | None) -> tuple[Columns, list[str]]:
    """Device events with impossible durations set to nothing (the call stays), impossible starts left out.

    Returns
    -------
    gpu : in order of start.
    warnings : what was found, with its share of the time.
    """
    warnings: list[str] = []
    if not len(gpu):
        return gpu, warnings
    low, high = window_ns or (int(np.median(gpu.start_ns)),) * 2
    far = (gpu.start_ns < low - _FAR_NS) | (gpu.start_ns > high + _FAR_NS)
    if far.any():
        warnings.append(f"{int(far.sum())} device events lie hours away from the others and are left out")
        gpu = gpu.take(~far)
    wrong = _overruns(gpu)
    if window_ns:
        wrong |= (gpu.end_ns > window_ns[1] + _AFTER_END_NS) & (gpu.dur_ns > _AFTER_END_NS)
    if wrong.any():
        total = int(gpu.dur_ns.sum(dtype=np.int64))
        lost = int(gpu.dur_ns[wrong].sum(dtype=np.int64))
        lanes = len(np.unique(gpu.lane[wrong]))
        warnings.append(
            f"{int(wrong.sum())} of {len(gpu)} device events on {lanes} stream(s) end long after later ones on "
            f"the same stream: {100 * lost / total:.1f} % of the recorded time is not counted"
        )
        gpu = replace(gpu, dur_ns=np.where(wrong, 0, gpu.dur_ns))
    return gpu, warnings


def _overruns(gpu: Columns) -> NDArray[np.bool_]:
    """Which events outlast later ones on their stream beyond doubt."""
    wrong = np.zeros(len(gpu), bool)
    typical: dict[int, float] = {}
    for lane in np.unique(gpu.lane):
        here = np.flatnonzero(gpu.lane == lane)
        start, end = gpu.start_ns[here], gpu.end_ns[here]
        suspects = np.flatnonzero(end[:-_OVERRUN_EVENTS] > start[_OVERRUN_EVENTS:])
        if not len(suspects):
            continue
        later = np.searchsorted(start, end[suspects], "left") - suspects - 1
        rest = np.ones(len(here), bool)
        rest[suspects] = False
        if not _in_order(start[rest], end[rest]):
            continue
        for i, overrun in zip(suspects, later, strict=True):
            name = int(gpu.name[here[i]])
            if name not in typical:
                same = gpu.dur_ns[gpu.name == name]
                typical[name] = float(np.median(same)) if len(same) > 2 else np.inf
            unusual = gpu.dur_ns[here[i]] > _TIMES_USUAL * typical[name]
            wrong[here[i]] = unusual or overrun >= _OVERRUN_EVENTS_CERTAIN
    return wrong


def _in_order(start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> bool:
    """Whether hardly any time on a stream is covered twice."""
    reach = np.maximum.accumulate(end_ns)
    twice = np.maximum(0, np.minimum(reach[:-1], end_ns[1:]) - start_ns[1:]).sum()
    return bool(twice <= _IN_ORDER_SHARE * max(1, int((end_ns - start_ns).sum())))
