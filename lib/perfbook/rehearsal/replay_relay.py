"""A relay that mistreats TCP segments and knows when it did: splits, merges and delays them, seeded.

On an undisturbed loopback one token is one segment, and a kernel stamp is right almost by construction.
Behind this relay an event may come in pieces, several events in one segment, or late. The truth is then the
moment at which the relay sent the byte that completes the event. ``python -m perfbook.rehearsal.replay_relay
--to PORT --log FILE`` prints its port; when it is terminated it writes FILE: a ``.npy`` array of (token's own
stamp, completing send time) in ns."""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import select
import signal
import socket
import sys
import time
from array import array
from collections import deque
from types import FrameType

import numpy as np

from perfbook.rehearsal.replay_text import STAMP_DIGITS

_STAMP = re.compile(rb" (\d{%d})" % STAMP_DIGITS)


class _Pair:
    """A client's connection and the one to the server behind it."""

    __slots__ = ("client", "open", "queue", "server", "unfinished")

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.queue: deque[tuple[int, bytes]] = deque()
        self.unfinished = b""
        self.open = True


class Relay:
    """The relay; ``serve`` runs until SIGTERM."""

    def __init__(self, to_port: int, seed: int) -> None:
        self.to_port = to_port
        self.rng = random.Random(seed)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self.listener.getsockname()[1]
        self.epoll = select.epoll()
        self.epoll.register(self.listener.fileno(), select.EPOLLIN)
        self.from_client: dict[int, _Pair] = {}
        self.from_server: dict[int, _Pair] = {}
        self.late: deque[_Pair] = deque()
        self.truth = array("q")
        self.ended = False

    def serve(self) -> None:
        """Relay until ``ended`` is set."""
        gc.disable()
        while not self.ended:
            waiting = [pair.queue[0][0] for pair in self.late if pair.queue]
            wait_ns = min(waiting) - time.monotonic_ns() if waiting else 100_000_000
            if wait_ns > 0:
                select.select([self.epoll], [], [], wait_ns / 1e9)
            for fd, _ in self.epoll.poll(0):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd in self.from_client:
                    self._up(self.from_client[fd])
                elif fd in self.from_server:
                    self._down(self.from_server[fd])
            for _ in range(len(self.late)):
                pair = self.late.popleft()
                self._flush(pair)
                if pair.queue:
                    self.late.append(pair)

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        server = socket.create_connection(("127.0.0.1", self.to_port))
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.epoll.register(sock.fileno(), select.EPOLLIN)
        pair = _Pair(client, server)
        self.from_client[client.fileno()] = pair
        self.from_server[server.fileno()] = pair

    def _up(self, pair: _Pair) -> None:
        data = _receive(pair.client)
        if data:
            pair.server.sendall(data)
        else:
            self._close(pair)

    def _down(self, pair: _Pair) -> None:
        data = _receive(pair.server)
        if not data:
            self._close(pair)
            return
        for delay_ns, piece in self._mistreat(data):
            earliest = pair.queue[-1][0] if pair.queue else 0
            pair.queue.append((max(earliest, time.monotonic_ns() + delay_ns), piece))
        self._flush(pair)
        if pair.queue and pair not in self.late:
            self.late.append(pair)

    def _mistreat(self, data: bytes) -> list[tuple[int, bytes]]:
        """Pass on, split now, split over time, or hold back (so that the next data is merged with it)."""
        rng = self.rng
        fate = rng.random()
        later = int(rng.uniform(0.2e6, 3e6))
        if fate < 0.4 or len(data) < 4:
            return [(0, data)]
        cut = rng.randrange(1, len(data))
        if fate < 0.6:
            return [(0, data[:cut]), (0, data[cut:])]
        if fate < 0.8:
            return [(0, data[:cut]), (later, data[cut:])]
        return [(later, data)]

    def _flush(self, pair: _Pair) -> None:
        """Send what is due; pieces that are due together go in one segment or in several, by chance."""
        now = time.monotonic_ns()
        due: list[bytes] = []
        while pair.queue and pair.queue[0][0] <= now:
            due.append(pair.queue.popleft()[1])
        if len(due) > 1 and self.rng.random() < 0.5:
            due = [b"".join(due)]
        for piece in due:
            if not pair.open:
                return
            done, separator, rest = (pair.unfinished + piece).rpartition(b"\n\n")
            at = time.monotonic_ns()
            try:
                pair.client.sendall(piece)
            except OSError:
                self._close(pair)
                return
            if separator:
                for stamp in _STAMP.findall(done):
                    self.truth.extend((int(stamp), at))
            pair.unfinished = rest

    def _close(self, pair: _Pair) -> None:
        pair.open = False
        for table, sock in ((self.from_client, pair.client), (self.from_server, pair.server)):
            table.pop(sock.fileno(), None)
            sock.close()
        pair.queue.clear()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def main(arguments: list[str] | None = None) -> None:
    """Start the relay and print ``{"port": …}``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once; a traceback would say nothing
    parser = argparse.ArgumentParser(prog="perfbook.rehearsal.replay_relay")
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    relay = Relay(given.to, given.seed)

    def end(number: int, frame: FrameType | None) -> None:
        relay.ended = True

    signal.signal(signal.SIGTERM, end)
    sys.stdout.write(json.dumps({"port": relay.port}) + "\n")
    sys.stdout.flush()
    relay.serve()
    np.save(given.log, np.frombuffer(relay.truth, np.int64).reshape(-1, 2))


if __name__ == "__main__":
    main()
