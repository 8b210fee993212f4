"""What really happened in the engine: steps, tokens and how late they left, for tests to hold a client against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfbook.rehearsal.engine import Step, Token

KEPT_STEPS = 20_000


class Truth:
    """Counts since the start, and the newest steps: (start, end, decoding, prefill tokens, lateness), times in ns."""

    def __init__(self, launch: int, ready_ns: int) -> None:
        self._launch, self._ready_ns = launch, ready_ns
        self._steps: list[tuple[int, int, int, int, int]] = []
        self._tokens = self._prompts = 0
        self._last_report = (ready_ns, 0, 0)

    def after_step(self, step: Step, tokens: Sequence[Token], now_ns: int) -> None:
        """Note a finished step."""
        self._tokens += len(tokens)
        self._prompts += sum(len(token.generation.prompt) for token in tokens if token.gap_ns is None)
        self._steps.append((step.start_ns, step.end_ns, step.decoding, step.prefill_tokens, now_ns - step.end_ns))
        if len(self._steps) > 2 * KEPT_STEPS:
            del self._steps[:KEPT_STEPS]

    def rates_since_last(self, now_ns: int) -> tuple[float, float]:
        """Prompt and output tokens per second since the last call."""
        last_ns, tokens, prompts = self._last_report
        self._last_report = (now_ns, self._tokens, self._prompts)
        seconds = max(now_ns - last_ns, 1) / 1e9
        return (self._prompts - prompts) / seconds, (self._tokens - tokens) / seconds

    def state(self) -> dict[str, Any]:
        """For ``GET /rehearsal``; times on CLOCK_MONOTONIC, which clients on the same machine share."""
        steps = self._steps[-KEPT_STEPS:]
        late = sorted(lateness for *_, lateness in steps)
        return {
            "rehearsal": True,
            "launch": self._launch,
            "ready_ns": self._ready_ns,
            "tokens": self._tokens,
            "lateness_us": {
                "p50": late[len(late) // 2] / 1e3 if late else None,
                "p99": late[min(len(late) * 99 // 100, len(late) - 1)] / 1e3 if late else None,
                "max": late[-1] / 1e3 if late else None,
            },
            "steps": steps,
        }
