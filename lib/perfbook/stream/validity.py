"""Is a cell worth believing? Valid, suspect or invalid, each with its reasons.

*Invalid*: the numbers are not about what the cell was meant to measure. *Suspect*: they may be, but something
was seen that can move them. The thresholds are constants below, each with what it guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from perfbook.stream.cell import Costs
from perfbook.stream.hostload import HostLoad
from perfbook.stream.reconcile import Counters, delta

FAILED_SHARE = 0.05  # more failures than this and the load was not the one asked for
MERGED_SHARE = 0.05  # gap percentiles then rest on a selection
LAG_MS = 15.0  # two schedulers' time slices; a stream's next request then starts visibly late
LAG_GAPS = 0.25  # and this share of the median gap: slow steps bear more
OTHER_THREADS = 0.3  # of a core: they hold the interpreter's lock against the receiving thread
BUSY_SHARE = 0.8  # of one core, in the receiving thread
# Waiting alone is no fault: a server on the same cores makes the client wait, and the kernel's stamps do not mind.
WAITING_SHARE = 0.5  # of the time in which the receiving thread wanted a CPU
PREFIX_SHARE = 0.05  # of the prompt tokens, beyond what the chat template shares
TOKEN_SHARE = 0.005  # client against server
SHORT_SHARE = 0.05  # of the requests
FOREIGN_CORES = 0.25
FOREIGN_SHARE = 0.1  # of all cores


@dataclass(frozen=True, slots=True)
class Validity:
    """A verdict ("valid", "suspect" or "invalid") and the reasons for it, one sentence each."""

    verdict: str
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"verdict": self.verdict, "reasons": list(self.reasons)}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on; None where nothing is known."""

    requests: int
    ok: int
    errors: Mapping[str, int] = field(default_factory=dict)
    clock: str = "kernel"
    clock_step_ms: float = 0.0
    merged_share: float = 0.0
    lag_p50_ms: float | None = None
    lag_p99_ms: float | None = None
    lag_max_ms: float | None = None
    gap_p50_ms: float | None = None
    busy_share: float = 0.0
    other_threads: float = 0.0
    waiting_share: float | None = None
    tokens: int = 0
    server_tokens: float | None = None
    server_requests: float | None = None
    prompt_tokens: int = 0
    template_tokens: int = 0
    prompts_short: int = 0
    outputs_short: int = 0
    prefix_hits: float | None = None
    preemptions: float | None = None
    others_waiting: float = 0.0
    foreign_cores: float | None = None
    cores: int = 1
    throttled: int = 0
    server_restarted: bool = False


def gather(
    summary: Mapping[str, Any],
    requests: pa.Table,
    costs: Costs,
    before: Counters | None,
    after: Counters | None,
    host: HostLoad,
    cores: int,
) -> Evidence:
    """Collect the evidence from a cell's tables, its costs, the server's counters and the host."""
    rows = requests.select(
        ["ok", "output_tokens", "output_tokens_asked", "prompt_tokens", "prompt_tokens_asked"]
    ).to_pylist()
    good = [r for r in rows if r["ok"]]
    counted = [r for r in good if r["prompt_tokens"] is not None]
    templated = [r for r in counted if r["prompt_tokens_asked"] is not None]
    lag = costs.lag_ms

    def lag_at(percent: float) -> float | None:
        return float(np.percentile(lag, percent)) if len(lag) else None

    wanted_ns = costs.waited_ns + costs.hot_cpu_ns
    running = [c.get("num_requests_running", 0.0) + c.get("num_requests_waiting", 0.0) for c in (before, after) if c]
    names = ("generation_tokens_total", "prompt_tokens_total")
    fell = before is not None and after is not None and any(after.get(n, 0) < before.get(n, 0) for n in names)
    return Evidence(
        requests=summary["requests"],
        ok=summary["ok"],
        errors=summary["errors"],
        clock=summary["clock"],
        clock_step_ms=costs.clock_step_ms,
        merged_share=summary["merged_share"],
        lag_p50_ms=lag_at(50),
        lag_p99_ms=lag_at(99),
        lag_max_ms=lag_at(100),
        gap_p50_ms=summary["gap_ms"]["p50"],
        busy_share=costs.hot_cpu_ns / costs.loop_ns if costs.loop_ns else 0.0,
        other_threads=costs.other_cpu_ns / costs.loop_ns if costs.loop_ns else 0.0,
        waiting_share=costs.waited_ns / wanted_ns if costs.waited_ns >= 0 and wanted_ns else None,
        tokens=sum(r["output_tokens"] for r in rows),
        server_tokens=delta(before, after, "generation_tokens_total"),
        server_requests=delta(before, after, "request_success_total"),
        prompt_tokens=sum(r["prompt_tokens"] for r in counted),
        template_tokens=sum(max(0, r["prompt_tokens"] - r["prompt_tokens_asked"]) for r in templated),
        prompts_short=sum(r["prompt_tokens"] < r["prompt_tokens_asked"] for r in templated),
        outputs_short=sum(
            r["output_tokens_asked"] is not None and r["output_tokens"] < r["output_tokens_asked"] for r in good
        ),
        prefix_hits=delta(before, after, "prefix_cache_hits_total"),
        preemptions=delta(before, after, "num_preemptions_total"),
        others_waiting=max(running, default=0.0),
        foreign_cores=host.foreign_cores,
        cores=cores,
        throttled=host.throttled,
        server_restarted=fell,
    )


