"""All-reduce latency under one environment: :func:`all_reduce` starts one process of this module per rank."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perfbook.errors import BadInput
from perfbook.micro import spawn
from perfbook.micro.results import AllReduce, Message
from perfbook.micro.spawn import Elsewhere

#: What makes NCCL say what it read and chose; TUNING has a line per size.
_SAY = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,GRAPH,TUNING"}


def all_reduce(
    message_bytes: Sequence[int],
    ranks: int,
    *,
    backend: str,
    env: Mapping[str, str] | None = None,
    repeats: int = 7,
    timeout_s: float = 60.0,
    elsewhere: Elsewhere | None = None,
) -> AllReduce:
    """Check and time all-reduces (bfloat16, sum, in place) of some sizes over ranks of this machine, or of several.

    Every rank starts afresh with `env` on top of this process's environment: a communicator keeps what it read. Sums
    are checked first, on integers that every order of adding gives exactly.

    Parameters
    ----------
    message_bytes : sequence of int
        Even sizes.
    ranks : int
        At least 2.
    backend : str
        ``nccl`` (one GPU per rank) or ``gloo`` (the CPU).
    env : mapping, optional
        The setting.
    repeats : int
        At most; fewer where one takes long.
    timeout_s : float
        Deadline for all of it; then the outcome is ``hangs``, and nothing is left running.

    elsewhere : Elsewhere, optional
        The nodes of the other ranks.

    Raises
    ------
    BadInput
        For fewer than 2 ranks or an odd size.
    """
    sizes = sorted(set(message_bytes))
    if ranks < 2 or not sizes or any(size < 2 or size % 2 for size in sizes):
        raise BadInput(f"all-reduce: {ranks} ranks with messages of {sizes} bytes is impossible")
    alone = {} if elsewhere else {"GLOO_SOCKET_IFNAME": "lo"}
    own = {**(_SAY if backend == "nccl" else alone), **(env or {})}
    whole = {**os.environ, **own}
    here = elsewhere.here if elsewhere else ranks
    with spawn.working_folder() as name:
        folder = Path(name)
        if backend == "nccl":
            whole["NCCL_DEBUG_FILE"] = str(folder / "nccl.%p.log")
        meeting = f"file://{folder / 'meeting'}" if elsewhere is None else f"tcp://{elsewhere.host}:{_port()}"
        job = {
            "sizes": sizes, "ranks": ranks, "backend": backend, "repeats": repeats, "timeout_s": timeout_s,
            "meeting": meeting,
        }  # fmt: skip
        jobs = [{**job, "rank": rank, "device": rank % here} for rank in range(ranks)]
        others = [jobs[at : at + here] for at in range(here, ranks, here)]
        rest = elsewhere.begin(__name__, others, own, timeout_s) if elsewhere else tuple
        ended = spawn.run_jobs(__name__, jobs[:here], env=whole, timeout_s=timeout_s, folder=folder)
        ended = spawn.joined([ended, *rest()])
        logs = sorted(folder.glob("nccl.*.log"))
        log = logs[0].read_text(errors="replace") if logs else ""
    if ended.outcome != "ok":
        return AllReduce(ended.outcome, backend, ranks, ended.detail, log=log)
    times = [said["repeats_us"] for said in ended.results]
    messages = tuple(
        # An all-reduce has ended when the last rank has its sum.
        Message(size, tuple(map(max, *(rank[index] for rank in times))), ranks)
        for index, size in enumerate(sizes)
    )
    wrong = [f"rank {i}: {said['wrong']}" for i, said in enumerate(ended.results) if said["wrong"]]
    return AllReduce("wrong sums" if wrong else "ok", backend, ranks, "; ".join(wrong)[:300], messages, log)


def _rank(job: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: one rank."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from perfbook.micro.timing import repeats_us

    rank, ranks = job["rank"], job["ranks"]
    device = "cuda" if job["backend"] == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(job["device"])
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        job["backend"],
        init_method=job["meeting"],
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=job["timeout_s"]),
    )

    def slowest(value: float) -> float:
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared)

    wrong, times = "", []
    for size in job["sizes"]:
        wrong = wrong or _check(size, rank, ranks, device)
        buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        times.append(repeats_us(partial(dist.all_reduce, buffer), device=device, repeats=job["repeats"], agree=slowest))
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": wrong, "repeats_us": times}


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check(size: int, rank: int, ranks: int, device: str, rounds: int = 3) -> str:
    """What is wrong with sums of integers, empty when nothing is.

    Element i of rank r holds (i + r) mod 3, so sums stay below 2n: exact in bfloat16 up to 128 ranks, in any order.
    """
    import torch
    import torch.distributed as dist

    index = torch.arange(size // 2, device=device)
    expected = sum(((index + other) % 3 for other in range(ranks)), torch.zeros_like(index))
    for _ in range(rounds):
        values = ((index + rank) % 3).to(torch.bfloat16)
        dist.all_reduce(values)
        differs = (values.to(torch.int64) != expected).nonzero()
        if len(differs):
            at = int(differs[0])
            got = f"{float(values[at]):g}, not {int(expected[at])}"
            return f"{len(differs)} of {size // 2} sums of {size} bytes, first at {at}: {got}"
    return ""


if __name__ == "__main__":
    given, output = sys.argv[1:]
    Path(output).write_text(json.dumps(_rank(json.loads(Path(given).read_text()))))
