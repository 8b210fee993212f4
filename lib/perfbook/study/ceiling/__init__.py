"""07: is there anything left? The floor under a decode step, from what was measured, beside what was reached.

Nothing is quoted from a data sheet: bandwidth and rates come from the micro-benchmarks, bytes from the checkpoint,
times from 03 and 04. What is missing leaves the floor unknown, or lower than it is, and the notebook says so.
"""

from perfbook.study.ceiling.analysis import Operating, Study, compute, machine_of, measure, operating_points
from perfbook.study.ceiling.crosscheck import crosscheck
from perfbook.study.ceiling.verdict import conclude
from perfbook.study.ceiling.view import (
    figure,
    floor_table,
    inputs_table,
    lever_table,
    roofline_figure,
    targets_table,
)

__all__ = [
    "Operating",
    "Study",
    "compute",
    "conclude",
    "crosscheck",
    "figure",
    "floor_table",
    "inputs_table",
    "lever_table",
    "machine_of",
    "measure",
    "operating_points",
    "roofline_figure",
    "targets_table",
]
