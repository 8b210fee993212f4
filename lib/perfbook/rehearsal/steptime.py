"""What a law means: the time of one engine step. Pure functions, no clock, no randomness.

A step is one forward pass over the tokens that the scheduler picked. Its time is

    max(decode(B, p), prefill floor if there is any prefill) + prefill tokens / prefill rate

with ``decode(B, p) = curve(B) + slope · p``, B the sequences that decode and p their mean position (prompt
included). The *mean* because the slopes of the field (a microsecond per token at one stream) are far above
what reading that much cache costs: they are the latency of a loop over the context, and the loops of
different sequences run side by side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from perfbook.rehearsal.law import Curve, Law, Setting

BYTES_PER_ACTIVATION = 2


def on_curve(curve: Curve, batch: float) -> float:
    """A curve's value at a batch: linear between points, flat before them, the last slope kept beyond."""
    batches = [point[0] for point in curve]
    if batch <= batches[0] or len(curve) == 1:
        return curve[0][1]
    right = min(bisect_right(batches, batch), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)


def flat_on_curve(curve: Curve, batch: float) -> float:
    """Like :func:`on_curve`, but flat beyond the last point: for effects, which nobody measured out there."""
    return on_curve(curve, min(batch, curve[-1][0]))


def active_settings(law: Law, env: Mapping[str, str], args: Mapping[str, Any]) -> tuple[Setting, ...]:
    """The law's settings that a launch with this environment and these arguments turned on."""
    return tuple(
        setting
        for setting in law.settings
        if all(env.get(key) == value for key, value in setting.env.items())
        and all(key in args and str(args[key]) == str(value) for key, value in setting.args.items())
    )


def all_reduce_us(law: Law, message_bytes: float, active: Sequence[Setting] = ()) -> float:
    """Latency of one all-reduce in µs: fixed part + bytes · 2(n-1)/n / busbw (as nccl-tests define it)."""
    ranks = law.model.tensor_parallel
    if ranks == 1:
        return 0.0
    latency, bandwidth = law.communication.latency_us, law.communication.busbw_gb_s
    for effect in (setting.all_reduce for setting in active if setting.all_reduce):
        if effect.outcome != "ignored":
            latency *= effect.latency_factor
            bandwidth *= effect.bandwidth_factor
    return latency + message_bytes * 2 * (ranks - 1) / ranks / (bandwidth * 1e3)


def decode_ms(law: Law, batch: int, mean_position: float, active: Sequence[Setting] = ()) -> float:
    """Time of a decode step in ms; a setting acts through the step's all-reduces and ``step_pct``."""
    message_bytes = batch * law.model.hidden_size * BYTES_PER_ACTIVATION
    saved_us = all_reduce_us(law, message_bytes) - all_reduce_us(law, message_bytes, active)
    time_ms = on_curve(law.step.decode_ms, batch) + law.step.context_us_per_token * mean_position / 1e3
    time_ms -= law.communication.calls_per_step * saved_us / 1e3
    for setting in active:
        if setting.step_pct is not None:
            time_ms *= 1 + flat_on_curve(setting.step_pct, batch) / 100
    return time_ms


def step_ms(law: Law, batch: int, mean_position: float, prefill_tokens: int, active: Sequence[Setting] = ()) -> float:
    """Time in ms of a step with ``batch`` decoding sequences and ``prefill_tokens`` prompt tokens."""
    time_ms = decode_ms(law, batch, mean_position, active) if batch else 0.0
    if prefill_tokens:
        time_ms = max(time_ms, law.step.prefill_floor_ms) + 1e3 * prefill_tokens / law.step.prefill_tok_s
    return time_ms


def warmup_extra_ms(law: Law, prefill_steps_before: int, decode_steps_before: int, has_prefill: bool) -> float:
    """Extra time in ms that the warm-up adds to a step, given how many of each kind came before it."""
    warmup = law.warmup
    if has_prefill:
        return warmup.prefill_extra_ms if prefill_steps_before == 0 else 0.0
    steps = warmup.decode_steps
    weight = max(steps - decode_steps_before, 0) / (steps * (steps + 1) / 2)
    return warmup.decode_extra_ms * weight
