"""05: which settings are worth a reload, and which of them win?

Screen, predict, confirm. The server is stopped once; in that window everything that needs the devices free is
measured. Only settings that can matter are relaunched, interleaved with the baseline, and judged launch by launch:
requests of one launch are not repeats of a setting.
"""

from perfbook.study.tuning.decision import Decision, decide, plan_relaunches
from perfbook.study.tuning.verdicts import conclude
from perfbook.study.tuning.view import decision_table, describe, screen_table, settings_table, verdict_table
from perfbook.study.tuning.window import Screening, measure_baseline, measure_devices

__all__ = [
    "Decision",
    "Screening",
    "conclude",
    "decide",
    "decision_table",
    "describe",
    "measure_baseline",
    "measure_devices",
    "plan_relaunches",
    "screen_table",
    "settings_table",
    "verdict_table",
]
