"""What an undisturbed client must find against a law, in closed form: the truth of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfbook.rehearsal.law import Law, Setting
from perfbook.rehearsal.steptime import decode_ms, step_ms


@dataclass(frozen=True)
class SingleStream:
    """One request alone on a warm server, without noise."""

    ttft_ms: float
    tpot_ms: float
    blended_tok_s: float


def single_stream(law: Law, prompt_tokens: int, output_tokens: int, active: Sequence[Setting] = ()) -> SingleStream:
    """The first token comes with the prefill step; token k + 1 is decoded after ``prompt + k`` tokens."""
    ttft_ms = step_ms(law, 0, 0.0, prompt_tokens, active)
    steps = [decode_ms(law, 1, prompt_tokens + k, active) for k in range(1, output_tokens)]
    tpot_ms = sum(steps) / len(steps) if steps else float("nan")
    return SingleStream(ttft_ms, tpot_ms, 1e3 * output_tokens / (ttft_ms + sum(steps)))


def running_limit(law: Law, concurrency: int, prompt_tokens: int, output_tokens: int) -> int:
    """How many of ``concurrency`` requests run at a time: the slots, or what fits the cache.

    The cache is counted as if all were at full length; younger ones leave room, so where it is the limit this is the
    least, and the throughput from it a lower bound.
    """
    fit = law.limits.kv_cache_tokens // (prompt_tokens + output_tokens)
    return max(1, min(concurrency, law.limits.max_num_seqs, fit))


def closed_loop_tok_s(
    law: Law, concurrency: int, prompt_tokens: int, output_tokens: int, active: Sequence[Setting] = ()
) -> float:
    """Throughput of a steady closed loop in output tokens per second.

    While the running requests each produce ``output_tokens``, the engine decodes that many steps and prefills
    that many prompts; the prefill floor is left out, since it acts on few steps of many.
    """
    running = running_limit(law, concurrency, prompt_tokens, output_tokens)
    decode = output_tokens * decode_ms(law, running, prompt_tokens + output_tokens / 2, active)
    prefill = running * prompt_tokens / law.step.prefill_tok_s * 1e3
    return 1e3 * running * output_tokens / (decode + prefill)
