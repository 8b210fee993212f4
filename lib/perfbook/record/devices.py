"""NVIDIA devices of this machine through NVML (without a driver none, which is an answer too), and what its CPU can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml


@dataclass(frozen=True)
class Gpu:
    """One device as found; memory in bytes."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    compute_capability: tuple[int, int] | None
    holders: tuple[int, ...]


@contextmanager
def session() -> Iterator[Any | None]:
    """NVML, initialised; None when there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def gpus() -> list[Gpu]:
    """All devices, with the processes that compute on them."""
    with session() as nvml:
        if nvml is None:
            return []
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            capability = None
            with suppress(nvml.NVMLError):
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                capability = (int(major), int(minor))
            pids: tuple[int, ...] = ()
            with suppress(nvml.NVMLError):
                pids = tuple(sorted(one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
            found.append(Gpu(index, _text(nvml.nvmlDeviceGetName(handle)), memory.total, memory.used, capability, pids))
        return found


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    with session() as nvml:
        return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, by the kernel's names (``avx512f``); empty where the kernel does not say."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
