"""Who listens on a port of this machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

from perfbook.server import tree


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


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str) -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def reachable(host: str) -> str:
    """The address to connect to for an address to bind to."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{reached}]" if ":" in reached else reached
