"""What 05 ends with: a verdict per setting and concurrency, and the findings that follow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from perfbook import stats
from perfbook.desk import Desk, Verdict
from perfbook.stats import Label
from perfbook.study import doubts, noise, relaunch
from perfbook.study.noise import WITHIN_NOISE
from perfbook.study.tuning.decision import NOT_RELAUNCHED, NOT_WORTH, Decision, promise
from perfbook.study.tuning.view import describe
from perfbook.study.tuning.window import Screening
from perfbook.units import count, quantity

NO_START = "does not start or stay up"


def conclude(desk: Desk, screening: Screening, decisions: Sequence[Decision]) -> Verdict:
    """Record a verdict per setting and concurrency, with findings; the closing sentence."""
    plan = desk.variant.tuning
    cells = doubts.usable(desk.run.records("tuning_cell"))
    judged = relaunch.verdicts(cells, minimum_effect_pct=plan.minimum_effect_pct, settings=list(plan.settings))
    failed = {record["setting"]: record["error"] for record in desk.run.records("tuning_failed")}
    said: list[str] = []
    untried: dict[str, list[str]] = {}
    for decision in decisions:
        for concurrency in plan.concurrency:
            verdict = judged.get((decision.setting, concurrency))
            expected = screening.predictions.get((decision.setting, concurrency))
            refused = _within_noise(desk, verdict)
            text = verdict.text if verdict else NO_START if decision.setting in failed else decision.verdict
            text = WITHIN_NOISE if refused else text
            hope = promise([expected], plan.minimum_effect_pct) if expected else decision.why
            why = hope if decision.verdict == NOT_WORTH else decision.why
            why = verdict.sentence if verdict else failed.get(decision.setting, why)
            doubtful = relaunch.doubtful(cells, decision.setting, concurrency)
            why += f"; but {refused}" if refused else ""
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
                said.append(f"{decision.setting} at {count(concurrency, 'stream')}: {why}")
            elif decision.setting not in untried.setdefault(text, []):
                untried[text].append(decision.setting)
            _find(desk, decision.setting, concurrency, text, verdict, why, record)
    if screening.skipped and plan.settings:
        desk.find("no_screen", why=screening.skipped, evidence=screening.skipped)
    _find_inert(desk, screening)
    said += [f"{text}: {', '.join(settings)}" for text, settings in untried.items()]
    return desk.conclude(_sentence(said, screening))


def _within_noise(desk: Desk, verdict: stats.Verdict | None) -> str:
    """Why a difference that the statistics call real may still be the client's; empty where it cannot."""
    if verdict is None or verdict.label not in (Label.FASTER, Label.SLOWER):
        return ""
    effect_ms = verdict.effect_pct / 100 * median(verdict.baseline)
    return noise.refusal(desk.run.records(noise.RECORD), effect_ms, "gap")


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
    if text == WITHIN_NOISE:
        rule = "setting_no_matter"
    elif verdict is not None:
        rule = _RULES.get(verdict.label, "setting_no_matter")
    elif text in (NOT_WORTH, NOT_RELAUNCHED):
        rule = "setting_not_tried"
    else:
        rule = "setting_broken"
    desk.find(
        rule,
        subject=setting if rule == "setting_broken" else f"{setting}/{concurrency}",
        setting=setting,
        streams=count(concurrency, "stream"),
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
