"""Collectives across ranks: how much is transfer, and how much is waiting for the rank that comes last. Pure.

A collective ends for all ranks together, so the rank that arrives last is in it for the shortest time. The minimum
duration over ranks of the k-th call is therefore the transfer, and what a rank has beyond that it waited: its arrival
skew. This needs no common clock, only that calls are matched: the k-th of the same kind and payload in the same step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfbook.trace.columns import UNKNOWN, IntArray
from perfbook.trace.kernels import CATEGORIES, COMMUNICATION
from perfbook.trace.rank import RankTrace

_KINDS = tuple(c for c in CATEGORIES if c in COMMUNICATION)
_SAME_NAMES = 0.9
_GROUP = re.compile(r"(?:^|_)(dp\d+_pp\d+)_")


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective at one payload in one phase.

    ``duration_us`` is the mean over calls and ranks; ``transfer_us`` and ``skew_us`` (per rank) are means per call, and
    None and empty where the ranks' calls cannot be matched, as with one rank. ``message_bytes`` is None where the trace
    does not say.
    """

    category: str
    message_bytes: int | None
    calls_per_step: float
    duration_us: float
    transfer_us: float | None
    skew_us: dict[int, float]

    @property
    def slowest_rank(self) -> int | None:
        """The rank that the others wait for: the one that waits least."""
        return min(self.skew_us, key=lambda r: (self.skew_us[r], r)) if self.skew_us else None


def collectives(
    ranks: Sequence[RankTrace], chosen: Sequence[NDArray[np.bool_]], counts: Sequence[int]
) -> tuple[Collective, ...]:
    """Every kind and payload that occurs in the chosen steps, largest total time first."""
    aligned = align(ranks)
    keyed = [_codes(r, c) for r, c in zip(ranks, chosen, strict=True)]
    keys = sorted({k for key, _, _ in keyed for k in map(tuple, np.unique(key, axis=0).tolist())})
    found = []
    for kind, size in keys:
        per_rank = [(step[mine], dur[mine]) for key, step, dur in keyed for mine in [(key == (kind, size)).all(1)]]
        calls = float(np.mean([len(step) / count for (step, _), count in zip(per_rank, counts, strict=True)]))
        mean_us = float(np.concatenate([dur for _, dur in per_rank]).mean()) / 1e3
        matched = _matched(per_rank, aligned) if aligned is not None else None
        transfer: float | None = None
        skew: dict[int, float] = {}
        if matched is not None:
            least = matched.min(0)
            transfer = float(least.mean()) / 1e3
            waits_us = (matched - least).mean(1) / 1e3
            skew = {label(rank, i): float(us) for i, (rank, us) in enumerate(zip(ranks, waits_us, strict=True))}
        found.append(Collective(_KINDS[kind], None if size == UNKNOWN else size, calls, mean_us, transfer, skew))
    return tuple(sorted(found, key=lambda c: (-c.calls_per_step * c.duration_us, c.category, c.message_bytes or 0)))


def label(rank: RankTrace, position: int) -> int:
    """The number a rank goes by."""
    return position if rank.rank is None else rank.rank


def align(ranks: Sequence[RankTrace]) -> list[IntArray] | None:
    """For each rank the number that each of its steps has in common with the other ranks' (-1: none).

    Equal numbers of like-named steps correspond one to one. Otherwise steps correspond that began nearest in time, if
    the traces share the host's clock. None when neither holds, or with one rank, or where the files' names say that
    the ranks belong to several engines or pipeline stages, which do not call collectives together.
    """
    groups = {named[1] if (named := _GROUP.search(r.label)) else "" for r in ranks}
    if len(ranks) < 2 or len(groups) > 1:
        return None
    lengths = {len(r.steps) for r in ranks}
    if len(lengths) == 1:
        names = [[s.name for s in r.steps] for r in ranks]
        alike = min(np.mean([a == b for a, b in zip(names[0], other, strict=True)] or [True]) for other in names)
        if alike >= _SAME_NAMES or any(r.how != "annotations" for r in ranks):
            return [np.arange(len(r.steps)) for r in ranks]
        return None
    shortest = min(ranks, key=lambda r: len(r.steps))
    if len(shortest.steps) < 2 or len({r.step_base_ns > 0 for r in ranks}) > 1:
        return None
    anchor = np.array([s.start_ns + shortest.step_base_ns for s in shortest.steps])
    near = np.median(np.diff(anchor)) / 2
    result = []
    for rank in ranks:
        starts = np.array([s.start_ns + rank.step_base_ns for s in rank.steps])
        nearest = np.abs(starts[:, None] - anchor).argmin(1)
        result.append(np.where(np.abs(starts - anchor[nearest]) < near, nearest, -1))
    return result


def _codes(rank: RankTrace, chosen: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
    """Kind and payload, step, and duration of each communication call in the chosen steps."""
    kinds = np.array([_KINDS.index(c) if c in COMMUNICATION else -1 for c in rank.categories], np.int64)
    calls = rank.calls
    mine = (calls.step >= 0) & (chosen[np.maximum(calls.step, 0)] if len(chosen) else False)
    key = np.stack([kinds[calls.name[mine]], calls.message_bytes[mine].astype(np.int64)], axis=1)
    return key, calls.step[mine].astype(np.int64), calls.dur_ns[mine].astype(np.int64)


def _matched(per_rank: Sequence[tuple[IntArray, IntArray]], aligned: Sequence[IntArray]) -> NDArray[np.int64] | None:
    """Durations of corresponding calls, shape (ranks, calls); only steps in which every rank has as many calls."""
    common = [numbers[step] for (step, _), numbers in zip(per_rank, aligned, strict=True)]
    top = max((int(c.max()) for c in common if len(c)), default=-1) + 1
    if top < 1:
        return None
    counts = np.stack([np.bincount(c[c >= 0], minlength=top) for c in common])
    good = (counts == counts[0]).all(0) & (counts[0] > 0)
    if not good.any():
        return None
    rows = []
    for (_, dur), numbers in zip(per_rank, common, strict=True):
        usable = (numbers >= 0) & good[np.maximum(numbers, 0)]
        order = np.argsort(numbers[usable], kind="stable")
        rows.append(dur[usable][order])
    table = np.stack(rows)
    table = table[:, (table > 0).all(0)]  # a duration that was damaged says nothing
    return table if table.shape[1] else None
