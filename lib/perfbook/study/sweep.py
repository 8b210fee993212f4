"""04: where does throughput saturate, what does it cost in latency, and what is the limit?

Cells are measured in blocks: every concurrency once per block, in shuffled order, so that drift of the machine does not
look like an effect of concurrency. The knee is a stated rule, and what limits there, requests that queue or a step
whose time saturates, is decided from what server and client saw.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfbook import figures, stats
from perfbook.desk import Desk, Verdict
from perfbook.errors import MeasurementFailed
from perfbook.figures import Figure
from perfbook.figures.cells import per_user_tok_s, statistic, throughput_tok_s
from perfbook.params import Slo
from perfbook.report.table import Column, Table
from perfbook.stream.load import measure as measure_cell
from perfbook.stream.workload import RequestShape
from perfbook.units import quantity

NOTEBOOK = "04_sweep"
CellRecord = Mapping[str, Any]


def measure(desk: Desk, progress: Callable[[str], None]) -> None:
    """Measure every cell, block after block; one record per cell, and one that says what was skipped.

    Every cell gets prompts of its own, distinct from their first cache block on.
    """
    plan, workload = desk.variant.sweep, desk.variant.workload
    endpoint = desk.endpoint()
    shape = RequestShape(
        output_tokens=plan.output_tokens,
        min_tokens=plan.output_tokens if workload.ignore_eos else 0,
        ignore_eos=workload.ignore_eos,
        temperature=workload.temperature,
        extra_body=workload.extra_body,
    )
    shuffle, began, order = random.Random(workload.seed), time.monotonic(), 0
    skipped = []
    with desk.measuring():
        for repeat in range(plan.repeats):
            # The first block ascends: each cell is warm for the next, and an early end leaves a usable curve.
            block = list(plan.concurrency) if repeat == 0 else shuffle.sample(plan.concurrency, len(plan.concurrency))
            for concurrency in block:
                spent = time.monotonic() - began
                if repeat > 0 and plan.time_budget_s is not None and spent > plan.time_budget_s:
                    skipped.append({"concurrency": concurrency, "repeat": repeat})
                    continue
                progress(f"block {repeat + 1} of {plan.repeats}, {concurrency} streams")
                count = concurrency * plan.requests_per_stream
                key = f"{concurrency}/{repeat}"
                cell = measure_cell(
                    endpoint, desk.prompts(plan.prompt_tokens, count + 1, workload.seed + 1000 * order), shape,
                    concurrency=concurrency, requests=count, warmup=1,
                    metrics=desk.counters, cell=f"{NOTEBOOK}/{key}",
                )  # fmt: skip
                seen = server_side(cell.reconciliation, cell.summary["duration_s"])
                goodput = within_slo(cell.requests.to_pylist(), plan.slo)
                desk.record_cell(
                    "sweep_cell",
                    cell,
                    {
                        "order": order,
                        "repeat": repeat,
                        "server": seen,
                        "goodput": goodput,
                        "reconciliation": cell.reconciliation,
                    },
                    key=key,
                )
                order += 1
    desk.record("sweep_skipped", {"cells": skipped, "time_budget_s": plan.time_budget_s})


def server_side(reconciliation: Sequence[Mapping[str, Any]], duration_s: float | None) -> dict[str, float | None]:
    """The server's own view of a cell, from what its counters and histograms saw (pure).

    Requests running and waiting are time averages by Little's law: the seconds that all requests together spent in
    a state, over the length of the cell. That needs no polling, which would load the process that streams.

    Returns
    -------
    dict
        ``running, waiting`` (requests), ``queue_ms`` (mean per request), ``preemptions``; None where the server did
        not say.
    """
    said = {row["quantity"]: row["server"] for row in reconciliation}
    queue_ms, e2e_ms, count = said.get("queue mean"), said.get("E2E mean"), said.get("requests finished")

    def on_average(spent_ms: float | None) -> float | None:
        return spent_ms / 1e3 * count / duration_s if spent_ms is not None and count and duration_s else None

    return {
        "running": on_average(e2e_ms - queue_ms) if e2e_ms is not None and queue_ms is not None else None,
        "waiting": on_average(queue_ms),
        "queue_ms": queue_ms,
        "preemptions": said.get("preemptions"),
    }


def within_slo(requests: Sequence[Mapping[str, Any]], slo: Slo) -> dict[str, Any] | None:
    """Requests that met every limit of the SLO; None when there is none. A failed request meets nothing."""
    if slo.ttft_ms is None and slo.tpot_ms is None:
        return None
    met = [request for request in requests if request["ok"] and _meets(request, slo)]
    return {"met": len(met), "of": len(requests), "share": len(met) / len(requests) if requests else None}


def _meets(request: Mapping[str, Any], slo: Slo) -> bool:
    limits = ((slo.ttft_ms, request["ttft_ms"]), (slo.tpot_ms, request["tpot_ms"]))
    return all(limit is None or (value is not None and value <= limit) for limit, value in limits)


@dataclass(frozen=True)
class Sweep:
    """The analysis of a sweep.

    Attributes
    ----------
    cells : tuple of mappings
        Every measured cell (repeats apart), in the order measured.
    knee, limit, slo
        Where the plateau begins, what holds it, the last concurrency within the SLO (None without an SLO).
    failed_cells : tuple of int
        Concurrencies of cells in which no request succeeded.
    """

    cells: tuple[CellRecord, ...]
    knee: stats.Knee
    limit: stats.Limitation
    slo: stats.SloLimit | None
    failed_cells: tuple[int, ...]

    @property
    def not_valid(self) -> list[CellRecord]:
        """Cells that are suspect or invalid."""
        return [cell for cell in self.cells if cell["validity"]["verdict"] != "valid"]


SLO_SHARE = 0.95
"""A cell meets the SLO when at least this share of its requests does."""


def analyse(cells: Sequence[CellRecord], *, seed: int, max_num_seqs: int | None) -> Sweep:
    """Knee, limit and SLO of measured cells (pure).

    Raises
    ------
    MeasurementFailed
        No cell has a throughput.
    """
    rates: dict[int, list[float]] = {}
    for cell in cells:
        if rate := throughput_tok_s(cell):
            rates.setdefault(cell["concurrency"], []).append(rate)
    failed = tuple(sorted({cell["concurrency"] for cell in cells} - set(rates)))
    if not rates:
        raise MeasurementFailed(
            "no cell of the sweep delivered a token: see the errors in its records and the server's log"
        )
    knee = stats.find_knee(rates, seed=seed)
    met: dict[int, list[bool]] = {}
    for cell in cells:
        if cell.get("goodput"):
            met.setdefault(cell["concurrency"], []).append(cell["goodput"]["share"] >= SLO_SHARE)
    return Sweep(
        cells=tuple(cells),
        knee=knee,
        limit=stats.what_limits([_load_of(cells, c) for c in sorted(rates)], knee, max_num_seqs=max_num_seqs),
        slo=stats.find_slo_limit(met) if met else None,
        failed_cells=failed,
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


def cell_table(sweep: Sweep) -> Table:
    """One row per concurrency: medians over its repeats."""
    rows = []
    for concurrency in sorted({cell["concurrency"] for cell in sweep.cells}):
        cells = [cell for cell in sweep.cells if cell["concurrency"] == concurrency]
        verdicts = sorted({cell["validity"]["verdict"] for cell in cells})
        windows = sorted({str(cell["window"]) for cell in cells})
        rows.append(
            (
                concurrency,
                len(cells),
                sum(cell["requests"] for cell in cells),
                sum(cell["failed"] for cell in cells),
                _over(cells, throughput_tok_s),
                _over(cells, per_user_tok_s),
                _over(cells, lambda cell: statistic(cell, "ttft_ms", "p50")),
                _over(cells, lambda cell: statistic(cell, "ttft_ms", "p95")),
                _over(cells, lambda cell: statistic(cell, "tpot_ms", "p50")),
                _over(cells, lambda cell: statistic(cell, "gap_ms", "p99")),
                _over(cells, lambda cell: (cell.get("goodput") or {}).get("share")),
                "/".join(windows),
                "/".join(verdicts),
            )
        )
    return Table(
        [
            "streams", "repeats", "requests", "failed", Column("throughput", "tok_s"), Column("per user", "tok_s"),
            Column("TTFT p50", "ms"), Column("TTFT p95", "ms"), Column("TPOT p50", "ms"), Column("gap p99", "ms"),
            "share within SLO", "window", "validity",
        ],
        rows,
        caption="Throughput and latency over concurrency; medians over repeats of one launch",
    )  # fmt: skip


def reasons_table(sweep: Sweep) -> Table | str:
    """Why cells are not valid as measured."""
    rows = [
        (
            cell["concurrency"],
            cell["repeat"] + 1,
            cell["validity"]["verdict"],
            "; ".join(cell["validity"]["reasons"]),
        )
        for cell in sweep.not_valid
    ]
    if not rows:
        return f"All {len(sweep.cells)} cells are valid."
    return Table(["streams", "repeat", "validity", "reasons"], rows, caption="Cells to read with care")


def throughput_figure(desk: Desk, sweep: Sweep) -> Figure:
    """Throughput over concurrency, knee and SLO marked."""
    return desk.figure(
        "throughput_over_concurrency",
        figures.throughput_over_concurrency(
            sweep.cells,
            knee=sweep.knee.concurrency,
            best=sweep.knee.best_tok_s,
            slo=sweep.slo.concurrency if sweep.slo else None,
            rehearsed=desk.run.rehearsed,
        ),
    )


def latency_figure(desk: Desk, sweep: Sweep) -> Figure:
    """Time to first token and time per token over concurrency, against the limits."""
    slo = desk.variant.sweep.slo
    drawn = figures.latency_over_concurrency(
        sweep.cells, slo_ttft_ms=slo.ttft_ms, slo_tpot_ms=slo.tpot_ms, rehearsed=desk.run.rehearsed
    )
    return desk.figure("latency_over_concurrency", drawn)


def pareto_figure(desk: Desk, sweep: Sweep) -> Figure:
    """What all users get together over what each one gets."""
    return desk.figure("throughput_latency", figures.throughput_latency(sweep.cells, rehearsed=desk.run.rehearsed))


def reconciliation_table(sweep: Sweep) -> Table | str:
    """Client against server: token sums over all cells, and the mean time to first token of each."""
    rows = []
    for cell in sweep.cells:
        said = {row["quantity"]: row for row in cell["reconciliation"]}
        if not said:
            continue
        ttft, tokens, queue = (
            said.get("TTFT mean", {}),
            said.get("output tokens", {}),
            said.get("queue mean", {}),
        )
        rows.append(
            (
                cell["concurrency"], cell["repeat"] + 1, tokens.get("client"), tokens.get("server"),
                ttft.get("client"), ttft.get("server"), ttft.get("difference"), queue.get("server"),
            )
        )  # fmt: skip
    if not rows:
        return "The server gives no metrics: its side cannot be known."
    return Table(
        [
            "streams", "repeat", Column("client counted", "tokens"), Column("server counted", "tokens"),
            Column("TTFT, client", "ms"), Column("TTFT, server", "ms"), Column("difference", "ms", sign=True),
            Column("of it queueing", "ms"),
        ],
        rows,
        caption="Client against the server's own counters (means over each cell)",
    )  # fmt: skip


def conclude(desk: Desk, sweep: Sweep) -> Verdict:
    """Record the headline numbers and findings; the closing sentence."""
    knee, limit = sweep.knee, sweep.limit
    best = quantity(knee.best_tok_s, "tok_s")
    skipped = desk.run.record("sweep_skipped")
    record = desk.record(
        "sweep",
        {
            "best_tok_s": knee.best_tok_s,
            "best_concurrency": knee.best_concurrency,
            "knee_concurrency": knee.concurrency,
            "limit": str(limit.limit),
            "knee": knee.to_json(),
            "limitation": limit.to_json(),
            "slo": sweep.slo.to_json() if sweep.slo else None,
            "skipped": skipped["cells"] if skipped else [],
        },
    )
    if knee.concurrency is None:
        last = max(cell["concurrency"] for cell in sweep.cells)
        desk.find(
            "no_plateau",
            last=last,
            best=best,
            evidence=knee.sentence,
            verdict=stats.NO_PLATEAU,
            records=[record],
        )
    else:
        desk.find("plateau", knee=knee.concurrency, best=best, evidence=knee.sentence, records=[record])
        desk.record(
            "bottleneck",
            {"regime": f"{knee.concurrency} streams and more", "sentence": limit.sentence},
            key="plateau",
        )
    if limit.limit is stats.Limit.QUEUEING:
        desk.find(
            "limited_by_queueing",
            queue=quantity(_queue_at_end(sweep), "ms"),
            max_num_seqs=desk.variant.server.args.get("max-num-seqs", "vLLM's default"),
            evidence=limit.sentence,
            verdict=str(limit.limit),
            records=[record],
        )
    elif limit.limit is stats.Limit.STEP_TIME:
        desk.find(
            "limited_by_step_time",
            knee=knee.concurrency,
            evidence=limit.sentence,
            verdict=str(limit.limit),
            records=[record],
        )
    if sweep.slo is not None:
        met = sweep.slo.concurrency is not None
        desk.find(
            "slo_met" if met else "slo_missed",
            concurrency=sweep.slo.concurrency,
            evidence=sweep.slo.sentence,
            records=[record],
        )
    if sweep.not_valid:
        desk.find(
            "cells_not_valid",
            count=len(sweep.not_valid),
            cells=len(sweep.cells),
            evidence=_reasons(sweep),
            records=[record],
        )
    slo = f" {sweep.slo.sentence}" if sweep.slo else ""
    return desk.conclude(f"{knee.sentence} {limit.sentence}{slo}")


def _load_of(cells: Sequence[CellRecord], concurrency: int) -> stats.CellLoad:
    group = [cell for cell in cells if cell["concurrency"] == concurrency]

    def server(name: str) -> float | None:
        return _over(group, lambda cell: (cell.get("server") or {}).get(name))

    preemptions = server("preemptions")
    return stats.CellLoad(
        concurrency=concurrency,
        throughput_tok_s=_over(group, throughput_tok_s) or 0.0,
        tpot_ms=_over(group, lambda cell: statistic(cell, "tpot_ms", "p50")),
        ttft_ms=_over(group, lambda cell: statistic(cell, "ttft_ms", "p50")),
        running=server("running"),
        waiting=server("waiting"),
        preemptions=None if preemptions is None else round(preemptions),
    )


def _over(cells: Sequence[CellRecord], value: Callable[[CellRecord], float | None]) -> float | None:
    """Median over repeats of what is known."""
    known = [found for cell in cells if (found := value(cell)) is not None]
    return float(stats.median_interval(known).value or 0.0) if known else None


def _queue_at_end(sweep: Sweep) -> float | None:
    last = max(cell["concurrency"] for cell in sweep.cells)
    return _over(
        [c for c in sweep.cells if c["concurrency"] == last],
        lambda c: (c.get("server") or {}).get("queue_ms"),
    )


def _reasons(sweep: Sweep) -> str:
    return "; ".join(sorted({reason for cell in sweep.not_valid for reason in cell["validity"]["reasons"]}))
