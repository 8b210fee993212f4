"""Tables, figures and the verdict of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from perfbook import figures, stats
from perfbook.desk import Desk, Verdict
from perfbook.figures import Figure
from perfbook.figures.cells import per_user_tok_s, statistic, throughput_tok_s
from perfbook.params import Slo
from perfbook.report.table import Column, Note, Table
from perfbook.study import doubts, noise
from perfbook.study.sweep.analysis import SLO_SHARE, Sweep, over_repeats
from perfbook.units import count, quantity


def cell_table(sweep: Sweep) -> Table:
    """One row per concurrency: medians over its repeats."""
    rows = []
    for concurrency in sorted({cell["concurrency"] for cell in sweep.cells}):
        cells = [cell for cell in sweep.cells if cell["concurrency"] == concurrency]
        verdicts = sorted({cell["validity"]["verdict"] for cell in cells})
        windows = sorted({str(cell["window"]) for cell in cells})
        known = doubts.usable(cells) or cells
        rows.append(
            (
                concurrency,
                len(cells),
                sum(cell["requests"] for cell in cells),
                sum(cell["failed"] for cell in cells),
                over_repeats(known, throughput_tok_s),
                over_repeats(known, per_user_tok_s),
                over_repeats(known, lambda cell: statistic(cell, "ttft_ms", "p50")),
                over_repeats(known, lambda cell: statistic(cell, "ttft_ms", "p95")),
                over_repeats(known, lambda cell: statistic(cell, "tpot_ms", "p50")),
                over_repeats(known, lambda cell: statistic(cell, "gap_ms", "p99")),
                over_repeats(known, lambda cell: (cell.get("goodput") or {}).get("share")),
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
        caption="Throughput and latency over concurrency; medians over those repeats that are not invalid; "
        f"{doubts.clock(sweep.cells)}{energy_in_words(sweep.cells)}",
    )  # fmt: skip


def energy_in_words(cells: Sequence[Mapping[str, Any]]) -> str:
    """``; energy of the GPUs per token: 1.9 J at 1, 0.21 J at 128``: empty where their power is not known."""
    known: dict[int, list[float]] = {}
    for cell in cells:
        joules = cell.get("details", {}).get("telemetry", {}).get("energy_per_token_j")
        if joules is not None:
            known.setdefault(cell["concurrency"], []).append(joules)
    said = [f"{quantity(median(known[streams]), 'J', 2)} at {streams}" for streams in sorted(known)]
    return f"; energy of the GPUs per token: {', '.join(said)}" if said else ""


def reasons_table(sweep: Sweep) -> Table | Note:
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
        return Note(f"All {len(sweep.cells)} cells are valid.")
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


def own_noise(desk: Desk, sweep: Sweep, progress: Callable[[str], None]) -> Table | Note:
    """Null runs where the curve is read: what the client adds to the numbers by itself."""
    return noise.measure(desk, sweep.landmarks, progress)


def reconciliation_table(sweep: Sweep) -> Table | Note:
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
                ttft.get("client"), ttft.get("server"), queue.get("server"), ttft.get("difference"),
            )
        )  # fmt: skip
    if not rows:
        return Note("The server gives no metrics: its side cannot be known.")
    return Table(
        [
            "streams", "repeat", Column("client counted", "tokens"), Column("server counted", "tokens"),
            Column("TTFT, client", "ms"), Column("TTFT, server", "ms"), Column("of the server's: queueing", "ms"),
            Column("client − server", "ms", sign=True),
        ],
        rows,
        caption="Client against the server's own counters (means over each cell)",
    )  # fmt: skip


def conclude(desk: Desk, sweep: Sweep) -> Verdict:
    """Record the headline numbers and findings; the closing sentence."""
    knee, limit = sweep.knee, sweep.limit
    best, doubt = quantity(knee.best_tok_s, "tok_s"), doubts.sentence(sweep.cells) + burst_in_words(sweep)
    skipped = desk.run.record("sweep_skipped") or {"cells": [], "ended": None}
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
            "skipped": skipped["cells"],
            "ended": skipped["ended"],
        },
    )
    failed = unusable_in_words(sweep)
    if skipped["ended"]:
        failed = f"The sweep ended early: {skipped['ended'].partition(';')[0]}. {failed}"
        desk.find("sweep_ended", count=len(skipped["cells"]), evidence=skipped["ended"], records=[record])
    if sweep.unusable:
        desk.find(
            "cells_failed",
            streams=_streams(sweep.unusable),
            evidence=doubts.reasons(cell for cell in sweep.cells if cell["concurrency"] in sweep.unusable),
            records=[record],
        )
    if knee.concurrency is None and knee.cells > 1:  # one cell alone says nothing of a plateau
        last = max(cell["concurrency"] for cell in sweep.cells if cell["concurrency"] not in sweep.unusable)
        desk.find(
            "no_plateau",
            last=last,
            best=best,
            evidence=knee.sentence + doubt,
            verdict=stats.NO_PLATEAU,
            records=[record],
        )
    elif knee.concurrency is not None:
        desk.find(
            "plateau",
            streams=count(knee.concurrency, "stream"),
            best=best,
            evidence=knee.sentence + doubt,
            records=[record],
        )
        desk.record(
            "bottleneck",
            {"regime": f"{count(knee.concurrency, 'stream')} and more", "sentence": limit.sentence + doubt},
            key="plateau",
        )
    if limit.limit is stats.Limit.QUEUEING:
        desk.find(
            "limited_by_queueing",
            queue=quantity(_queue_at_end(sweep), "ms"),
            max_num_seqs=desk.variant.server.args.get("max-num-seqs", "vLLM's default"),
            evidence=limit.sentence + doubt,
            verdict=str(limit.limit),
            records=[record],
        )
    elif limit.limit is stats.Limit.STEP_TIME:
        desk.find(
            "limited_by_step_time",
            knee=knee.concurrency,
            evidence=limit.sentence + doubt,
            verdict=str(limit.limit),
            records=[record],
        )
    if sweep.slo is not None:
        desk.find(
            slo_rule(sweep.slo),
            streams=count(sweep.slo.concurrency or 0, "stream"),
            evidence=f"{slo_in_words(desk.variant.sweep.slo)}: {sweep.slo.sentence}{doubt}",
            records=[record],
        )
    if sweep.not_valid:
        desk.find(
            "cells_not_valid",
            count=len(sweep.not_valid),
            cells=f"{len(sweep.cells)} cells",
            where=desk.notebook,
            evidence=doubts.reasons(sweep.cells),
            records=[record],
        )
    slo = f" {sweep.slo.sentence}" if sweep.slo else ""
    return desk.conclude(f"{failed}{knee.sentence} {limit.sentence}{slo}{skipped_in_words(skipped['cells'])}{doubt}")


def skipped_in_words(cells: Sequence[Mapping[str, Any]]) -> str:
    """`` Planned cells that were not measured: 3, the time budget was spent.``, to follow a verdict; else empty."""
    reasons = Counter(str(cell["why"]) for cell in cells)
    if not reasons:
        return ""
    said = "; ".join(f"{number}, {why}" for why, number in reasons.items())
    return f" Planned cells that were not measured: {said}."


def unusable_in_words(sweep: Sweep) -> str:
    """Where nothing was measured that can be used, as a sentence before what the other cells say; empty: nowhere."""
    return f"Nothing usable was measured at {_streams(sweep.unusable)}. " if sweep.unusable else ""


def _streams(concurrencies: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, concurrencies))} stream{'s' if concurrencies != (1,) else ''}"


def burst_in_words(sweep: Sweep) -> str:
    """What a best throughput from bursts is worth, as a sentence to follow a claim; empty where it was steady."""
    best = [cell for cell in sweep.cells if cell["concurrency"] == sweep.knee.best_concurrency]
    if all(cell["window"] == "steady" for cell in best):
        return ""
    return " The best throughput comes from a burst: too few requests per stream for a steady window."


def slo_rule(slo: stats.SloLimit) -> str:
    """Which finding an SLO limit is; cells that miss it below others that meet it decide nothing."""
    if slo.concurrency is not None:
        return "slo_met"
    return "slo_unclear" if slo.meets_again else "slo_missed"


def slo_in_words(slo: Slo) -> str:
    """``SLO TTFT ≤ 2000 ms, TPOT ≤ 100 ms, for at least 95 % of a cell's requests``."""
    limits = [f"{name} ≤ {limit:g} ms" for name, limit in (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms)) if limit]
    return f"SLO {', '.join(limits)}, for at least {100 * SLO_SHARE:g} % of a cell's requests"


def _queue_at_end(sweep: Sweep) -> float | None:
    last = max(cell["concurrency"] for cell in sweep.cells)
    return over_repeats(
        [c for c in sweep.cells if c["concurrency"] == last],
        lambda c: (c.get("server") or {}).get("queue_ms"),
    )
