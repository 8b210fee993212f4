"""Wall, busy, idle and overlap of each step on one rank's timeline. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfbook.trace.columns import UNKNOWN, Columns, IntArray
from perfbook.trace.intervals import Union
from perfbook.trace.steps import Segmentation

_PAUSE_STEPS = 20
_IDLE = ("host", "launch", "device", "unknown")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Arrays with one value per step, in ns.

    A step's wall time runs from its first device event to the next step's first one, so that the time in which the
    host prepares the next step is part of it. ``host_ns`` + ``launch_ns`` + ``device_ns`` + ``unknown_ns`` is its idle
    time: before a step's first kernel the device waited for the host, before a later one that had not been launched
    yet for the launch, before one that had for something on the device itself. ``closed`` is False where no next step
    ends the wall time (the last step, or a pause in the work): it then ends with the step's last device event.
    ``hidden_ns`` is communication under other work, ``exposed_ns`` communication with nothing beside it.
    """

    wall_ns: IntArray
    closed: NDArray[np.bool_]
    busy_ns: IntArray
    host_ns: IntArray
    launch_ns: IntArray
    device_ns: IntArray
    unknown_ns: IntArray
    hidden_ns: IntArray
    exposed_ns: IntArray


def step_times(
    events: Columns, owner: IntArray, seg: Segmentation, is_comm: NDArray[np.bool_], is_copy: NDArray[np.bool_]
) -> StepTimes:
    """Wall, busy, idle and overlap of each step."""
    count = len(seg.steps)
    on_gpu = len(seg.launch_ns) > 0
    last = np.full(count, -1, np.int64)
    np.maximum.at(last, owner[owner >= 0], events.end_ns[owner >= 0])
    present = np.flatnonzero(last >= 0)
    start = _begins(events, owner, count, is_copy) if on_gpu else np.array([s.start_ns for s in seg.steps], np.int64)
    stop = np.where(last >= 0, last, start)
    closed = np.zeros(count, bool)
    if len(present) > 1:
        closed[present[:-1]] = True
        length = start[present[1:]] - start[present[:-1]]
        pause = length > _PAUSE_STEPS * np.median(length)
        closed[present[:-1][pause]] = False
        stop[present[:-1][~pause]] = start[present[1:][~pause]]
    else:
        closed[present] = True
    cover = Union(events.start_ns, events.dur_ns)
    shares = (np.where(is_comm, events.dur_ns, 0), np.where(is_comm, 0, events.dur_ns))
    parts = (cover, *(Union(events.start_ns, dur) for dur in shares))
    busy, communicating, other = (part.before(stop) - part.before(start) for part in parts)
    # An operator around a collective covers it, so on the host nothing can be called hidden.
    exposed = busy - other if on_gpu else communicating
    idle = {kind: np.zeros(count, np.int64) for kind in _IDLE}
    for gap in cover.gaps() if on_gpu and len(present) else ():
        window = present[np.maximum(np.searchsorted(start[present], gap.end_ns, "left") - 1, 0)]
        inside = (gap.start_ns >= start[window]) & (gap.end_ns <= stop[window])
        launch, mine = seg.launch_ns[gap.opener], owner[gap.opener]
        waits = [launch == UNKNOWN, launch <= gap.start_ns, mine != window]
        kinds = np.select(waits, ["unknown", "device", "host"], "launch")
        for kind, total in idle.items():
            chosen = inside & (kinds == kind)
            np.add.at(total, window[chosen], (gap.end_ns - gap.start_ns)[chosen])
    waits_ns = (idle["host"], idle["launch"], idle["device"], idle["unknown"])
    return StepTimes(stop - start, closed, busy, *waits_ns, communicating - exposed, exposed)


def _begins(events: Columns, owner: IntArray, count: int, is_copy: NDArray[np.bool_]) -> IntArray:
    """First device event of each step that does not run ahead, as a copy may, of the last kernel of the one before."""
    latest = np.zeros(count + 1, np.int64)
    kernels = (owner >= 0) & ~is_copy
    np.maximum.at(latest, owner[kernels] + 1, events.start_ns[kernels])
    inside = owner >= 0
    in_turn = inside & (events.start_ns >= np.maximum.accumulate(latest)[np.maximum(owner, 0)])
    never = np.iinfo(np.int64).max
    first, any_first = np.full(count, never), np.full(count, never)
    np.minimum.at(first, owner[in_turn], events.start_ns[in_turn])
    np.minimum.at(any_first, owner[inside], events.start_ns[inside])
    first = np.where(first == never, any_first, first)
    return np.where(first == never, 0, first)
