"""Arithmetic of intervals on one timeline: unions, measures, gaps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfbook.trace.columns import IntArray


@dataclass(frozen=True, slots=True)
class Union:
    """The union of intervals as disjoint segments in order.

    Attributes
    ----------
    start_ns, end_ns : of each segment.
    opener : position, in the intervals given, of the one that opens each segment.
    """

    start_ns: IntArray
    end_ns: IntArray
    opener: IntArray

    @property
    def total_ns(self) -> int:
        """Time covered."""
        return int((self.end_ns - self.start_ns).sum())

    def before(self, times_ns: IntArray) -> IntArray:
        """Time covered before each of ``times_ns``; the difference of two is the time covered between them."""
        times = np.asarray(times_ns, np.int64)
        if not len(self.start_ns):
            return np.zeros(len(times), np.int64)
        done = np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])
        at = np.searchsorted(self.start_ns, times, "right") - 1
        inside = np.minimum(times, self.end_ns[np.maximum(at, 0)]) - self.start_ns[np.maximum(at, 0)]
        return np.where(at >= 0, done[np.maximum(at, 0)] + inside, 0)


def union(start_ns: IntArray, end_ns: IntArray) -> Union:
    """The union of intervals that are given in order of their start; empty intervals cover nothing."""
    if not len(start_ns):
        nothing = np.zeros(0, np.int64)
        return Union(nothing, nothing, nothing)
    reach = np.maximum.accumulate(end_ns)
    opener = np.concatenate([[0], np.flatnonzero(start_ns[1:] > reach[:-1]) + 1])
    last = np.concatenate([opener[1:] - 1, [len(start_ns) - 1]])
    return Union(start_ns[opener], reach[last], opener)
