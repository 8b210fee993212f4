"""What the micro-benchmarks would have measured on the law's machine: all-reduce, bandwidth, GEMM.

Every reading is the law's value times a seeded spread, so that equal seeds give equal readings and repeats
scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from perfbook.rehearsal.law import Law
from perfbook.rehearsal.steptime import active_settings, all_reduce_us

SPREAD = 0.01


@dataclass(frozen=True)
class AllReduceReading:
    """One message size under one environment; times are None where the setting hangs."""

    message_bytes: int
    latency_us: tuple[float, ...]
    busbw_gb_s: tuple[float, ...]
    taken: bool
    sums_right: bool
    hangs: bool


def all_reduce(
    law: Law, message_bytes: Sequence[int], env: Mapping[str, str], repeats: int = 5, seed: int = 0
) -> list[AllReduceReading]:
    """Latency in µs and bus bandwidth (S/t · 2(n-1)/n) in GB/s per message size, ``repeats`` readings each.

    The settings that count are the law's whose whole ``env`` is in the given one and that need no arguments.
    """
    active = [setting for setting in active_settings(law, env, {}) if setting.all_reduce]
    outcomes = {setting.all_reduce.outcome for setting in active if setting.all_reduce}
    hangs = "hangs" in outcomes
    ranks = law.model.tensor_parallel
    spread = Random(f"{law.variation.seed}/{seed}/all-reduce/{sorted(env.items())}")
    readings = []
    for size in message_bytes:
        truth_us = all_reduce_us(law, size, active)
        times = () if hangs else tuple(truth_us * _scatter(spread) for _ in range(repeats))
        rates = tuple(size / us / 1e3 * 2 * (ranks - 1) / ranks for us in times if us > 0)
        readings.append(
            AllReduceReading(size, times, rates, "ignored" not in outcomes, "wrong sums" not in outcomes, hangs)
        )
    return readings


def memory_bandwidth_gb_s(law: Law, repeats: int = 5, seed: int = 0) -> dict[str, tuple[float, ...]]:
    """Readings of ``read`` and ``copy`` bandwidth in GB/s (1e9 bytes; a copy counts its bytes twice)."""
    spread = Random(f"{law.variation.seed}/{seed}/bandwidth")
    truth = {"read": law.device.read_gb_s, "copy": law.device.copy_gb_s}
    return {kind: tuple(rate * _scatter(spread) for _ in range(repeats)) for kind, rate in truth.items()}


def gemm_us(law: Law, m: int, n: int, k: int, weight_bits: int = 16) -> float:
    """Time in µs of an M×N×K product (roofline): the longest of arithmetic, traffic and one launch."""
    moved_bytes = 2 * m * k + 2 * m * n + n * k * weight_bits / 8
    compute_us = 2 * m * n * k / (law.device.gemm_tflop_s * 1e6)
    memory_us = moved_bytes / (law.device.read_gb_s * 1e3)
    return max(compute_us, memory_us, law.device.launch_us)


def gemm(
    law: Law, shapes: Sequence[tuple[int, int, int]], weight_bits: int = 16, repeats: int = 5, seed: int = 0
) -> list[tuple[float, ...]]:
    """Readings in µs per (M, N, K)."""
    spread = Random(f"{law.variation.seed}/{seed}/gemm/{weight_bits}")
    return [tuple(gemm_us(law, m, n, k, weight_bits) * _scatter(spread) for _ in range(repeats)) for m, n, k in shapes]


@dataclass(frozen=True)
class DeviceSample:
    """One accelerator at one moment."""

    index: int
    name: str
    clock_mhz: float
    power_w: float
    memory_used_bytes: int
    memory_total_bytes: int
    utilisation_pct: float
    throttle_reasons: tuple[str, ...]


def devices(law: Law, busy_share: float, seed: int = 0) -> list[DeviceSample]:
    """What the telemetry would have sampled while the engine is busy for a share (0 to 1) of the time."""
    device = law.device
    spread = Random(f"{law.variation.seed}/{seed}/devices")
    gib = 1 << 30
    return [
        DeviceSample(
            index=index,
            name=device.name,
            clock_mhz=device.clock_mhz,
            power_w=(device.idle_w + busy_share * (device.busy_w - device.idle_w)) * _scatter(spread),
            memory_used_bytes=round(device.memory_used_gib * gib),
            memory_total_bytes=round(device.memory_gib * gib),
            utilisation_pct=100 * busy_share,
            throttle_reasons=(),
        )
        for index in range(law.model.tensor_parallel)
    ]


def _scatter(source: Random) -> float:
    return 1 + max(-3.0, min(3.0, source.gauss(0.0, 1.0))) * SPREAD
