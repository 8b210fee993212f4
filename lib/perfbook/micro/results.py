"""What the micro-benchmarks return. Every reading keeps its repeats; an interval is over them."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfbook import stats
from perfbook.stats.result import Estimate, Result


@dataclass(frozen=True)
class Bandwidth(Result):
    """Memory bandwidth of one kind of access.

    Attributes
    ----------
    kind : str
        ``read``, ``copy`` (a read and a write) or ``triad`` (two reads and a write).
    buffer_bytes : int
        Size of each array.
    repeats_gb_s : tuple of float
        Bytes read and written over time, in 1e9 bytes per second, per repeat.
    """

    kind: str
    buffer_bytes: int
    repeats_gb_s: tuple[float, ...]

    @property
    def gb_s(self) -> Estimate:
        """Median over the repeats."""
        return stats.median_interval(self.repeats_gb_s, "gb_s")

    @property
    def best_gb_s(self) -> float:
        """The fastest repeat, as STREAM reports it: whatever disturbs a copy makes it slower, never faster."""
        return max(self.repeats_gb_s)


@dataclass(frozen=True)
class Gemm(Result):
    """One matrix product of a decode step: (m, k) times (k, n), with weights that are not in a cache.

    Attributes
    ----------
    name : str
        Which layer's: ``qkv``, ``o``, ``gate_up``, ``down``, ``head``.
    m, n, k : int
        Tokens in the step; output and input features.
    per_step : int
        How often a step computes it.
    kernel : str
        Whose implementation was measured.
    repeats_us : tuple of float
        Time of one product in µs, per repeat.
    element_bytes : int
        Bytes of a weight.
    """

    name: str
    m: int
    n: int
    k: int
    per_step: int
    kernel: str
    repeats_us: tuple[float, ...]
    element_bytes: int = 2

    @property
    def us(self) -> Estimate:
        """Median over the repeats."""
        return stats.median_interval(self.repeats_us, "us")

    @property
    def best_flop_s(self) -> float:
        """Operations per second (2·m·n·k over time) of the fastest repeat."""
        return 2e6 * self.m * self.n * self.k / min(self.repeats_us)


@dataclass(frozen=True)
class DeviceBench(Result):
    """Bandwidth and matrix products of one device.

    Attributes
    ----------
    device : str
        What was measured: the GPU's name, or the processor's threads.
    bandwidth : tuple of Bandwidth
    gemms : tuple of Gemm
    """

    device: str
    bandwidth: tuple[Bandwidth, ...]
    gemms: tuple[Gemm, ...]

    def kind(self, name: str) -> Bandwidth | None:
        """The bandwidth of a kind."""
        return next((one for one in self.bandwidth if one.kind == name), None)

    @property
    def best_flop_s(self) -> float | None:
        """The highest rate that any product reached, in operations per second: the one with the most tokens, mostly."""
        return max((one.best_flop_s for one in self.gemms), default=None)


@dataclass(frozen=True)
class Message(Result):
    """All-reduces of one message size.

    Attributes
    ----------
    message_bytes : int
    repeats_us : tuple of float
        Latency of one all-reduce in µs, per repeat; of the slowest rank.
    ranks : int
    """

    message_bytes: int
    repeats_us: tuple[float, ...]
    ranks: int

    @property
    def us(self) -> Estimate:
        """Median over the repeats."""
        return stats.median_interval(self.repeats_us, "us")

    @property
    def busbw_gb_s(self) -> float | None:
        """Bus bandwidth S/t · 2(n−1)/n in 1e9 bytes per second, as nccl-tests define it."""
        latency_us = self.us.value
        return self.message_bytes / latency_us / 1e3 * 2 * (self.ranks - 1) / self.ranks if latency_us else None


@dataclass(frozen=True)
class AllReduce(Result):
    """One all-reduce benchmark: a communicator made, checked and timed under one environment.

    Attributes
    ----------
    outcome : str
        ``ok``, ``wrong sums``, ``hangs`` or ``fails``.
    detail : str
        What a failure says; empty when ok.
    backend : str
        ``nccl`` or ``gloo``.
    ranks : int
    messages : tuple of Message
        Ascending; empty unless the outcome is ``ok`` or ``wrong sums``.
    log : str
        NCCL's debug output of rank 0, empty with gloo.
    """

    outcome: str
    backend: str
    ranks: int
    detail: str = ""
    messages: tuple[Message, ...] = ()
    log: str = field(default="", repr=False)

    def latency_us(self, message_bytes: int) -> float | None:
        """Median latency at a size; None where it was not measured."""
        return next((m.us.value for m in self.messages if m.message_bytes == message_bytes), None)
