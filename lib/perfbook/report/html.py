"""``report.html``: the one file to mail. The answer first, then what it rests on; offline, with nothing fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import yaml

from perfbook import __version__, units
from perfbook.masking import mask
from perfbook.record import jsonl
from perfbook.record.run import Run
from perfbook.report import answer, cells, evidence, page, safe
from perfbook.report.evidence import ENDED_WELL, Evidence, Notebook, of_a_kind, verdict_to_show
from perfbook.report.table import Table

Scrub = Callable[[str], str]
_SENTENCE_END = re.compile(r"(?<=[.;])\s+")
_RECORD_LIMIT = 20_000  # characters of one record in the page; the file has all of it


@dataclass(frozen=True)
class Link:
    """A link inside the page; without an id, just the text."""

    text: str
    id: str = ""


@dataclass(frozen=True)
class Entry:
    """A line of the table of contents; ``mark`` says what went wrong there."""

    id: str
    text: str
    mark: str = ""
    parts: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Section:
    """One notebook in the page."""

    name: str
    title: str
    status: str
    reason: str
    took: str
    verdict: str
    html: str
    headings: tuple[cells.Heading, ...] = ()
    cell_texts: Mapping[str, str] | None = None
    error_id: str = ""


def render(run: Run) -> Path:
    """Write ``report.html`` of a run and return its path.

    Whatever state the folder is in, there is a report: what is missing, broken or unfinished is said in it.
    """
    found = evidence.read(run)
    scrub = safe.scrubber(run.path)
    sections = [_section(notebook, scrub) for notebook in found.notebooks]
    findings = _findings(found, sections, scrub)
    cited = {identity for finding in found.findings for identity in finding.get("records", [])}
    header = found.header
    text = page.fill(
        "report.html.j2",
        variant=found.variant,
        run=run.path.name,
        version=__version__,
        rehearsed=found.rehearsed,
        model=answer.model(found),
        engine=answer.engine(found),
        hardware=answer.hardware(found),
        started=answer.when(header.get("started")),
        took=_took(header.get("started"), header.get("finished")),
        warnings=[(severity, scrub(sentence)) for severity, sentence in answer.warnings(found)],
        headlines=answer.headlines(found),
        bottlenecks=[(regime, scrub(sentence)) for regime, sentence in answer.bottlenecks(found)],
        targets=_html(answer.targets(found)),
        tuning=_html(answer.tuning(found)),
        findings=findings,
        provenance=_html(_provenance(found, scrub)),
        folded=_folded(header, scrub),
        sections=sections,
        sections_by_name={section.name for section in sections},
        records=[_record(found.records[identity], scrub) for identity in sorted(cited) if identity in found.records],
        record_count=len(found.records),
        contents=_contents(sections, bool(cited & set(found.records))),
    )
    path = run.path / "report.html"
    jsonl.write_atomically(path, text)
    return path


def _section(notebook: Notebook, scrub: Scrub) -> Section:
    """A notebook's section; one that cannot be converted still has its place, and says so."""
    reason, html, title = scrub(notebook.reason), "", notebook.name
    fragment = None
    if notebook.content is not None:
        try:
            fragment = cells.fragment(notebook.name, notebook.content, scrub)
            title, html = fragment.title, fragment.html
        except Exception as error:  # the other notebooks must not suffer from this one
            html = f'<p class="notice problem">This notebook could not be shown: {escape(scrub(repr(error)))}</p>'
    return Section(
        name=notebook.name,
        title=title,
        status=notebook.status,
        reason=reason or ("" if notebook.status == ENDED_WELL else "No reason is recorded."),
        took=units.duration(notebook.seconds) if notebook.seconds else "",
        verdict=scrub(notebook.verdict),
        html=html,
        headings=fragment.headings if fragment else (),
        cell_texts=fragment.cell_texts if fragment else None,
        error_id=fragment.error_id if fragment else "",
    )


def _findings(found: Evidence, sections: list[Section], scrub: Scrub) -> list[dict[str, Any]]:
    """Findings, those of a kind together, each with links to the cell that shows it and the records it rests on."""
    by_name = {section.name: section for section in sections}
    shown = []
    for kin in of_a_kind(found.findings):
        points = []
        for finding in kin:
            texts = {key: scrub(str(finding.get(key) or "")) for key in ("title", "evidence")}
            name = str(finding.get("notebook", ""))
            links = [_where(by_name.get(name), name, texts["title"], *_SENTENCE_END.split(texts["evidence"]))]
            for identity in finding.get("records", []):
                known = identity in found.records
                links.append(Link(f"record {identity}", f"record-{identity}" if known else ""))
            points.append({**texts, "verdict": scrub(verdict_to_show(finding)), "links": links})
        next_step = scrub(str(kin[0].get("next_step") or ""))
        shown.append({"severity": kin[0]["severity"], "points": points, "next_step": next_step})
    return shown


