"""The other nodes of a server that is larger than one (vLLM's ``--nnodes``).

Such a server is one process per node: the first node's serves, the others wait for its word (``--headless``). They are
started by a mate on each node, a Ray actor that the campaign on the cluster placed there and named in ``MATES``. What
happens on one node alone finds no such variable, and nothing here needs Ray.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from perfbook.errors import BadInput, MeasurementFailed, ServerFailed
from perfbook.nodes.connect import connect
from perfbook.params import Variant
from perfbook.record import carry
from perfbook.record.carry import State

MATES = "PERFBOOK_MATES"
"""JSON: ``address`` of the cluster, ``host`` that the other nodes reach this one by, ``per_node`` ranks of each,
``names`` of the mates by node rank."""
NAMESPACE = "perfbook"
_KINDS = {"tensor": "tp", "pipeline": "pp", "data": "dp"}


def option(args: Mapping[str, Any], *names: str) -> int:
    """A whole number among vLLM's options, under its long name or a short one, written as number or text; 1 without.

    Raises
    ------
    BadInput
        It is there and no whole number above 0.
    """
    dashed = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    for name in names:
        value = dashed.get(name)
        if value is not None:
            try:
                number = int(value) if not isinstance(value, bool) else 0
            except (TypeError, ValueError):
                number = 0
            if number < 1:
                raise BadInput(f"server.args.{name}: {value!r} is not a whole number above 0")
            return number
    return 1


def world_size(args: Mapping[str, Any]) -> int:
    """Devices of the whole server: tensor x pipeline x data parallel."""
    size = 1
    for kind, short in _KINDS.items():
        size *= option(args, f"{kind}-parallel-size", short)
    return size


def node_count(args: Mapping[str, Any]) -> int:
    """Nodes that the server spreads over.

    Raises
    ------
    BadInput
        Its devices do not divide by them.
    """
    nodes, devices = option(args, "nnodes", "n"), world_size(args)
    if devices % nodes:
        raise BadInput(f"server.args.nnodes: {devices} ranks (tensor x pipeline x data) do not divide by {nodes} nodes")
    return nodes


class Mates:
    """The mates of this run's server, in the order of their node ranks, which begin at 1."""

    def __init__(self, ray: Any, host: str, per_node: int, actors: Sequence[Any]) -> None:
        self.ray, self.host, self.per_node, self.actors = ray, host, per_node, actors
        self._sent: list[dict[str, State]] = [{} for _ in actors]

    def start(self, variant: Variant, log: str, extra_args: Mapping[str, Any], extra_env: Mapping[str, str]) -> None:
        """Start every node's part; they wait for the first node's, whose address is among ``extra_args``."""
        self._all("launch", variant, log, dict(extra_args), dict(extra_env))

    def look(self) -> str:
        """Which node's part ended, and why; empty while all run."""
        found = self._all("failure")
        return next((f"node {rank}: {why}" for rank, why in enumerate(found, 1) if why), "")

    def stop(self) -> list[str]:
        """End every node's part; what could not be ended."""
        return [f"node {rank}: {left}" for rank, left in enumerate(self._all("stop"), 1) if left]

    def about(self) -> list[dict[str, Any]]:
        """Provenance of each node."""
        return self._all("about")

    def gather(self, run: Path) -> None:
        """Bring their traces and logs into the run's folder; a folder that the nodes share has them already."""
        for actor, sent in zip(self.actors, self._sent, strict=True):
            more = True
            while more:
                pieces, more = self._get(actor.pieces.remote(dict(sent)))
                carry.write(run, pieces)
                sent |= {piece.name: piece.reached for piece in pieces}

    def run_jobs(
        self, module: str, jobs: Sequence[Sequence[Mapping[str, Any]]], env: Mapping[str, str], timeout_s: float
    ) -> list[Any]:
        """Begin measuring processes on the first nodes, a list of jobs for each; :meth:`ended` waits for them."""
        return [
            actor.run_jobs.remote(module, list(own), dict(env), timeout_s)
            for actor, own in zip(self.actors, jobs, strict=False)
        ]

    def ended(self, running: Sequence[Any]) -> list[Any]:
        """How they ended, a :class:`perfbook.micro.spawn.Ended` for each node."""
        return [self._get(one) for one in running]

    def _all(self, method: str, *words: Any) -> list[Any]:
        asked = [getattr(actor, method).remote(*words) for actor in self.actors]
        return [self._get(one) for one in asked]

    def _get(self, asked: Any) -> Any:
        try:
            return self.ray.get(asked)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, BadInput | ServerFailed) else _lost(error) from None
        except self.ray.exceptions.RayError as error:
            raise _lost(error) from None


def _lost(error: Exception) -> ServerFailed:
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return ServerFailed(f"a node of the server was lost ({type(error).__name__}: {said[:200]})")


def mates() -> Mates | None:
    """The mates that the campaign placed; None on one node alone.

    Raises
    ------
    MeasurementFailed
        They were named and cannot be reached.
    """
    named = os.environ.get(MATES)
    return _connect(named) if named else None


def require(variant: Variant, *, rehearsed: bool) -> Mates | None:
    """The mates of a server that spreads over nodes, None for one that does not, and in a rehearsal.

    Raises
    ------
    BadInput
        It spreads over nodes and none but this one is there.
    """
    if rehearsed or variant.server.model is None or node_count(variant.server.args) == 1:
        return None
    found = mates()
    if found is None:
        nodes = node_count(variant.server.args)
        raise BadInput(f"server.args.nnodes: {nodes} nodes are started on a cluster; add --on ray to perfbook run")
    return found


@cache
def _connect(named: str) -> Mates:
    said = json.loads(named)
    try:
        ray = connect(f"ray:{said['address']}")
        actors = [ray.get_actor(name, namespace=NAMESPACE) for name in said["names"]]
        return Mates(ray, said["host"], said["per_node"], actors)
    except (ServerFailed, ValueError) as error:
        raise MeasurementFailed(f"the other nodes of the server cannot be reached ({error})") from None
