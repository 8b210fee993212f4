"""What can stand in the way of a set-up, each told in one line with what to do about it."""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("cpu", "cuda")

# Free bytes: for the installed environment with the model, and for the downloads that pip unpacks it from.
DISK = {"cpu": (5_000_000_000, 1_500_000_000), "cuda": (20_000_000_000, 6_000_000_000)}
DISK_FOR_CHANGES = (500_000_000, 100_000_000)

NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ConnectTimeoutError",
    "ProxyError",
    "Read timed out",
)
# pip says these many times; the lines after them tell more.
CHATTER = ("WARNING: Retrying", "WARNING: Location")


class CannotSetUpError(Exception):
    """One line: what is in the way, and what to do about it."""


def check_python() -> None:
    """Refuse a Python for which vLLM has no packages."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        version = platform.python_version()
        raise CannotSetUpError(f"vLLM needs Python 3.11 to 3.14; {sys.executable} is {version}")


def check_machine(engine: str) -> None:
    """Refuse a machine for which no packages exist, before gigabytes are fetched."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise CannotSetUpError(f"vLLM's packages need Linux on x86-64; this is {system} on {machine}")
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 31):
        raise CannotSetUpError(f"vLLM's packages need glibc 2.31 or newer; here is {libc} {version}")
    if engine == "cpu":
        check_cpu(Path("/proc/cpuinfo").read_text())


def check_cpu(cpuinfo: str) -> None:
    """Refuse a processor, or a system, on which vLLM's CPU engine does not load."""
    if "avx2" not in cpuinfo.split():
        raise CannotSetUpError("vLLM's CPU engine needs a processor with AVX2; with an NVIDIA GPU: ENGINE=cuda")
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise CannotSetUpError(
            "vLLM's CPU engine needs libnuma.so.1: install libnuma1 (Debian) or numactl-libs (Fedora)"
        ) from None


def check_disk(engine: str, fresh: bool) -> None:
    """Refuse a disk on which the installation would not end."""
    installed, downloads = DISK[engine] if fresh else DISK_FOR_CHANGES
    temporary = Path(tempfile.gettempdir())
    shared = temporary.stat().st_dev == ROOT.stat().st_dev
    needs = {ROOT: installed + downloads} if shared else {ROOT: installed, temporary: downloads}
    for folder, needed in needs.items():
        free = shutil.disk_usage(folder).free
        if free < needed:
            remedy = "free some" if folder == ROOT else "set TMPDIR to a folder on another disk"
            raise CannotSetUpError(
                f"{folder} has {free / 1e9:.1f} GB free, set-up needs {needed / 1e9:.1f} GB: {remedy}"
            )


def explain(log: Path) -> str:
    """The likely reason of a failed step, from what it printed, with the end of that."""
    text = log.read_text(errors="replace")
    if "No space left on device" in text or "Disk quota exceeded" in text:
        reason = "the disk is full: free some space, or set TMPDIR to a folder on another disk"
    elif any(sign in text for sign in NO_NETWORK):
        reason = "the package index cannot be reached: check the network, the proxy and pip's configuration"
    elif "No matching distribution found" in text:
        version = platform.python_version()
        reason = f"the package index has nothing for Python {version}: try another, PYTHON=/path/to/python3.11"
    else:
        reason = "this step failed"
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(CHATTER)]
    tail = "\n".join(f"    {line[:300]}" for line in lines[-12:])
    return f"{reason}; then run the same command again. The end of {log}:\n{tail}"
