"""Ranks to phases: milliseconds and calls per step by category and kernel, busy and idle, collectives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfbook.trace.kernels import CATEGORIES, UNCLASSIFIED
from perfbook.trace.rank import RankTrace
from perfbook.trace.ranks import Collective, collectives
from perfbook.trace.steps import PHASES

ALL = "all"


@dataclass(frozen=True, slots=True)
class Part:
    """One category or one kernel within a phase.

    ``ms_per_step`` and ``calls_per_step`` are per rank (mean over ranks); ``share`` is of the phase's summed device
    time, ``share_of_step`` of the step's wall time.
    """

    name: str
    category: str
    ms_per_step: float
    share: float
    share_of_step: float
    calls_per_step: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle time per step in ms, by what the device waited for.

    ``host_ms``: the next step had not begun to be launched. ``launch_ms``: the next kernel of the step had not been
    launched. ``device_ms``: it had been; the wait is on the device. ``unknown_ms``: no launch is recorded.
    """

    host_ms: float
    launch_ms: float
    device_ms: float
    unknown_ms: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What a step of one kind is made of; means are over steps first and ranks second.

    ``steps`` is per rank; ``busy_share`` and ``idle_share`` are of wall time; ``kernels`` in order of time;
    ``requests`` and ``tokens`` are medians, None where the annotations do not say. For "all", which is the whole trace
    with nothing set aside, the shares are of the span from the first device event to the last.
    """

    steps: int
    requests: float | None
    tokens: float | None
    step_mean_ms: float
    step_p50_ms: float
    step_p99_ms: float
    busy_ms: float
    busy_share: float
    idle: Idle
    idle_reliable: bool
    hidden_communication_ms: float
    exposed_communication_ms: float
    categories: tuple[Part, ...]
    kernels: tuple[Part, ...]
    collectives: tuple[Collective, ...]

    @property
    def idle_share(self) -> float:
        """Share of wall time in which nothing ran."""
        return 1.0 - self.busy_share

    @property
    def device_ms(self) -> float:
        """Summed durations per step; more than ``busy_ms`` where streams overlap."""
        return sum(part.ms_per_step for part in self.categories)

    @property
    def unclassified_share(self) -> float:
        """Share of device time in kernels that no rule knows."""
        return sum(part.share for part in self.categories if part.category == UNCLASSIFIED)

    @property
    def unclassified(self) -> tuple[Part, ...]:
        """Those kernels, in order of time."""
        return tuple(part for part in self.kernels if part.category == UNCLASSIFIED)


def counted(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Ranks with something recorded; where devices were traced, only those with device events."""
    recorded = [rank for rank in ranks if len(rank.sums.step)]
    return [rank for rank in recorded if rank.device == "gpu"] or recorded


def phases(ranks: Sequence[RankTrace]) -> dict[str, Phase]:
    """Each phase that occurs, and "all", over the ranks that count; empty when nothing is recorded."""
    ranks = counted(ranks)
    found = {}
    for phase in PHASES:
        chosen = [np.array([s.phase == phase and not s.set_aside for s in r.steps], bool) for r in ranks]
        having = [(r, c) for r, c in zip(ranks, chosen, strict=True) if c.any()]
        if having:
            found[phase] = _phase([r for r, _ in having], [c for _, c in having])
    if ranks:
        found[ALL] = _phase(ranks, [np.ones(len(r.steps), bool) for r in ranks], whole=True)
    return found


