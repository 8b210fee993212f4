"""05: which settings are worth a reload, and which of them win?

Screen, predict, confirm. The server is stopped once; in that window everything that needs the devices free is
measured. Only settings that can matter are relaunched, interleaved with the baseline, and judged launch by launch:
requests of one launch are not repeats of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfbook import stats
from perfbook.desk import Desk, Verdict
from perfbook.figures.cells import statistic
from perfbook.micro import AllReduce, DeviceBench
from perfbook.params import Setting
from perfbook.report.table import Column, Note, Table
from perfbook.server import process
from perfbook.server.launch import option_words, own_environment
from perfbook.stats import Label
from perfbook.study import bench, relaunch
from perfbook.study.bench import Served
from perfbook.study.profile import unprofiled_tpot_ms
from perfbook.study.screen import BASELINE, OK, Prediction, Screened, predict, screen
from perfbook.units import byte_size, duration, number, quantity

ALL_SIZES = tuple(2**power for power in range(10, 27))  # 1 KiB to 64 MiB
NOT_WORTH, NOT_RELAUNCHED, NO_START = "not worth a reload", "not relaunched", "does not start"


@dataclass(frozen=True)
class Screening:
    """What the window with free devices gave.

    Attributes
    ----------
    skipped : str
        Why there was no screen; empty when there was.
    screened : dict
        Setting → result, ``baseline`` among them; empty without a screen.
    predictions : dict
        (setting, concurrency) → prediction, where one can be made.
    devices : DeviceBench or str
        Bandwidth and products, or why they were not measured.
    """

    skipped: str
    screened: Mapping[str, Screened]
    predictions: Mapping[tuple[str, int], Prediction]
    devices: DeviceBench | str


@dataclass(frozen=True)
class Decision:
    """Whether a setting is relaunched, and why."""

    setting: str
    relaunch: bool
    why: str
    verdict: str = NOT_RELAUNCHED


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


def no_screen(desk: Desk, served: Served) -> str:
    """Why the all-reduce cannot be screened here; empty when it can."""
    gpus = len(desk.hardware.gpus())
    if desk.variant.server.base_url is not None:
        return "the server was not started here: its devices are its owner's"
    if served.ranks == 1:
        return "not applicable: one rank sums nothing over others"
    if gpus == 0:
        return "not applicable: CPU ranks sum through shared memory of vLLM's own, which NCCL variables do not reach"
    if gpus < served.ranks:
        return f"{gpus} GPUs here for {served.ranks} ranks: a benchmark on fewer would not stand for the server"
    if served.shape.hidden is None:
        return f"the size of a message is unknown ({served.unknown})"
    return ""


def measure_baseline(desk: Desk, progress: Callable[[str], None]) -> None:
    """Measure the running server: the baseline's first launch."""
    if desk.variant.tuning.settings:
        handle = desk.server()
        relaunch.measure_launch(desk, relaunch.Launch(BASELINE, 0, 0), 0, handle.ready_s, progress)


def measure_devices(desk: Desk, progress: Callable[[str], None]) -> Screening:
    """Stop the server where that is needed, and measure what needs the devices free.

    An idle server does not disturb bandwidth and products; it is stopped for the all-reduce screen, whose ranks need
    the GPUs' memory, and where settings are relaunched afterwards anyway.
    """
    served = bench.served_model(desk.variant, desk.hardware)
    reason = no_screen(desk, served)
    plan = desk.variant.tuning
    to_screen = {name: dict(one.env) for name, one in plan.settings.items() if _is_screened(one)}
    skipped = reason or ("" if to_screen else "no setting changes NCCL")
    if desk.variant.server.base_url is None and (not skipped or (plan.settings and plan.confirm == "all")):
        progress("stopping the server")
        process.stop(desk.run)
    progress("memory bandwidth and matrix products")
    measured = bench.measure(desk, served)
    screened: dict[str, Screened] = {}
    if not reason:

        def keep(name: str, turn: int, reading: AllReduce) -> None:
            desk.record("micro_all_reduce", {"setting": name, "round": turn, **reading.to_json()}, key=f"{name}/{turn}")

        with desk.measuring():
            screened = screen(
                to_screen, [_size(served, count) for count in plan.concurrency], served.ranks,
                reduce=desk.hardware.all_reduce, backend="nccl", env=own_environment(desk.variant),
                baseline_bytes=[*ALL_SIZES, *(_size(served, count) for count in desk.variant.sweep.concurrency)],
                rounds=plan.screen_rounds, timeout_s=plan.screen_timeout_s, progress=progress, keep=keep,
            )  # fmt: skip
    return Screening(skipped, screened, predictions(desk, served, screened), measured)


