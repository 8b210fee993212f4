"""Steps without annotations: the period of a repeating sequence of kernels."""

from __future__ import annotations

import numpy as np

from perfbook.trace.columns import Columns, IntArray

_LEAST_REPEATS = 3
_ALIKE = 0.9


def repeated_starts(gpu: Columns) -> IntArray | None:
    """Positions in ``gpu`` at which a repeating sequence starts over; None when nothing repeats.

    The longest period is looked for: among kernels that recur at equal distances on the busiest stream, the one that
    recurs least often. The sequence is then turned so that it starts after its longest pause, where the host works.
    """
    busiest = np.bincount(gpu.lane).argmax()
    here = np.flatnonzero(gpu.lane == busiest)
    names = gpu.name[here]
    kinds, counts = np.unique(names, return_counts=True)
    for kind in kinds[np.argsort(counts, kind="stable")]:
        at = np.flatnonzero(names == kind)
        if len(at) < _LEAST_REPEATS:
            continue
        distance = np.diff(at)
        period = int(np.median(distance))
        if period < 2 or np.mean(distance == period) < _ALIKE:
            continue
        whole = at[:-1][distance == period]
        table = names[whole[:, None] + np.arange(period)]
        if np.mean(table == table[0]) < _ALIKE:
            continue
        pauses = gpu.start_ns[here][1:] - gpu.end_ns[here][:-1]
        before = np.concatenate([[0], pauses])
        inner = whole[1:, None] - np.arange(period)
        turn = int(np.median(before[inner[(inner >= 0).all(1)]], axis=0).argmax())
        starts = at - turn
        return here[starts[starts >= 0]]
    return None
