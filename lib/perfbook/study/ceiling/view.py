"""What the floor rests on, the floor itself, and what would move it, in tables and figures."""

from __future__ import annotations

from perfbook import figures
from perfbook.ceiling import Requirement, to_reach
from perfbook.desk import Desk
from perfbook.figures import Figure
from perfbook.report.table import Column, Note, Table
from perfbook.study import bench
from perfbook.study.ceiling.analysis import Study, find_levers, target_ms
from perfbook.units import byte_rate, byte_size, count, flop_rate, number, quantity


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
    aim_ms = target_ms(desk)
    if aim_ms is None:
        return Note("The parameter file sets no target for the time per token of one stream.")
    needed: tuple[Requirement, ...] = to_reach(study.floors[0], aim_ms)
    if not needed:
        return Note(f"What {quantity(aim_ms, 'ms')} per token needs is unknown: so is the floor.")
    return Table(
        ["what", "times now", "in words"],
        [(one.what, one.factor, one.sentence) for one in needed],
        caption=f"What would have to be true for {quantity(aim_ms, 'ms')} per token at "
        f"{count(study.points[0].streams, 'stream')}, changing one thing alone; above 1 is room",
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
