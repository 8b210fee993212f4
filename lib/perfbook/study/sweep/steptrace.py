"""A short trace at the end of a sweep: how many all-reduces a decode step makes.

05 predicts what a faster all-reduce is worth before any reload; that takes their number per step, which only a trace
knows. One rank sums nothing over others and needs none.
"""

from __future__ import annotations

from collections.abc import Callable

from perfbook import trace
from perfbook.desk import Desk
from perfbook.errors import ServerFailed
from perfbook.report.table import Column, Note, Table
from perfbook.study import bench, profile
from perfbook.units import count


def count_all_reduces(desk: Desk, progress: Callable[[str], None]) -> Table | Note:
    """Trace a few decode steps of the smallest load and record their calls by kind (``step_trace``)."""
    if bench.served_model(desk.variant, desk.hardware).ranks == 1:
        return Note("One rank: a step has no all-reduce to count, so no trace was taken.")
    try:
        armed = desk.server().endpoints.can_profile()
    except ServerFailed as error:  # it died in the sweep, which keeps its cells and says so
        return Note(f"No trace: {error}")
    if not armed:
        return Note("No trace: the server offers no profiler. 05 takes the number of all-reduces from the layers.")
    streams = min(desk.variant.sweep.concurrency)
    progress(f"a short trace at {count(streams, 'stream')}")
    with desk.measuring():
        files = profile.take(desk, streams)
    if not files:
        return Note("No trace: the server wrote none that this machine can see.")
    phase = trace.analyse(files).phases.get("decode")
    if phase is None:
        return Note("The trace holds no decode step: the number of all-reduces stays unknown.")
    categories = [
        {"category": part.category, "calls_per_step": part.calls_per_step, "ms_per_step": part.ms_per_step}
        for part in phase.categories
    ]
    desk.record(
        "step_trace",
        {
            "concurrency": streams,
            "steps": phase.steps,
            "categories": categories,
            "files": [path.name for path in files],
        },
    )
    return Table(
        ["category", "calls per step", Column("time per step", "ms")],
        [(part.category, part.calls_per_step, part.ms_per_step) for part in phase.categories],
        caption=f"Calls of a decode step at {count(streams, 'stream')}: {count(phase.steps, 'step')} of a short trace, "
        "mean over ranks; profiled times are longer than real ones",
    )
