"""07: is there anything left? The floor under a decode step, from what was measured, beside what was reached.

Nothing is quoted from a data sheet: bandwidth and rates come from the micro-benchmarks, bytes from the checkpoint,
times from 03 and 04. What is missing leaves the floor unknown, or lower than it is, and the notebook says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from perfbook import figures, micro
from perfbook.ceiling import Floor, Lever, Machine, Requirement, decode_floor, levers, to_reach
from perfbook.desk import Desk, Verdict
from perfbook.errors import OutOfOrder
from perfbook.figures import Figure
from perfbook.figures.cells import statistic
from perfbook.params import Ceiling
from perfbook.report.table import Column, Note, Table
from perfbook.study import bench, doubts
from perfbook.study.bench import Served
from perfbook.units import byte_rate, byte_size, count, flop_rate, number, quantity

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
    size = served.shape.message_bytes(streams, bench.DTYPE_BYTES)
    for record in reversed(desk.run.records("micro_all_reduce")):
        if record["setting"] == "baseline" and record["backend"] == "nccl":
            for message in record["messages"]:
                if message["message_bytes"] == size:
                    return float(median(message["repeats_us"]))
    return None


def inputs_table(desk: Desk, study: Study) -> Table:
    """What the floor rests on, each with its origin."""
    shape, given = study.served.shape, desk.variant.ceiling

    def origin(stated: object, otherwise: str) -> str:
        return "stated in the parameters" if stated is not None else otherwise

    read = "best repeat of the read benchmark" if study.measured else "not measured"
    rate = "fastest product measured" if study.measured and study.measured.gemms else "not measured"
    checkpoint = study.served.unknown or "headers of the checkpoint"
    rows = [
        ("weights read per step", byte_size(shape.dense_bytes), origin(given.weight_gb, checkpoint)),
        ("routed experts", byte_size(shape.expert_bytes), checkpoint),
        (
            "KV cache per token",
            byte_size(shape.kv_bytes_per_token, binary=True),
            origin(given.kv_bytes_per_token, study.served.unknown or "config.json"),
        ),
        ("memory bandwidth", byte_rate(study.machine.bandwidth_bytes_s), origin(given.bandwidth_gb_s, read)),
        ("matrix products", flop_rate(study.machine.flop_s), origin(given.gemm_tflop_s, rate)),
        ("tensor-parallel ranks", str(study.served.ranks), "server.args"),
    ]
    if study.served.ranks > 1:
        rows += [
            ("all-reduces per step", number(study.all_reduces), study.count_source),
            (
                "all-reduce latency",
                quantity(study.machine.all_reduce_us, "us"),
                origin(given.all_reduce_us, "05_nccl_tuning"),
            ),
        ]
    else:
        rows.append(("all-reduces per step", "not applicable", "one rank"))
    return Table(["what", "value", "from"], rows, caption="What the floor is computed from")


def floor_table(study: Study) -> Table:
    """Floor, measured TPOT and ratio per concurrency."""
    rows = []
    for index, (point, floor) in enumerate(zip(study.points, study.floors, strict=True)):
        top = max(floor.parts, key=lambda part: part.ms, default=None)
        products = bench.products_ms(study.measured, point.streams)
        rows.append(
            (
                point.streams, round(point.context_tokens), floor.floor_ms,
                f"{top.name} ({top.bound})" if top else None, products, point.tpot_ms, study.ratio(index), point.source,
            )
        )  # fmt: skip
    return Table(
        [
            "streams", Column("context", "tokens"), Column("floor", "ms"), "largest part",
            Column("products alone", "ms"), Column("TPOT measured", "ms"), "times the floor", "from",
        ],
        rows,
        caption="The floor under a decode step. Products alone: the matrix products of a step, measured one by one",
    )  # fmt: skip


def figure(desk: Desk, study: Study) -> Figure:
    """Measured TPOT above the parts of its floor."""
    rows = [
        {
            "streams": point.streams,
            "tpot_ms": point.tpot_ms,
            "parts": [part.to_json() for part in floor.parts] if floor.floor_ms is not None else [],
        }
        for point, floor in zip(study.points, study.floors, strict=True)
    ]
    return desk.figure("floor_over_concurrency", figures.floor_over_concurrency(rows, rehearsed=desk.run.rehearsed))


def roofline_figure(desk: Desk, study: Study) -> Figure | Note:
    """The parts of a step on the machine's roofline, at the fewest and at the most streams."""
    machine = study.machine
    if not machine.bandwidth_bytes_s or not machine.flop_s:
        return Note("No roofline: bandwidth or rate is unknown.")
    ends = dict(zip(study.points, study.floors, strict=True))
    parts = [
        {
            "name": f"{part.name}, {'1 stream' if point.streams == 1 else f'{point.streams} streams'}",
            "intensity_flop_per_byte": part.intensity_flop_per_byte,
        }
        for point, floor in ends.items()
        if point in (study.points[0], study.points[-1])
        for part in floor.parts
    ]
    drawn = figures.roofline(machine.bandwidth_bytes_s, machine.flop_s, parts, rehearsed=desk.run.rehearsed)
    return desk.figure("roofline", drawn)


