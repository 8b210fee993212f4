"""What a profile shows: breakdowns, kernels, waits, collectives, and how far to trust them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfbook import figures
from perfbook.desk import Desk
from perfbook.figures import Figure
from perfbook.report.table import Column, Note, Table
from perfbook.study.profile.record import Profile, step_name
from perfbook.trace.breakdown import Phase
from perfbook.units import count, number, quantity


def breakdown_table(profile: Profile) -> Table:
    """Milliseconds, shares and calls per category of one phase."""
    device = any(rank.gpu_events for rank in profile.report.ranks)
    phase = profile.report.phases[profile.phase]
    return step_table(profile.phase, phase, profile.streams, len(profile.report.ranks), device=device)


def step_table(name: str, phase: Phase, at: str, ranks: int, *, device: bool = True) -> Table:
    """The same for any breakdown; ``at`` says where it comes from."""
    rows = [
        (part.category, part.ms_per_step, 100 * part.share, 100 * part.share_of_step, part.calls_per_step)
        for part in phase.categories
    ]
    return Table(
        [
            "category", Column("time per step", "ms", digits=2), Column("of device time", "pct", digits=1),
            Column("of the step", "pct", digits=1), Column("calls per step"),
        ],
        rows,
        caption=f"{step_name(name).capitalize()} at {at}: {count(phase.steps, 'step')}, mean "
        f"{quantity(phase.step_mean_ms, 'ms')}, {'busy' if device else 'traced operators'} "
        f"{number(100 * phase.busy_share)} % (mean over {count(ranks, 'rank')})",
    )  # fmt: skip


def waits_table(profiles: Sequence[Profile]) -> Table | Note:
    """Each phase's wall time: busy, and what the device waited for; communication that other work hides or does not."""
    rows = []
    for profile in profiles:
        for name, phase in profile.report.phases.items():
            if (name != "all" or len(profile.report.phases) == 1) and any(r.gpu_events for r in profile.report.ranks):
                idle = phase.idle
                waits = (idle.host_ms, idle.launch_ms, idle.device_ms, idle.unknown_ms)
                communication = (phase.exposed_communication_ms, phase.hidden_communication_ms)
                at = f"{name}, {profile.streams}"
                rows.append((at, phase.step_mean_ms, phase.busy_ms, *waits, phase.idle_reliable, *communication))
    if not rows:
        return Note("No device was traced: what it waited for is not known.")
    return Table(
        [
            "step", Column("wall", "ms"), Column("busy", "ms"), Column("host", "ms"), Column("launch", "ms"),
            Column("device", "ms"), Column("unknown", "ms"), "reliable",
            Column("exposed", "ms"), Column("hidden", "ms"),
        ],
        rows,
        caption="Idle by what the device waited for: the host between steps, a launch within a step, itself; "
        "communication alone (exposed) or under other work (hidden)",
    )  # fmt: skip


def collectives_table(profile: Profile) -> Table | Note:
    """Each collective at each size: its time split into transfer and waiting, and who comes last."""
    found = profile.report.phases[profile.phase].collectives
    if not found:
        return Note(f"No collective in a {profile.step} at {profile.streams}.")
    rows = [
        (
            one.category,
            one.message_bytes,
            one.calls_per_step,
            one.duration_us,
            one.transfer_us,
            max(one.skew_us.values(), default=None),
            one.slowest_rank,
        )
        for one in found
    ]
    return Table(
        [
            "collective", "bytes", "calls per step", Column("each", "us"), Column("transfer", "us"),
            Column("longest wait", "us"), "rank waited for",
        ],
        rows,
        caption=f"Collectives of a {profile.step} at {profile.streams}: transfer is the shortest duration over "
        "ranks of the same call; the rest of a rank's time there it waits for the last to arrive",
    )  # fmt: skip


def kernel_table(profile: Profile, most: int = 12) -> Table:
    """The kernels (or operators) that take most of the time."""
    phase = profile.report.phases[profile.phase]
    rows = [
        (part.name[:90], part.category, part.ms_per_step, 100 * part.share, part.calls_per_step)
        for part in phase.kernels[:most]
    ]
    return Table(
        [
            "kernel",
            "category",
            Column("time per step", "ms", digits=2),
            Column("of device time", "pct", digits=1),
            Column("calls per step"),
        ],
        rows,
        caption=f"The {len(rows)} longest of {len(phase.kernels)} kernels at {count(profile.concurrency, 'stream')}",
    )


def breakdown_figure(desk: Desk, profiles: Sequence[Profile]) -> Figure | Note:
    """One stacked bar per phase and profile."""
    bars: list[dict[str, Any]] = []
    for profile in profiles:
        for name, phase in profile.report.to_json()["phases"].items():
            if name != "all" or len(profile.report.phases) == 1:
                bars.append({"label": f"{name}, {count(profile.concurrency, 'stream')}", **phase})
    if not bars:
        return Note("Nothing was profiled.")
    device = any(rank.gpu_events for profile in profiles for rank in profile.report.ranks)
    return desk.figure("step_breakdown", figures.step_breakdown(bars, device=device, rehearsed=desk.run.rehearsed))


def warnings_table(profiles: Sequence[Profile]) -> Table | Note:
    """What the traces say about their own reliability."""
    ranks: dict[tuple[int, str], list[str]] = {}
    for profile in profiles:
        for rank in profile.report.to_json()["ranks"]:
            for warning in rank["warnings"]:
                ranks.setdefault((profile.concurrency, warning), []).append(str(rank["rank"]))
    rows = [(streams, ", ".join(which), warning) for (streams, warning), which in ranks.items()]
    return (
        Table(["streams", "ranks", "warning"], rows, caption="Read with care")
        if rows
        else Note("The traces raise no warning.")
    )
