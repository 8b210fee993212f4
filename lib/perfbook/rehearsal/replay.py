"""Ground truth for clients: a server that replays a known schedule and says when it sent each token.

``python -m perfbook.rehearsal.replay`` prints one JSON line with its port and serves an OpenAI-compatible
stream. Like an inference engine it works in steps: every ``tick_ms`` each running request gets one token; a
request joins at the first step at least ``first_ms`` after it arrived. The text of a token is its send time
on CLOCK_MONOTONIC, taken just before the system call, so every arrival can be held against it.

Three things are kept out of the truth: connections are accepted as soon as they come, whether or not a
request follows; a request counts as received when the *kernel* got its last byte; and the server's own
lateness against its schedule is reported, so that a cell in which the server was late can be repeated.

``GET /replay/truth`` reports what was sent since the last ``POST /replay/law`` (body: ``tick_ms``,
``first_ms``)."""

from __future__ import annotations

import argparse
import gc
import json
import select
import signal
import socket
import struct
import sys
import time
from array import array
from typing import Any

import numpy as np

from perfbook.rehearsal.replay_text import Script, answer

_SO_TIMESTAMPING, _RX_SOFTWARE, _SOFTWARE = 37, 8, 16
_MODELS = json.dumps({"object": "list", "data": [{"id": "replay", "object": "model", "max_model_len": 131072}]})


