"""The client: one thread, one epoll, non-blocking sockets, and a hot path that keeps (bytes, time) and
nothing else.

Everything that could wait is done before the cell (name look-up, connections, request bytes) or after it
(HTTP, SSE, JSON, timing). The time of a read is the kernel's, so a client that is late reads late but does
not time late; what lateness does cost is merged reads, and those are marked.

The end of a response has to be known at once, to send the next request. Chunked streams end in CRLF CRLF
whatever their trailers, so the HTTP parser is asked when the bytes end so, and otherwise only every 64 KiB.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httptools

from perfbook.stream import clock
from perfbook.stream.endpoint import Deadlines, Endpoint
from perfbook.stream.record import Recorded, Spool
from perfbook.stream.response import HttpFraming

__all__ = ["Deadlines", "Endpoint", "Recording", "Schedule", "record"]

CLOSED, CONNECTING, HANDSHAKE, IDLE, SENDING, READING = range(6)
_READ_BYTES = 65536
_FEED_BYTES = 65536
_END = b"\r\n\r\n"
MAX_RESPONSE_BYTES = 64 * 2**20
SPOOL_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests start and when to stop.

    Attributes
    ----------
    concurrency : int
        Connections, and so the most requests outstanding.
    due_ns : sequence of int, optional
        Open loop: start of each request, in ns from the cell's start, ascending. Without it a stream's next
        request starts when its last one ended.
    seconds : float, optional
        Start no request later than this after the cell's start.
    enough : callable, optional
        Called with each finished request's duration in ns; true means start no more.
    start_at_ns : callable, optional
        Called when all connections stand; returns the CLOCK_MONOTONIC ns at which to begin (processes that
        share a cell begin together).

    """

    concurrency: int
    due_ns: Sequence[int] | None = None
    seconds: float | None = None
    enough: Callable[[int], bool] | None = None
    start_at_ns: Callable[[], int] | None = None


@dataclass(slots=True)
class Recording:
    """The raw outcome of a cell: one ``Recorded`` per request that was begun, and the clock's readings."""

    spool: Spool
    responses: list[Recorded] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    hot_cpu_ns: int = 0
    process_cpu_begin_ns: int = 0
    offset_before_ns: int = 0
    offset_after_ns: int = 0
    connect_failures: int = 0


class _Connection:
    __slots__ = (
        "address",
        "began_ns",
        "eager",
        "family",
        "fd",
        "fed",
        "http",
        "kernel",
        "out",
        "rec",
        "sock",
        "state",
    )

    def __init__(self, family: int, address: tuple[object, ...]) -> None:
        self.family = family
        self.address = address
        self.state = CLOSED
        self.fd = -1
        self.sock: socket.socket
        self.kernel = False
        self.began_ns = 0
        self.rec: Recorded | None = None
        self.http: HttpFraming
        self.out = memoryview(b"")
        self.fed = 0
        self.eager = True


def record(
    endpoint: Endpoint,
    requests: Sequence[bytes],
    schedule: Schedule,
    *,
    deadlines: Deadlines | None = None,
    progress: Callable[[int, float], None] | None = None,
    kernel_times: bool = True,
    spool_bytes: int = SPOOL_BYTES,
    max_response_bytes: int = MAX_RESPONSE_BYTES,
) -> Recording:
    """Send the requests as scheduled and record every byte that comes back.

    Parameters
    ----------
    endpoint : Endpoint
    requests : sequence of bytes
        Complete HTTP requests, in order.
    schedule : Schedule
    deadlines : Deadlines, optional
    progress : callable, optional
        Called about once a second with (requests finished, seconds since the start).
    kernel_times : bool
        Ask for kernel receive times; false forces user-space times.
    spool_bytes : int
        Response bytes kept in memory; more goes to a temporary file.
    max_response_bytes : int
        A longer response fails as ``oversized``.

    Raises
    ------
    ServerFailed
        The host cannot be resolved. A refused connection is a failed request, not an exception.

    """
    return _Cell(
        endpoint,
        requests,
        schedule,
        deadlines or Deadlines(),
        progress,
        kernel_times,
        spool_bytes,
        max_response_bytes,
    ).run()


