"""Tables of 05: settings, screen, what is relaunched, and the verdicts beside every launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfbook.desk import Desk
from perfbook.params import Setting
from perfbook.report.table import Column, Note, Table
from perfbook.server.launch import option_words
from perfbook.study import bench, owner, relaunch
from perfbook.study.tuning.decision import Decision
from perfbook.study.tuning.window import Screening, message_size
from perfbook.units import byte_size, duration, number


def settings_table(desk: Desk) -> Table | Note:
    """The settings to try, and what each changes."""
    settings = desk.variant.tuning.settings
    if not settings:
        return Note("The parameter file names no settings (tuning.settings): only the devices are measured.")
    return Table(
        ["setting", "changes"],
        [(name, describe(setting)) for name, setting in settings.items()],
        caption=f"Settings to try, at {', '.join(map(str, desk.variant.tuning.concurrency))} streams",
    )


def describe(setting: Setting) -> str:
    """``NCCL_PROTO=LL --enforce-eager``."""
    return " ".join([*(f"{key}={value}" for key, value in setting.env.items()), *option_words(setting.args)])


def screen_table(desk: Desk, screening: Screening) -> Table | Note:
    """Status, latency and prediction of every screened setting."""
    if screening.skipped:
        return Note(f"No screen: {screening.skipped}.")
    rows: list[tuple[Any, ...]] = []
    for name, one in screening.screened.items():
        for concurrency in desk.variant.tuning.concurrency:
            size = message_size(bench.served_model(owner.described(desk), desk.hardware), concurrency)
            expected = screening.predictions.get((name, concurrency))
            times = ", ".join(number(us) for us in one.latencies_us.get(size, ())) or "not measured"
            best = None if expected is None else expected.best_pct
            predicted = None if expected is None else expected.predicted_pct
            rows.append(
                (name, concurrency, byte_size(size, binary=True), one.status, times, one.used.get(size, "unknown"),
                 predicted, best, one.reason)
            )  # fmt: skip
    return Table(
        ["setting", "streams", "message", "status", "latency per round (µs)", "NCCL chose",
         Column("predicted TPOT", "pct", sign=True), Column("at best", "pct", sign=True), "reason"],
        rows,
        caption="All-reduce at the decode sizes; a prediction is the latency saved × all-reduces per step over TPOT",
    )  # fmt: skip


def decision_table(decisions: Sequence[Decision], planned: relaunch.Plan) -> Table | Note:
    """What is relaunched and why, and what that costs: shown before it starts."""
    if not decisions:
        return Note("No settings: nothing is relaunched.")
    counts = {one.setting: sum(launch.setting == one.setting for launch in planned.launches) for one in decisions}
    dropped = f"; left out for the time budget: {planned.dropped}" if planned.dropped else ""
    return Table(
        ["setting", "relaunches", "why"],
        [(one.setting, counts[one.setting], one.why) for one in decisions],
        caption=f"{len(planned.launches)} launches, baseline included, about {duration(planned.cost_s)}{dropped}",
    )


def verdict_table(desk: Desk) -> Table | Note:
    """Every launch's number beside the verdict, prediction beside outcome."""
    rows = [
        (
            r["setting"], r["concurrency"], r["verdict"], r["effect_pct"], r["predicted_pct"],
            ", ".join(number(x) for x in r["tpot_ms"]) or "none",
            ", ".join(number(x) for x in r["baseline_tpot_ms"]) or "none", r["why"],
        )
        for r in desk.run.records("tuning")
    ]  # fmt: skip
    if not rows:
        return Note("No setting was tried.")
    return Table(
        ["setting", "streams", "verdict", Column("effect on TPOT", "pct", sign=True),
         Column("predicted", "pct", sign=True), "launches (ms)", "baseline launches (ms)", "in words"],
        rows,
        caption="Against the baseline, one number per launch; below zero is faster",
    )  # fmt: skip
