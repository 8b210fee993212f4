"""Record floor and ratio, with the findings that follow from them."""

from __future__ import annotations

from perfbook.desk import Desk, Verdict
from perfbook.study import bench
from perfbook.study.ceiling.analysis import Study, find_levers
from perfbook.units import count, number, quantity

NEAR = 1.5
"""Below this ratio to the floor, only a lever that moves the floor itself is worth the work."""


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
