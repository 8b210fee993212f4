"""Connections: opened before the cell, non-blocking, plain or TLS, with kernel receive times where there are
any.
"""

from __future__ import annotations

import errno
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from perfbook.errors import BadInput
from perfbook.stream import clock
from perfbook.stream.endpoint import Deadlines, Endpoint
from perfbook.stream.record import Recorded
from perfbook.stream.response import HttpFraming

CLOSED, CONNECTING, HANDSHAKE, IDLE, SENDING, READING = range(6)

Failure = tuple[str, str]
"""Error class and detail."""


class Connection:
    """One connection and the request that it carries now."""

    __slots__ = (
        "began_ns",
        "eager",
        "fd",
        "hot",
        "http",
        "kernel",
        "out",
        "rec",
        "receive",
        "sock",
        "state",
        "unfed",
    )

    def __init__(self) -> None:
        self.state = CLOSED
        self.fd = -1
        self.sock: socket.socket
        self.receive: Callable[[int, int], tuple[bytes, list[tuple[int, int, bytes]], int, Any]]  # its recvmsg
        self.kernel = False
        self.hot = False  # readable in the hot path: a request is out, the kernel gives times
        self.began_ns = 0
        self.rec: Recorded | None = None
        self.http: HttpFraming
        self.out = memoryview(b"")
        self.unfed = 0  # bytes of the response that its framing has not been asked about
        self.eager = True

    def begin(self, rec: Recorded, request: bytes) -> None:
        """Take a request; it still has to be sent."""
        self.rec = rec
        self.http = HttpFraming()
        self.eager = True
        self.unfed = 0
        self.out = memoryview(request)

    def overdue(self, now: int, limit: Deadlines) -> Failure | None:
        """Which deadline the request that is out has missed."""
        rec = self.rec
        assert rec is not None
        if self.state in (CONNECTING, HANDSHAKE):
            if now - self.began_ns > limit.connect_s * 1e9:
                return "connect_timeout", f"no connection within {limit.connect_s:g} s"
        elif now - rec.start_ns > limit.total_s * 1e9:
            return "total_timeout", f"not finished within {limit.total_s:g} s"
        elif not rec.user_ns and now - rec.start_ns > limit.first_byte_s * 1e9:
            return "first_byte_timeout", f"no byte within {limit.first_byte_s:g} s"
        elif rec.user_ns and now - rec.user_ns[-1] > limit.stall_s * 1e9:
            return "stall", f"no byte for {limit.stall_s:g} s after {rec.size + self.unfed} bytes"
        return None


