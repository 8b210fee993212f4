"""What the micro-benchmarks would have measured on the law's machine, in the results of :mod:`perfbook.micro`. Pure.

Every reading is the law's value times a seeded spread: equal seeds give equal readings, and repeats scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from perfbook.micro.results import AllReduce, Bandwidth, DeviceBench, Gemm, Message
from perfbook.micro.shapes import GemmShape
from perfbook.rehearsal.law import Law, Setting
from perfbook.rehearsal.steptime import active_settings, all_reduce_us

SPREAD = 0.01
BUFFER_BYTES = 1 << 30
LL_LIMIT_BYTES = 1 << 16
GIB = 1 << 30


def all_reduce(
    law: Law, message_bytes: Sequence[int], env: Mapping[str, str], repeats: int = 7, seed: int = 0
) -> AllReduce:
    """All-reduces under one environment.

    The settings that count are the law's whose whole ``env`` is in `env` and that need no arguments. What is ignored or
    taken stands in the result's ``log``, in NCCL's words, as the screen has to find it out.
    """
    active = [setting for setting in active_settings(law, env, {}) if setting.all_reduce]
    outcomes = {setting.all_reduce.outcome for setting in active if setting.all_reduce}
    ranks = law.model.tensor_parallel
    log = "\n".join(_nccl_says(law, sorted(set(message_bytes)), env, active))
    for bad, detail in (("hangs", "no result before the deadline"), ("fails", "unhandled system error")):
        if bad in outcomes:
            return AllReduce(bad, "nccl", ranks, detail=detail, log=log)
    spread = Random(f"{law.variation.seed}/{seed}/all-reduce/{sorted(env.items())}")
    messages = tuple(
        Message(size, tuple(all_reduce_us(law, size, active) * _scatter(spread) for _ in range(repeats)), ranks)
        for size in sorted(set(message_bytes))
    )
    outcome = "wrong sums" if "wrong sums" in outcomes else "ok"
    return AllReduce(outcome, "nccl", ranks, messages=messages, log=log)


def _nccl_says(law: Law, sizes: Sequence[int], env: Mapping[str, str], active: Sequence[Setting]) -> list[str]:
    """Debug output of rank 0: version, the variables that were understood, the choice per size."""
    ignored: set[str] = set()
    for setting in active:
        if setting.all_reduce and setting.all_reduce.outcome == "ignored":
            ignored |= setting.env.keys()
    taken = {name: value for name, value in env.items() if name.startswith("NCCL_") and name not in ignored}
    algorithm = taken.get("NCCL_ALGO", "RING").upper()
    lines = [f"NCCL version {law.communication.nccl_version}"]
    lines += [f"rank0:1:1 [0] NCCL INFO {name} set by environment to {value}." for name, value in taken.items()]
    lines.append("rank0:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct")
    for size in sizes:
        protocol = taken.get("NCCL_PROTO", "LL" if size <= LL_LIMIT_BYTES else "SIMPLE").upper()
        choice = f"AllReduce: {size} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..3}}"
        lines.append(f"rank0:1:1 [0] NCCL INFO {choice}")
    return lines


def gemm_us(law: Law, m: int, n: int, k: int) -> float:
    """Time in µs of a bfloat16 product (m, k) × (k, n): the longest of arithmetic, traffic, one launch (roofline)."""
    compute_us = 2 * m * n * k / (law.device.gemm_tflop_s * 1e6)
    memory_us = 2 * (m * k + m * n + n * k) / (law.device.read_gb_s * 1e3)
    return max(compute_us, memory_us, law.device.launch_us)


def measure_device(
    law: Law, gemms: Sequence[GemmShape], tokens: Sequence[int], repeats: int = 7, seed: int = 0
) -> DeviceBench:
    """Memory bandwidth, and each product at every count of `tokens`."""
    spread = Random(f"{law.variation.seed}/{seed}/device")
    rates = {"read": law.device.read_gb_s, "copy": law.device.copy_gb_s, "triad": law.device.copy_gb_s}
    return DeviceBench(
        f"{law.device.name} (rehearsed)",
        tuple(
            Bandwidth(kind, BUFFER_BYTES, tuple(rate * _scatter(spread) for _ in range(repeats)))
            for kind, rate in rates.items()
        ),
        tuple(
            Gemm(
                name=shape.name,
                m=m,
                n=shape.n,
                k=shape.k,
                per_step=shape.per_step,
                kernel="rehearsed bfloat16",
                repeats_us=tuple(gemm_us(law, m, shape.n, shape.k) * _scatter(spread) for _ in range(repeats)),
            )
            for shape in gemms
            for m in tokens
        ),
    )


@dataclass(frozen=True)
class DeviceSample:
    """One accelerator at one moment, as the telemetry would sample it; no throttle reason is ever active."""

    index: int
    name: str
    clock_mhz: float
    power_w: float
    memory_used_bytes: int
    memory_total_bytes: int
    utilisation_pct: float


def devices(law: Law, busy_share: float, seed: int = 0) -> list[DeviceSample]:
    """All devices while the engine is busy for a share (0 to 1) of the time."""
    device = law.device
    spread = Random(f"{law.variation.seed}/{seed}/devices")
    return [
        DeviceSample(
            index=index,
            name=device.name,
            clock_mhz=device.clock_mhz,
            power_w=(device.idle_w + busy_share * (device.busy_w - device.idle_w)) * _scatter(spread),
            memory_used_bytes=round(device.memory_used_gib * GIB),
            memory_total_bytes=round(device.memory_gib * GIB),
            utilisation_pct=100 * busy_share,
        )
        for index in range(law.model.tensor_parallel)
    ]


def _scatter(source: Random) -> float:
    """A factor near 1, never further than three standard deviations."""
    return 1 + max(-3.0, min(3.0, source.gauss(0.0, 1.0))) * SPREAD
