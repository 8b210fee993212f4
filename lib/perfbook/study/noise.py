"""The client's own noise beside what it measured: an effect that the client can make by itself is not the server's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from perfbook.desk import Desk
from perfbook.errors import MeasurementFailed
from perfbook.figures.cells import statistic
from perfbook.report.table import Column, Note, Table
from perfbook.stream.calibrate import NoiseFloor, null_run
from perfbook.study import doubts
from perfbook.units import quantity

RECORD = "null_run"
WITHIN_NOISE = "within the client's noise"
"""The verdict on a difference that the statistics call real and the client can make by itself."""
_SECONDS = 2.0
_MOST_TOKENS, _FEWEST_TOKENS = 2000, 10


def measure(desk: Desk, concurrencies: Iterable[int], progress: Callable[[str], None]) -> Table | Note:
    """A null run at each concurrency, its tokens as far apart as the sweep's cells had them; recorded.

    A server with a known schedule takes the place of the measured one, on this machine and otherwise idle: what is left
    is what client, kernel and clock add by themselves.
    """
    if desk.run.rehearsed:
        return Note("No null run: it would put this machine's client into a rehearsal of another one.")
    cells = doubts.usable(desk.run.records("sweep_cell"))
    rows = []
    with desk.measuring():
        for concurrency in sorted(set(concurrencies)):
            known = [cell for cell in cells if cell["concurrency"] == concurrency]
            gaps_ms = [gap for cell in known if (gap := statistic(cell, "gap_ms", "p50"))]
            if not gaps_ms:
                continue
            progress(f"null run, {concurrency} streams")
            try:
                floor = run_null(concurrency, min(gaps_ms))
            except MeasurementFailed as error:
                return Note(f"The client's own noise is unknown: {error}.")
            desk.record(RECORD, floor.as_dict(), key=str(concurrency))
            rows.append(row(floor))
    return Table(COLUMNS, rows, caption=CAPTION) if rows else Note("No null run: no cell has a time between tokens.")


def run_null(concurrency: int, gap_ms: float) -> NoiseFloor:
    """The null run beside a cell of so many streams, whose tokens come so far apart.

    Raises
    ------
    MeasurementFailed
        The null server did not start, or the client was starved.
    """
    tick_ms = max(1.0, gap_ms)
    tokens = min(_MOST_TOKENS, max(_FEWEST_TOKENS, math.ceil(_SECONDS * 1e3 / tick_ms)))
    return null_run(concurrency, tick_ms=tick_ms, tokens=tokens)


COLUMNS: Sequence[str | Column] = (
    "streams", Column("between tokens", "ms"), "token events", Column("TTFT error, mean", "ms", digits=2, sign=True),
    Column("TTFT error, largest", "ms", digits=2), Column("gap error, p99", "ms", digits=2),
    Column("arrival error, p99", "ms", digits=2), "clock",
)  # fmt: skip
CAPTION = "The client's own error, against a server that says when it sent each token; nothing smaller is an effect"


def row(floor: NoiseFloor) -> tuple[Any, ...]:
    """One line of the table."""
    return (
        floor.concurrency, floor.tick_ms, floor.tokens, floor.ttft_error_ms["mean"], floor.ttft_error_ms["max"],
        floor.gap_error_ms["p99"], floor.arrival_error_ms["p99"], floor.clock,
    )  # fmt: skip


def sentence(floor: NoiseFloor) -> str:
    """``the client's own error at 64 streams (null run, 1,280 tokens): TTFT +0.004 ms, gaps 0.02 ms (p99)``."""
    ttft = quantity(floor.ttft_error_ms["mean"], "ms", 2, sign=True)
    gap = quantity(floor.gap_error_ms["p99"], "ms", 2)
    return (
        f"the client's own error at {floor.concurrency} streams (null run, {floor.tokens:,} tokens): "
        f"TTFT {ttft} in the mean, gaps {gap} (p99)"
    )


def refusal(records: Iterable[Mapping[str, Any]], effect_ms: float, of: Literal["ttft", "gap"]) -> str:
    """Why an effect may not be called real, by any null run on record; empty when none refuses it (pure).

    Parameters
    ----------
    records : iterable of mapping
        ``null_run`` records.
    effect_ms : float
        Difference of two means or medians of TTFT, or of TPOT and gaps.
    of : {"ttft", "gap"}
    """
    names = [field.name for field in fields(NoiseFloor)]
    floors = [NoiseFloor(**{name: record[name] for name in names}) for record in records]
    return next((said for floor in floors if (said := floor.refuses(effect_ms, of))), "")