class _Cell:
    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        schedule: Schedule,
        deadlines: Deadlines,
        progress: Callable[[int, float], None] | None,
        kernel_times: bool,
        spool_bytes: int,
        max_response_bytes: int,
    ) -> None:
        self.endpoint = endpoint
        self.requests = requests
        self.schedule = schedule
        self.deadlines = deadlines
        self.progress = progress
        self.kernel_times = kernel_times and not endpoint.tls
        self.max_response_bytes = max_response_bytes
        self.tls = endpoint.tls_context()
        self.out = Recording(Spool(spool_bytes))
        self.next = 0
        self.finished = 0
        self.stopped = False
        self.epoll = select.epoll()
        self.by_fd: dict[int, _Connection] = {}
        # Streams free to take a request; connected ones first, since a connect would delay the others.
        self.free: deque[_Connection] = deque()

    # -- the cell ----------------------------------------------------------

    def run(self) -> Recording:
        out, schedule = self.out, self.schedule
        family, address = self.endpoint.resolve(self.deadlines.connect_s)
        connections = [_Connection(family, address) for _ in range(schedule.concurrency)]
        try:
            self._connect_all(connections)
            self.free.extend(sorted(connections, key=lambda c: c.state != IDLE))
            out.offset_before_ns = clock.realtime_offset_ns()
            if schedule.start_at_ns is not None:
                self._wait_until(schedule.start_at_ns())
            with _no_gc():
                out.process_cpu_begin_ns = time.process_time_ns()
                cpu = time.thread_time_ns()
                out.begin_ns = time.monotonic_ns()
                self._loop()
                out.end_ns = time.monotonic_ns()
                out.hot_cpu_ns = time.thread_time_ns() - cpu
            out.offset_after_ns = clock.realtime_offset_ns()
        finally:
            for connection in connections:
                self._close(connection)
            self.epoll.close()
        out.responses.sort(key=lambda r: r.index)
        return out

    def _loop(self) -> None:
        tick_ns = int(min(0.25, *(getattr(self.deadlines, f) / 4 for f in self.deadlines.__slots__)) * 1e9)
        next_tick = self.out.begin_ns + tick_ns
        next_word = self.out.begin_ns + 1_000_000_000
        poll, by_fd = self.epoll.poll, self.by_fd
        monotonic_ns = time.monotonic_ns
        no_stamp = clock.NO_STAMP
        ancillary = clock.ANCILLARY_BYTES
        readable = select.EPOLLIN
        wait_ns = self._issue(monotonic_ns())
        while self.finished < self.next or not self._exhausted():
            now = monotonic_ns()
            wait_ns = min(wait_ns, next_tick - now)
            if wait_ns < 2_000_000:  # epoll waits whole milliseconds, select microseconds
                select.select([self.epoll], [], [], max(0, wait_ns) / 1e9)
                wait_ns = 0
            for fd, mask in poll(max(0, wait_ns) / 1e9):
                connection = by_fd[fd]
                if connection.state != READING or not connection.kernel or not mask & readable:
                    self._on_event(connection, mask)
                    continue
                try:
                    data, extra, _, _ = connection.sock.recvmsg(_READ_BYTES, ancillary)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._fail(connection, *_transport_error(error))
                    continue
                at = monotonic_ns()
                if not data:
                    self._on_eof(connection)
                    continue
                rec = connection.rec
                assert rec is not None
                raw = rec.raw
                raw += data
                rec.size += len(data)
                rec.ends.append(rec.size)
                rec.user_ns.append(at)
                rec.stamps += extra[0][2][:16] if extra else no_stamp
                if connection.eager or raw.endswith(_END) or len(raw) - connection.fed > _FEED_BYTES:
                    self._on_bytes(connection)
            now = monotonic_ns()
            wait_ns = self._issue(now) if self.free else tick_ns
            if now >= next_tick:
                next_tick = now + tick_ns
                self._housekeeping(now)
            if self.progress is not None and now >= next_word:
                next_word = now + 1_000_000_000
                self.progress(self.finished, (now - self.out.begin_ns) / 1e9)

    # -- starting requests ----------------------------------------------------------

    def _exhausted(self) -> bool:
        return self.stopped or self.next >= len(self.requests)

    def _issue(self, now: int) -> int:
        """Start what is due; return ns until the next start (a long time when nothing waits for the
        clock).

        """
        schedule, begin = self.schedule, self.out.begin_ns
        if schedule.seconds is not None and now - begin > schedule.seconds * 1e9:
            self.stopped = True
        while self.free and not self._exhausted():
            due = -1
            if schedule.due_ns is not None:
                due = begin + schedule.due_ns[self.next]
                if due > now:
                    return due - now
            rec = Recorded(self.next, due)
            self.next += 1
            self.out.responses.append(rec)
            self._start(self.free.popleft(), rec)
            if schedule.due_ns is not None:
                now = time.monotonic_ns()
        return 1_000_000_000

    def _start(self, connection: _Connection, rec: Recorded) -> None:
        connection.rec = rec
        connection.http = HttpFraming()
        connection.eager = True
        connection.fed = 0
        connection.out = memoryview(self.requests[rec.index])
        if connection.state == IDLE:
            self._send(connection)
        else:
            self._connect(connection)

    def _send(self, connection: _Connection) -> None:
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
            return
        except OSError as error:
            self._fail(connection, *_transport_error(error))
            return
        if connection.state == SENDING:
            self.epoll.modify(connection.fd, select.EPOLLIN)
        connection.state = READING

    # -- connections ----------------------------------------------------------

    def _connect_all(self, connections: list[_Connection]) -> None:
        """Open every connection before the cell; those that fail are tried again when a request needs
        them.

        """
        until = time.monotonic() + self.deadlines.connect_s
        for connection in connections:
            self._connect(connection)
        while any(c.state in (CONNECTING, HANDSHAKE) for c in connections) and time.monotonic() < until:
            for fd, mask in self.epoll.poll(0.05):
                self._on_event(self.by_fd[fd], mask)
        for connection in connections:
            if connection.state != IDLE:
                self.out.connect_failures += 1
                self._close(connection)

    def _connect(self, connection: _Connection) -> None:
        sock = socket.socket(connection.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.kernel = self.kernel_times and clock.want_kernel_times(sock)
        connection.sock = sock
        connection.fd = sock.fileno()
        connection.began_ns = time.monotonic_ns()
        connection.state = CONNECTING
        self.by_fd[connection.fd] = connection
        self.epoll.register(connection.fd, select.EPOLLOUT)
        code = sock.connect_ex(connection.address)
        if code not in (0, errno.EINPROGRESS):
            self._fail(connection, *_transport_error(OSError(code, errno.errorcode.get(code, "error"))))

    def _on_event(self, connection: _Connection, mask: int) -> None:
        """Everything that is not a read in the hot path."""
        if connection.state == CONNECTING:
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._fail(connection, *_transport_error(OSError(code, errno.errorcode.get(code, "error"))))
                return
            if self.tls is None:
                self._connected(connection)
                return
            # The new object takes the descriptor over, so epoll keeps watching the same number.
            connection.sock = self.tls.wrap_socket(
                connection.sock, server_hostname=self.endpoint.host, do_handshake_on_connect=False
            )
            connection.state = HANDSHAKE
        if connection.state == HANDSHAKE:
            self._shake(connection)
        elif connection.state == SENDING:
            self._send(connection)
        elif connection.state == READING:
            self._read_plainly(connection)
        elif connection.state == IDLE:  # the server ended a connection that waited for its next request
            self._close(connection)

    def _shake(self, connection: _Connection) -> None:
        assert isinstance(connection.sock, ssl.SSLSocket)
        try:
            connection.sock.do_handshake()
        except ssl.SSLWantReadError:
            self.epoll.modify(connection.fd, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self.epoll.modify(connection.fd, select.EPOLLOUT)
        except OSError as error:
            self._fail(connection, "tls", str(error))
        else:
            self._connected(connection)

    def _connected(self, connection: _Connection) -> None:
        self.epoll.modify(connection.fd, select.EPOLLIN)
        connection.state = IDLE
        if connection.rec is not None:
            self._send(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.state != CLOSED:
            self.by_fd.pop(connection.fd, None)
            connection.sock.close()
            connection.state = CLOSED

    # -- receiving ----------------------------------------------------------

    def _read_plainly(self, connection: _Connection) -> None:
        """Read with user-space times: TLS, systems without kernel stamps, errors on the socket."""
        while connection.state == READING:
            rec = connection.rec
            assert rec is not None
            try:
                data = connection.sock.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except ssl.SSLEOFError:
                data = b""
            except OSError as error:
                self._fail(connection, *_transport_error(error))
                return
            at = time.monotonic_ns()
            if not data:
                self._on_eof(connection)
                return
            rec.raw += data
            rec.size += len(data)
            rec.ends.append(rec.size)
            rec.user_ns.append(at)
            rec.stamps += clock.NO_STAMP
            self._on_bytes(connection)
            if connection.rec is not rec or self.tls is None:
                return  # a TLS socket must be emptied: epoll does not see what it has decrypted already

    def _on_bytes(self, connection: _Connection) -> None:
        rec = connection.rec
        assert rec is not None
        if not self._feed(connection, rec):
            return
        if connection.http.complete:
            self._finish(connection, keep=connection.http.keep_alive)
            self._issue(time.monotonic_ns())
        elif rec.size > self.max_response_bytes:
            self._fail(connection, "oversized", f"a response of more than {self.max_response_bytes} bytes")

    def _feed(self, connection: _Connection, rec: Recorded) -> bool:
        http = connection.http
        try:
            with memoryview(rec.raw) as view:
                http.feed(view[connection.fed :])
        except httptools.HttpParserError as error:
            self._fail(connection, "bad_http", f"not a valid HTTP response: {error}")
            return False
        connection.fed = len(rec.raw)
        connection.eager = not (http.headers_complete and http.chunked)
        return True

    def _on_eof(self, connection: _Connection) -> None:
        rec = connection.rec
        assert rec is not None
        rec.closed = True
        if self._feed(connection, rec):
            self._finish(connection, keep=False)

    def _finish(self, connection: _Connection, *, keep: bool) -> None:
        rec = connection.rec
        assert rec is not None
        rec.finished_ns = time.monotonic_ns()
        connection.rec = None
        self.finished += 1
        if keep and connection.state == READING:
            connection.state = IDLE
            self.free.appendleft(connection)
        else:
            self._close(connection)
            self.free.append(connection)
        enough = self.schedule.enough
        if enough is not None and rec.error is None and enough(rec.finished_ns - rec.start_ns):
            self.stopped = True

    def _fail(self, connection: _Connection, error: str, detail: str) -> None:
        if connection.rec is None:
            self._close(connection)
            return
        connection.rec.error, connection.rec.detail = error, detail
        self._finish(connection, keep=False)

    # -- now and then ----------------------------------------------------------

    def _housekeeping(self, now: int) -> None:
        """Deadlines, and bytes to the file when they are too many."""
        limit = self.deadlines
        for connection in [c for c in self.by_fd.values() if c.rec is not None]:
            rec = connection.rec
            assert rec is not None
            if connection.state in (CONNECTING, HANDSHAKE):
                if now - connection.began_ns > limit.connect_s * 1e9:
                    self._fail(connection, "connect_timeout", f"no connection within {limit.connect_s:g} s")
            elif now - rec.start_ns > limit.total_s * 1e9:
                self._fail(connection, "total_timeout", f"not finished within {limit.total_s:g} s")
            elif not rec.user_ns and now - rec.start_ns > limit.first_byte_s * 1e9:
                self._fail(connection, "first_byte_timeout", f"no byte within {limit.first_byte_s:g} s")
            elif rec.user_ns and now - rec.user_ns[-1] > limit.stall_s * 1e9:
                self._fail(connection, "stall", f"no byte for {limit.stall_s:g} s after {rec.size} bytes")
        self._keep_small()

    def _keep_small(self) -> None:
        spool = self.out.spool
        held = sum(len(rec.raw) for rec in self.out.responses)
        if held <= spool.limit_bytes:
            return
        live = {c.rec.index: c for c in self.by_fd.values() if c.rec is not None}
        for rec in sorted(self.out.responses, key=lambda r: -len(r.raw)):
            connection = live.get(rec.index)
            if connection is not None:
                if not self._feed(connection, rec):
                    continue
                connection.fed = 0
                connection.eager = True  # once: the end's CRLF CRLF may straddle the cut
            held -= len(rec.raw)
            spool.spill(rec)
            if held <= spool.limit_bytes // 2:
                return

    @staticmethod
    def _wait_until(at_ns: int) -> None:
        while (left := at_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """A collection would stop the reader for milliseconds; the hot path makes no cycles that need one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _transport_error(error: OSError) -> tuple[str, str]:
    if isinstance(error, ssl.SSLError):
        return "tls", str(error)
    if error.errno == errno.ECONNREFUSED:
        return "refused", "connection refused: nothing listens there"
    if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return "reset", "the connection was reset"
    return "connection", f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}"
