"""HTTP/1.1 over one non-blocking socket: requests in, answers out, plain or chunked. Nothing about vLLM here."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

import httptools

from perfbook.rehearsal.wire import dumps

JSON = "application/json"
READ_BYTES = 1 << 18
LARGEST_BODY_BYTES = 1 << 26


@dataclass
class Exchange:
    """One request and the way to answer it, with :meth:`respond` or with :meth:`open`, :meth:`send` and :meth:`close`.

    Everything is silently dropped once the client is gone; ``on_gone`` is called then.
    """

    connection: Connection
    method: str = ""
    target: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    keep_alive: bool = True
    opened: bool = False
    on_gone: Callable[[], None] | None = None

    @property
    def path(self) -> str:
        """Path without the query."""
        return urlsplit(self.target.decode("latin-1")).path

    @property
    def query(self) -> dict[str, list[str]]:
        """Query parameters."""
        return parse_qs(urlsplit(self.target.decode("latin-1")).query)

    def respond(self, status: int, body: bytes = b"", content_type: str = JSON) -> None:
        """A whole answer."""
        head = f"{_status_line(status)}content-length: {len(body)}\r\ncontent-type: {content_type}\r\n\r\n"
        self.connection.write(head.encode() + body)
        self.connection.done(self, status)

    def respond_json(self, status: int, value: object) -> None:
        """A whole answer of JSON."""
        self.respond(status, dumps(value))

    def open(self) -> None:
        """Send the head of an event stream."""
        kind = "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        self.opened = True
        self.connection.write((_status_line(200) + kind).encode())

    def send(self, events: bytes) -> None:
        """Send one chunk of an opened stream, as one write."""
        self.connection.write(b"%x\r\n%b\r\n" % (len(events), events))

    def close(self) -> None:
        """End an opened stream."""
        self.connection.write(b"0\r\n\r\n")
        self.connection.done(self, 200)

    def reset(self) -> None:
        """Break the connection: the client sees ECONNRESET."""
        self.connection.reset()


class Connection:
    """A client's connection; requests on it are answered one after the other.

    ``changed`` is called when the connection is gone or when it starts or stops to have something unsent.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        handle: Callable[[Exchange], None],
        changed: Callable[[Connection], None],
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.fd = sock.fileno()
        self.gone = False
        self.unsent = bytearray()
        self._peer = peer
        self._handle = handle
        self._changed = changed
        self._parser = httptools.HttpRequestParser(self)
        self._reading = Exchange(self)
        self._queue: deque[Exchange] = deque()
        self._busy = self._last = False

    def readable(self) -> None:
        """Take in what the client sent."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            Exchange(self, method="?").respond(400, b"Invalid HTTP request received.", "text/plain")
            self.drop()
            return
        self._next()

    def write(self, data: bytes) -> None:
        """Send now what the kernel takes, keep the rest for :meth:`flush`."""
        if self.gone:
            return
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop()
            return
        if sent < len(data):
            self.unsent += data[sent:]
            self._changed(self)

    def flush(self) -> None:
        """Send what was kept."""
        kept = bytes(self.unsent)
        self.unsent.clear()
        self.write(kept)
        self._changed(self)
        self._close_after_last()

    def done(self, exchange: Exchange, status: int) -> None:
        """The exchange is answered: log it as uvicorn does, and take up the next one."""
        target = exchange.target.decode("latin-1")
        line = f'INFO:     {self._peer} - "{exchange.method} {target} HTTP/1.1" {status} {_phrase(status)}'
        print(line, flush=True)  # noqa: T201  (the server's log is its standard output)
        exchange.on_gone = None
        self._last = not exchange.keep_alive
        self._close_after_last()
        if self._queue and self._queue[0] is exchange:
            self._queue.popleft()
            self._busy = False
            self._next()

    def drop(self) -> None:
        """Close; running exchanges learn that the client is gone."""
        if self.gone:
            return
        self.gone = True
        self.socket.close()
        self._changed(self)
        for exchange in self._queue:
            if exchange.on_gone:
                exchange.on_gone()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.drop()

    def on_url(self, url: bytes) -> None:
        """httptools: a part of the target."""
        self._reading.target += url

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the body."""
        self._reading.body += body
        if len(self._reading.body) > LARGEST_BODY_BYTES:
            self.drop()

    def on_message_complete(self) -> None:
        """httptools: a request is whole."""
        exchange, self._reading = self._reading, Exchange(self)
        exchange.method = self._parser.get_method().decode("ascii")
        exchange.keep_alive = bool(self._parser.should_keep_alive())
        self._queue.append(exchange)

    def _close_after_last(self) -> None:
        """A client that asked for it gets its connection closed, once everything is sent."""
        if self._last and not self.unsent:
            self.drop()

    def _next(self) -> None:
        """Hand the oldest request over, unless one is being answered; never from inside the parser, which would turn
        an error of ours into one of the client's."""
        if self._queue and not self._busy and not self.gone:
            self._busy = True
            self._handle(self._queue[0])


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase


def _status_line(status: int) -> str:
    return f"HTTP/1.1 {status} {_phrase(status)}\r\nserver: perfbook-rehearsal\r\n"
