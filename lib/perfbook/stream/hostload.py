"""Who else used this machine during a cell: CPU time outside the client's and the server's process trees."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil


@dataclass(frozen=True, slots=True)
class HostLoad:
    """``foreign_cores`` is the mean number of cores that other processes kept busy, None when it cannot be
    told (the server runs here but its processes are not visible). ``throttled`` counts CPU throttling events.
    """

    foreign_cores: float | None
    throttled: int


class Watch:
    """Context manager around a cell; ``seen`` is the result."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self.seen = HostLoad(None, 0)

    def __enter__(self) -> Watch:
        self._server = _listener(self._port) if is_this_host(self._host) else None
        self._known = self._server is not None or not is_this_host(self._host)
        self._throttled = _throttle_count()
        self._busy = _busy_s()
        self._own = self._own_s()
        self._at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._at
        foreign = (_busy_s() - self._busy) - (self._own_s() - self._own)
        enough = seconds >= 0.5  # the kernel counts in ticks of 10 ms
        self.seen = HostLoad(
            max(0.0, foreign / seconds) if self._known and enough else None,
            _throttle_count() - self._throttled,
        )

    def _own_s(self) -> float:
        used = os.times()
        total = used.user + used.system + used.children_user + used.children_system
        if self._server is not None:
            total += _tree_s(self._server)
        return total


def _busy_s() -> float:
    now = psutil.cpu_times()
    return float(sum(getattr(now, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _tree_s(root: psutil.Process) -> float:
    total = 0.0
    try:
        members = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    for process in members:
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system
    return total


def _listener(port: int) -> psutil.Process | None:
    """The process that listens on a local port, if this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        return None
    return None


def is_this_host(host: str) -> bool:
    """Whether a name or an address is this machine's."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    if any(ipaddress.ip_address(a.split("%")[0]).is_loopback for a in addresses):
        return True
    own = {a.address for group in psutil.net_if_addrs().values() for a in group}
    return bool(addresses & own)


def _throttle_count() -> int:
    """Throttling events so far: the cgroup's CPU quota, and the cores' own heat."""
    total = 0
    try:
        for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines():
            if line.startswith("nr_throttled "):
                total += int(line.split()[1])
    except (OSError, ValueError):
        pass
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        try:
            total += int(path.read_text())
        except (OSError, ValueError):
            continue
    return total
