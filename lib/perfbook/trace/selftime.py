"""Self time of host operators: what is left of each when the operators inside it are taken out."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from perfbook.trace.columns import Columns, IntArray, Trace

_CONTAINER = re.compile(r"^## |CompiledFxGraph|^Torch-Compiled|^CompiledFunction|^record_param_comms|^ProfilerStep")
_BACKEND = re.compile(r"^gloo:")


def host_operators(trace: Trace) -> Columns:
    """Operators of a trace without device events; the collective backend's own ranges count as operators."""
    backend = np.array([bool(_BACKEND.match(name)) for name in trace.names], bool)
    if not len(trace.annotations) or not backend[trace.annotations.name].any():
        return trace.ops
    return Columns.join([trace.ops, trace.annotations.take(backend[trace.annotations.name])]).by_start()


def containers(names: Sequence[str]) -> NDArray[np.bool_]:
    """Which names only wrap other work. A collective's dispatch is one where the backend's own range is recorded."""
    backend = any(_BACKEND.match(name) for name in names)
    return np.array([bool(_CONTAINER.search(n)) or (backend and n.startswith("c10d::")) for n in names], bool)


def self_times(ops: Columns, category: Sequence[str]) -> tuple[IntArray, NDArray[np.bool_]]:
    """Self time of each operator, and whether it is a call of its category or only a layer inside one.

    Parameters
    ----------
    ops : in order of start, parents before children.
    category : of each name.

    Returns
    -------
    self_ns : duration less the durations of direct children on the same thread.
    outermost : False where an operator around it has the same category (``aten::linear`` around ``aten::addmm``).
    """
    self_ns = ops.dur_ns.astype(np.int64)
    outermost = np.ones(len(ops), bool)
    starts, ends = ops.start_ns.tolist(), ops.end_ns.tolist()
    names, lanes = ops.name.tolist(), ops.lane.tolist()
    stacks: dict[int, list[int]] = {}
    for i, start in enumerate(starts):
        stack = stacks.setdefault(lanes[i], [])
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack:
            self_ns[stack[-1]] -= min(ends[i], ends[stack[-1]]) - start
            mine = category[names[i]]
            outermost[i] = all(category[names[j]] != mine for j in stack)
        stack.append(i)
    return np.maximum(self_ns, 0), outermost
