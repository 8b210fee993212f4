"""What would have to be true to reach a target, and the levers that move the floor, each with its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perfbook import units
from perfbook.ceiling.floor import Floor, Machine, decode_floor
from perfbook.ceiling.shape import ModelShape
from perfbook.errors import BadInput
from perfbook.stats.result import Result


@dataclass(frozen=True)
class Requirement(Result):
    """One thing that, changed alone, would bring the floor to the target.

    Attributes
    ----------
    what : str
        The quantity.
    factor : float or None
        By what it would have to be multiplied; None: no value of it alone is enough.
    sentence : str
        The same in words.
    """

    what: str
    factor: float | None
    sentence: str


def to_reach(floor: Floor, target_ms: float) -> tuple[Requirement, ...]:
    """Say what each part of the floor would have to become, alone, for a step of `target_ms`.

    Empty where the floor is unknown. Where the floor already lies below the target every factor is above 1:
    room, and not a requirement. The parts add up, so a part may take what the others leave of the target.

    Raises
    ------
    BadInput
        When the target is not above zero.
    """
    if target_ms <= 0:
        raise BadInput(f"target: {target_ms:g} ms is not above zero")
    if floor.floor_ms is None:
        return ()
    found = []
    for what, bound in (
        ("bytes moved over bandwidth", "memory"),
        ("computing time", "compute"),
        ("all-reduce time", "latency"),
    ):
        own = sum(part.ms for part in floor.parts if part.bound == bound)
        if own == 0:
            continue
        left = target_ms - (floor.floor_ms - own)
        goal, now = units.quantity(target_ms, "ms"), units.quantity(own, "ms")
        if left <= 0:
            others = units.quantity(floor.floor_ms - own, "ms")
            found.append(Requirement(what, None, f"{what}: the rest alone takes {others}, over {goal}"))
            continue
        text = f"{what}: may take {units.quantity(left, 'ms')}, takes {now} ({units.number(left / own)} times)"
        found.append(Requirement(what, left / own, text))
    return tuple(found)


@dataclass(frozen=True)
class Lever(Result):
    """A change that moves the floor.

    Attributes
    ----------
    name : str
        The change.
    floor_ms : float or None
        Time per output token of a stream at the floor with it; None: it needs a number that was not measured.
    arithmetic : str
        How the number comes about, and what it assumes.
    """

    name: str
    floor_ms: float | None
    arithmetic: str


def levers(
    shape: ModelShape,
    machine: Machine,
    *,
    streams: int,
    context_tokens: float,
    all_reduces: int | None = None,
    all_reduce_us_by_ranks: Mapping[int, float] | None = None,
    draft_tokens: int = 3,
    acceptance: float = 0.7,
) -> tuple[Lever, ...]:
    """Return the floor of one stream's token under each lever.

    `all_reduce_us_by_ranks` holds latencies measured with fewer ranks, for splits of tensor into pipeline
    parallelism. `draft_tokens` and `acceptance` (chance that a draft token is right) are assumptions, and
    said so.

    Raises
    ------
    BadInput
        When `acceptance` is not between 0 and 1, or `draft_tokens` below 1.
    """
    if not 0 <= acceptance < 1 or draft_tokens < 1:
        raise BadInput(f"speculation: {draft_tokens} draft tokens accepted at {acceptance:g} is impossible")

    def floor(
        shape: ModelShape = shape, machine: Machine = machine, tokens: int = 1, count: int | None = all_reduces
    ) -> Floor:
        return decode_floor(
            shape,
            machine,
            streams=streams,
            context_tokens=context_tokens,
            all_reduces=count,
            tokens_per_stream=tokens,
        )

    lighter = replace(shape, dense_bytes=_half(shape.dense_bytes), expert_bytes=_half(shape.expert_bytes))
    smaller = replace(shape, kv_bytes_per_token=_half(shape.kv_bytes_per_token))
    found = [
        Lever(
            "weights of half the bytes",
            _complete(floor(lighter)),
            "weight and expert bytes × 0.5, same bandwidth (needs a kernel that reaches it)",
        ),
        Lever("KV cache of half the bytes", _complete(floor(smaller)), "KV bytes × 0.5 (fp8 for bfloat16)"),
    ]
    steps = (1 - acceptance ** (draft_tokens + 1)) / (1 - acceptance)
    drafted = _complete(floor(tokens=draft_tokens + 1))
    found.append(
        Lever(
            f"speculative decoding, {draft_tokens} draft tokens",
            None if drafted is None else drafted / steps,
            f"floor of a step over {draft_tokens + 1} tokens a stream ({units.quantity(drafted, 'ms')}) over the "
            f"{units.number(steps)} tokens it yields, (1 − a^{draft_tokens + 1}) / (1 − a) (Leviathan et al. 2023); "
            f"assumes a = {acceptance:g}, a free draft, the same all-reduce latency",
        )
    )
    ranks = machine.tensor_parallel
    known = {**(all_reduce_us_by_ranks or {}), ranks: machine.all_reduce_us}
    for stages in range(2, ranks + 1):
        if ranks % stages == 0:
            fewer = ranks // stages
            split = floor(machine=replace(machine, tensor_parallel=fewer, all_reduce_us=known.get(fewer)))
            latency = f"an all-reduce over {fewer} takes {units.quantity(known.get(fewer), 'us')}"
            latency = latency if fewer > 1 else "no all-reduces"
            found.append(
                Lever(
                    f"TP {fewer} × PP {stages}",
                    _complete(split),
                    f"a token passes {stages} stages in turn, each read by {fewer} of {ranks} ranks: bytes a rank "
                    f"× {stages} over the stages; {latency}; hops between stages "
                    "not counted; several batches in flight raise throughput, not this time",
                )
            )
    if ranks > 1 and shape.experts:
        need = units.quantity(machine.all_reduce_us, "us")
        found.append(
            Lever(
                "expert parallel",
                None,
                f"each MoE layer's all-reduce ({need}) becomes a dispatch and a combine: it pays where those two "
                "together take less; measure an all-to-all at the same bytes to know",
            )
        )
    return tuple(found)


def _half(size: float | None) -> float | None:
    return None if size is None else size / 2


def _complete(floor: Floor) -> float | None:
    """A lever is compared with the floor, so one that lacks a part must not look better than it is."""
    return None if floor.missing else floor.floor_ms
