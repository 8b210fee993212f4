"""Where a run's measurements come from: the devices of this machine or, in a rehearsal, the law in the run's folder.

Everything that is asked of a machine without going through its server is asked here, so that no figure of the machine
that rehearses can enter a report about another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from perfbook import micro
from perfbook.ceiling import Tensor, checkpoint_tensors
from perfbook.errors import BadInput
from perfbook.micro import AllReduce, DeviceBench, GemmShape
from perfbook.micro.spawn import Elsewhere
from perfbook.params import Variant
from perfbook.record import devices, provenance
from perfbook.record.devices import Gpu
from perfbook.record.run import Run
from perfbook.rehearsal import micro as rehearsed
from perfbook.rehearsal.law import Law, load_law
from perfbook.server import ranks as server_ranks
from perfbook.server.handle import ServerHandle
from perfbook.server.launch import local_model
from perfbook.server.telemetry import Sampler

_CLIENT_ONLY = ("cpu", "memory_bytes", "nvidia_driver")


class Telemetry(Protocol):
    """What the devices did during a cell; ``summary`` is filled when the block ends."""

    summary: dict[str, Any]

    def __enter__(self) -> Self:
        """Begin to look."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Sum up."""


class Hardware(Protocol):
    """What a study may ask of a machine; parameters and results are those of the rooms behind it."""

    def gpus(self) -> list[Gpu]:
        """The devices, and which processes compute on them."""

    def all_reduce(
        self, message_bytes: Sequence[int], ranks: int, *, backend: str, env: Mapping[str, str], timeout_s: float
    ) -> AllReduce:
        """As :func:`perfbook.micro.all_reduce`."""

    def measure_device(
        self,
        gemms: Sequence[GemmShape],
        tokens: Sequence[int],
        *,
        weight_bytes: float | None,
        dtype: str,
        env: Mapping[str, str],
    ) -> DeviceBench:
        """As :func:`perfbook.micro.measure_device`."""

    def checkpoint(self, variant: Variant) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """``config.json``, and the tensors that the checkpoint's headers name."""

    def provenance(self, variant: Variant) -> dict[str, Any]:
        """As :func:`perfbook.record.provenance.collect`."""

    def telemetry(self, handle: ServerHandle) -> Telemetry:
        """As :class:`perfbook.server.telemetry.Sampler`, for the time of a ``with`` block."""


def _elsewhere(ranks: int) -> Elsewhere | None:
    """The other nodes of the server where its ranks do not fit into this one."""
    mates = server_ranks.mates()
    if mates is None or ranks <= mates.per_node:
        return None

    def begin(
        module: str, jobs: Sequence[Sequence[Mapping[str, Any]]], env: Mapping[str, str], timeout_s: float
    ) -> Callable[[], Sequence[Any]]:
        running = mates.run_jobs(module, jobs, env, timeout_s)
        return lambda: mates.ended(running)

    return Elsewhere(mates.host, mates.per_node, begin)


def hardware_of(run: Run) -> Hardware:
    """What the run's numbers come from."""
    return Rehearsed(load_law(run.law_path)) if run.rehearsed else ThisMachine()


class ThisMachine:
    """The machine that perfbook runs on."""

    gpus = staticmethod(devices.gpus)
    measure_device = staticmethod(micro.measure_device)

    def all_reduce(
        self, message_bytes: Sequence[int], ranks: int, *, backend: str, env: Mapping[str, str], timeout_s: float
    ) -> AllReduce:
        """Over the nodes that the server's ranks lie on."""
        return micro.all_reduce(
            message_bytes, ranks, backend=backend, env=env, timeout_s=timeout_s, elsewhere=_elsewhere(ranks)
        )

    def provenance(self, variant: Variant) -> dict[str, Any]:
        """With the other nodes of a server that is larger than one."""
        found = provenance.collect(variant)
        mates = server_ranks.mates()
        return found if mates is None else {**found, "nodes": mates.about()}

    def telemetry(self, handle: ServerHandle) -> Telemetry:
        """Clocks, power, throttling and load, sampled once a second."""
        return Sampler(handle, every_s=1.0)

    def checkpoint(self, variant: Variant) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """From the model's folder, or the hub's cache on this disk; ``BadInput`` where neither has it."""
        folder = _folder(variant)
        return json.loads((folder / "config.json").read_text(encoding="utf-8")), checkpoint_tensors(folder)


@dataclass(frozen=True)
class Rehearsed:
    """The law's machine. Its readings scatter, each from a seed of its own, and are the same in every rehearsal."""

    law: Law
    _seeds: count[int] = field(default_factory=count, repr=False)

    def gpus(self) -> list[Gpu]:
        """The law's devices; nobody else computes on them."""
        return [
            Gpu(one.index, one.name, one.memory_total_bytes, one.memory_used_bytes, None, ())
            for one in rehearsed.devices(self.law, busy_share=0.0)
        ]

    def all_reduce(
        self, message_bytes: Sequence[int], ranks: int, *, backend: str, env: Mapping[str, str], timeout_s: float
    ) -> AllReduce:
        """The law's latencies."""
        return rehearsed.all_reduce(self.law, message_bytes, env, seed=next(self._seeds))

    def measure_device(
        self,
        gemms: Sequence[GemmShape],
        tokens: Sequence[int],
        *,
        weight_bytes: float | None,
        dtype: str,
        env: Mapping[str, str],
    ) -> DeviceBench:
        """The law's rates."""
        return rehearsed.measure_device(self.law, gemms, tokens, seed=next(self._seeds))

    def checkpoint(self, variant: Variant) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the law tells of the model, its weights as one tensor of each kind."""
        model = self.law.model
        config = {"num_hidden_layers": model.layers, "hidden_size": model.hidden_size, **model.config}
        sizes = {"dense.weight": model.dense_gb, "mlp.experts.weight": model.expert_gb}
        return config, {name: Tensor("U8", round(1e9 * size)) for name, size in sizes.items() if size}

    def provenance(self, variant: Variant) -> dict[str, Any]:
        """The law's devices in place of this machine's."""
        found = {key: value for key, value in provenance.collect(variant).items() if key not in _CLIENT_ONLY}
        cards = self.gpus()
        gpus = [
            {"index": card.index, "name": card.name, "memory_bytes": card.memory_bytes, "compute_capability": None}
            for card in cards
        ]
        return {**found, "hardware": f"{len(cards)} × {cards[0].name}, rehearsed", "gpus": gpus}

    def telemetry(self, handle: ServerHandle) -> Telemetry:
        """The law's devices at work."""
        return RehearsedTelemetry(self.law, next(self._seeds))


class RehearsedTelemetry:
    """The law's devices as a sampler would have seen them; nothing there ever throttles."""

    def __init__(self, law: Law, seed: int) -> None:
        self.summary: dict[str, Any] = {}
        self._law, self._seed = law, seed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cards = rehearsed.devices(self._law, busy_share=1.0, seed=self._seed)
        self.summary = {"gpus": [asdict(card) for card in cards], "suspect": []}


def _folder(variant: Variant) -> Path:
    if variant.server.model is None:
        raise BadInput("the server was not started here, so its checkpoint is not known")
    model = local_model(variant.server.model)
    if isinstance(model, Path):
        if model.is_dir():
            return model
        raise BadInput(f"{model.name} is one file: its tensors are not read")
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    if not isinstance(found, str):
        raise BadInput(f"{model} is not on this disk")
    return Path(found).parent