class _Stream:
    """One connection, and the request that it is being answered."""

    __slots__ = ("buffer", "index", "join_ns", "last_ns", "pending", "received_ns", "script", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.pending = b""
        self.script: Script | None = None
        self.index = 0
        self.received_ns = 0
        self.join_ns = 0
        self.last_ns = 0


class Truth:
    """What was sent: first-token delays, gaps, and how late each step was, all in ns."""

    def __init__(self) -> None:
        self.ttft = array("q")
        self.gaps = array("q")
        self.late = array("q")
        self.took = array("q")
        self.requests = 0
        self.blocked = 0
        self.began_ns = 0
        self.ended_ns = 0

    def report(self) -> dict[str, Any]:
        """Plain numbers in ms; null where nothing was sent."""
        tokens = len(self.ttft) + len(self.gaps)
        seconds = (self.ended_ns - self.began_ns) / 1e9
        return {
            "requests": self.requests,
            "tokens": tokens,
            "tok_s": tokens / seconds if seconds > 0 else None,
            "ttft_ms": _spread(self.ttft),
            "gap_ms": _spread(self.gaps),
            "late_ms": _spread(self.late),
            "step_ms": _spread(self.took),
            "sends_blocked": self.blocked,
        }


def _spread(values: array[int]) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys(("mean", "p50", "p99", "max"))
    ms = np.frombuffer(values, np.int64) / 1e6
    p50, p99 = np.percentile(ms, (50, 99))
    return {"mean": float(ms.mean()), "p50": float(p50), "p99": float(p99), "max": float(ms.max())}


class Server:
    """The server; ``serve`` runs until its process is ended."""

    def __init__(self, port: int, tick_ms: float, first_ms: float) -> None:
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        # Accepted sockets inherit this, so a request that arrived before the accept carries its time too.
        self.listener.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _RX_SOFTWARE | _SOFTWARE)
        self.port: int = self.listener.getsockname()[1]
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.streams: dict[int, _Stream] = {}
        self.waiting: list[_Stream] = []
        self.running: list[_Stream] = []
        self.scripts: dict[tuple[Any, ...], Script] = {}
        self.law(tick_ms, first_ms)

    def law(self, tick_ms: float, first_ms: float) -> None:
        """Take a new schedule and forget the old truth."""
        self.tick_ns = int(tick_ms * 1e6)
        self.first_ns = int(first_ms * 1e6)
        self.next_ns = 0
        self.truth = Truth()

    def serve(self) -> None:
        """Serve for ever."""
        gc.disable()
        while True:
            busy = bool(self.running or self.waiting)
            left_ns = self.next_ns - time.monotonic_ns() if busy else 1_000_000_000
            if left_ns > 0:
                # epoll waits whole milliseconds, select microseconds
                select.select([self.epoll], [], [], left_ns / 1e9)
            for fd, mask in self.epoll.poll(0):
                self._on_event(fd, mask)
            if (self.running or self.waiting) and time.monotonic_ns() >= self.next_ns:
                self._step()

    def _step(self) -> None:
        """Send one token to every running request."""
        due = self.next_ns
        ready = [s for s in self.waiting if s.join_ns <= due]
        if ready:
            self.waiting = [s for s in self.waiting if s.join_ns > due]
            self.running += ready
        truth = self.truth
        monotonic_ns = time.monotonic_ns
        ended = False
        began = monotonic_ns()
        for stream in self.running:
            script = stream.script
            if script is None:
                ended = True
                continue
            index = stream.index
            before, after = script.around(index)
            if not index:
                before = script.head + before
            now = monotonic_ns()
            data = b"%s %019d%s" % (before, now, after)
            try:
                sent = stream.sock.send(data) if not stream.pending else 0
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(stream)
                ended = True
                continue
            if sent < len(data):
                self._block(stream, data[sent:])
            if index:
                truth.gaps.append(now - stream.last_ns)
            else:
                truth.ttft.append(now - stream.received_ns)
            stream.last_ns = now
            stream.index = index + 1
            if stream.index == script.tokens:
                self._send(stream, script.tail)
                stream.script = None
                ended = True
        if self.running:
            truth.late.append(began - due)
            truth.ended_ns = monotonic_ns()
            truth.took.append(truth.ended_ns - began)
        if ended:
            self.running = [s for s in self.running if s.script is not None]
        # Steps that were missed altogether are left out, as an engine would: its steps take as long as they take.
        self.next_ns = max(due + self.tick_ns, monotonic_ns())

    def _send(self, stream: _Stream, data: bytes) -> None:
        try:
            sent = stream.sock.send(data) if not stream.pending else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(stream)
            return
        if sent < len(data):
            self._block(stream, data[sent:])

    def _block(self, stream: _Stream, rest: bytes) -> None:
        self.truth.blocked += 1
        stream.pending += rest
        self.epoll.modify(stream.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _drop(self, stream: _Stream) -> None:
        self.streams.pop(stream.sock.fileno(), None)
        stream.sock.close()
        stream.script = None
        if stream in self.waiting:
            self.waiting.remove(stream)

    def _on_event(self, fd: int, mask: int) -> None:
        if fd == self.listener.fileno():
            self._accept()
            return
        stream = self.streams[fd]
        if mask & select.EPOLLOUT and stream.pending:
            rest, stream.pending = stream.pending, b""
            self.epoll.modify(fd, select.EPOLLIN)
            self._send(stream, rest)
        if mask & ~select.EPOLLOUT:
            self._receive(stream)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.streams[sock.fileno()] = _Stream(sock)
            self.epoll.register(sock.fileno(), select.EPOLLIN)

    def _receive(self, stream: _Stream) -> None:
        try:
            data, extra, _, _ = stream.sock.recvmsg(262144, 96)
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        if not data:
            self._drop(stream)
            return
        stream.buffer += data
        head, separator, body = stream.buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        size = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                size = int(value)
            elif name.lower() == b"expect" and not body:
                self._send(stream, b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(body) < size:
            return
        stream.buffer = body[size:]
        received_ns = time.monotonic_ns()
        if extra:
            seconds, nanoseconds = struct.unpack_from("qq", extra[0][2])
            received_ns -= max(0, time.time_ns() - seconds * 1_000_000_000 - nanoseconds)
        self._handle(stream, head.split(b"\r\n", 1)[0].decode("latin-1"), body[:size], received_ns)

    def _handle(self, stream: _Stream, line: str, body: bytes, received_ns: int) -> None:
        path = line.split(" ")[1].split("?")[0] if line.count(" ") == 2 else ""
        if path.endswith("/completions"):
            self._start(stream, path.endswith("/chat/completions"), json.loads(body), received_ns)
        elif path == "/replay/law":
            self.law(**json.loads(body))
            self._send(stream, answer(b"{}"))
        elif path == "/replay/truth":
            self._send(stream, answer(json.dumps(self.truth.report()).encode()))
        elif path == "/v1/models":
            self._send(stream, answer(_MODELS.encode()))
        elif path == "/health":
            self._send(stream, answer(b""))
        else:
            self._send(stream, answer(b'{"error":"not found"}', b"404 Not Found"))

    def _start(self, stream: _Stream, chat: bool, body: dict[str, Any], received_ns: int) -> None:
        tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        options = body.get("stream_options") or {}
        usage, continuous = bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))
        prompt = len(str(body.get("messages", body.get("prompt", ""))).split())
        key = (chat, tokens, prompt, usage, continuous)
        script = self.scripts.get(key)
        if script is None:
            script = self.scripts[key] = Script(*key)
            script.around(tokens - 1)
        now = time.monotonic_ns()
        if not self.truth.requests:
            self.truth.began_ns = received_ns
        self.truth.requests += 1
        if not (self.running or self.waiting):
            self.next_ns = max(now, received_ns + self.first_ns)
        stream.script, stream.index, stream.received_ns = script, 0, received_ns
        stream.join_ns = received_ns + self.first_ns
        self.waiting.append(stream)


def main(arguments: list[str] | None = None) -> None:
    """Start the server and print ``{"port": …}``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; a traceback would say nothing
    parser = argparse.ArgumentParser(prog="perfbook.rehearsal.replay", description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tick-ms", type=float, default=10.0)
    parser.add_argument("--first-ms", type=float, default=5.0)
    given = parser.parse_args(arguments)
    server = Server(given.port, given.tick_ms, given.first_ms)
    sys.stdout.write(json.dumps({"port": server.port}) + "\n")
    sys.stdout.flush()
    server.serve()


if __name__ == "__main__":
    main()