class Pool:
    """Opens, watches and closes the connections of one cell."""

    def __init__(self, endpoint: Endpoint, kernel_times: bool, connect_s: float) -> None:
        self._host = endpoint.host
        self._tls = endpoint.tls_context()
        self._kernel_times = kernel_times and self._tls is None
        self._family, self._address = endpoint.resolve(connect_s)
        self._connect_s = connect_s
        self.epoll = select.epoll()
        self.by_fd: dict[int, Connection] = {}

    def connect_all(self, count: int) -> list[Connection]:
        """Open connections before the cell, those that stand first; the others are tried again when
        needed.
        """
        _allow_descriptors(count + 64)
        connections = [Connection() for _ in range(count)]
        for connection in connections:
            if self.open(connection) is not None:
                self.close(connection)
        until = time.monotonic() + self._connect_s
        while any(c.state in (CONNECTING, HANDSHAKE) for c in connections) and time.monotonic() < until:
            for fd, _ in self.epoll.poll(0.05):
                connection = self.by_fd[fd]
                # An idle one that speaks was closed by the server; the next request opens it again.
                if connection.state == IDLE or self.advance(connection) is not None:
                    self.close(connection)
        for connection in connections:
            if connection.state != IDLE:
                self.close(connection)
        return sorted(connections, key=lambda c: c.state != IDLE)

    def open(self, connection: Connection) -> Failure | None:
        """Begin to connect."""
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.kernel = self._kernel_times and clock.want_kernel_times(sock)
        connection.sock = sock
        connection.receive = sock.recvmsg
        connection.fd = sock.fileno()
        connection.began_ns = time.monotonic_ns()
        connection.state = CONNECTING
        self.by_fd[connection.fd] = connection
        self.epoll.register(connection.fd, select.EPOLLOUT)
        code = sock.connect_ex(self._address)
        return None if code in (0, errno.EINPROGRESS) else transport_error(OSError(code, ""))

    def advance(self, connection: Connection) -> Failure | None:
        """Carry an opening connection on; it is ``IDLE`` when it stands."""
        if connection.state == CONNECTING:
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return transport_error(OSError(code, ""))
            if self._tls is not None:
                # The new object takes the descriptor over, so epoll keeps watching the same number.
                connection.sock = self._tls.wrap_socket(
                    connection.sock, server_hostname=self._host, do_handshake_on_connect=False
                )
                connection.state = HANDSHAKE
        if isinstance(connection.sock, ssl.SSLSocket):
            try:
                connection.sock.do_handshake()
            except ssl.SSLWantReadError:
                self.epoll.modify(connection.fd, select.EPOLLIN)
                return None
            except ssl.SSLWantWriteError:
                self.epoll.modify(connection.fd, select.EPOLLOUT)
                return None
            except OSError as error:
                return "tls", str(error)
        self.epoll.modify(connection.fd, select.EPOLLIN)
        connection.state = IDLE
        return None

    def send(self, connection: Connection) -> Failure | None:
        """Hand on what is unsent of the request; ``READING`` when the last byte is with the kernel."""
        rec = connection.rec
        assert rec is not None
        try:
            while connection.out:
                # Before the call: the server may answer while the call still runs.
                rec.start_ns = time.monotonic_ns()
                sent = connection.sock.send(connection.out)
                connection.out = connection.out[sent:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            if connection.state != SENDING:
                connection.state = SENDING
                self.epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
            return None
        except OSError as error:
            return transport_error(error)
        if connection.state == SENDING:
            self.epoll.modify(connection.fd, select.EPOLLIN)
        connection.state = READING
        connection.hot = connection.kernel
        return None

    def busy(self) -> list[Connection]:
        """Those that carry a request now."""
        return [one for one in self.by_fd.values() if one.rec is not None]

    def silent_s(self, now: int, last_end_ns: int) -> float:
        """Since when all streams wait in vain; 0 while none waits."""
        waiting = [(one.began_ns, one.rec) for one in self.busy() if one.rec is not None]
        heard = [rec.user_ns[-1] if rec.user_ns else max(began, rec.start_ns) for began, rec in waiting]
        return (now - max(last_end_ns, *heard)) / 1e9 if heard else 0.0

    def close(self, connection: Connection) -> None:
        """Close it; its object can be opened again."""
        if connection.state != CLOSED:
            self.by_fd.pop(connection.fd, None)
            connection.sock.close()
            connection.state = CLOSED
            connection.hot = False

    def close_all(self) -> None:
        """Close every connection and the epoll."""
        for connection in list(self.by_fd.values()):
            self.close(connection)
        self.epoll.close()


def _allow_descriptors(count: int) -> None:
    """Raise the limit on open files of this process if the connections need it and the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise BadInput(f"{count} connections exceed the limit of {hard} open files; raise it with ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def transport_error(error: OSError) -> Failure:
    """Name what the transport did."""
    if isinstance(error, ssl.SSLError):
        return "tls", str(error)
    if error.errno == errno.ECONNREFUSED:
        return "refused", "connection refused: nothing listens there"
    if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return "reset", "the connection was reset"
    return "connection", f"{errno.errorcode.get(error.errno or 0, 'unknown error')} {error.strerror or ''}".strip()