def targets_table(desk: Desk, study: Study) -> Table | Note:
    """What would have to be true to reach the variant's target for one stream."""
    target_ms = _target_ms(desk)
    if target_ms is None:
        return Note("The parameter file sets no target for the time per token of one stream.")
    needed: tuple[Requirement, ...] = to_reach(study.floors[0], target_ms)
    if not needed:
        return Note(f"What {quantity(target_ms, 'ms')} per token needs is unknown: so is the floor.")
    return Table(
        ["what", "times now", "in words"],
        [(one.what, one.factor, one.sentence) for one in needed],
        caption=f"What would have to be true for {quantity(target_ms, 'ms')} per token at "
        f"{count(study.points[0].streams, 'stream')}, changing one thing alone; above 1 is room",
    )


def _target_ms(desk: Desk) -> float | None:
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


def lever_table(desk: Desk, study: Study) -> Table:
    """Levers with their arithmetic."""
    now = study.floors[0].floor_ms
    return Table(
        ["lever", Column("floor then", "ms"), Column("change", "pct", sign=True), "arithmetic"],
        [
            (one.name, one.floor_ms, 100 * (one.floor_ms / now - 1) if one.floor_ms and now else None, one.arithmetic)
            for one in find_levers(desk, study)
        ],
        caption=f"What would move the floor of {quantity(now, 'ms')} at {count(study.points[0].streams, 'stream')}",
    )


def conclude(desk: Desk, study: Study) -> Verdict:
    """Record floor and ratio; the closing sentence."""
    point, floor, ratio = study.points[0], study.floors[0], study.ratio(0)
    record = desk.record(
        "ceiling",
        {
            "floor_ms": floor.floor_ms,
            "ratio": ratio,
            "concurrency": point.streams,
            "tpot_ms": point.tpot_ms,
            "points": [
                {
                    "concurrency": one.streams,
                    "context_tokens": one.context_tokens,
                    "tpot_ms": one.tpot_ms,
                    "floor_ms": below.floor_ms,
                    "ratio": below.ratio(one.tpot_ms),
                    "parts": [part.to_json() for part in below.parts],
                    "missing": list(below.missing),
                    "assumed": list(below.assumed),
                }
                for one, below in zip(study.points, study.floors, strict=True)
            ],
            "machine": study.machine.to_json(),
            "levers": [one.to_json() for one in find_levers(desk, study)],
        },
    )
    sentence = floor.sentence(point.tpot_ms)
    if ratio is None:
        desk.find("floor_unknown", missing=", ".join(floor.missing), evidence=sentence, records=[record])
    elif ratio >= 1:
        desk.find(
            "near_floor" if ratio < NEAR else "above_floor",
            ratio=number(ratio),
            streams=count(point.streams, "stream"),
            top=max(floor.parts, key=lambda part: part.ms).name,
            evidence=sentence,
            verdict=f"{number(ratio)} times the floor",
            records=[record],
        )
    for index in range(len(study.points)):
        _find_below(desk, study, index, record)
    products = bench.products_ms(study.measured, point.streams)
    apart = ""
    if products is not None and products < point.tpot_ms:
        rest = quantity(point.tpot_ms - products, "ms")
        apart = (
            f" The matrix products alone, measured one by one, take {quantity(products, 'ms')}; {rest} are the rest."
        )
    return desk.conclude(f"{sentence}{apart}")


def _find_below(desk: Desk, study: Study, index: int, record: str) -> None:
    """A floor above the measurement is no floor, at whatever concurrency it shows."""
    point, floor, ratio = study.points[index], study.floors[index], study.ratio(index)
    if ratio is not None and ratio < 1:
        desk.find(
            "below_floor",
            subject=str(point.streams),
            ratio=number(ratio),
            streams=count(point.streams, "stream"),
            evidence=floor.sentence(point.tpot_ms),
            verdict=f"{number(ratio)} times the floor",
            records=[record],
        )


NEAR = 1.5
"""Below this ratio to the floor, only a lever that moves the floor itself is worth the work."""
