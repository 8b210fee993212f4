"""What the machine did during a measurement: clocks, power, throttling, memory, and the load of others.

A GPU that throttles, a processor that others use or a virtual machine whose host takes time away make a number wrong
without leaving a trace in it. Sampled beside each cell; what cannot be read here is missing, not zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from perfbook.record import devices
from perfbook.server import state, tree
from perfbook.server.process import ServerHandle

#: Bits of NVML's clock event reasons that slow a GPU against its owner's wish (nvml.h).
THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
#: Processors' worth of foreign load, as a share of all, above which a cell is suspect.
STOLEN_SHARE = 0.02
_KIB = 1024


class Sampler:
    """Samples the machine while active; afterwards :attr:`summary` holds plain values.

    Parameters
    ----------
    handle : ServerHandle, optional
        Ours: its processes do not count as foreign load.
    every_s : float
        Between samples.

    Examples
    --------
    >>> with Sampler() as sampler:
    ...     pass
    >>> sampler.summary["samples"] >= 1
    True
    """

    def __init__(self, handle: ServerHandle | None = None, *, every_s: float = 0.5) -> None:
        self.every_s = every_s
        self.summary: dict[str, Any] = {}
        self._handle = handle
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._gpus: dict[int, list[dict[str, float]]] = {}
        self._throttled: dict[int, int] = {}
        self._frequencies: list[float] = []
        self._samples = 0

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        self._before = _cpu_seconds(self._ours())
        self._energy = _gpu_energy_j()
        self._throttles = _cpu_throttle_count()
        self._thread = threading.Thread(target=self._run, name="perfbook-telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.summary = self._summarise()

    def _run(self) -> None:
        with devices.session() as nvml:
            while True:
                self._sample(nvml)
                if self._stop.wait(self.every_s):
                    return

    def _sample(self, nvml: Any | None) -> None:
        self._samples += 1
        with suppress(OSError, AttributeError, NotImplementedError):
            frequency = psutil.cpu_freq()
            if frequency is not None and frequency.current:
                self._frequencies.append(frequency.current)
        if nvml is None:
            return
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                row, reasons = _read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
                self._gpus.setdefault(index, []).append(row)
                self._throttled[index] = self._throttled.get(index, 0) | reasons

    def _ours(self) -> list[tree.Process]:
        """The server's processes and this one's, with everything started from it."""
        ours = [tree.Process(one.pid, -1) for one in [psutil.Process(), *psutil.Process().children(recursive=True)]]
        if self._handle is not None and self._handle.run_path is not None:
            known = state.read(self._handle.run_path)
            if known is not None and known.leader is not None and known.here:
                ours += tree.tree_of(known.leader, known.tree)
        return ours

    def _summarise(self) -> dict[str, Any]:
        wall = time.monotonic() - self._begun
        after = _cpu_seconds(self._ours())
        threads = psutil.cpu_count() or 1
        busy = max(0.0, after["busy"] - self._before["busy"])
        mine = max(0.0, after["ours"] - self._before["ours"])
        stolen = max(0.0, after["steal"] - self._before["steal"]) / (wall * threads) if wall else 0.0
        foreign = max(0.0, busy - mine) / wall if wall else 0.0
        energy = _gpu_energy_j()
        gpus = [_summarise_gpu(index, rows, self._throttled[index]) for index, rows in sorted(self._gpus.items())]
        for gpu in gpus:
            if gpu["index"] in energy and gpu["index"] in self._energy:
                gpu["energy_j"] = energy[gpu["index"]] - self._energy[gpu["index"]]
        throttles = _cpu_throttle_count()
        cpu = {
            "threads": threads,
            "busy_cores": busy / wall if wall else 0.0,
            "own_cores": mine / wall if wall else 0.0,
            "foreign_cores": foreign,
            "stolen_share": stolen,
            "frequency_mhz": _span(self._frequencies),
            "governor": _governor(),
            "throttle_events": None if throttles is None or self._throttles is None else throttles - self._throttles,
        }
        known_energy = [gpu["energy_j"] for gpu in gpus if "energy_j" in gpu]
        return {
            "duration_s": wall,
            "samples": self._samples,
            "cpu": cpu,
            "gpus": gpus,
            "energy_j": sum(known_energy) if gpus and len(known_energy) == len(gpus) else None,
            "suspect": list(_suspicions(cpu, gpus)),
        }


def energy_per_token_j(summary: dict[str, Any], tokens: int) -> float | None:
    """Joules per output token of all GPUs; None where the power is not known or nothing was generated."""
    energy = summary.get("energy_j")
    return energy / tokens if isinstance(energy, int | float) and tokens > 0 else None


def _suspicions(cpu: dict[str, Any], gpus: Iterable[dict[str, Any]]) -> Iterable[str]:
    """Why the numbers of this time may be wrong. Foreign CPU load is judged with the cell (``stream.validity``)."""
    if cpu["stolen_share"] > STOLEN_SHARE:
        yield f"the host took {100 * cpu['stolen_share']:.0f} % of this virtual machine's CPU time"
    if cpu["throttle_events"]:
        yield f"the CPU throttled {cpu['throttle_events']} times"
    for gpu in gpus:
        if gpu["throttled"]:
            yield f"GPU {gpu['index']} was slowed: {', '.join(gpu['throttled'])}"


def _cpu_seconds(ours: Iterable[tree.Process]) -> dict[str, float]:
    """CPU time so far: everybody's, ours, and what a hypervisor took."""
    now = psutil.cpu_times()
    idle = now.idle + getattr(now, "iowait", 0.0)
    guests = getattr(now, "guest", 0.0) + getattr(now, "guest_nice", 0.0)  # counted in user and nice, too
    steal = getattr(now, "steal", 0.0)
    mine = 0.0
    for pid in {one.pid for one in ours}:
        with suppress(psutil.Error):
            used = psutil.Process(pid).cpu_times()
            mine += used.user + used.system
    return {"busy": sum(now) - idle - steal - guests, "ours": mine, "steal": steal}


def _read_gpu(nvml: Any, handle: Any) -> tuple[dict[str, float], int]:
    """One sample of one device; what it does not report is missing."""
    row: dict[str, float] = {}
    readings: dict[str, Callable[[], Any]] = {
        "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "utilisation_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "pcie_tx_bytes_per_s": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) * _KIB,
        "pcie_rx_bytes_per_s": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) * _KIB,
    }
    for name, read in readings.items():
        with suppress(nvml.NVMLError):
            row[name] = float(read())
    reasons = 0
    with suppress(nvml.NVMLError):
        reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return row, reasons


def _summarise_gpu(index: int, rows: list[dict[str, float]], reasons: int) -> dict[str, Any]:
    names = sorted({name for row in rows for name in row})
    return {
        "index": index,
        "throttled": [text for bit, text in THROTTLING.items() if reasons & bit],
        **{name: _span([row[name] for row in rows if name in row]) for name in names},
    }


def _span(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}


def _gpu_energy_j() -> dict[int, float]:
    """Energy counters by device; empty where there are none."""
    found: dict[int, float] = {}
    with devices.session() as nvml:
        if nvml is None:
            return found
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                found[index] = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    return found


def _cpu_throttle_count() -> int | None:
    """Thermal throttling events of all cores so far; None where the kernel does not count them."""
    counts = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    return sum(counts) if counts else None


def _governor() -> str | None:
    with suppress(OSError):
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    return None
