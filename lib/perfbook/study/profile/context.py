"""Beside a profile: its files, one step as it ran, what changed since the last profile, exports of Nsight Systems."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from perfbook import figures, trace
from perfbook.desk import Desk
from perfbook.errors import BadInput
from perfbook.figures import Figure
from perfbook.record.run import Run
from perfbook.report.table import Column, Note, Table
from perfbook.study.profile.record import Profile
from perfbook.study.profile.view import step_table
from perfbook.trace.compare import Change, PhaseChange
from perfbook.units import count, quantity

EXPORTS = ("*.sqlite", "*.sqlite3")
_STREAMS = re.compile(r"^c(\d+)(?![0-9])")
_WORTH_A_ROW = 0.005


def files_table(desk: Desk, profiles: Sequence[Profile]) -> Table | Note:
    """One row per file: which rank's, how large, where."""
    rows = [
        (profile.streams, rank.rank, rank.label, path.stat().st_size / 1e6)
        for profile in profiles
        for rank in profile.report.ranks
        for path in profile.files
        if path.name == rank.label
    ]
    if not rows:
        return Note("No trace was taken.")
    caption = f"Trace files in {desk.run.path / 'traces'}; ui.perfetto.dev opens them as they are"
    return Table(["at", "rank", "file", Column("size", "MB")], rows, caption=caption)


def timelines(desk: Desk, profiles: Sequence[Profile]) -> list[Figure | Note]:
    """For each profile the step of median length on its first rank."""
    shown: list[Figure | Note] = []
    for profile in profiles:
        first = next(path for path in profile.files if path.name == profile.report.ranks[0].label)
        step = trace.one_step(first, profile.phase)
        if step is None:
            shown.append(Note(f"No {profile.step} to draw at {profile.streams}."))
            continue
        data = {
            "label": f"{profile.step}, {profile.streams}, rank {profile.report.ranks[0].rank}",
            "duration_ms": step.duration_ms,
            "events": [asdict(bar) for bar in step.bars],
        }
        figure = figures.timeline(data, device=step.device == "gpu", rehearsed=desk.run.rehearsed)
        shown.append(desk.figure(f"step_timeline_c{profile.concurrency}", figure))
    return shown or [Note("Nothing was profiled.")]


def changes(desk: Desk, profiles: Sequence[Profile]) -> list[Table | Note]:
    """What changed since the last profile of this variant at the same concurrency, by category and by kernel."""
    shown: list[Table | Note] = []
    for profile in profiles:
        before = _last_profile(desk, profile)
        if before is None:
            shown.append(Note(f"No earlier profile of this variant at {profile.streams} whose traces are still there."))
            continue
        name, files = before
        change = trace.diff(trace.analyse(files), profile.report).phases.get(profile.phase)
        if change is None:
            shown.append(Note(f"The last profile at {profile.streams} ({name}) holds no {profile.step}."))
            continue
        shown += _change_tables(change, f"{profile.step.capitalize()} at {profile.streams}", name)
    return shown or [Note("Nothing was profiled.")]


def exports(desk: Desk) -> list[Table | Note]:
    """The breakdown of each Nsight Systems export in ``traces/``, and whether one can be recorded here."""
    shown: list[Table | Note] = []
    folder = desk.run.path / "traces"
    for path in sorted(path for pattern in EXPORTS for path in folder.rglob(pattern)):
        try:
            report = trace.analyse([path])
        except BadInput as error:
            shown.append(Note(str(error)))
            continue
        named = _STREAMS.match(path.name)
        at = f"{count(int(named[1]), 'stream')}, {path.name}" if named else path.name
        name = "decode" if "decode" in report.phases else "all"
        shown.append(step_table(name, report.phases[name], at, len(report.ranks)))
    if not shown:
        nsys = shutil.which("nsys")
        here = f"Nsight Systems is at {nsys}" if nsys else "Nsight Systems is not installed here (no nsys on the PATH)"
        shown.append(Note(f"No export in {folder}. {here}."))
    return shown


def _last_profile(desk: Desk, profile: Profile) -> tuple[str, list[Path]] | None:
    """Run and files of the newest earlier profile at this concurrency whose files are all there."""
    now = {path.name for path in profile.files}
    for run in _runs_back(desk.run):
        there = {path.name: path for path in (run.path / "traces").rglob("*") if path.is_file()}
        for record in reversed(run.history()):
            if record.get("kind") != "profile" or record.get("concurrency") != profile.concurrency:
                continue
            names = record.get("files", [])
            if names and now.isdisjoint(names) and set(names) <= set(there):
                return run.path.name, [there[name] for name in names]
    return None


def _runs_back(run: Run) -> Iterator[Run]:
    """This run and the earlier ones of its variant and kind, newest first."""
    for other in reversed(Run.every()):
        same = other.path.parent == run.path.parent and other.path.name <= run.path.name
        if same and other.rehearsed == run.rehearsed:
            yield other


def _change_tables(change: PhaseChange, what: str, before: str) -> list[Table | Note]:
    columns: list[str | Column] = [
        Column("before", "ms", digits=4), Column("now", "ms", digits=4), Column("change", "ms", sign=True),
        "calls before", "calls now",
    ]  # fmt: skip
    step = f"{what}: {quantity(change.before_step_ms, 'ms')} in {before}, {quantity(change.after_step_ms, 'ms')} now"
    least_ms = _WORTH_A_ROW * change.after_step_ms
    kernels = [one for one in change.kernels if abs(one.ms) >= least_ms or one.before_calls != one.after_calls][:10]
    tables: list[Table | Note] = [Table(["category", *columns], [_row(one) for one in change.categories], caption=step)]
    if kernels:
        rows = [_row(one) for one in kernels]
        tables.append(Table(["kernel", *columns], rows, caption="Kernels that changed most"))
    else:
        tables.append(Note(f"No kernel changed by {quantity(least_ms, 'ms')} per step or in its number of calls."))
    return tables


def _row(one: Change) -> tuple[str, float, float, float, float, float]:
    return one.name[:90], one.before_ms, one.after_ms, round(one.ms, 4), one.before_calls, one.after_calls
