"""Continuous batching as vLLM's V1 scheduler does it, on a clock that is handed in; no sockets, no sleeping.

A step is begun (generations picked, its time fixed by the law) and later finished (tokens come out). Running
ones come first, each with one token or the next part of its prompt; then waiting ones enter while there is a
slot, token budget and cache. When a running one finds no block, the youngest running one is preempted: it
gives its blocks back and later computes its prompt and answer so far again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from perfbook.rehearsal.kv import KVCache
from perfbook.rehearsal.law import Law, Setting
from perfbook.rehearsal.steptime import step_ms, warmup_extra_ms

Reason = Literal["stop", "length", "abort", "error"]
NS_PER_MS = 1_000_000
NS_PER_MIN = 60_000_000_000


@dataclass(eq=False)
class Generation:
    """One request inside the engine; times are CLOCK_MONOTONIC ns, 0 while unknown."""

    number: int
    prompt: Sequence[int]
    max_tokens: int
    stop_after: int | None
    arrival_ns: int
    scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    computed: int = 0
    generated: int = 0
    cached: int = 0
    preemptions: int = 0
    finish_reason: Reason | None = None

    @property
    def length(self) -> int:
        """Prompt and answer so far, in tokens."""
        return len(self.prompt) + self.generated

    @property
    def decodes(self) -> bool:
        """Whether the next step computes only the newest token of the answer."""
        return self.generated > 0 and self.length - self.computed == 1


@dataclass(frozen=True)
class Step:
    """One engine step: what it computes and when it ends."""

    start_ns: int
    end_ns: int
    parts: tuple[tuple[Generation, int], ...]
    decoding: int
    mean_position: float
    prefill_tokens: int
    prefilling: int
    admitted: tuple[Generation, ...]
    preempted: int


@dataclass(frozen=True)
class Token:
    """A token that came out of a step; ``gap_ns`` since the generation's last one, None for the first."""

    generation: Generation
    gap_ns: int | None


class Engine:
    """The state of the batch; a request that can never fit must be refused before :meth:`submit`."""

    def __init__(self, law: Law, active: Sequence[Setting] = (), launch: int = 0, ready_ns: int = 0) -> None:
        self.law = law
        self.cache = KVCache(law.limits.kv_cache_tokens)
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.overhead_ms = 0.0
        self._active = tuple(active)
        self._random = Random(f"{law.variation.seed}/{launch}")
        self._launch_factor = math.exp(self._random.gauss(0.0, law.variation.launch_pct / 100))
        self._ready_ns = ready_ns
        self._prefill_steps = self._decode_steps = 0

    def submit(self, generation: Generation) -> None:
        """Queue a request; it is considered when the next step begins."""
        self.waiting.append(generation)

    def abort(self, generation: Generation, reason: Reason = "abort") -> None:
        """Drop a request, running or waiting; one that already finished stays as it is."""
        if generation.finish_reason is None:
            generation.finish_reason = reason
            self._remove(generation)

    def begin(self, now_ns: int) -> Step | None:
        """Pick the next batch at a time; None when there is nothing to do."""
        parts: list[tuple[Generation, int]] = []
        budget = self.law.limits.max_num_batched_tokens
        preempted = 0
        for generation in list(self.running):
            if budget == 0 or (preempted and generation not in self.running):
                continue
            tokens = min(generation.length - generation.computed, budget)
            while not self.cache.grow(generation.number, generation.computed + tokens):
                victim = self.running[-1]
                self._preempt(victim)
                preempted += 1
                budget += sum(count for other, count in parts if other is victim)
                parts = [part for part in parts if part[0] is not victim]
                if victim is generation:
                    break
            else:
                parts.append((generation, tokens))
                budget -= tokens
        admitted = [] if preempted else self._admit(parts, budget, now_ns)
        if not parts:
            return None
        return self._timed(tuple(parts), tuple(admitted), preempted, now_ns)

    def finish(self, step: Step, now_ns: int) -> list[Token]:
        """Account for a step's end: every generation whose context is now computed gets a token."""
        tokens: list[Token] = []
        for generation, count in step.parts:
            if generation.finish_reason is not None:
                continue
            generation.computed += count
            if generation.computed < generation.length:
                continue
            if not generation.first_token_ns:
                generation.first_token_ns = now_ns
                self.cache.remember(generation.prompt)
            gap_ns = now_ns - generation.last_token_ns if generation.last_token_ns else None
            generation.last_token_ns = now_ns
            generation.generated += 1
            tokens.append(Token(generation, gap_ns))
            if generation.stop_after is not None and generation.generated > generation.stop_after:
                generation.finish_reason = "stop"
            elif generation.generated >= generation.max_tokens:
                generation.finish_reason = "length"
            if generation.finish_reason is not None:
                self._remove(generation)
        return tokens

    def _admit(self, parts: list[tuple[Generation, int]], budget: int, now_ns: int) -> list[Generation]:
        """Move waiting requests into the batch; returns those that run for the first time."""
        admitted = []
        while self.waiting and budget and len(self.running) < self.law.limits.max_num_seqs:
            generation = self.waiting[0]
            hit = self.cache.match(generation.prompt)
            tokens = min(generation.length - hit, budget)
            if not self.cache.grow(generation.number, hit + tokens):
                break
            self.running.append(self.waiting.popleft())
            generation.computed = hit
            if not generation.scheduled_ns:
                generation.scheduled_ns, generation.cached = now_ns, hit
                self.cache.queried_tokens += len(generation.prompt)
                self.cache.hit_tokens += hit
                admitted.append(generation)
            parts.append((generation, tokens))
            budget -= tokens
        return admitted

    def _timed(
        self,
        parts: tuple[tuple[Generation, int], ...],
        admitted: tuple[Generation, ...],
        preempted: int,
        now_ns: int,
    ) -> Step:
        """The step with its time by the law, warm-up, noise, launch and drift included."""
        positions = [generation.length for generation, _ in parts if generation.decodes]
        prefill = [count for generation, count in parts if not generation.decodes]
        mean = sum(positions) / len(positions) if positions else 0.0
        time_ms = step_ms(self.law, len(positions), mean, sum(prefill), self._active)
        time_ms += warmup_extra_ms(self.law, self._prefill_steps, self._decode_steps, bool(prefill))
        noise = self.law.variation.noise_pct / 100
        drift = self.law.variation.drift_pct_per_min / 100 * (now_ns - self._ready_ns) / NS_PER_MIN
        time_ms *= self._launch_factor * math.exp(self._random.gauss(-(noise**2) / 2, noise)) * max(1 + drift, 0.1)
        time_ms += self.overhead_ms
        self._prefill_steps += bool(prefill)
        self._decode_steps += not prefill
        end_ns = now_ns + round(time_ms * NS_PER_MS)
        return Step(now_ns, end_ns, parts, len(positions), mean, sum(prefill), len(prefill), admitted, preempted)

    def _preempt(self, generation: Generation) -> None:
        """Back to the head of the queue, with everything to compute again."""
        self.running.remove(generation)
        self.cache.release(generation.number)
        generation.computed = 0
        generation.preemptions += 1
        self.waiting.appendleft(generation)

    def _remove(self, generation: Generation) -> None:
        if generation in self.running:
            self.running.remove(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)
        self.cache.release(generation.number)
