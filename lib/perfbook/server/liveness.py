"""Does the engine make progress?

``/health`` and ``/version`` answer 200 while the engine hangs, so they prove nothing. What proves life is that
something in the server's counters moves while requests are there. vLLM counts the steps that give tokens
(``iteration_tokens_total``); the chunks of a long prefill give none, but its cache fills, so that gauge counts as well.

A look costs the process that streams a few milliseconds, so none is taken while any stream gets bytes: the silence of
the cell itself triggers it, in a thread of its own, and the receiving loop never waits for the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Literal, TypeVar

from perfbook.errors import ServerFailed
from perfbook.server.endpoints import Endpoints, Unreachable
from perfbook.server.handle import ServerHandle
from perfbook.server.log import first_error_in

T = TypeVar("T")

_COUNTED = ("iteration_tokens_total_count", "generation_tokens_total", "prompt_tokens_total")
_PROGRESS = (*_COUNTED, "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "num_preemptions_total")
QUIET_S = 5.0
EVERY_S = 5.0
#: A first batch of a size may compile for a minute; a stream that stalls is given up by the client after two.
PATIENCE_S = 100.0
MISSES = 3


@dataclass(frozen=True)
class Status:
    """One look at the server.

    Attributes
    ----------
    state : str
        ``progressing``: steps since the last look; ``idle``: nothing to do; ``waiting``: requests but no step
        yet, within patience; ``hung``: none for longer; ``dead``: the process is gone or does not answer;
        ``unknown``: it answers, but has no counters.
    reason : str
        What this was concluded from.
    steps : int
        Engine steps since the last look.
    """

    state: Literal["progressing", "idle", "waiting", "hung", "dead", "unknown"]
    reason: str
    steps: int = 0

    @property
    def failed(self) -> bool:
        """Whether a measurement should end."""
        return self.state in ("hung", "dead")

    def __str__(self) -> str:
        """``the server is hung: …``."""
        return f"the server is {self.state}: {self.reason}"


class Watch:
    """Looks at one server; as a callable, the ``watch`` of :func:`perfbook.stream.load.measure`.

    Parameters
    ----------
    endpoints : Endpoints
        Its HTTP side.
    handle : ServerHandle, optional
        Process and log, when ours.
    patience_s : float
        Without progress for so long, while there are requests, it hangs.
    quiet_s, every_s : float
        Called with less silence than the first nobody looks; further looks come at the second's distance.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        handle: ServerHandle | None = None,
        *,
        patience_s: float | None = None,
        quiet_s: float = QUIET_S,
        every_s: float = EVERY_S,
    ) -> None:
        self.endpoints = endpoints
        self.handle = handle
        self.patience_s = PATIENCE_S if patience_s is None else patience_s
        self.status: Status | None = None
        self.quiet_s, self._every_s = quiet_s, every_s
        self._missed = 0
        self._seen: tuple[float, ...] | None = None
        self._moved_at = time.monotonic()
        self._looked_at = -float("inf")
        self._looking: threading.Thread | None = None

    def __call__(self, silent_s: float) -> str | None:
        """Why the cell should end, from the last look; returns at once and looks aside, while there is silence."""
        if silent_s >= self.quiet_s and not self.failed:
            busy = self._looking is not None and self._looking.is_alive()
            if not busy and time.monotonic() - self._looked_at >= self._every_s:
                self._looked_at = time.monotonic()
                self._looking = threading.Thread(target=self.look, args=(1,), name="perfbook-liveness", daemon=True)
                self._looking.start()
        return str(self.status) if self.failed else None

    @property
    def failed(self) -> bool:
        """Whether the last look found it hung or dead."""
        return self.status is not None and self.status.failed

    def autopsy(self) -> str | None:
        """After requests failed: whether the server did, asked until it is certain (some seconds at most)."""
        for _ in range(MISSES):
            status = self.look()
            if status.failed:
                return str(status)
            if not self._missed:
                return None
            time.sleep(1.0)
        return None

    def look(self, in_flight: int = 0) -> Status:
        """Look once.

        Parameters
        ----------
        in_flight : int
            Requests that the caller has out; the server's own count may be stale when the engine hangs.
        """
        self.status = self._look(in_flight)
        return self.status

    def _look(self, in_flight: int) -> Status:
        if self.handle is not None and self.handle.owned and not self.handle.alive():
            return Status("dead", f"its process {self.handle.pid} ended: {self._last_words()}")
        try:
            metrics = self.endpoints.metrics()
        except Unreachable as error:
            self._missed += 1
            if self._missed < MISSES:
                return Status("waiting", f"no answer ({self._missed} of {MISSES} polls): {error}")
            return Status("dead", f"no answer to {self._missed} polls in a row: {error}")
        except ServerFailed as error:
            return Status("unknown", f"it answers, but its counters cannot be read ({error})")
        self._missed = 0
        now = time.monotonic()
        seen = tuple(metrics.get(name, 0.0) for name in _PROGRESS)
        before, self._seen = self._seen, seen
        if before is None:
            self._moved_at = now
        elif seen != before:
            self._moved_at = now
            return Status("progressing", f"{seen[0] - before[0]:.0f} engine steps", max(0, int(seen[0] - before[0])))
        requests = max(in_flight, int(metrics.get("num_requests_running", 0) + metrics.get("num_requests_waiting", 0)))
        if requests == 0:
            self._moved_at = now
            return Status("idle", "no requests")
        if not any(name in metrics for name in _COUNTED):
            return Status("unknown", "it counts no engine steps")
        stuck = now - self._moved_at
        if stuck < self.patience_s:
            return Status("waiting", f"requests are out, no engine step for {stuck:.0f} s")
        return Status("hung", f"requests are out and no engine step for {stuck:.0f} s, though /metrics answers")

    def _last_words(self) -> str:
        """The log's first error, in short."""
        path = self.handle.log_path if self.handle else None
        if path is None:
            return "no log"
        error = first_error_in(path)
        return error.message if error else f"its log names no error ({path})"


def watched(watch: Watch, work: Callable[[], T]) -> T:
    """What ``work`` returns, which sends one request to the server and waits for the whole answer.

    Raises
    ------
    ServerFailed
        The server hung or died meanwhile. ``work`` is left behind: its answer will never come.
    Exception
        Whatever ``work`` raises.
    """
    result: Future[T] = Future()

    def aside() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # the caller's to handle
            result.set_exception(error)

    began = time.monotonic()
    threading.Thread(target=aside, name="perfbook-request", daemon=True).start()
    while not wait([result], timeout=min(1.0, watch.quiet_s)).done:
        reason = watch(time.monotonic() - began)
        if reason is not None:
            raise ServerFailed(reason)
    return result.result()
