"""``results.md``: the running results document. Readable on its own at any moment of a run."""

from __future__ import annotations

from pathlib import Path

from perfbook import units
from perfbook.record import jsonl
from perfbook.record.run import Run, now_utc
from perfbook.report import answer, evidence, safe
from perfbook.report.evidence import ENDED_WELL, Evidence, mappings, of_a_kind, verdict_to_show
from perfbook.report.table import Column, Table


def write(run: Run) -> Path:
    """Write ``results.md`` from what is recorded so far, and return its path."""
    found = evidence.read(run)
    scrub = safe.scrubber(run.path)
    path = run.path / "results.md"
    parts = [_head(found), _headlines(found), _limits(found), _tables(found), _findings(found), _notebooks(found)]
    jsonl.write_atomically(path, scrub("\n\n".join(part for part in parts if part)) + "\n")
    return path


def _head(found: Evidence) -> str:
    lines = [
        f"# {_plain(found.variant)}{' (rehearsal)' if found.rehearsed else ''}",
        f"{_plain(answer.model(found))} on {_plain(answer.engine(found))}, {_plain(answer.hardware(found))}. "
        f"Started {answer.when(found.header.get('started'))}; written {answer.when(now_utc())}.",
    ]
    lines += [f"> **{severity.capitalize()}.** {_plain(sentence)}" for severity, sentence in answer.warnings(found)]
    return "\n\n".join(lines)


def _headlines(found: Evidence) -> str:
    rows = [
        (one.label, one.value, "; ".join(one.details), one.notebook if one.known else "")
        for one in answer.headlines(found)
    ]
    return "## The answer\n\n" + Table(["what", "value", "details", "from"], rows).markdown()


def _limits(found: Evidence) -> str:
    lines = [f"- **{_plain(regime)}**: {_plain(sentence)}" for regime, sentence in answer.bottlenecks(found)]
    return "## What limits\n\n" + "\n".join(lines) if lines else ""


def _tables(found: Evidence) -> str:
    tables = (
        ("Targets", answer.targets(found)),
        ("Concurrency sweep", _sweep(found)),
        ("What was tried", answer.tuning(found)),
    )
    return "\n\n".join(f"## {title}\n\n{table.markdown()}" for title, table in tables if table)


def _sweep(found: Evidence) -> Table | None:
    """Every cell, in the order of concurrency."""
    cells = mappings(found.part("sweep").get("cells"))
    cells = cells or [r for r in found.records.values() if r.get("kind") == "sweep_cell"]
    cells.sort(key=lambda cell: [answer.finite(cell.get(key)) or 0 for key in ("concurrency", "repeat")])
    rows = [
        (
            answer.finite(cell.get("concurrency")),
            repeat + 1 if (repeat := answer.finite(cell.get("repeat"))) is not None else units.UNKNOWN,
            _first(answer.finite(cell.get("output_tok_s_plateau")), answer.finite(cell.get("output_tok_s"))),
            *(answer.finite(_within(cell, key, which)) for key in ("ttft_ms", "tpot_ms") for which in ("p50", "p99")),
            answer.finite(cell.get("failed")),
            _within(cell, "validity", "verdict") or units.UNKNOWN,
        )
        for cell in cells
    ]
    columns: list[str | Column] = ["concurrency", "repeat", Column("throughput", "tok_s")]
    columns += [Column(f"{name} {which}", "ms") for name in ("TTFT", "TPOT") for which in ("p50", "p99")]
    return Table([*columns, "failed", "validity"], rows) if rows else None


def _findings(found: Evidence) -> str:
    parts = []
    for kin in of_a_kind(found.findings):
        for finding in kin:
            records = finding.get("records", [])
            named = f", {'records' if len(records) > 1 else 'record'} {', '.join(records)}" if records else ""
            verdict = _plain(verdict_to_show(finding))
            parts += [
                f"### {str(finding['severity']).capitalize()}: {_plain(finding.get('title'))}",
                _plain(finding.get("evidence")),
                f"Verdict: {verdict}" if verdict else "",
                f"From {_plain(finding.get('notebook'))}{named}.",
            ]
        parts.append(f"Next: {_plain(kin[0]['next_step'])}" if kin[0].get("next_step") else "")
    parts = [part for part in parts if part]
    return "## Findings\n\n" + "\n\n".join(parts) if parts else ""


def _notebooks(found: Evidence) -> str:
    """What is finished so far, and when."""
    last: dict[str, str] = {}
    for record in found.records.values():
        name = str(record.get("notebook", ""))
        last[name] = max(last.get(name, ""), str(record.get("time", "")))
    rows = [
        (
            one.name,
            one.status,
            answer.when(last[one.name]) if last.get(one.name) else units.UNKNOWN,
            units.duration(one.seconds),
            _plain(one.verdict if one.status == ENDED_WELL else one.reason),
        )
        for one in found.notebooks
    ]
    if not rows:
        return "## Notebooks\n\nNone has recorded anything yet."
    return (
        "## Notebooks\n\n" + Table(["notebook", "status", "last record", "took", "verdict or reason"], rows).markdown()
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _within(cell: dict[str, object], key: str, which: str) -> object:
    value = cell.get(key)
    return value.get(which) if isinstance(value, dict) else None


def _plain(value: object) -> str:
    """Text that Markdown shows as it is: on one line, and no tag of it taken for markup."""
    return " ".join(str(value or "").replace("&", "&amp;").replace("<", "&lt;").split())
