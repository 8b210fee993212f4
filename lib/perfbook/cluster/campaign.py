"""``perfbook run PARAMS… --on ray``: each variant on a node of its own, its run brought home as it grows.

A variant is a Ray actor that needs its devices and the whole of a node's ``measurement``, a resource that keeps two
campaigns off one node; nodes are started with ``--resources='{"measurement": 1}'``. When a node dies, its variant goes
on elsewhere from what was brought home; when this process dies, Ray ends the actors, and with them their servers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfbook import paths
from perfbook.batch.campaign import INTERRUPTED, Options, finish, prepare
from perfbook.batch.execute import Outcome
from perfbook.batch.result import Result
from perfbook.batch.terminal import Terminal
from perfbook.cluster.mate import Mate
from perfbook.cluster.node import PATIENCE_S, Station
from perfbook.errors import BadInput
from perfbook.nodes.connect import MEASUREMENT, connect
from perfbook.params import Variant
from perfbook.record import carry
from perfbook.record.carry import State
from perfbook.record.run import Run
from perfbook.server.ranks import NAMESPACE, node_count, world_size

_PATIENCE_S = 60.0  # until somebody who waits for a node is told so
_TRIES = 3  # nodes on which a variant is begun before it is given up


_WAITING = (
    "still waiting for a node that is free, or for its worker to start "
    "(`ray status` tells; Ray starts no worker of a Python whose path holds a space)"
)


@dataclass
class Placed:
    """A variant and where it runs."""

    variant: Variant
    text: str
    result: Result
    station: Any = None
    mates: list[Any] = field(default_factory=list)
    group: Any = None
    pending: Any = None
    run: str = ""
    sent: dict[str, State] = field(default_factory=dict)
    tries: int = 0
    asked_s: float = 0.0
    heard: bool = False
    code: int | None = None


def run_on(address: str, files: Sequence[Path], options: Options, terminal: Terminal | None = None) -> int:
    """Run every variant on the cluster; returns the exit code: 0 complete, 1 something failed, 130 interrupted.

    Parameters
    ----------
    address : str
        ``ray``: the cluster that this machine belongs to (``RAY_ADDRESS``, or one started here), else one of this
        machine alone; ``ray://HOST:PORT``: a cluster's client port; ``ray:HOST:PORT`` its own.

    Raises
    ------
    BadInput
        Ray is not installed, a parameter file cannot be used, or no node offers what a variant needs.
    ServerFailed
        The cluster cannot be reached.
    """
    terminal = terminal or Terminal()
    variants = prepare(files, options)
    if options.resume:
        raise BadInput(
            "--resume is for runs of this machine; on a cluster, a variant that lost its node resumes itself"
        )
    if options.keep_server:
        raise BadInput("--keep-server is for runs of this machine; on a cluster, the node goes to the next variant")
    ray = connect(address)
    placed = [
        Placed(one, file.read_text(encoding="utf-8"), Result(one.variant))
        for one, file in zip(variants, files, strict=True)
    ]
    try:
        for one in placed:
            _require_node(ray, one.variant, rehearsed=options.rehearse)
        interrupted = _follow(ray, placed, options, terminal)
    finally:
        ray.shutdown()
    for one in placed:
        _settle(one)
    terminal.conclude([one.result for one in placed])
    if interrupted:
        return INTERRUPTED
    return 0 if all(one.code == 0 and one.result.complete for one in placed) else 1


def needs(variant: Variant, *, rehearsed: bool) -> dict[str, float]:
    """What each node of the server must offer: its GPUs (TP x PP x DP / nodes), else a core; and all its measurement.

    A variant that sets the CPU backend's variables (``VLLM_CPU_…``), an attached one and a rehearsal need no GPU.
    """
    args = variant.server.args
    gpus = world_size(args) // node_count(args)
    on_cpu = any(name.startswith("VLLM_CPU_") for name in variant.server.env)
    on_gpus = not rehearsed and variant.server.base_url is None and not on_cpu
    return {("GPU" if on_gpus else "CPU"): float(gpus if on_gpus else 1), MEASUREMENT: 1.0}


def _require_node(ray: Any, variant: Variant, *, rehearsed: bool) -> None:
    """Ray waits without a word for what no node has: so ask before."""
    wanted = needs(variant, rehearsed=rehearsed)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = sum(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes)
    asked = node_count(variant.server.args)
    if fit >= asked:
        return
    said = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
    have = "no node of the cluster offers" if asked == 1 else f"{asked} nodes are asked for, and {fit} offer"
    larger = "; a server larger than a node says over how many it goes: server.args.nnodes" if asked == 1 else ""
    raise BadInput(
        f"{variant.variant}: {have} {said}; start its nodes with "
        f"""--resources='{{"{MEASUREMENT}": 1}}' and the devices that the variant needs{larger}"""
    )


def _follow(ray: Any, placed: Sequence[Placed], options: Options, terminal: Terminal) -> bool:
    """Start everything, and bring home what comes until all have ended; returns whether it was interrupted."""
    interrupted = False
    for one in placed:
        _begin(ray, one, options)
    while running := [one for one in placed if one.code is None and not one.result.error]:
        try:
            ready, _ = ray.wait([one.pending for one in running], timeout=1.0)
            for one in running:
                if one.pending in ready:
                    _hear(ray, one, options, terminal)
                elif not one.heard and time.monotonic() - one.asked_s > _PATIENCE_S:
                    one.asked_s = float("inf")  # once is enough
                    terminal.note(f"{one.variant.variant}: {_WAITING}")
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            terminal.note(f"interrupted: stopping the servers on their nodes (up to {PATIENCE_S:.0f} s)")
            for one in running:
                if one.heard:
                    one.station.interrupt.remote()
                else:  # still waiting for a node
                    one.result.error = "interrupted"
                    _release(ray, one)
    return interrupted


def _begin(ray: Any, one: Placed, options: Options) -> None:
    """Ask for a node; what an earlier node had finished goes with the variant."""
    one.tries += 1
    one.asked_s, one.heard = time.monotonic(), False
    nodes, wanted = node_count(one.variant.server.args), needs(one.variant, rehearsed=options.rehearse)
    one.group = ray.util.placement_group([wanted] * nodes, strategy="STRICT_SPREAD")
    one.station = _place(ray, one, Station, 0, wanted).remote()
    names = [f"{one.variant.variant}-{secrets.token_hex(4)}-{rank}" for rank in range(1, nodes)]
    one.mates = [_place(ray, one, Mate, at, wanted, name).remote(at) for at, name in enumerate(names, 1)]
    earlier = []
    if one.run:
        folder = paths.outputs() / one.variant.variant / one.run
        earlier = [(one.run, piece) for piece in carry.changes(folder, {})]
    one.sent = {}
    words, per_node = _words(options, resume=bool(one.run)), world_size(one.variant.server.args) // nodes
    started = one.station.start.remote(one.variant.variant, one.text, words, earlier, names, per_node)
    one.pending = one.station.news.remote(one.variant.variant, dict(one.sent), started)


def _place(ray: Any, one: Placed, kind: type, node: int, wanted: Mapping[str, float], name: str | None = None) -> Any:
    """An actor that takes the whole of its node's share."""
    rest = dict(wanted)
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(one.group, node)
    return ray.remote(kind).options(
        num_cpus=rest.pop("CPU", 0), num_gpus=rest.pop("GPU", 0), resources=rest, scheduling_strategy=strategy,
        name=name, namespace=NAMESPACE if name else None,
    )  # fmt: skip