def judge(seen: Evidence) -> Validity:
    """The verdict on the evidence."""
    invalid: list[str] = []
    suspect: list[str] = []
    failed = seen.requests - seen.ok
    if failed:
        classes = ", ".join(f"{name} {count}" for name, count in seen.errors.items())
        where = invalid if not seen.ok or failed > FAILED_SHARE * seen.requests else suspect
        where.append(f"{failed} of {seen.requests} requests failed ({classes})")
    if seen.server_restarted:
        invalid.append("the server's counters fell during the cell: it was restarted")
    if seen.tokens:
        _judge_client(seen, suspect)
    _judge_server(seen, suspect, failed)
    _judge_work(seen, suspect)
    verdict = "invalid" if invalid else "suspect" if suspect else "valid"
    return Validity(verdict, (*invalid, *suspect))


def _judge_client(seen: Evidence, suspect: list[str]) -> None:
    if seen.clock_step_ms:
        suspect.append(f"the wall clock was set by {seen.clock_step_ms:.3f} ms; user-space times were used instead")
    if seen.merged_share > MERGED_SHARE:
        suspect.append(f"{seen.merged_share:.0%} of the token events were read together with a later one")
    foreign = (seen.foreign_cores or 0.0) > max(FOREIGN_CORES, FOREIGN_SHARE * seen.cores)
    waiting = seen.waiting_share or 0.0
    if seen.lag_p99_ms is not None and seen.lag_p99_ms > max(LAG_MS, LAG_GAPS * (seen.gap_p50_ms or 0.0)):
        suspect.append(f"the client read {seen.lag_p99_ms:.1f} ms late (p99): it was starved of CPU")
    elif waiting > WAITING_SHARE and (foreign or seen.clock == "user"):
        suspect.append(f"the client was starved: it waited {waiting:.0%} of the time in which it wanted a CPU")
    if seen.busy_share > BUSY_SHARE:
        suspect.append(f"the receiving thread used {seen.busy_share:.0%} of a core; spread it over more processes")
    if seen.other_threads > OTHER_THREADS:
        suspect.append(f"other threads of the client's process used {seen.other_threads:.1f} cores beside it")
    if foreign:
        suspect.append(f"other processes on this machine kept {seen.foreign_cores:.1f} cores busy")
    if seen.throttled:
        suspect.append(f"the CPU was throttled {seen.throttled} times")


def _judge_server(seen: Evidence, suspect: list[str], failed: int) -> None:
    if seen.server_tokens is not None:
        surplus = seen.server_tokens - seen.tokens
        if abs(surplus) > max(TOKEN_SHARE * seen.tokens, 0.5):
            who = "requests of this cell failed, or somebody else used the server" if failed else (
                "somebody else used the server" if surplus > 0 else "the server counts fewer than it sent"
            )  # fmt: skip
            suspect.append(f"the server generated {seen.server_tokens:.0f} tokens, this cell {seen.tokens}: {who}")
    if seen.server_requests is not None and seen.server_requests > seen.requests:
        extra = seen.server_requests - seen.requests
        suspect.append(f"the server finished {extra:.0f} requests that are not from this cell")
    if seen.others_waiting:
        suspect.append(f"{seen.others_waiting:.0f} requests of somebody else were on the server before or after")
    if seen.preemptions:
        suspect.append(f"the server preempted {seen.preemptions:.0f} requests: its KV cache was full")


def _judge_work(seen: Evidence, suspect: list[str]) -> None:
    if seen.prefix_hits is not None and seen.prompt_tokens:
        repeated = seen.prefix_hits - seen.template_tokens
        if repeated > PREFIX_SHARE * seen.prompt_tokens:
            share = repeated / seen.prompt_tokens
            suspect.append(f"{share:.0%} of the prompt tokens came from the prefix cache: prompts repeat")
    if seen.outputs_short > SHORT_SHARE * seen.ok:
        suspect.append(f"{seen.outputs_short} of {seen.ok} answers are shorter than asked for")
    if seen.prompts_short > SHORT_SHARE * seen.ok:
        suspect.append(f"{seen.prompts_short} of {seen.ok} prompts were counted shorter than asked for")
