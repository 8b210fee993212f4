"""Runs side by side: ``perfbook compare`` and notebook 90.

Runs with equal servers and variants are launches of one *side*; the first run's side is the baseline. What differs in
the workload is not compared, and says so; a difference of host, hardware, versions or answers is said beside every
verdict. Runs that are all of one side are compared one by one.
"""

from perfbook.study.compare.runs import Measured
from perfbook.study.compare.verdicts import Comparison, compare_measured, compare_runs
from perfbook.study.compare.view import conclusion, difference_table, metric_table, render_text, side_table

__all__ = [
    "Comparison",
    "Measured",
    "compare_measured",
    "compare_runs",
    "conclusion",
    "difference_table",
    "metric_table",
    "render_text",
    "side_table",
]
