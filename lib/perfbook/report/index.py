"""``outputs/index.html``: every run of every variant with its headline numbers, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from perfbook import paths
from perfbook.record import jsonl
from perfbook.record.run import Run
from perfbook.report import answer, evidence, page


@dataclass(frozen=True)
class Line:
    """One run in the index; ``numbers`` are (text, sortable value) in the order of the columns."""

    variant: str
    run: str
    href: str
    started: str
    state: str
    because: str
    tone: str
    rehearsed: bool
    model: str
    hardware: str
    numbers: tuple[tuple[str, float | None], ...]
    targets: str
    limits: tuple[tuple[str, str], ...]


def write() -> Path:
    """Write the index of all runs and return its path."""
    folder = paths.outputs()
    lines = [_line(run) for run in sorted(Run.every(), key=lambda run: run.path.name, reverse=True)]
    path = folder / "index.html"
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write_atomically(path, page.fill("index.html.j2", lines=lines, variants=len({x.variant for x in lines})))
    return path


def _line(run: Run) -> Line:
    found = evidence.glance(run)
    single, sweep, ceiling = found.part("single_stream"), found.part("sweep"), found.part("ceiling")
    values = (
        single.get("decode_tok_s"),
        single.get("ttft_ms"),
        sweep.get("best_tok_s"),
        sweep.get("knee_concurrency"),
        ceiling.get("ratio"),
    )
    word, sentence = answer.state(found)
    here = next((name for name in ("report.html", "results.md") if (run.path / name).is_file()), "")
    return Line(
        variant=found.variant,
        run=run.path.name,
        href=quote(f"{found.variant}/{run.path.name}/{here}") if here else "",
        started=answer.when(found.header.get("started")),
        state=word,
        because="" if word == "complete" else sentence,
        tone={"complete": "good", "incomplete": "problem"}.get(word, "warning"),
        rehearsed=found.rehearsed,
        model=answer.model(found),
        hardware=answer.hardware(found),
        numbers=tuple(answer.shown(value) for value in values),
        targets=answer.targets_met(found),
        limits=tuple(answer.bottlenecks(found)),
    )
