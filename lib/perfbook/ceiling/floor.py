"""The floor under a decode step: the time that this machine, as measured, cannot go below.

A decode step reads every weight it uses and the KV cache of every stream, computes little, and on
tensor-parallel ranks sums their partial results layer by layer. Its parts follow one another, so

    floor = Σ over parts of max(bytes / bandwidth, operations / rate) + all-reduces × latency

(the roofline of Williams, Waterman & Patterson 2009, per part), with *measured* bandwidth, rate and latency.
What is not known is left out and named; without weights or bandwidth there is no floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfbook import units
from perfbook.ceiling.shape import ModelShape, distinct_experts
from perfbook.errors import BadInput
from perfbook.stats.result import Result


@dataclass(frozen=True)
class Machine(Result):
    """What was measured on the devices, per rank; None is unknown.

    Attributes
    ----------
    bandwidth_bytes_s : float or None
        Memory bandwidth of one device in bytes per second (reading).
    flop_s : float or None
        Matrix-product rate of one device in operations per second.
    all_reduce_us : float or None
        Latency of one all-reduce at the step's message size, in µs.
    tensor_parallel : int
        Ranks that share every layer.
    """

    bandwidth_bytes_s: float | None
    flop_s: float | None = None
    all_reduce_us: float | None = None
    tensor_parallel: int = 1

    @property
    def ridge_flop_per_byte(self) -> float | None:
        """Operations per byte above which a part is bound by computing and not by memory."""
        if not self.bandwidth_bytes_s or not self.flop_s:
            return None
        return self.flop_s / self.bandwidth_bytes_s


@dataclass(frozen=True)
class FloorPart(Result):
    """One part of the step on one rank.

    Attributes
    ----------
    name : str
        Weights, experts, KV cache or all-reduce.
    ms : float
        Its share of the floor.
    bound : str
        ``memory``, ``compute`` or ``latency``.
    moved_bytes, flops : float or None
        What one rank reads and computes; None where unknown or not applicable.
    """

    name: str
    ms: float
    bound: str
    moved_bytes: float | None = None
    flops: float | None = None

    @property
    def intensity_flop_per_byte(self) -> float | None:
        """Operations per byte moved: the part's place on the roofline's axis."""
        if not self.moved_bytes or self.flops is None:
            return None
        return self.flops / self.moved_bytes


@dataclass(frozen=True)
class Floor(Result):
    """The floor under one decode step.

    Attributes
    ----------
    streams : int
        Streams decoded together.
    context_tokens : float
        Mean length of their context.
    floor_ms : float or None
        The floor; None: unknown.
    parts : tuple of FloorPart
        What it is made of.
    missing : tuple of str
        What is not in it because it is unknown; with any, the true floor may be higher.
    assumed : tuple of str
        What it takes for granted.
    """

    streams: int
    context_tokens: float
    floor_ms: float | None
    parts: tuple[FloorPart, ...]
    missing: tuple[str, ...]
    assumed: tuple[str, ...]

    def ratio(self, tpot_ms: float | None) -> float | None:
        """Measured TPOT over the floor: 1 means that nothing is left; None where either is unknown."""
        return None if not self.floor_ms or tpot_ms is None else tpot_ms / self.floor_ms

    def sentence(self, tpot_ms: float | None = None) -> str:
        """The floor, its largest part, the distance of a measured TPOT, and what is missing."""
        missing = f" Not in it, because unknown: {', '.join(self.missing)}." if self.missing else ""
        if self.floor_ms is None:
            return f"The floor is unknown.{missing}"
        top = max(self.parts, key=lambda part: part.ms)
        text = (
            f"At concurrency {self.streams} and {units.number(self.context_tokens)} tokens of context a step cannot "
            f"go below {units.quantity(self.floor_ms, 'ms')}, {units.quantity(top.ms, 'ms')} of it {top.name}"
        )
        ratio = self.ratio(tpot_ms)
        if ratio is not None and ratio >= 1:
            text += f"; measured {units.quantity(tpot_ms, 'ms')} is {units.number(ratio)} times that"
        elif ratio is not None:
            text += f"; measured {units.quantity(tpot_ms, 'ms')} lies below it, so one of the numbers is wrong"
        return f"{text}.{missing}"


def decode_floor(
    shape: ModelShape,
    machine: Machine,
    *,
    streams: int,
    context_tokens: float,
    all_reduces: int | None = None,
    tokens_per_stream: int = 1,
) -> Floor:
    """Return the floor under a decode step of `streams` streams.

    Weights and experts are split over the tensor-parallel ranks, the KV cache as far as its heads go round
    (MLA's not at all); the slowest rank counts.

    Parameters
    ----------
    shape : ModelShape
        What moves.
    machine : Machine
        How fast it can.
    streams : int
        Streams decoded together.
    context_tokens : float
        Mean context of a stream, in tokens.
    all_reduces : int, optional
        All-reduces in a step, as traced; left out, two a layer and one.
    tokens_per_stream : int
        Tokens that a stream's step works on: 1, or draft length + 1 with speculative decoding.

    Raises
    ------
    BadInput
        For a number of streams, ranks or tokens below 1, or a measured value that is not above zero.
    """
    if min(streams, tokens_per_stream, machine.tensor_parallel) < 1 or context_tokens < 0:
        raise BadInput(
            f"floor: {streams} streams, {context_tokens:g} context, {machine.tensor_parallel} ranks is impossible"
        )
    for name in ("bandwidth_bytes_s", "flop_s", "all_reduce_us"):
        measured = getattr(machine, name)
        if measured is not None and measured <= 0:
            raise BadInput(f"floor: {name} is {measured:g}; leave it out where it was not measured")
    ranks, tokens = machine.tensor_parallel, streams * tokens_per_stream
    moved: dict[str, tuple[float | None, float | None]] = {
        "weights": (_of(shape.dense_bytes, 1 / ranks), _of(shape.dense_params, 2 * tokens / ranks))
    }
    assumed: list[str] = []
    if shape.expert_bytes != 0:
        moved["experts"] = _experts(shape, tokens, ranks)
        if tokens > 1:
            assumed.append("tokens choose experts independently and evenly")
    # A rank holds a whole number of heads, at least one: beyond that the cache is replicated.
    held = None if not shape.kv_heads else -(-shape.kv_heads // ranks) / shape.kv_heads
    moved["KV cache"] = (
        _of(shape.kv_bytes_per_token, None if held is None else held * streams * context_tokens),
        _of(shape.attention_flops, tokens * context_tokens / ranks),
    )
    missing = [f"{name} (bytes)" for name, (size, _) in moved.items() if size is None]
    parts: list[FloorPart] = []
    if machine.bandwidth_bytes_s is None:
        missing.append("memory bandwidth")
    else:
        for name, (size, flops) in moved.items():
            if size is not None:
                parts.append(_part(name, size, flops, machine.bandwidth_bytes_s, machine.flop_s))
    if machine.flop_s is None or any(part.flops is None for part in parts):
        assumed.append("memory binds where operations or their rate are unknown")
    known = any(part.name == "weights" for part in parts) and moved.get("experts", (0.0, None))[0] is not None
    if ranks > 1:
        count = shape.all_reduces if all_reduces is None else all_reduces
        if count is None or machine.all_reduce_us is None:
            missing.append("all-reduces (count or latency)")
        else:
            parts.append(FloorPart("all-reduce", count * machine.all_reduce_us / 1e3, "latency"))
            if all_reduces is None:
                assumed.append(f"{count} all-reduces a step, from the layers and not from a trace")
    floor_ms = sum(part.ms for part in parts) if known else None
    return Floor(streams, context_tokens, floor_ms, tuple(parts), tuple(missing), tuple(assumed))


def _experts(shape: ModelShape, tokens: int, ranks: int) -> tuple[float | None, float | None]:
    """Bytes and operations of the routed experts on one rank."""
    if not shape.experts or not shape.experts_per_token:
        return None, None
    touched = distinct_experts(shape.experts, shape.experts_per_token, tokens) / shape.experts
    active = shape.experts_per_token / shape.experts
    return _of(shape.expert_bytes, touched / ranks), _of(shape.expert_params, 2 * active * tokens / ranks)


def _part(name: str, size: float, flops: float | None, bandwidth: float, rate: float | None) -> FloorPart:
    reading_ms = 1e3 * size / bandwidth
    computing_ms = 0.0 if flops is None or rate is None else 1e3 * flops / rate
    bound = "memory" if reading_ms >= computing_ms else "compute"
    return FloorPart(name, max(reading_ms, computing_ms), bound, size, flops)


def implied_bandwidth_bytes_s(small_bytes: float, small_ms: float, large_bytes: float, large_ms: float) -> float:
    """Return the bandwidth that two models' decode times imply: more bytes over more time.

    What both share (launches, sampling, HTTP) cancels, so the result should come near the measured bandwidth
    if the bytes per step are right: a check of the bytes without a hardware counter.

    Raises
    ------
    BadInput
        When the larger model does not move more bytes in more time.
    """
    if large_bytes <= small_bytes or large_ms <= small_ms:
        raise BadInput("implied bandwidth: the larger model must move more bytes and take longer")
    return 1e3 * (large_bytes - small_bytes) / (large_ms - small_ms)


def _of(value: float | None, factor: float | None) -> float | None:
    return None if value is None or factor is None else value * factor
