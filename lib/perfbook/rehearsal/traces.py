"""The law's profile as trace files: the recorded engine steps, filled with the kernels of the nearest regime.

A step's wall time is shared out as the law says; what is left of it lies as gaps before the kernels. Ranks arrive at an
all-reduce later than the first by their skew, because their other kernels take longer, and wait there for the last: so
every rank's step has the same length, and over the ranks each kernel's mean is its share.
"""

from __future__ import annotations

import gzip
import math
import time
from collections.abc import Sequence
from pathlib import Path

from perfbook.rehearsal.engine import Step
from perfbook.rehearsal.kineto import Kernel, StepLaw, trace_text
from perfbook.rehearsal.law import Kernel as KernelLaw
from perfbook.rehearsal.law import Law, Regime
from perfbook.rehearsal.steptime import BYTES_PER_ACTIVATION

NS_PER_US = 1e3


def write_traces(law: Law, folder: Path, prefix: str, steps: Sequence[Step]) -> list[Path]:
    """Write one compressed trace per rank under vLLM's names; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    laws = [step_law(law, step) for step in steps]
    ranks = law.model.tensor_parallel
    paths = []
    for rank in range(ranks):
        name = f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{time.time_ns()}.pt.trace.json.gz"
        path = folder / (f"{prefix}_{name}" if prefix else name)
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as out:
            out.writelines(trace_text(laws, rank, ranks))
        paths.append(path)
    return paths


def step_law(law: Law, step: Step) -> StepLaw:
    """A recorded step with its kernels; decode-only steps are graph replays, the others launch kernel by kernel."""
    tokens = step.decoding + step.prefill_tokens
    annotation = f"execute_context_{step.prefilling}({step.prefill_tokens})_generation_{step.decoding}({step.decoding})"
    message_bytes = tokens * law.model.hidden_size * BYTES_PER_ACTIVATION
    kernels = _kernels(law, nearest_regime(law, tokens), step.end_ns - step.start_ns, message_bytes)
    placed_ns = sum(kernel.gap_ns + kernel.dur_ns + _mean(kernel.wait_ns) for kernel in kernels)
    pause_ns = max(step.end_ns - step.start_ns - round(placed_ns), 0)
    return StepLaw(annotation, kernels, graph=step.prefill_tokens == 0, pause_ns=pause_ns)


def nearest_regime(law: Law, tokens: int) -> Regime:
    """The regime whose batch is nearest in ratio."""
    return min(law.profile.regimes, key=lambda regime: abs(math.log(regime.batch / tokens)))


def _kernels(law: Law, regime: Regime, step_ns: int, message_bytes: int) -> tuple[Kernel, ...]:
    """The regime's kernels, each one's calls spread evenly over the step."""
    ranks = law.model.tensor_parallel
    late_ns = [us * NS_PER_US for us in (law.profile.skew_us or (0.0,) * ranks)][:ranks]
    late_ns += [0.0] * (ranks - len(late_ns))
    waits_ns = [max(late_ns) - late for late in late_ns]
    collectives = sum(kernel.calls for kernel in regime.kernels if kernel.all_reduce)
    other_ns = step_ns * sum(kernel.share for kernel in regime.kernels if not kernel.all_reduce)
    # what a rank's other kernels take beyond the quickest rank's, as a share of their own mean time
    extra = [collectives * (late - min(late_ns)) / other_ns for late in late_ns] if other_ns else [0.0] * ranks
    calls = sum(kernel.calls for kernel in regime.kernels)
    gap_ns = int(step_ns * (1 - sum(kernel.share for kernel in regime.kernels)) / calls)
    order = [((call + 0.5) / kernel.calls, kernel) for kernel in regime.kernels for call in range(kernel.calls)]
    order.sort(key=lambda item: item[0])
    made = {}
    for kernel in regime.kernels:
        mean_ns = step_ns * kernel.share / kernel.calls
        added = waits_ns if kernel.all_reduce else [mean_ns * share for share in extra]
        made[kernel.name] = _one(kernel, mean_ns, added, gap_ns, message_bytes)
    return tuple(made[kernel.name] for _, kernel in order)


def _one(kernel: KernelLaw, mean_ns: float, added_ns: Sequence[float], gap_ns: int, message_bytes: int) -> Kernel:
    """A kernel whose duration, with what is added per rank, has the given mean over the ranks."""
    base_ns = max(mean_ns - sum(added_ns) / len(added_ns), 0.0)
    return Kernel(
        name=kernel.name,
        dur_ns=round(base_ns),
        gap_ns=gap_ns,
        message_bytes=message_bytes if kernel.all_reduce else None,
        wait_ns=tuple(round(added) for added in added_ns),
    )


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
