"""04: where does throughput saturate, what does it cost in latency, and what is the limit?

Cells are measured in blocks: every concurrency once per block, in shuffled order, so that drift of the machine does not
look like an effect of concurrency. The knee is a stated rule, and what limits there, requests that queue or a step
whose time saturates, is decided from what server and client saw.
"""

from perfbook.study.sweep.analysis import Sweep, analyse, load
from perfbook.study.sweep.measure import measure, server_side, within_slo
from perfbook.study.sweep.steptrace import count_all_reduces
from perfbook.study.sweep.view import (
    cell_table,
    conclude,
    latency_figure,
    own_noise,
    pareto_figure,
    reasons_table,
    reconciliation_table,
    throughput_figure,
)

__all__ = [
    "Sweep",
    "analyse",
    "cell_table",
    "conclude",
    "count_all_reduces",
    "latency_figure",
    "load",
    "measure",
    "own_noise",
    "pareto_figure",
    "reasons_table",
    "reconciliation_table",
    "server_side",
    "throughput_figure",
    "within_slo",
]
