"""From measured cells to knee, limit and SLO (pure, but for :func:`load`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfbook import stats
from perfbook.desk import Desk
from perfbook.errors import MeasurementFailed
from perfbook.figures.cells import statistic, throughput_tok_s
from perfbook.study import doubts
from perfbook.study.sweep.measure import NOTEBOOK

CellRecord = Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The analysis of a sweep.

    Attributes
    ----------
    cells : tuple of mappings
        Every measured cell (repeats apart), in the order measured.
    knee, limit, slo
        Where the plateau begins, what holds it, the last concurrency within the SLO (None without an SLO).
    unusable : tuple of int
        Concurrencies without a cell that can decide anything: no request succeeded there, or every cell is invalid.
    """

    cells: tuple[CellRecord, ...]
    knee: stats.Knee
    limit: stats.Limitation
    slo: stats.SloLimit | None
    unusable: tuple[int, ...]

    @property
    def landmarks(self) -> list[int]:
        """The concurrencies that the curve is read at: lowest, knee, highest."""
        measured = sorted({cell["concurrency"] for cell in self.cells} - set(self.unusable))
        return sorted({measured[0], self.knee.concurrency or measured[-1], measured[-1]})

    @property
    def not_valid(self) -> list[CellRecord]:
        """Cells that are suspect or invalid."""
        return doubts.not_valid(self.cells)


SLO_SHARE = 0.95
"""A cell meets the SLO when at least this share of its requests does."""


def analyse(cells: Sequence[CellRecord], *, seed: int, max_num_seqs: int | None) -> Sweep:
    """Knee, limit and SLO of measured cells (pure). Invalid cells are shown, but decide nothing.

    Raises
    ------
    MeasurementFailed
        No usable cell has a throughput.
    """
    usable = doubts.usable(cells)
    rates: dict[int, list[float]] = {}
    for cell in usable:
        if rate := throughput_tok_s(cell):
            rates.setdefault(cell["concurrency"], []).append(rate)
    if not rates:
        raise MeasurementFailed(
            f"no cell of the sweep can be used ({doubts.reasons(cells) or 'no token arrived'}): see the server's log"
        )
    knee = stats.find_knee(rates, seed=seed)
    met: dict[int, list[bool]] = {}
    for cell in usable:
        if cell.get("goodput"):
            met.setdefault(cell["concurrency"], []).append(cell["goodput"]["share"] >= SLO_SHARE)
    return Sweep(
        cells=tuple(cells),
        knee=knee,
        limit=stats.what_limits([_load_of(usable, c) for c in sorted(rates)], knee, max_num_seqs=max_num_seqs),
        slo=stats.find_slo_limit(met) if met else None,
        unusable=tuple(sorted({cell["concurrency"] for cell in cells} - set(rates))),
    )


def load(desk: Desk) -> Sweep:
    """Read what :func:`measure` recorded, and analyse it."""
    desk.need("sweep_cell", NOTEBOOK)
    limit = desk.variant.server.args.get("max-num-seqs")
    return analyse(
        desk.run.records("sweep_cell"),
        seed=desk.variant.workload.seed,
        max_num_seqs=limit if isinstance(limit, int) else None,
    )


def _load_of(cells: Sequence[CellRecord], concurrency: int) -> stats.CellLoad:
    group = [cell for cell in cells if cell["concurrency"] == concurrency]

    def server(name: str) -> float | None:
        return over_repeats(group, lambda cell: (cell.get("server") or {}).get(name))

    preemptions = server("preemptions")
    return stats.CellLoad(
        concurrency=concurrency,
        throughput_tok_s=over_repeats(group, throughput_tok_s) or 0.0,
        tpot_ms=over_repeats(group, lambda cell: statistic(cell, "tpot_ms", "p50")),
        ttft_ms=over_repeats(group, lambda cell: statistic(cell, "ttft_ms", "p50")),
        running=server("running"),
        waiting=server("waiting"),
        preemptions=None if preemptions is None else round(preemptions),
    )


def over_repeats(cells: Sequence[CellRecord], value: Callable[[CellRecord], float | None]) -> float | None:
    """Median over repeats of what is known."""
    known = [found for cell in cells if (found := value(cell)) is not None]
    return float(stats.median_interval(known).value or 0.0) if known else None
