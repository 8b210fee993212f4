"""06: where does a decode step go?

The profiler runs for a bounded number of engine steps while a cell decodes, after a warm-up, and never inside a
measured cell: it slows the server. Every profile is therefore set beside the unprofiled time per token at the same
concurrency.
"""

from __future__ import annotations

from perfbook.study.profile.context import changes, exports, files_table, timelines
from perfbook.study.profile.record import (
    Profile,
    conclude,
    record_traces,
    take,
    top_sentence,
    unprofiled_tpot_ms,
)
from perfbook.study.profile.view import (
    breakdown_figure,
    breakdown_table,
    collectives_table,
    kernel_table,
    waits_table,
    warnings_table,
)

__all__ = [
    "Profile", "breakdown_figure", "breakdown_table", "changes", "collectives_table", "conclude", "exports",
    "files_table", "kernel_table", "record_traces", "take", "timelines", "top_sentence", "unprofiled_tpot_ms",
    "waits_table", "warnings_table",
]  # fmt: skip
