"""The floor at every operating point that 03 and 04 measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from perfbook import micro
from perfbook.ceiling import Floor, Lever, Machine, decode_floor, levers
from perfbook.desk import Desk
from perfbook.errors import OutOfOrder
from perfbook.figures.cells import statistic
from perfbook.params import Ceiling
from perfbook.study import bench, doubts
from perfbook.study.bench import Served

NOTEBOOK = "07_ceiling"
CellRecord = Mapping[str, Any]


@dataclass(frozen=True)
class Operating:
    """One point that was measured: streams, mean context in tokens, TPOT in ms, and where it comes from."""

    streams: int
    context_tokens: float
    tpot_ms: float
    source: str


@dataclass(frozen=True)
class Study:
    """The floor at every operating point.

    Attributes
    ----------
    points, floors : tuple
        In the same order, by streams.
    machine, served
        What the floor is computed from; ``machine`` at the smallest number of streams.
    count_source : str
        Where the number of all-reduces comes from.
    measured : DeviceBench or None
        The devices, as measured.
    """

    points: tuple[Operating, ...]
    floors: tuple[Floor, ...]
    machine: Machine
    served: Served
    all_reduces: int | None
    count_source: str
    measured: micro.DeviceBench | None

    def ratio(self, index: int) -> float | None:
        """Measured TPOT over the floor at a point."""
        return self.floors[index].ratio(self.points[index].tpot_ms)


def measure(desk: Desk, progress: Callable[[str], None]) -> micro.DeviceBench | str:
    """What 05 measured with the server stopped; without it, the devices now, beside the idle server."""
    found = bench.recorded(desk)
    if found is not None:
        return found
    progress("memory bandwidth and matrix products")
    return bench.measure(desk, bench.served_model(desk.variant, desk.hardware))


def operating_points(cells: Sequence[CellRecord]) -> list[Operating]:
    """One point per concurrency: of several output lengths the longest, TPOT the median over repeats (pure).

    The context of a step grows from the prompt to prompt and answer: its mean is the prompt and half the answer.
    """
    grouped: dict[tuple[int, str], list[CellRecord]] = {}
    for cell in doubts.usable(cells):
        if statistic(cell, "tpot_ms", "p50") is not None and cell["ok"]:
            grouped.setdefault((cell["concurrency"], cell["notebook"]), []).append(cell)
    points: dict[int, Operating] = {}
    for (streams, notebook), group in sorted(grouped.items()):
        longest = max(cell["output_tokens"] / cell["ok"] for cell in group)
        chosen = [cell for cell in group if cell["output_tokens"] / cell["ok"] == longest]
        times = [value for cell in chosen if (value := statistic(cell, "tpot_ms", "p50")) is not None]
        prompt = sum(cell["prompt_tokens"] or 0 for cell in chosen) / sum(cell["ok"] for cell in chosen)
        # 03 sorts before 04 and has more repeats at one stream, so it stays.
        points.setdefault(streams, Operating(streams, prompt + longest / 2, median(times), notebook))
    return [points[streams] for streams in sorted(points)]


def machine_of(measured: micro.DeviceBench | None, all_reduce_us: float | None, ranks: int, given: Ceiling) -> Machine:
    """Measured rates; what the parameters state wins (pure)."""
    read = measured.kind("read") if measured else None
    bandwidth = 1e9 * read.best_gb_s if read else None
    flop_s = measured.best_flop_s if measured else None
    return Machine(
        bandwidth_bytes_s=1e9 * given.bandwidth_gb_s if given.bandwidth_gb_s else bandwidth,
        flop_s=1e12 * given.gemm_tflop_s if given.gemm_tflop_s else flop_s,
        all_reduce_us=given.all_reduce_us or all_reduce_us,
        tensor_parallel=ranks,
    )


def compute(desk: Desk, measured: micro.DeviceBench | str) -> Study:
    """The floor at every point that 03 and 04 measured.

    Raises
    ------
    OutOfOrder
        Neither has run.
    """
    points = operating_points([*desk.run.records("single_stream_cell"), *desk.run.records("sweep_cell")])
    if not points:
        raise OutOfOrder(f"{desk.run.name} has no measured TPOT yet: run 03_single_stream or 04_sweep first")
    served = bench.served_model(desk.variant, desk.hardware)
    known = None if isinstance(measured, str) else measured
    count, source = bench.all_reduce_count(desk, served)
    machines = [
        machine_of(known, _all_reduce_us(desk, served, point.streams), served.ranks, desk.variant.ceiling)
        for point in points
    ]
    floors = tuple(
        decode_floor(
            served.shape,
            machine,
            streams=point.streams,
            context_tokens=point.context_tokens,
            all_reduces=count if not source.startswith("assumed") else None,
        )
        for point, machine in zip(points, machines, strict=True)
    )
    return Study(tuple(points), floors, machines[0], served, count, source, known)


def _all_reduce_us(desk: Desk, served: Served, streams: int) -> float | None:
    """The baseline's latency at the step's message size, as 05 measured it with the server's own library."""
    size = served.message_bytes(streams)
    for record in reversed(desk.run.records("micro_all_reduce")):
        if record["setting"] == "baseline" and record["backend"] == "nccl":
            for message in record["messages"]:
                if message["message_bytes"] == size:
                    return float(median(message["repeats_us"]))
    return None


def target_ms(desk: Desk) -> float | None:
    """Milliseconds per token that the variant aims at for one stream; None where it sets no target."""
    targets = desk.variant.targets
    if targets.tpot_ms is not None:
        return targets.tpot_ms
    return 1e3 / targets.single_stream_tok_s if targets.single_stream_tok_s else None


def find_levers(desk: Desk, study: Study) -> tuple[Lever, ...]:
    """What moves the floor of the first point."""
    point, given = study.points[0], desk.variant.ceiling
    return levers(
        study.served.shape,
        study.machine,
        streams=point.streams,
        context_tokens=point.context_tokens,
        all_reduces=study.all_reduces if not study.count_source.startswith("assumed") else None,
        draft_tokens=given.draft_tokens,
        acceptance=given.acceptance,
    )
