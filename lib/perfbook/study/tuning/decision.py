"""Which settings are relaunched: none that is broken, ignored, or cannot matter, unless all are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfbook.desk import Desk
from perfbook.params import Setting
from perfbook.study import relaunch
from perfbook.study.tuning.screen import BASELINE, OK, Prediction
from perfbook.study.tuning.window import Screening, is_screened
from perfbook.units import count, number

NOT_WORTH, NOT_RELAUNCHED = "not worth a reload", "not relaunched"


@dataclass(frozen=True)
class Decision:
    """Whether a setting is relaunched, and why."""

    setting: str
    relaunch: bool
    why: str
    verdict: str = NOT_RELAUNCHED


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
        return Decision(name, False, "a relaunch with a setting needs a server that perfbook starts itself")
    if confirm == "none":
        return Decision(name, False, "tuning.confirm is none")
    expected = [found for c in concurrency if (found := screening.predictions.get((name, c))) is not None]
    if confirm == "all":
        return Decision(name, True, "tuning.confirm is all")
    if not expected:
        why = screening.skipped if is_screened(setting) and screening.skipped else "it changes more than NCCL"
        return Decision(name, False, f"cannot be predicted ({why}); tuning.confirm: all relaunches it")
    saved = promise(expected, minimum_effect_pct)
    if all(not found.worth_a_reload(minimum_effect_pct) for found in expected):
        return Decision(name, False, saved, NOT_WORTH)
    return Decision(name, True, saved)


def promise(expected: Sequence[Prediction], minimum_effect_pct: float) -> str:
    """``at best −0.4 % of TPOT at 1 stream, against a minimum effect of 2 %``: what the screen lets one hope for."""
    best = (f"{number(one.best_pct, sign=True)} % of TPOT at {count(one.concurrency, 'stream')}" for one in expected)
    return f"at best {', '.join(best)}, against a minimum effect of {minimum_effect_pct:g} %"


def plan_relaunches(desk: Desk, decisions: Sequence[Decision]) -> relaunch.Plan:
    """The relaunches and their expected time, from this server's own load and the baseline's cells."""
    plan = desk.variant.tuning
    cells = [cell for cell in desk.run.records("tuning_cell") if cell["setting"] == BASELINE and cell["launch"] == 0]
    measuring = sum((1 + 1 / plan.requests_per_stream) * cell["duration_s"] for cell in cells)
    ready_s = next((cell["ready_s"] for cell in cells if cell["ready_s"]), 0.0)
    chosen = [one.setting for one in decisions if one.relaunch]
    return relaunch.plan(chosen, plan.launches, ready_s + measuring, plan.time_budget_s)
