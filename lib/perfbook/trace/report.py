"""What a profile says: for machines (``to_json``) and for people at 80 columns (``render_text``)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perfbook.trace.breakdown import ALL, Phase
from perfbook.trace.rank import RankTrace
from perfbook.trace.ranks import label

SCHEMA = 1
_WIDTH = 80
_TOP_KERNELS = 8
_TOP_UNCLASSIFIED = 5


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The traces of one profile, broken down.

    Attributes
    ----------
    ranks : what was read, per rank.
    phases : "decode", "prefill" and "mixed" as they occur, and "all"; empty when nothing was recorded.
    warnings : about the profile as a whole; those about a file stand with its rank.
    """

    ranks: tuple[RankTrace, ...]
    phases: dict[str, Phase]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report in the schema of ``perfbook trace --json``; plain numbers, units in the keys.

        ``share`` is of the phase's summed device time, ``share_of_step`` of the steps' wall time; ms and calls are per
        rank. ``message_bytes`` is null where the trace does not say, ``transfer_us`` where it cannot be told.
        """
        return {
            "schema": SCHEMA,
            "ranks": [
                {
                    "rank": r.rank,
                    "file": r.label,
                    "events": r.events,
                    "gpu_events": r.gpu_events,
                    "warnings": [*r.warnings, *(self.warnings if i == 0 else ())],
                }
                for i, r in enumerate(self.ranks)
            ],
            "phases": {name: _phase_json(phase) for name, phase in self.phases.items()},
        }


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {
        "steps": phase.steps,
        "step_ms": {"mean": phase.step_mean_ms, "p50": phase.step_p50_ms, "p99": phase.step_p99_ms},
        "busy_share": phase.busy_share,
        "idle_share": phase.idle_share,
        "idle_reliable": phase.idle_reliable,
        "categories": [
            {
                "category": part.category,
                "ms_per_step": part.ms_per_step,
                "share": part.share,
                "share_of_step": part.share_of_step,
                "calls_per_step": part.calls_per_step,
            }
            for part in phase.categories
        ],
        "unclassified_share": phase.unclassified_share,
        "collectives": [
            {
                "category": c.category,
                "message_bytes": c.message_bytes,
                "calls_per_step": c.calls_per_step,
                "transfer_us": c.transfer_us,
                "skew_us": {str(rank): us for rank, us in c.skew_us.items()},
            }
            for c in phase.collectives
        ],
    }


def render_text(report: TraceReport) -> str:
    """The report as text of at most 80 columns: what was read, a table per phase, the warnings."""
    lines = list(_ranks_text(report))
    host_only = any(rank.device == "cpu" for rank in report.ranks)
    shown = [name for name in report.phases if name != ALL] or list(report.phases)
    for name in shown:
        lines += ["", *_phase_text(name, report.phases[name], host_only)]
    if not report.phases:
        lines += ["", "Nothing was recorded: no device events and no operators."]
    said: dict[str, list[int]] = {}
    for i, rank in enumerate(report.ranks):
        for warning in rank.warnings:
            said.setdefault(warning, []).append(label(rank, i))
    notes = list(report.warnings)
    for warning, ranks in said.items():
        everyone = len(ranks) == len(report.ranks)
        notes.append(warning if everyone else f"rank {', '.join(map(str, ranks))}: {warning}")
    if notes:
        lines += ["", "Notes"]
        for note in notes:
            lines += _wrapped(note, "  - ", "    ")
    return "\n".join(lines) + "\n"


def _ranks_text(report: TraceReport) -> Iterator[str]:
    for i, rank in enumerate(report.ranks):
        what = f"{rank.gpu_events} on the device" if rank.device == "gpu" else "host operators only"
        yield from _wrapped(f"rank {label(rank, i)}: {rank.label}: {rank.events} events, {what}", "", "  ")
        aside: dict[str, int] = {}
        for step in rank.steps:
            if step.set_aside:
                aside[step.set_aside] = aside.get(step.set_aside, 0) + 1
        for reason, count in aside.items():
            yield from _wrapped(f"{count} step{'s' if count > 1 else ''} set aside: {reason}", "  ", "    ")


def _phase_text(name: str, phase: Phase, host_only: bool) -> Iterator[str]:
    batch = f", {phase.requests:g} requests" if phase.requests is not None else ""
    tokens = f", {phase.tokens:g} tokens" if phase.tokens is not None else ""
    plural = "" if phase.steps == 1 else "s"
    yield f"{name}: {phase.steps} step{plural}{batch}{tokens}"
    yield f"  step ms: mean {phase.step_mean_ms:.3f}, p50 {phase.step_p50_ms:.3f}, p99 {phase.step_p99_ms:.3f}"
    if host_only:
        yield f"  operators {_percent(phase.busy_share)} of the step, not traced {_percent(phase.idle_share)}"
    else:
        trust = "" if phase.idle_reliable else " (unreliable)"
        yield f"  busy {_percent(phase.busy_share)} of the step, idle {_percent(phase.idle_share)}{trust}"
    idle = phase.idle
    kinds = {"host": idle.host_ms, "launch": idle.launch_ms, "device": idle.device_ms, "unknown": idle.unknown_ms}
    if any(kinds.values()):
        yield "  idle ms waiting for: " + ", ".join(f"{k} {v:.3f}" for k, v in kinds.items() if v)
    if phase.hidden_communication_ms or phase.exposed_communication_ms:
        yield (
            f"  communication ms: exposed {phase.exposed_communication_ms:.3f}, "
            f"hidden under other work {phase.hidden_communication_ms:.3f}"
        )
    of = "of op time" if host_only else "of device"
    yield f"  {'category':<18}{'ms/step':>11}{of:>12}{'of step':>10}{'calls/step':>13}"
    for part in phase.categories:
        yield (
            f"  {part.category:<18}{part.ms_per_step:>11.3f}{_percent(part.share):>12}"
            f"{_percent(part.share_of_step):>10}{part.calls_per_step:>13.1f}"
        )
    yield f"  unclassified: {_percent(phase.unclassified_share)} of {'operator' if host_only else 'device'} time"
    for part in phase.unclassified[:_TOP_UNCLASSIFIED]:
        yield f"    {_percent(part.share):>7}  {_short(part.name, 60)}"
    if phase.collectives:
        yield f"  {'collective':<18}{'bytes':>11}{'calls/step':>12}{'us each':>10}{'transfer':>10}{'slowest':>9}"
    for c in phase.collectives:
        size = "?" if c.message_bytes is None else str(c.message_bytes)
        transfer = "?" if c.transfer_us is None else f"{c.transfer_us:.1f}"
        slowest = "?" if c.slowest_rank is None else f"rank {c.slowest_rank}"
        yield f"  {c.category:<18}{size:>11}{c.calls_per_step:>12.1f}{c.duration_us:>10.1f}{transfer:>10}{slowest:>9}"
    yield "  top kernels"
    for part in phase.kernels[:_TOP_KERNELS]:
        yield f"    {_percent(part.share):>7}{part.calls_per_step:>8.1f} x  {_short(part.name, 55)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _short(name: str, width: int) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= width else name[: width - 1] + "…"


def _wrapped(text: str, first: str, rest: str) -> Iterator[str]:
    """Break at spaces, and long words where they must."""
    yield from textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest)