def predictions(desk: Desk, served: Served, screened: Mapping[str, Screened]) -> dict[tuple[str, int], Prediction]:
    """What each screened setting should change, per concurrency."""
    calls, _ = bench.all_reduce_count(desk, served)
    found: dict[tuple[str, int], Prediction] = {}
    for name, one in screened.items():
        for concurrency in desk.variant.tuning.concurrency:
            tpot_ms = baseline_tpot_ms(desk, concurrency)
            if name == BASELINE or calls is None or tpot_ms is None:
                continue
            expected = predict(
                screened[BASELINE], one, concurrency=concurrency, message_bytes=_size(served, concurrency),
                calls_per_step=calls, tpot_ms=tpot_ms,
            )  # fmt: skip
            if expected is not None:
                found[name, concurrency] = expected
    return found


def baseline_tpot_ms(desk: Desk, concurrency: int) -> float | None:
    """TPOT without any setting: measured here, else in 04 or 03."""
    for cell in desk.run.records("tuning_cell"):
        if cell["setting"] == BASELINE and cell["concurrency"] == concurrency:
            return statistic(cell, "tpot_ms", "p50")
    return unprofiled_tpot_ms(desk, concurrency)


def screen_table(desk: Desk, screening: Screening) -> Table | Note:
    """Status, latency and prediction of every screened setting."""
    if screening.skipped:
        return Note(f"No screen: {screening.skipped}.")
    rows: list[tuple[Any, ...]] = []
    for name, one in screening.screened.items():
        for concurrency in desk.variant.tuning.concurrency:
            size = _size(bench.served_model(desk.variant, desk.hardware), concurrency)
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


def decide(desk: Desk, screening: Screening) -> list[Decision]:
    """Which settings are relaunched: none that is broken, ignored, or (unless all are asked) cannot matter."""
    plan = desk.variant.tuning
    attached = desk.variant.server.base_url is not None
    return [
        _decide(name, setting, screening, plan.confirm, plan.minimum_effect_pct, plan.concurrency, attached=attached)
        for name, setting in plan.settings.items()
    ]


def _decide(
    name: str,
    setting: Setting,
    screening: Screening,
    confirm: str,
    minimum_effect_pct: float,
    concurrency: Sequence[int],
    *,
    attached: bool = False,
) -> Decision:
    one = screening.screened.get(name)
    if one is not None and one.status != OK:
        return Decision(name, False, one.reason, one.status)
    if attached:
        return Decision(name, False, "the server was not started here")
    if confirm == "none":
        return Decision(name, False, "tuning.confirm is none")
    expected = [found for c in concurrency if (found := screening.predictions.get((name, c))) is not None]
    best = min((found.best_pct for found in expected), default=None)
    if confirm == "all":
        return Decision(name, True, "tuning.confirm is all")
    if best is None:
        why = screening.skipped if _is_screened(setting) and screening.skipped else "it changes more than NCCL"
        return Decision(name, False, f"cannot be predicted ({why}); tuning.confirm: all relaunches it")
    saved = f"at best {number(best, sign=True)} % of TPOT, against a minimum effect of {minimum_effect_pct:g} %"
    if all(not found.worth_a_reload(minimum_effect_pct) for found in expected):
        return Decision(name, False, saved, NOT_WORTH)
    return Decision(name, True, saved)


def plan_relaunches(desk: Desk, decisions: Sequence[Decision]) -> relaunch.Plan:
    """The relaunches and their expected time, from this server's own load and the baseline's cells."""
    plan = desk.variant.tuning
    cells = [cell for cell in desk.run.records("tuning_cell") if cell["setting"] == BASELINE and cell["launch"] == 0]
    measuring = sum((1 + 1 / plan.requests_per_stream) * cell["duration_s"] for cell in cells)
    ready_s = next((cell["ready_s"] for cell in cells if cell["ready_s"]), 0.0)
    chosen = [one.setting for one in decisions if one.relaunch]
    return relaunch.plan(chosen, plan.launches, ready_s + measuring, plan.time_budget_s)


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