def _where(section: Section | None, name: str, *sentences: str) -> Link:
    """The cell whose output says the first of some sentences that any says, else the notebook's section or its name."""
    if section is None:
        return Link(name)
    for sentence in (" ".join(sentence.split()) for sentence in sentences):
        for anchor, text in (section.cell_texts or {}).items():
            if sentence and sentence in text:
                return Link(f"{name}, cell", anchor)
    return Link(name, name)


def _provenance(found: Evidence, scrub: Scrub) -> Table:
    """Where the numbers come from, one fact a row."""
    header = found.header
    source = header.get("provenance")
    source = source if isinstance(source, Mapping) else {}
    versions = source.get("versions")
    git = source.get("git")
    clock = source.get("clock")
    rows: list[tuple[str, Any]] = [
        ("run", f"{found.variant}/{found.path.name}"),
        ("started", answer.when(header.get("started"))),
        ("finished", answer.when(header["finished"]) if header.get("finished") else "not recorded"),
        ("model", answer.model(found)),
        ("engine", answer.engine(found)),
        ("server's hardware", answer.hardware(found)),
        ("measured from", "the same host" if source.get("server_is_here") else "another host, or not recorded"),
        ("answers", found.summary.get("answers") or "unchecked"),
        *_nodes(source),
        ("operating system", source.get("os")),
        ("kernel", source.get("kernel")),
        ("NVIDIA driver", source.get("nvidia_driver")),
        ("Python", source.get("python")),
        ("packages", ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else None),
        ("clock source", clock.get("source") if isinstance(clock, Mapping) else None),
        ("perfbook's commit", _commit(git) if isinstance(git, Mapping) else None),
    ]
    return Table(
        ["what", "value"], [(what, scrub(str(value))) for what, value in rows if value], "Where the numbers come from"
    )


def _nodes(source: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The further nodes of a server that is larger than one, and where they differ from the first."""
    kept = ("kernel", "nvidia_driver", "versions")
    said = []
    for node in source.get("nodes") or []:
        differs = [f"{key}: {node.get(key)}" for key in kept if node.get(key) != source.get(key)]
        words = "; ".join([str(node.get("host")), str(node.get("hardware")), *(differs or ["else as the first node"])])
        said.append((f"node {node.get('node_rank')}", words))
    return said


def _commit(git: Mapping[str, Any]) -> str:
    return f"{str(git.get('commit', ''))[:12]}{' with local changes' if git.get('dirty') else ''}"


def _folded(header: Mapping[str, Any], scrub: Scrub) -> list[tuple[str, str]]:
    """Long texts of the provenance: parameters and environment, secrets masked."""
    source = header.get("provenance")
    parts = {"Parameters in force": header.get("parameters")}
    if isinstance(source, Mapping):
        parts["Environment variables"] = source.get("environment")
        parts["Everything recorded about the host"] = {
            key: value for key, value in source.items() if key not in ("environment", "server_environment")
        }
    return [
        (name, scrub(yaml.safe_dump(mask(jsonl.plain(part)), sort_keys=False, allow_unicode=True)))
        for name, part in parts.items()
        if isinstance(part, Mapping) and part
    ]


def _record(record: Mapping[str, Any], scrub: Scrub) -> dict[str, str]:
    shown = {**mask(record), "key": record.get("key", "")}  # which cell a record is of: no secret, despite its name
    text = scrub(json.dumps(shown, indent=1, ensure_ascii=False))
    if len(text) > _RECORD_LIMIT:
        text = f"{text[:_RECORD_LIMIT]}\n… {len(text) - _RECORD_LIMIT} more characters in records.jsonl"
    return {**{key: str(record.get(key, "")) for key in ("id", "notebook", "kind", "key")}, "text": text}


def _contents(sections: list[Section], with_records: bool) -> list[Entry]:
    entries = [Entry("answer", "The answer"), Entry("findings", "Findings"), Entry("provenance", "Provenance")]
    for section in sections:
        parts = tuple(Link(heading.text, heading.id) for heading in section.headings if heading.level == cells.TOP)
        mark = "" if section.status == ENDED_WELL else section.status
        number = section.name.partition("_")[0]
        numbered = number.isdigit() and not section.title.startswith(number)
        title = f"{number} {section.title}" if numbered else section.title
        entries.append(Entry(section.name, title, mark, parts))
    return [*entries, Entry("records", "Records")] if with_records else entries


def _took(started: Any, finished: Any) -> str:
    try:
        span = datetime.fromisoformat(str(finished)) - datetime.fromisoformat(str(started))
    except ValueError:
        return ""
    return units.duration(span.total_seconds())


def _html(table: Table | None) -> str:
    return table._repr_html_() if table else ""
