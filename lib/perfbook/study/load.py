"""The call behind ``perfbook load``: a measured sweep of any OpenAI-compatible server, no notebook."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from perfbook.errors import BadInput, MeasurementFailed, ServerFailed
from perfbook.server.endpoints import Endpoints
from perfbook.server.liveness import Watch
from perfbook.stream.calibrate import NoiseFloor
from perfbook.stream.cell import Cell
from perfbook.stream.endpoint import Deadlines, Endpoint
from perfbook.stream.export import vllm_bench_result
from perfbook.stream.load import Spread, measure
from perfbook.stream.tokenizers import ServerTokenizer
from perfbook.stream.workers import run_all
from perfbook.stream.workload import RequestShape, exact_prompts
from perfbook.study import noise
from perfbook.units import count, number, percent


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to measure: one cell per concurrency, each of ``requests`` after ``warmup`` more.

    ``kind`` is the endpoint. ``deadlines`` end a request that takes longer.
    ``seed`` makes the prompts repeatable; without one they are new each time, so that a server that was
    measured before cannot answer from its prefix cache. ``out`` gets ``requests.parquet``, ``events.parquet``
    and per cell ``vllm-bench-<cell>.json``."""

    base_url: str
    model: str
    concurrency: Sequence[int]
    requests: int
    max_tokens: int
    rate_per_s: float | None = None
    warmup: int = 1
    workers: int = 1
    prompt_tokens: int = 128
    api_key: str | None = field(default=None, repr=False)
    out: Path | None = None
    seed: int | None = None
    deadlines: Deadlines | None = None
    kind: Literal["chat", "completions"] = "chat"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The cells, notes on what was approximated or left out, and the client's own error at the most streams."""

    cells: list[Cell]
    notes: list[str]
    noise: NoiseFloor | None = None

    @property
    def measured(self) -> bool:
        """Whether at least one request succeeded."""
        return any(cell.measured for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        """Schema 1; plain numbers, null where there is none."""
        return {
            "schema": 1,
            "cells": [cell.summary | _shared(cell) for cell in self.cells],
            "null_run": self.noise.as_dict() if self.noise else None,
            "notes": self.notes,
        }

    def render_text(self) -> str:
        """A table for people, and under it each cell's reasons, reconciliation and notes."""
        rows = [_HEADER, *(_row(cell.summary) for cell in self.cells)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        lines.append(_UNITS)
        for cell in self.cells:
            lines += [f"{cell.name}: {_how(cell.summary)}"] if cell.measured else []
            lines += [f"{cell.name}: {reason}" for reason in cell.summary["validity"]["reasons"]]
            lines += [f"{cell.name}: note: {note}" for note in cell.details["notes"]]
            lines += [_of_worker(cell.name, worker) for worker in cell.details["workers"]]
            lines += _reconciled(cell)
        if self.noise is not None:
            lines.append(noise.sentence(self.noise))
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def run_load(
    request: LoadRequest, progress: Callable[[str], None] | None = None, spread: Spread = run_all
) -> LoadReport:
    """Measure every concurrency in turn; a server that hangs ends it there, and what was measured is reported.

    ``spread`` runs the workers.

    Raises
    ------
    BadInput
        Impossible values, or a folder that cannot be written.
    ServerFailed
        The host name cannot be resolved, or the server hung in the first warm-up. A server that refuses every
        request is a report with ``measured`` false.
    """
    endpoint = Endpoint(request.base_url, request.model, request.api_key, request.kind)
    _prepare(request.out)
    server = Endpoints(endpoint.root.rsplit("/", 1)[0], api_key=request.api_key)
    tokenizer = ServerTokenizer.find(endpoint)
    notes = []
    if tokenizer is None:
        notes.append("the server has no /tokenize: prompt lengths are approximate, one token per word")
    shape = RequestShape(request.max_tokens, min_tokens=request.max_tokens, ignore_eos=True)
    seeds = random.Random(request.seed)
    needed = request.requests + request.warmup
    cells: list[Cell] = []
    for concurrency in request.concurrency:
        prompts = exact_prompts(tokenizer, request.prompt_tokens, needed, seeds.randrange(2**31))
        try:
            cell = measure(
                endpoint,
                prompts,
                shape,
                concurrency=concurrency,
                requests=request.requests,
                warmup=request.warmup,
                rate_per_s=request.rate_per_s,
                deadlines=request.deadlines,
                metrics=server.metrics,
                progress=progress,
                watch=Watch(server),
                cell=_name(concurrency, cells),
                processes=request.workers,
                spread=spread,
            )
        except ServerFailed as error:
            if not cells:
                raise
            notes.append(f"ended before {concurrency} streams: {error}")
            break
        cells.append(cell)
        if cell.details["ended"]:
            notes.append(f"ended at {concurrency} streams: {cell.details['ended']}")
            break
    report = LoadReport(cells, notes, _own_error(cells, notes, progress))
    if request.out is not None:
        _write(request, report, endpoint)
    return report


def _own_error(cells: Sequence[Cell], notes: list[str], progress: Callable[[str], None] | None) -> NoiseFloor | None:
    """A null run like the cell with the most streams, on this machine and otherwise idle."""
    timed = [cell for cell in cells if cell.summary["gap_ms"]["p50"]]
    if not timed:
        return None
    most = max(timed, key=lambda cell: cell.summary["concurrency"])
    if progress is not None:
        progress(f"null run at {most.summary['concurrency']} streams: how much of it is the client")
    try:
        return noise.run_null(most.summary["concurrency"], most.summary["gap_ms"]["p50"])
    except MeasurementFailed as error:
        notes.append(f"the client's own error is unknown: {error}")
        return None


_HEADER = ("streams", "ok", "tok/s", "plateau", "TTFT", "p99", "TPOT", "gap p99", "E2E", "verdict")
_UNITS = (
    "TTFT, TPOT, E2E: means, ms; gap: between token events, ms;\n"
    "plateau: tok/s while all streams have a request outstanding"
)


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(cell["concurrency"]),
        f"{cell['ok']}/{cell['requests']}",
        number(cell["output_tok_s"]),
        number(cell["output_tok_s_plateau"]),
        number(cell["ttft_ms"]["mean"]),
        number(cell["ttft_ms"]["p99"]),
        number(cell["tpot_ms"]["mean"]),
        number(cell["gap_ms"]["p99"]),
        number(cell["e2e_ms"]["mean"]),
        cell["validity"]["verdict"],
    )


def _how(cell: dict[str, Any]) -> str:
    """What the numbers of a cell rest on."""
    clocks = {"kernel": "arrivals stamped by the kernel", "user": "arrivals read in user space"}
    merged = percent(cell["merged_share"] * 100)
    cost = number(cell["client_cpu_us_per_token"])
    return f"{cell['window']} window, {clocks[cell['clock']]}, {merged} of them merged, client {cost} µs per token"


def _shared(cell: Cell) -> dict[str, Any]:
    """The workers of a cell that several machines shared."""
    return {"workers": cell.details["workers"]} if cell.details["workers"] else {}


def _of_worker(cell: str, worker: dict[str, Any]) -> str:
    share = f"{worker['ok']} of {count(worker['requests'], 'request')} over {count(worker['streams'], 'stream')}"
    return f"{cell}: worker on {worker['host']}: {share}, clock known to ±{number(worker['clock_error_ms'])} ms"


def _reconciled(cell: Cell) -> list[str]:
    lines = []
    for row in cell.reconciliation:
        client = "" if row["client"] is None else f"client {number(row['client'], 6)}, "
        lines.append(f"{cell.name}: {row['quantity']}: {client}server {number(row['server'], 6)} {row['unit']}")
    return lines


def _name(concurrency: int, cells: list[Cell]) -> str:
    same = sum(cell.summary["concurrency"] == concurrency for cell in cells)
    return f"c{concurrency}-{same + 1}" if same else f"c{concurrency}"


def _prepare(out: Path | None) -> None:
    """Find out now, not after the measurement, that the folder cannot be written."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".perfbook"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"output folder {out} cannot be written: {error.strerror}; choose another") from None


def _write(request: LoadRequest, report: LoadReport, endpoint: Endpoint) -> None:
    assert request.out is not None
    pq.write_table(pa.concat_tables([cell.requests for cell in report.cells]), request.out / "requests.parquet")
    pq.write_table(pa.concat_tables([cell.events for cell in report.cells]), request.out / "events.parquet")
    for cell in report.cells:
        result = vllm_bench_result(cell, endpoint, rate_per_s=request.rate_per_s)
        path = request.out / f"vllm-bench-{cell.name}.json"
        path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
