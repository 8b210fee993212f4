"""The profiler's session and what it writes: vLLM's rules for start and stop, one trace file per rank."""

from __future__ import annotations

from pathlib import Path

from perfbook.rehearsal.ask import Refused
from perfbook.rehearsal.engine import Step


class Profiler:
    """Collects engine steps between start and stop; ``folder`` None means it was not armed at the launch."""

    def __init__(self, folder: Path | None, iterations: int) -> None:
        self.folder = folder
        self._limit = iterations
        self._steps: list[Step] = []
        self._prefix = ""
        self._wanted = 0
        self._since_ns = 0
        self._open = False

    @property
    def recording(self) -> bool:
        """Whether the next step is recorded, and slowed down by it."""
        return self._open and (self._wanted == 0 or len(self._steps) < self._wanted)

    def start(self, now_ns: int, prefix: str, iterations: int | None) -> None:
        """Open a session; a second one is refused until stop, also after the iterations are spent."""
        if self._open:
            raise Refused(
                409,
                "A profiling session is already active. Call /stop_profile before starting another session.",
            )
        self._open = True
        self._prefix = prefix
        self._wanted = self._limit if iterations is None else iterations
        self._steps = []
        self._since_ns = now_ns

    def record(self, step: Step) -> None:
        """Take a finished step into the session, unless it began before it."""
        if self.recording and step.start_ns >= self._since_ns:
            self._steps.append(step)

    def stop(self) -> tuple[str, list[Step]]:
        """Close the session; its file prefix and its steps, none when there was no session."""
        steps, self._steps, self._open = self._steps, [], False
        return self._prefix, steps