def _phase(ranks: Sequence[RankTrace], chosen: Sequence[NDArray[np.bool_]], whole: bool = False) -> Phase:
    """One phase from the chosen steps of each rank; ``whole`` also counts what belongs to no step."""
    counts = [max(1, int(c.sum())) for c in chosen]
    ended = [_ended(r, c) for r, c in zip(ranks, chosen, strict=True)]
    walls = np.concatenate([r.times.wall_ns[e] for r, e in zip(ranks, ended, strict=True)]) / 1e6
    walls = walls if len(walls) else np.array([np.mean([r.span_ns for r in ranks]) / 1e6])

    def per_step(field: str) -> float:
        values = [getattr(r.times, field)[e] for r, e in zip(ranks, ended, strict=True) if e.any()]
        return float(np.mean([v.mean() for v in values])) / 1e6 if values else 0.0

    mean_ms = float(walls.mean())
    if whole:
        busy_ms = float(np.mean([r.busy_ns / n for r, n in zip(ranks, counts, strict=True)])) / 1e6
        frame_ms = float(np.mean([r.span_ns / n for r, n in zip(ranks, counts, strict=True)])) / 1e6
    else:
        busy_ms, frame_ms = per_step("busy_ns"), mean_ms
    steps = [s for r, c in zip(ranks, chosen, strict=True) for s, yes in zip(r.steps, c, strict=True) if yes]
    kernels = _parts(ranks, chosen, counts, frame_ms, whole)
    return Phase(
        steps=round(float(np.mean(counts))),
        requests=_median([s.requests for s in steps]),
        tokens=_median([s.tokens for s in steps]),
        step_mean_ms=mean_ms,
        step_p50_ms=float(np.percentile(walls, 50)),
        step_p99_ms=float(np.percentile(walls, 99)),
        busy_ms=busy_ms,
        busy_share=min(1.0, busy_ms / frame_ms) if frame_ms else 0.0,
        idle=Idle(*(per_step(f"{kind}_ns") for kind in ("host", "launch", "device", "unknown"))),
        idle_reliable=all(r.idle_reliable for r in ranks),
        hidden_communication_ms=per_step("hidden_ns"),
        exposed_communication_ms=per_step("exposed_ns"),
        categories=_by_category(kernels, ranks, chosen, counts, whole),
        kernels=kernels,
        collectives=collectives(ranks, chosen, counts),
    )


def _ended(rank: RankTrace, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The chosen steps whose wall time is known; where none is, the chosen ones up to their last device event."""
    closed = chosen & rank.times.closed
    return closed if closed.any() else chosen & (rank.times.wall_ns > 0)


def _selected(rank: RankTrace, chosen: NDArray[np.bool_], whole: bool) -> NDArray[np.bool_]:
    if whole or not len(chosen):
        return np.ones(len(rank.sums.step), bool)
    return np.asarray((rank.sums.step >= 0) & chosen[np.maximum(rank.sums.step, 0)])


def _parts(
    ranks: Sequence[RankTrace], chosen: Sequence[NDArray[np.bool_]], counts: Sequence[int], frame_ms: float, whole: bool
) -> tuple[Part, ...]:
    """Every kernel's part, largest first."""
    ms: dict[tuple[str, str], float] = {}
    calls: dict[tuple[str, str], float] = {}
    total: dict[tuple[str, str], int] = {}
    for rank, steps, count in zip(ranks, chosen, counts, strict=True):
        mine = _selected(rank, steps, whole)
        width = len(rank.names)
        dur = np.bincount(rank.sums.name[mine], weights=rank.sums.dur_ns[mine], minlength=width)
        times = np.bincount(rank.sums.name[mine], weights=rank.sums.calls[mine], minlength=width)
        for i in np.flatnonzero(times):
            key = (rank.names[i], rank.categories[i])
            ms[key] = ms.get(key, 0.0) + float(dur[i]) / count / len(ranks) / 1e6
            calls[key] = calls.get(key, 0.0) + float(times[i]) / count / len(ranks)
            total[key] = total.get(key, 0) + int(dur[i])
    device = sum(total.values()) or 1
    parts = [
        Part(name, category, ms[key], total[key] / device, ms[key] / frame_ms if frame_ms else 0.0, calls[key])
        for key in ms
        for name, category in (key,)
    ]
    return tuple(sorted(parts, key=lambda p: (-p.ms_per_step, p.name)))


def _by_category(
    kernels: Sequence[Part],
    ranks: Sequence[RankTrace],
    chosen: Sequence[NDArray[np.bool_]],
    counts: Sequence[int],
    whole: bool,
) -> tuple[Part, ...]:
    """Kernels added up by category; a layer inside a call of the same category is no call of its own."""
    calls = dict.fromkeys(CATEGORIES, 0.0)
    for rank, steps, count in zip(ranks, chosen, counts, strict=True):
        mine = _selected(rank, steps, whole)
        per_name = np.bincount(rank.sums.name[mine], weights=rank.sums.outermost_calls[mine], minlength=len(rank.names))
        for category, number in zip(rank.categories, per_name, strict=True):
            calls[category] += float(number) / count / len(ranks)
    parts = []
    for category in CATEGORIES:
        mine_parts = [p for p in kernels if p.category == category]
        if mine_parts:
            ms, share, of_step = (
                sum(getattr(p, f) for p in mine_parts) for f in ("ms_per_step", "share", "share_of_step")
            )
            parts.append(Part(category, category, ms, share, of_step, calls[category]))
    return tuple(sorted(parts, key=lambda p: (-p.ms_per_step, p.name)))


def _median(values: Sequence[int | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else None