def conclude(desk: Desk, screening: Screening, decisions: Sequence[Decision]) -> Verdict:
    """Record a verdict per setting and concurrency, with findings; the closing sentence."""
    plan = desk.variant.tuning
    cells = desk.run.records("tuning_cell")
    judged = relaunch.verdicts(cells, minimum_effect_pct=plan.minimum_effect_pct, settings=list(plan.settings))
    failed = {record["setting"]: record["error"] for record in desk.run.records("tuning_failed")}
    said: list[str] = []
    untried: dict[str, list[str]] = {}
    for decision in decisions:
        for concurrency in plan.concurrency:
            verdict = judged.get((decision.setting, concurrency))
            expected = screening.predictions.get((decision.setting, concurrency))
            text = verdict.text if verdict else NO_START if decision.setting in failed else decision.verdict
            why = verdict.sentence if verdict else failed.get(decision.setting, decision.why)
            doubtful = relaunch.doubtful(cells, decision.setting, concurrency)
            why += f"; {doubtful} not valid as measured" if verdict and doubtful else ""
            record = desk.record(
                "tuning",
                {
                    "setting": decision.setting,
                    "concurrency": concurrency,
                    "verdict": text,
                    "effect_pct": verdict.effect_pct if verdict else None,
                    "low_pct": verdict.low_pct if verdict else None,
                    "high_pct": verdict.high_pct if verdict else None,
                    "launches": len(verdict.candidate) if verdict else 0,
                    "predicted_pct": expected.predicted_pct if expected else None,
                    "why": why,
                    "changes": describe(plan.settings[decision.setting]),
                    "baseline_tpot_ms": list(verdict.baseline) if verdict else [],
                    "tpot_ms": list(verdict.candidate) if verdict else [],
                    "comparisons": verdict.comparisons if verdict else 0,
                },
                key=f"{decision.setting}/{concurrency}",
            )
            if verdict:
                said.append(f"{decision.setting} at {_streams(concurrency)}: {why}")
            elif decision.setting not in untried.setdefault(text, []):
                untried[text].append(decision.setting)
            _find(desk, decision.setting, concurrency, text, verdict, why, record)
    if screening.skipped and plan.settings:
        desk.find("no_screen", why=screening.skipped, evidence=screening.skipped)
    _find_inert(desk, screening)
    said += [f"{text}: {', '.join(settings)}" for text, settings in untried.items()]
    return desk.conclude(_sentence(said, screening))


def _sentence(said: Sequence[str], screening: Screening) -> str:
    if said:
        return "; ".join(said) + "."
    if isinstance(screening.devices, str):
        return f"No setting was tried. {screening.devices}"
    read = screening.devices.kind("read")
    rate = f" Its memory reads at {quantity(read.best_gb_s, 'gb_s')}." if read else ""
    return f"No setting was tried; the devices were measured ({screening.devices.device}).{rate}"


_RULES = {
    Label.FASTER: "setting_wins",
    Label.SLOWER: "setting_loses",
    Label.TOO_FEW: "setting_undecided",
}


def _find(
    desk: Desk, setting: str, concurrency: int, text: str, verdict: stats.Verdict | None, why: str, record: str
) -> None:
    if verdict is not None:
        rule = _RULES.get(verdict.label, "setting_no_matter")
    elif text in (NOT_WORTH, NOT_RELAUNCHED):
        rule = "setting_not_tried"
    else:
        rule = "setting_broken"
    desk.find(
        rule,
        subject=f"{setting}/{concurrency}",
        setting=setting,
        streams=_streams(concurrency),
        status=text,
        effect=quantity(verdict.effect_pct if verdict else None, "pct", sign=True),
        changes=describe(desk.variant.tuning.settings[setting]),
        evidence=why,
        verdict=text,
        records=[record],
    )


def _find_inert(desk: Desk, screening: Screening) -> None:
    """vLLM prefers other all-reduces for small messages; then NCCL's settings do not reach a decode step."""
    engine = desk.run.record("engine")
    backends = (engine or {}).get("all_reduce_backends") or []
    if not screening.skipped and backends and backends[0].upper() != "PYNCCL":
        desk.find("nccl_inert", first=backends[0], evidence=f"the log's dispatch order: {', '.join(backends)}")


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


def _is_screened(setting: Setting) -> bool:
    """Whether the all-reduce benchmark shows all that a setting does."""
    return bool(setting.env) and not setting.args and all(name.startswith("NCCL_") for name in setting.env)


def _size(served: Served, streams: int) -> int:
    return served.shape.message_bytes(streams, bench.DTYPE_BYTES) or 0


def _streams(concurrency: int) -> str:
    return "1 stream" if concurrency == 1 else f"{concurrency} streams"