def _release(ray: Any, one: Placed) -> None:
    """Give the nodes back; what was lost is lost."""
    for actor in (one.station, *one.mates):
        ray.kill(actor)
    ray.util.remove_placement_group(one.group)


def _lost(ray: Any, one: Placed) -> bool:
    """Whether another node of the variant's server is gone."""
    try:
        ray.get([mate.about.remote() for mate in one.mates], timeout=PATIENCE_S)
    except ray.exceptions.RayError:
        return True
    return False


def _words(options: Options, *, resume: bool) -> list[str]:
    """The command line of the campaign on its node."""
    words = [word for value in options.overrides for word in ("--set", value)]
    words += ["--only", ",".join(options.only)] if any(options.only) else []
    chosen = {
        "--resume": resume, "--force": options.force, "--allow-commands": options.allow_commands,
        "--rehearse": options.rehearse,
    }  # fmt: skip
    return words + [word for word, wanted in chosen.items() if wanted]


def _hear(ray: Any, one: Placed, options: Options, terminal: Terminal) -> None:
    """Take one answer of a node: lines to the terminal, pieces into the run's folder here."""
    name = one.variant.variant
    try:
        news = ray.get(one.pending)
    except ray.exceptions.RayError as error:
        _again(ray, one, options, terminal, type(error).__name__)
        return
    one.heard = True
    carry.write(paths.outputs() / name, news.pieces)
    for piece in news.pieces:
        one.run = one.run or piece.name.partition("/")[0]
        one.sent[piece.name] = piece.reached
    for line in news.lines:
        terminal.note(f"{name}: {line}")
    one.code = news.code
    if one.code is None:
        one.pending = one.station.news.remote(name, dict(one.sent))
    elif one.code not in (0, INTERRUPTED) and _lost(ray, one):
        one.code = None
        _again(ray, one, options, terminal, "one of several")
    else:
        ray.get([actor.leave.remote() for actor in (one.station, *one.mates)])
        _release(ray, one)


def _again(ray: Any, one: Placed, options: Options, terminal: Terminal, why: str) -> None:
    """Begin a variant anew whose node was lost, some times."""
    name = one.variant.variant
    _release(ray, one)
    if one.tries >= _TRIES:
        one.result.error = f"its node was lost {one.tries} times ({why})"
        terminal.problem(f"{name}: {one.result.error}")
        return
    terminal.note(f"{name}: its node was lost; begun again elsewhere, from what is finished here")
    _begin(ray, one, options)


def _settle(one: Placed) -> None:
    """The run that came home: linked as the latest, summed up, its report written from here."""
    if not one.run:
        one.result.error = one.result.error or "it never got a node"
        return
    run = Run(paths.outputs() / one.variant.variant / one.run)
    if not (run.path / "run.json").is_file():
        one.result.error = one.result.error or "nothing of it came home"
        return
    run.point()
    one.result.run = run
    for entry in run.header.get("notebooks", []):
        one.result.outcomes[entry["notebook"]] = Outcome(entry["status"], entry["reason"], entry["seconds"])
    one.result.report = finish(run)
