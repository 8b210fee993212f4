"""Measure one request at a time, the lengths in shuffled order."""

from __future__ import annotations

import random
from collections.abc import Callable

from perfbook.desk import Desk
from perfbook.study.prompts import numbered

NOTEBOOK = "03_single_stream"


def measure(desk: Desk, progress: Callable[[str], None]) -> None:
    """Measure every length once per repeat, the lengths in shuffled order within each repeat; one record each."""
    plan, workload = desk.variant.single_stream, desk.variant.workload
    shuffle = random.Random(workload.seed)
    prompts = numbered(workload.prompt, plan.repeats * len(plan.output_tokens), workload.seed + 1)
    order = 0
    with desk.measuring():
        for repeat in range(plan.repeats):
            for tokens in shuffle.sample(plan.output_tokens, len(plan.output_tokens)):
                progress(f"repeat {repeat + 1} of {plan.repeats}, {tokens} tokens")
                shape = desk.shape(tokens)
                key = f"{tokens}/{repeat}"
                cell = desk.measure([prompts[order]], shape, key=key, concurrency=1, requests=1)
                values = {"order": order, "repeat": repeat, "output_tokens_asked": tokens}
                desk.record_cell("single_stream_cell", cell, values, key=key)
                order += 1
