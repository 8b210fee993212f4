"""One thread that waits for sockets and for the end of the engine's step, to the microsecond.

asyncio hands epoll its timers in whole milliseconds, rounded up, and a web framework adds several layers and a task
switch to every token. Here ``select`` waits on the epoll handle with a microsecond timeout, and a token is one
formatted chunk and one ``send``: 14 us of CPU per token with its metrics, so that 256 streams can tick every 10 ms from
one core, and no second thread competes for the interpreter. How late the tokens of each step were is kept and shown by
:class:`perfbook.rehearsal.truth.Truth`.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from typing import Protocol

from perfbook.rehearsal.http import Connection, Exchange

BACKLOG = 4096
MOST_EVENTS = 16  # per turn: a burst of new requests must not hold up the tokens of those that run
NS_PER_S = 1e9


class Application(Protocol):
    """What the loop serves."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""

    def deadline_ns(self) -> int | None:
        """When :meth:`advance` must be called, on CLOCK_MONOTONIC; None when nothing is pending."""

    def advance(self, now_ns: int) -> None:
        """Do what is due; called at the deadline and after each round of requests."""


class Loop:
    """Sockets of one listening port."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, port))
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._signal_reader, self._signal_writer = socket.socketpair()
        for end in (self._signal_reader, self._signal_writer):
            end.setblocking(False)
        self._epoll.register(self._signal_reader.fileno(), select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._changed: list[Connection] = []

    @property
    def port(self) -> int:
        """The port bound; until :meth:`listen`, connections are refused, as with a vLLM that still loads."""
        return int(self._listener.getsockname()[1])

    def wake_on_signals(self) -> None:
        """End the wait of :meth:`turn` when a signal with a Python handler arrives; call it in the main thread."""
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)

    def listen(self) -> None:
        """Let clients in."""
        self._listener.listen(BACKLOG)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def turn(self, application: Application, until_ns: int) -> None:
        """Wait for the first of a request, the application's deadline and ``until_ns``; then do what is due."""
        deadline_ns = application.deadline_ns()
        wake_ns = until_ns if deadline_ns is None else min(deadline_ns, until_ns)
        wait_s = max(wake_ns - time.monotonic_ns(), 0) / NS_PER_S
        ready, _, _ = select.select([self._epoll], [], [], wait_s)
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            application.advance(time.monotonic_ns())
        if ready:
            self._serve(application)
            application.advance(time.monotonic_ns())
        self._watch_changed()

    def close(self) -> None:
        """Close everything."""
        for connection in list(self._connections.values()):
            connection.drop()
        signal.set_wakeup_fd(-1)
        self._signal_reader.close()
        self._signal_writer.close()
        self._epoll.close()
        self._listener.close()

    def _serve(self, application: Application) -> None:
        for fd, events in self._epoll.poll(0, MOST_EVENTS):
            if fd == self._listener.fileno():
                self._accept(application)
            elif fd == self._signal_reader.fileno():
                self._signal_reader.recv(4096)
            elif connection := self._connections.get(fd):
                if events & select.EPOLLOUT:
                    connection.flush()
                if events & ~select.EPOLLOUT and not connection.gone:
                    connection.readable()

    def _accept(self, application: Application) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            peer = f"{address[0]}:{address[1]}"
            connection = Connection(sock, peer, application.handle, self._changed.append)
            self._connections[connection.fd] = connection
            self._epoll.register(connection.fd, select.EPOLLIN)

    def _watch_changed(self) -> None:
        """Forget connections that are gone; wait for room to write where something is unsent."""
        for connection in self._changed:
            if self._connections.get(connection.fd) is not connection:
                continue
            if connection.gone:
                del self._connections[connection.fd]
            else:
                interest = select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0)
                self._epoll.modify(connection.fd, interest)
        self._changed.clear()
