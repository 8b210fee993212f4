"""Does the engine make progress?

``/health`` and ``/version`` answer 200 while the engine hangs, so they prove nothing. What proves life is engine steps
while requests are there: vLLM counts them (``iteration_tokens_total``), a long prefill in chunks counts too. The gauges
of running requests are only refreshed by the engine, so a caller that has requests out says so itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from perfbook.errors import ServerFailed
from perfbook.server.endpoints import Endpoints
from perfbook.server.log import first_error
from perfbook.server.process import ServerHandle

_PROGRESS = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")


@dataclass(frozen=True)
class Status:
    """One look at the server.

    Attributes
    ----------
    state : str
        ``progressing``: steps since the last look; ``idle``: nothing to do; ``waiting``: requests but no step
        yet, within patience; ``hung``: none for longer; ``dead``: the process is gone or does not answer.
    reason : str
        What this was concluded from.
    steps : int
        Engine steps since the last look.
    """

    state: Literal["progressing", "idle", "waiting", "hung", "dead"]
    reason: str
    steps: int = 0

    @property
    def failed(self) -> bool:
        """Whether a measurement should end."""
        return self.state in ("hung", "dead")


class Watch:
    """Looks at one server from time to time.

    Parameters
    ----------
    endpoints : Endpoints
        Its HTTP side.
    handle : ServerHandle, optional
        Process and log, when ours.
    patience_s : float
        Without a step for so long, while there are requests, it hangs; a first request may compile for a minute.
    misses : int
        Polls in a row that may go unanswered before it is called dead.
    """

    def __init__(
        self, endpoints: Endpoints, handle: ServerHandle | None = None, *, patience_s: float = 120.0, misses: int = 3
    ) -> None:
        self.endpoints = endpoints
        self.handle = handle
        self.patience_s = patience_s
        self.misses = misses
        self._missed = 0
        self._seen: tuple[float, ...] | None = None
        self._moved_at = time.monotonic()

    def look(self, in_flight: int = 0) -> Status:
        """Look once.

        Parameters
        ----------
        in_flight : int
            Requests that the caller has out; the server's own count may be stale when the engine hangs.
        """
        if self.handle is not None and self.handle.owned and not self.handle.alive():
            return Status("dead", f"the server's process {self.handle.pid} ended: {self._last_words()}")
        try:
            metrics = self.endpoints.metrics()
        except ServerFailed as error:
            self._missed += 1
            if self._missed < self.misses:
                return Status("waiting", f"no answer ({self._missed} of {self.misses} polls): {error}")
            return Status("dead", f"no answer to {self._missed} polls in a row: {error}")
        self._missed = 0
        now = time.monotonic()
        seen = tuple(metrics.get(name, 0.0) for name in _PROGRESS)
        before, self._seen = self._seen, seen
        if before is None:
            self._moved_at = now
        if before is not None and seen != before:
            self._moved_at = now
            return Status("progressing", f"{seen[0] - before[0]:.0f} engine steps", max(0, int(seen[0] - before[0])))
        requests = max(in_flight, int(metrics.get("num_requests_running", 0) + metrics.get("num_requests_waiting", 0)))
        if requests == 0:
            self._moved_at = now
            return Status("idle", "no requests")
        stuck = now - self._moved_at
        if stuck < self.patience_s:
            return Status("waiting", f"{requests} requests, no engine step for {stuck:.0f} s")
        return Status("hung", f"{requests} requests and no engine step for {stuck:.0f} s, though /metrics answers")

    @contextmanager
    def guard(self, *, every_s: float = 2.0) -> Iterator[Guard]:
        """Look from a thread for as long as the block takes; the guard knows what was seen."""
        watching = Guard(self, every_s)
        watching.start()
        try:
            yield watching
        finally:
            watching.finish()

    def _last_words(self) -> str:
        """The log's first error, in short."""
        path = self.handle.log_path if self.handle else None
        if path is None:
            return "no log"
        try:
            error = first_error(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            error = None
        return error.message if error else f"its log names no error ({path})"


class Guard(threading.Thread):
    """A watch that runs beside a measurement.

    Attributes
    ----------
    in_flight : int
        Set by the measurement: requests that are out now.
    status : Status or None
        The last look; once failed, it stays so.
    failed : threading.Event
        Set when the server hangs or is dead; the measurement waits on it or polls it.
    """

    def __init__(self, watch: Watch, every_s: float) -> None:
        super().__init__(name="perfbook-liveness", daemon=True)
        self.watch = watch
        self.every_s = every_s
        self.in_flight = 0
        self.status: Status | None = None
        self.failed = threading.Event()
        self._finished = threading.Event()

    def run(self) -> None:
        """Look until finished or failed."""
        while not self._finished.is_set():
            self.status = self.watch.look(self.in_flight)
            if self.status.failed:
                self.failed.set()
                return
            self._finished.wait(self.every_s)

    def finish(self) -> None:
        """End the thread; returns when it has ended."""
        self._finished.set()
        self.join()

    def check(self) -> None:
        """Raise :class:`ServerFailed` with the reason when the server hangs or is dead."""
        if self.failed.is_set() and self.status is not None:
            raise ServerFailed(f"the server is {self.status.state}: {self.status.reason}")
