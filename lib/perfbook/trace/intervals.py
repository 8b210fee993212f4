"""Arithmetic of intervals on one timeline: unions, measures, gaps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfbook.trace.columns import IntArray, blocks


class Gaps(NamedTuple):
    """Time that no interval covers: where each gap starts and ends, and which interval ends it."""

    start_ns: IntArray
    end_ns: IntArray
    opener: IntArray


class _Block(NamedTuple):
    """Some intervals: the position of the first, their starts, and how far the union reaches before and after each."""

    first: int
    start_ns: IntArray
    before_ns: IntArray
    reach_ns: IntArray

    @property
    def added_from_ns(self) -> IntArray:
        """Where the time begins that each interval adds to the union; it ends at ``reach_ns``."""
        return np.maximum(self.start_ns, self.before_ns)


@dataclass(frozen=True, slots=True)
class Union:
    """The union of intervals that are given in order of their start; empty intervals cover nothing.

    It is worked out block by block, never as a whole: that would take more memory than the intervals.
    """

    start_ns: IntArray
    dur_ns: IntArray

    @property
    def total_ns(self) -> int:
        """Time covered."""
        return sum(int((block.reach_ns - block.added_from_ns).sum()) for block in self._blocks())

    def before(self, times_ns: IntArray) -> IntArray:
        """Time covered before each of ``times_ns``; the difference of two is the time covered between them."""
        times = np.asarray(times_ns, np.int64)
        covered = np.zeros(len(times), np.int64)
        for block in self._blocks():
            begin = block.added_from_ns
            added = block.reach_ns - begin
            at = np.searchsorted(begin, times, "right") - 1
            some = at >= 0
            at = at[some]
            inside = np.minimum(times[some] - begin[at], added[at])
            covered[some] += np.cumsum(added)[at] - added[at] + inside
        return covered

    def gaps(self) -> Iterator[Gaps]:
        """The gaps between the first start and the last end, in order, some at a time."""
        for block in self._blocks():
            opens = np.flatnonzero(block.start_ns > block.before_ns)
            yield Gaps(block.before_ns[opens], block.start_ns[opens], opens + block.first)

    def _blocks(self) -> Iterator[_Block]:
        reached = self.start_ns[:1]
        for block in blocks(len(self.start_ns)):
            start = self.start_ns[block]
            reach = np.maximum(np.maximum.accumulate(start + self.dur_ns[block].astype(np.int64)), reached)
            yield _Block(block.start, start, np.concatenate([reached, reach[:-1]]), reach)
            reached = reach[-1:]
