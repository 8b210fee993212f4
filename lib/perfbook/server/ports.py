"""Who listens on a port of this machine."""

from __future__ import annotations

import ipaddress
import random
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from perfbook.server import tree

_FIRST = 10_000  # below it services have their numbers
_TRIES = 50


@dataclass(frozen=True)
class Listener:
    """A listening socket: its owner's number (None when the system does not say) and command line."""

    pid: int | None
    title: str

    def __str__(self) -> str:
        """Text for messages."""
        return "a process of another user" if self.pid is None else f"pid {self.pid} ({self.title or 'unknown'})"


def listeners(port: int) -> list[Listener]:
    """Everybody who listens on a TCP port, IPv4 and IPv6."""
    found = {
        connection.pid
        for connection in psutil.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
    }
    return [Listener(pid, tree.title(pid) if pid else "") for pid in sorted(found, key=lambda pid: pid or 0)]


def address(host: str) -> tuple[socket.AddressFamily, str]:
    """Family and number of an address to bind, as a server finds them; the first where a name has several.

    Raises
    ------
    OSError
        No such name, or not a name at all.
    """
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:
        raise OSError(f"{host!r} is not a host name") from None
    return found[0][0], str(found[0][4][0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there; False for a name that nobody knows."""
    try:
        return ipaddress.ip_address(address(host)[1].partition("%")[0]).is_loopback
    except OSError:
        return False


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now; with port 0, whether the address is one of this machine's."""
    try:
        family, number = address(host)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((number, port))
            probe.listen(1)
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    """A port that is free now, and that no outgoing connection takes until the server binds it, many seconds later.

    So it lies outside of the range from which the system gives connections theirs; within it where nothing else is
    free. OSError where the address is not one of this machine's.
    """
    family, number = address(host)
    given = _given_to_connections()
    outside = [port for port in range(_FIRST, 65536) if port not in given]
    for port in random.SystemRandom().sample(outside, min(_TRIES, len(outside))):
        if is_free(host, port):
            return port
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((number, 0))
        return int(probe.getsockname()[1])


def _given_to_connections() -> range:
    """The system's range for the near end of outgoing connections (ip(7), ip_local_port_range)."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    return range(low, high + 1)


def reachable(host: str) -> str:
    """The address to connect to for an address to bind to."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reached}]" if ":" in reached else reached
