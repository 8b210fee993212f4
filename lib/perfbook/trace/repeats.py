"""Steps without annotations: replays of one graph, or the period of a repeating sequence of kernels."""

from __future__ import annotations

import numpy as np

from perfbook.trace.columns import Columns, IntArray

_LEAST_REPEATS = 3
_ALIKE = 0.9


def replayed_starts(gpu: Columns, graph_launches: IntArray) -> IntArray | None:
    """Positions in ``gpu`` at which a replay of one and the same graph starts; None where those are no steps.

    Layers look alike, so a graph of nothing but layers repeats within a step too: its launch tells the steps apart.
    Where a step consists of several graphs these are not alike, the first and the last at least.

    Parameters
    ----------
    gpu : device events in order of start.
    graph_launches : correlations of the launches of graphs.
    """
    inside = np.flatnonzero(np.isin(gpu.correlation, graph_launches))
    if len(inside) < _ALIKE * len(gpu):
        return None
    _, first, graph, counts = np.unique(
        gpu.correlation[inside], return_index=True, return_inverse=True, return_counts=True
    )
    usual = int(np.median(counts))
    if len(counts) < _LEAST_REPEATS or usual < 2 or np.mean(counts == usual) < _ALIKE:
        return None
    in_turn = np.argsort(graph, kind="stable")
    table = gpu.name[inside[in_turn[(counts == usual)[graph[in_turn]]]]].reshape(-1, usual)
    return np.sort(inside[first]) if np.mean(table == table[0]) >= _ALIKE else None


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
