"""The hot path: one thread, one epoll, non-blocking sockets; it keeps (bytes, time) and nothing else.

Everything that could wait is done before the cell (name look-up, connections, request bytes) or after it
(HTTP, SSE, JSON, timing). The time of a read is the kernel's, so a client that is late reads late but does
not time late; what lateness does cost is merged reads, and those are marked.

The end of a response has to be known at once, to send the next request. Chunked streams end in CRLF CRLF
whatever their trailers, so the HTTP parser is asked when the bytes end so, and otherwise only every 64 KiB.
"""

from __future__ import annotations

import select
import ssl
import time
from collections import deque
from collections.abc import Sequence

import httptools

from perfbook.stream import clock, connections
from perfbook.stream.connections import CONNECTING, HANDSHAKE, IDLE, READING, SENDING, Connection, Pool
from perfbook.stream.endpoint import Deadlines, Endpoint
from perfbook.stream.record import Progress, Recorded, Recording, Schedule, Spool, no_gc

_READ_BYTES = 65536
_FEED_BYTES = 65536
_END = b"\r\n\r\n"
_STARTS_AT_ONCE = 16
"""Between so many sends the sockets are read: in a burst the first tokens come while the last requests go."""


class HotLoop:
    """One cell's receiving loop; see ``perfbook.stream.client.record`` for the arguments."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        schedule: Schedule,
        deadlines: Deadlines,
        progress: Progress | None,
        kernel_times: bool,
        spool_bytes: int,
        max_response_bytes: int,
    ) -> None:
        self.requests = requests
        self.schedule = schedule
        self.deadlines = deadlines
        self.progress = progress
        self.max_response_bytes = max_response_bytes
        self.pool = Pool(endpoint, kernel_times, deadlines.connect_s)
        self.tls = endpoint.tls
        self.out = Recording(Spool(spool_bytes))
        self.next = 0
        self.finished = 0
        self.stopped = False
        self.last_end_ns = 0
        self.held_bytes = 0  # of finished responses
        # Streams free to take a request; connected ones first, since a connect would delay the others.
        self.free: deque[Connection] = deque()

    # -- the cell ----------------------------------------------------------

    def run(self) -> Recording:
        """Connect, send, receive until every request ended; always leaves all connections closed."""
        out, schedule = self.out, self.schedule
        try:
            connected = self.pool.connect_all(schedule.concurrency)
            out.connect_failures = sum(c.state != IDLE for c in connected)
            self.free.extend(connected)
            out.offset_before_ns = clock.realtime_offset_ns()
            if schedule.start_at_ns is not None:
                self._wait_until(schedule.start_at_ns())
            with no_gc():
                out.process_cpu_begin_ns = time.process_time_ns()
                cpu = time.thread_time_ns()
                out.begin_ns = time.monotonic_ns()
                self._loop()
                out.end_ns = time.monotonic_ns()
                out.hot_cpu_ns = time.thread_time_ns() - cpu
                process_ns = time.process_time_ns() - out.process_cpu_begin_ns
                out.other_cpu_ns = max(0, process_ns - out.hot_cpu_ns)
            out.offset_after_ns = clock.realtime_offset_ns()
        finally:
            self.pool.close_all()
        out.responses.sort(key=lambda r: r.index)
        return out

    def _loop(self) -> None:
        tick_ns = int(min(0.25, *(getattr(self.deadlines, f) / 4 for f in self.deadlines.__slots__)) * 1e9)
        next_tick = self.out.begin_ns + tick_ns
        next_word = self.out.begin_ns + 1_000_000_000
        epoll, by_fd = self.pool.epoll, self.pool.by_fd
        poll = epoll.poll
        monotonic_ns = time.monotonic_ns
        no_stamp = clock.NO_STAMP
        ancillary = clock.ANCILLARY_BYTES
        wait_ns = self._issue(monotonic_ns())
        while self.finished < self.next or not self._exhausted():
            now = monotonic_ns()
            wait_ns = min(wait_ns, next_tick - now)
            if wait_ns < 2_000_000:  # epoll waits whole milliseconds, select microseconds
                select.select([epoll], [], [], max(0, wait_ns) / 1e9)
                wait_ns = 0
            for fd, _ in poll(max(0, wait_ns) / 1e9):
                connection = by_fd[fd]
                if not connection.hot:
                    self._on_event(connection)
                    continue
                try:
                    data, extra, _, _ = connection.receive(_READ_BYTES, ancillary)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._fail(connection, *connections.transport_error(error))
                    continue
                at = monotonic_ns()
                if not data:
                    self._on_eof(connection)
                    continue
                rec = connection.rec
                assert rec is not None
                rec.fresh.append(data)
                rec.user_ns.append(at)
                rec.stamps += extra[0][2] if extra else no_stamp
                size = len(data)
                connection.unfed += size
                if connection.unfed > _FEED_BYTES or data.endswith(_END) or size < len(_END) or connection.eager:
                    self._on_bytes(connection)
            now = monotonic_ns()
            wait_ns = self._issue(now) if self.free else tick_ns
            if now >= next_tick:
                next_tick = now + tick_ns
                self._housekeeping(now)
            if self.progress is not None and now >= next_word:
                next_word = now + 1_000_000_000
                reason = self.progress(
                    self.finished, (now - self.out.begin_ns) / 1e9, self.pool.silent_s(now, self.last_end_ns)
                )
                if reason is not None:
                    self._give_up(reason)

    # -- starting requests ----------------------------------------------------------

    def _exhausted(self) -> bool:
        return self.stopped or self.next >= len(self.requests)

    def _issue(self, now: int) -> int:
        """Start what is due; return ns until the next start (a second when nothing waits for the clock)."""
        schedule, begin = self.schedule, self.out.begin_ns
        if schedule.seconds is not None and now - begin > schedule.seconds * 1e9:
            self.stopped = True
        for _ in range(_STARTS_AT_ONCE):
            if not self.free or self._exhausted():
                return 1_000_000_000
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
        return 0

    def _start(self, connection: Connection, rec: Recorded) -> None:
        connection.begin(rec, self.requests[rec.index])
        step = self.pool.send if connection.state == IDLE else self.pool.open
        self._unless(connection, step(connection))

    def _unless(self, connection: Connection, failure: connections.Failure | None) -> None:
        if failure is not None:
            self._fail(connection, *failure)

    def _on_event(self, connection: Connection) -> None:
        """Everything that is not a read in the hot path."""
        pool = self.pool
        if connection.state in (CONNECTING, HANDSHAKE):
            self._unless(connection, pool.advance(connection))
            if connection.state == IDLE:
                self._unless(connection, pool.send(connection))
        elif connection.state == SENDING:
            self._unless(connection, pool.send(connection))
        elif connection.state == READING:
            self._read_plainly(connection)
        elif connection.state == IDLE:  # the server ended a connection that waited for its next request
            pool.close(connection)

    # -- receiving ----------------------------------------------------------

    def _read_plainly(self, connection: Connection) -> None:
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
                self._fail(connection, *connections.transport_error(error))
                return
            at = time.monotonic_ns()
            if not data:
                self._on_eof(connection)
                return
            rec.fresh.append(data)
            rec.user_ns.append(at)
            rec.stamps += clock.NO_STAMP
            self._on_bytes(connection)
            if connection.rec is not rec or not self.tls:
                return  # a TLS socket must be emptied: epoll does not see what it has decrypted already

    def _on_bytes(self, connection: Connection) -> None:
        rec = connection.rec
        assert rec is not None
        if not self._feed(connection, rec):
            return
        if connection.http.complete:
            self._finish(connection, keep=connection.http.keep_alive)
            self._issue(time.monotonic_ns())
        elif rec.size > self.max_response_bytes:
            self._fail(connection, "oversized", f"a response of more than {self.max_response_bytes} bytes")

    def _feed(self, connection: Connection, rec: Recorded) -> bool:
        http = connection.http
        connection.unfed = 0
        try:
            http.feed(rec.join())
        except httptools.HttpParserError as error:
            self._fail(connection, "bad_http", f"not a valid HTTP response: {error}")
            return False
        connection.eager = not (http.headers_complete and http.chunked)
        return True

    def _on_eof(self, connection: Connection) -> None:
        rec = connection.rec
        assert rec is not None
        rec.closed = True
        if self._feed(connection, rec):
            self._finish(connection, keep=False)

    def _finish(self, connection: Connection, *, keep: bool) -> None:
        rec = connection.rec
        assert rec is not None
        rec.finished_ns = self.last_end_ns = time.monotonic_ns()
        connection.rec = None
        connection.hot = False
        self.finished += 1
        if rec.fresh:
            rec.join()
        self.held_bytes += _held(rec)
        if keep and connection.state == READING:
            connection.state = IDLE
            self.free.appendleft(connection)
        else:
            self.pool.close(connection)
            self.free.append(connection)
        enough = self.schedule.enough
        if enough is not None and rec.error is None and enough(rec.finished_ns - rec.start_ns):
            self.stopped = True

    def _fail(self, connection: Connection, error: str, detail: str) -> None:
        if connection.rec is None:
            self.pool.close(connection)
            return
        connection.rec.error, connection.rec.detail = error, detail
        self._finish(connection, keep=False)

    # -- now and then ----------------------------------------------------------

    def _housekeeping(self, now: int) -> None:
        """Deadlines, and bytes to the file when they are too many."""
        for connection in self.pool.busy():
            self._unless(connection, connection.overdue(now, self.deadlines))
        self._keep_small()

    def _give_up(self, reason: str) -> None:
        """Start nothing more, and fail what is out."""
        self.stopped = True
        for connection in self.pool.busy():
            self._fail(connection, "given_up", reason)

    def _keep_small(self) -> None:
        """Move response bytes to the file, longest first, once there are too many in memory."""
        spool = self.out.spool
        live = {c.rec.index: c for c in self.pool.busy() if c.rec is not None}
        held = self.held_bytes + sum(c.unfed + _held(c.rec) for c in live.values() if c.rec is not None)
        if held <= spool.limit_bytes:
            return
        for rec in sorted(self.out.responses, key=_held, reverse=True):
            connection = live.get(rec.index)
            if connection is not None and rec.fresh and not self._feed(connection, rec):
                continue
            moved = spool.spill(rec)
            held -= moved
            if connection is None:
                self.held_bytes -= moved
            if held <= spool.limit_bytes // 2:
                return

    @staticmethod
    def _wait_until(at_ns: int) -> None:
        while (left := at_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)


def _held(rec: Recorded) -> int:
    return sum(map(len, rec.blocks))
