"""The bytes of a step, held against another size of model on the same machine.

The floor believes the checkpoint about the bytes that a step reads. Two models of different size, measured on one
machine, test that without a hardware counter: what both pay alike (scheduling, sampling, HTTP) cancels in the
difference of their times, so the bytes more, over the time more, cannot exceed the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perfbook.ceiling import implied_bandwidth_bytes_s
from perfbook.desk import Desk
from perfbook.record.run import Run
from perfbook.report.table import Note
from perfbook.study.ceiling.analysis import Study
from perfbook.units import byte_rate, byte_size, count, quantity

APART = 1.25  # bytes of one over the other from which their difference says something
BEYOND = 1.1  # of the bandwidth measured: a faster implied one is a contradiction, not noise
NEAR = 0.8  # of it: reading alone explains the difference


@dataclass(frozen=True)
class Reading:
    """One model's step at one stream: bytes that a rank reads, measured TPOT, and the run it is of."""

    run: str
    step_bytes: float
    tpot_ms: float


@dataclass(frozen=True)
class Crosscheck:
    """Two models against the memory.

    Attributes
    ----------
    here, there : Reading
        This run's and the other's.
    implied_bytes_s : float or None
        Bytes more over time more; None where the larger model takes no more time.
    bandwidth_bytes_s : float
        As measured in this run.
    """

    here: Reading
    there: Reading
    implied_bytes_s: float | None
    bandwidth_bytes_s: float

    @property
    def contradicted(self) -> bool:
        """Whether the bytes cannot be right, with this memory."""
        return self.implied_bytes_s is None or self.implied_bytes_s > BEYOND * self.bandwidth_bytes_s

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        pair = (
            f"{byte_size(self.here.step_bytes)} in {quantity(self.here.tpot_ms, 'ms')} here, "
            f"{byte_size(self.there.step_bytes)} in {quantity(self.there.tpot_ms, 'ms')} in {self.there.run}"
        )
        memory = byte_rate(self.bandwidth_bytes_s)
        if self.implied_bytes_s is None:
            return f"Contradicted: {pair}; the model that should read more takes no longer."
        implied = byte_rate(self.implied_bytes_s)
        if self.contradicted:
            return f"Contradicted: {pair}; the difference would be read at {implied}, and the memory gives {memory}."
        if self.implied_bytes_s >= NEAR * self.bandwidth_bytes_s:
            return f"Confirmed: {pair}; the difference is read at {implied}, about what the memory gives ({memory})."
        return (
            f"Not contradicted: {pair}; the difference is read at {implied} at least, within the memory's {memory}. "
            "The larger model also takes longer for other reasons than reading."
        )


def crosscheck(desk: Desk, study: Study) -> Note:
    """Hold the bytes against the newest other size of model with a floor on this machine; record what came out."""
    if desk.run.rehearsed:
        return Note("Not checked against another size of model: in a rehearsal bytes and times come from one law.")
    found = check(reading_of(desk.run.name, study), study.machine.bandwidth_bytes_s, others(desk.run))
    if found is None:
        return Note(
            "Not checked against another size of model: no other run on this machine has a floor with more, or "
            "fewer, bytes. The same model with half its layers would do."
        )
    record = desk.record(
        "bytes_check",
        {
            "other_run": found.there.run,
            "step_bytes": [found.here.step_bytes, found.there.step_bytes],
            "tpot_ms": [found.here.tpot_ms, found.there.tpot_ms],
            "implied_bytes_s": found.implied_bytes_s,
            "bandwidth_bytes_s": found.bandwidth_bytes_s,
            "contradicted": found.contradicted,
        },
    )
    if found.contradicted:
        desk.find("bytes_contradicted", other=found.there.run, evidence=found.sentence, records=[record])
    return Note(f"Checked against another size of model, at {count(1, 'stream')}. {found.sentence}")


def check(here: Reading | None, bandwidth_bytes_s: float | None, others: Iterable[Reading]) -> Crosscheck | None:
    """This run's reading against the first of the others apart enough; None where nothing can be said (pure)."""
    if here is None or not bandwidth_bytes_s:
        return None
    for there in others:
        small, large = sorted((here, there), key=lambda one: one.step_bytes)
        if large.step_bytes < APART * small.step_bytes:
            continue
        implied = None
        if large.tpot_ms > small.tpot_ms:
            implied = implied_bandwidth_bytes_s(small.step_bytes, small.tpot_ms, large.step_bytes, large.tpot_ms)
        return Crosscheck(here, there, implied, bandwidth_bytes_s)
    return None


def reading_of(run: str, study: Study) -> Reading | None:
    """The reading at one stream; None without one, or without a floor."""
    for point, floor in zip(study.points, study.floors, strict=True):
        if point.streams == 1 and floor.floor_ms is not None:
            return Reading(run, sum(part.moved_bytes or 0.0 for part in floor.parts), point.tpot_ms)
    return None


def others(run: Run) -> Iterable[Reading]:
    """Measured readings of other runs on the same machine, newest first."""
    machine = _machine(run)
    for other in reversed(Run.every()) if all(machine) else ():
        if other.path == run.path or other.rehearsed or _machine(other) != machine:
            continue
        record = other.record("ceiling") or {}
        for point in record.get("points", []):
            if point["concurrency"] == 1 and point["floor_ms"] is not None:
                moved = sum(part["moved_bytes"] or 0.0 for part in point["parts"])
                yield Reading(other.name, moved, point["tpot_ms"])


def _machine(run: Run) -> tuple[Any, ...]:
    provenance: Mapping[str, Any] = run.header.get("provenance", {})
    return (provenance.get("host"), provenance.get("hardware"))
