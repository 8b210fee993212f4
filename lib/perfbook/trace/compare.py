"""A profile beside another one, and beside the truth that was measured without a profiler. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from perfbook.errors import BadInput
from perfbook.trace.breakdown import ALL, Part, Phase
from perfbook.trace.report import SCHEMA, TraceReport

_TOP = 10


@dataclass(frozen=True, slots=True)
class Change:
    """One category or kernel in two profiles: ms and calls per step, before and after; 0 where it does not occur."""

    name: str
    category: str
    before_ms: float
    after_ms: float
    before_calls: float
    after_calls: float

    @property
    def ms(self) -> float:
        """Milliseconds per step gained (negative) or lost."""
        return self.after_ms - self.before_ms


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """A phase in two profiles; categories and kernels by the size of their change."""

    before_step_ms: float
    after_step_ms: float
    categories: tuple[Change, ...]
    kernels: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """Phases that occur in both profiles, and those that occur in only one."""

    phases: dict[str, PhaseChange]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"schema": SCHEMA, **asdict(self)}


def diff(before: TraceReport, after: TraceReport) -> TraceDiff:
    """What changed from one profile to another, per phase, by category and by kernel."""
    common = [p for p in before.phases if p in after.phases]
    return TraceDiff(
        {p: _phase_change(before.phases[p], after.phases[p]) for p in common},
        tuple(p for p in before.phases if p not in after.phases),
        tuple(p for p in after.phases if p not in before.phases),
    )


def _phase_change(before: Phase, after: Phase) -> PhaseChange:
    return PhaseChange(
        before.step_mean_ms,
        after.step_mean_ms,
        tuple(_changes(before.categories, after.categories)),
        tuple(_changes(before.kernels, after.kernels)),
    )


def _changes(before: tuple[Part, ...], after: tuple[Part, ...]) -> list[Change]:
    old = {(p.name, p.category): p for p in before}
    new = {(p.name, p.category): p for p in after}
    changes = []
    for key in old | new:
        a, b = old.get(key), new.get(key)
        changes.append(
            Change(
                *key,
                a.ms_per_step if a else 0.0,
                b.ms_per_step if b else 0.0,
                a.calls_per_step if a else 0.0,
                b.calls_per_step if b else 0.0,
            )
        )
    return sorted(changes, key=lambda c: (-abs(c.ms), c.name))


def render_diff(change: TraceDiff) -> str:
    """The changes as text of at most 80 columns."""
    return "\n".join(_diff_lines(change)) + "\n"


def _diff_lines(change: TraceDiff) -> Iterator[str]:
    shown = [p for p in change.phases if p != ALL] or list(change.phases)
    for name in shown:
        phase = change.phases[name]
        yield f"{name}: step {phase.before_step_ms:.3f} ms before, {phase.after_step_ms:.3f} ms after"
        for title, rows in (("category", phase.categories), ("kernel", phase.kernels[:_TOP])):
            yield f"  {title:<26}{'before ms':>11}{'after ms':>11}{'change':>10}{'calls':>18}"
            for row in rows:
                label = row.name if len(row.name) <= 25 else row.name[:24] + "…"
                calls = f"{row.before_calls:.1f} -> {row.after_calls:.1f}"
                yield f"  {label:<26}{row.before_ms:>11.3f}{row.after_ms:>11.3f}{row.ms:>+10.3f}{calls:>18}"
    for when, names in (("before", change.only_before), ("after", change.only_after)):
        if names:
            yield f"only {when}: {', '.join(names)}"


@dataclass(frozen=True, slots=True)
class Inflation:
    """A profiled decode step beside the unprofiled time per output token at the same concurrency.

    Attributes
    ----------
    concurrency : of both.
    step_ms, busy_ms : the profiled step and the part of it in which the device worked.
    tpot_ms : unprofiled.
    ratio : ``step_ms / tpot_ms``: how much profiling inflated the step.
    placed : "gaps" where the device works no longer than ``tpot_ms``: busy milliseconds stand as they are;
        "kernels" where it does, so that the kernels themselves are inflated; "none" where the step is not longer.
    scale : what to multiply profiled milliseconds by; 1 unless ``placed`` is "kernels".
    categories_ms : milliseconds per category and step, scaled.
    sentence : the same in words.
    """

    concurrency: int
    step_ms: float
    busy_ms: float
    tpot_ms: float
    ratio: float
    placed: str
    scale: float
    categories_ms: dict[str, float]
    sentence: str


DISTURBED = 0.9
"""A profiled step below this share of the unprofiled TPOT says that the two were not measured alike."""


def beside_unprofiled(report: TraceReport, tpot_ms: float, concurrency: int) -> Inflation:
    """State by how much profiling inflated a decode step, and where.

    Parameters
    ----------
    report : a profile at ``concurrency``.
    tpot_ms : unprofiled time per output token there. It is longer than a decode step where prefills interleave.

    Raises
    ------
    BadInput
        The profile has no decode step, or ``tpot_ms`` is not a positive number.
    """
    if not 0 < tpot_ms < float("inf"):
        raise BadInput(f"an unprofiled TPOT of {tpot_ms} ms cannot be compared with; it must be a positive number.")
    phase = report.phases.get("decode")
    if phase is None:
        raise BadInput("the profile has no decode step to set beside the TPOT; profile while requests decode.")
    step, busy = phase.step_mean_ms, phase.busy_ms
    ratio = step / tpot_ms
    placed = "none" if step <= tpot_ms else "gaps" if busy <= tpot_ms else "kernels"
    scale = tpot_ms / busy if placed == "kernels" else 1.0
    where = {
        "none": "profiling did not lengthen it; milliseconds stand as they are"
        if ratio > DISTURBED
        else "profiling cannot shorten a step: the unprofiled measurement was disturbed, so repeat both",
        "gaps": f"the device works {busy:.2f} ms of it, no more than the TPOT, so the inflation sits in the gaps and "
        "busy milliseconds stand as they are",
        "kernels": f"the device works {busy:.2f} ms of it, more than the TPOT: milliseconds here are as profiled; "
        f"unprofiled they are about {scale:.3f} times as long, assuming that profiling lengthens all kernels alike",
    }[placed]
    at = "1 stream" if concurrency == 1 else f"concurrency {concurrency}"
    sentence = (
        f"at {at} the profiled decode step takes {step:.2f} ms, {ratio:.2f} x the unprofiled TPOT of {tpot_ms:.2f} ms; "
        f"{where}."
    )
    categories = {part.category: part.ms_per_step * scale for part in phase.categories}
    return Inflation(concurrency, step, busy, tpot_ms, ratio, placed, scale, categories, sentence)
