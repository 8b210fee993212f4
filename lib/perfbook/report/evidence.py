"""Everything a run's folder holds, read without ever failing: what is missing or broken is itself reported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import nbformat

from perfbook.record import findings, jsonl, summary
from perfbook.record.run import Run

T = TypeVar("T")
ENDED_WELL = "completed"
_HIDDEN = frozenset({"injected-parameters", "papermill-error-cell-tag", "remove-cell"})


@dataclass(frozen=True)
class Notebook:
    """One notebook of the run: how it ended, and what it left.

    Attributes
    ----------
    status : str
        ``completed``, ``failed``, ``interrupted``, ``skipped``, or, where only traces were left, ``unfinished``.
    reason : str
        Why, when not completed.
    verdict : str
        The sentence it ended with, if it got there.
    content : NotebookNode or None
        The executed notebook.
    """

    name: str
    status: str
    reason: str
    seconds: float | None
    verdict: str
    content: Any


@dataclass(frozen=True)
class Evidence:
    """What a run's folder says.

    Attributes
    ----------
    header, summary : dict
        ``run.json`` and the headline numbers; empty where they cannot be read.
    findings : list of dict
        In force, gravest first.
    records : dict
        Id → record, superseded ones left out.
    problems : list of str
        What could not be read, one sentence each.
    """

    path: Path
    header: dict[str, Any]
    summary: dict[str, Any]
    findings: list[dict[str, Any]]
    records: dict[str, dict[str, Any]]
    notebooks: list[Notebook]
    problems: list[str]

    @property
    def variant(self) -> str:
        """Name of the variant: the folder's."""
        return self.path.parent.name

    @property
    def rehearsed(self) -> bool:
        """Whether the numbers come from the stand-in."""
        return bool(self.header.get("rehearsed"))

    @property
    def last_sign(self) -> str | None:
        """When the last record was written."""
        return max((str(record.get("time", "")) for record in self.records.values()), default=None)

    def part(self, name: str) -> dict[str, Any]:
        """A part of the summary; empty when it was not run."""
        value = self.summary.get(name)
        return value if isinstance(value, dict) else {}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A part of the summary that is a list of mappings; empty when it was not run."""
        return mappings(self.summary.get(name))


def of_a_kind(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Findings side by side that one rule made and that ask for the same next step: ten settings not tried are one."""

    def kind(one: dict[str, Any]) -> tuple[str, ...]:
        rule = str(one.get("id") or "").partition(":")[0]
        return (rule, *(str(one.get(key) or "") for key in ("severity", "notebook", "next_step")))

    return [list(group) for _, group in groupby(found, key=kind)]


def verdict_to_show(finding: Mapping[str, Any]) -> str:
    """A finding's verdict, unless its title or evidence says it already."""
    verdict = str(finding.get("verdict") or "")
    said = f"{finding.get('title')} {finding.get('evidence')}".casefold()
    return "" if verdict.casefold() in said else verdict


def mappings(value: Any) -> list[dict[str, Any]]:
    """Those elements of a list that are mappings; nothing where there is no list."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


class _Reader:
    """Tries things and keeps what went wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def attempt(self, what: str, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except Exception as error:  # a report must come out of any wreck
            reason = str(error).removeprefix(f"{what}: ")
            self.problems.append(f"{what} could not be read ({type(error).__name__}: {reason})")
            return otherwise


def read(run: Run) -> Evidence:
    """Read a run's folder; never raises for what is in it."""
    reader = _Reader()
    nothing: dict[str, Any] = {}
    none: list[dict[str, Any]] = []
    header = reader.attempt("run.json", lambda: run.header, nothing)
    in_force = reader.attempt("records.jsonl", lambda: run.records(), none)
    records = {str(record.get("id")): record for record in in_force}
    numbers = (
        reader.attempt("The summary of the records", lambda: summary.summarise(run), nothing) if records else nothing
    )
    if not numbers and (run.path / "summary.json").exists():
        numbers = reader.attempt("summary.json", lambda: _object(run.path / "summary.json"), nothing)
    torn = reader.attempt("records.jsonl", lambda: _torn(run.path / "records.jsonl"), 0)
    if torn:
        reader.problems.append(f"Torn lines in records.jsonl were left out ({torn}): something crashed while writing.")
    return Evidence(
        path=run.path,
        header=header,
        summary=numbers,
        findings=reader.attempt("findings.jsonl", lambda: _findings(run), none),
        records=records,
        notebooks=_notebooks(run.path, header, records, reader.problems),
        problems=reader.problems,
    )


def glance(run: Run) -> Evidence:
    """What ``run.json`` and ``summary.json`` say alone: enough for a line in the index of all runs."""
    reader = _Reader()
    header = reader.attempt("run.json", lambda: run.header, dict[str, Any]())
    path = run.path / "summary.json"
    numbers = reader.attempt(path.name, lambda: _object(path), dict[str, Any]()) if path.exists() else {}
    notebooks = [Notebook(name, *_outcome(entry, None), None, "", None) for name, entry in _entries(header).items()]
    return Evidence(run.path, header, numbers, [], {}, notebooks, reader.problems)


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _findings(run: Run) -> list[dict[str, Any]]:
    """Findings in force, each with a list of record ids."""
    found = findings.current(run)
    return [
        {**one, "records": [str(identity) for identity in one.get("records") or [] if isinstance(identity, str | int)]}
        for one in found
    ]


def _torn(path: Path) -> int:
    """Lines that are not whole."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.exists() else []
    return len(lines) - len(jsonl.read(path))


def _name(text: str) -> str:
    """A notebook's name as an id of the page can hold it."""
    return re.sub(r"[^\w.-]", "_", Path(text).stem) or "_"


def _entries(header: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What ``run.json`` says of each notebook."""
    listed = header.get("notebooks")
    return {
        _name(str(entry["notebook"])): entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and entry.get("notebook")
    }


def _notebooks(
    run: Path, header: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]], problems: list[str]
) -> list[Notebook]:
    """Notebooks that ``run.json`` names, that left an executed copy, or that only left records (run by hand)."""
    entries = _entries(header)
    files = {_name(path.name): path for path in sorted((run / "notebooks").glob("*.ipynb"))}
    verdicts = {
        _name(str(r.get("notebook"))): str(r.get("sentence", ""))
        for r in records.values()
        if r.get("kind") == "verdict"
    }
    by_hand = {_name(str(record["notebook"])) for record in records.values() if record.get("notebook")}
    found = []
    for name in sorted({*entries, *files, *by_hand}):
        content, reason = _content(files.get(name))
        if reason:
            problems.append(f"{name}: {reason}.")
        status, why = _outcome(entries.get(name), content)
        if name not in entries and name not in files:
            status, why = _from_records(name in verdicts)
        seconds = entries.get(name, {}).get("seconds")
        found.append(
            Notebook(
                name=name,
                status=status,
                reason=why or reason,
                seconds=seconds if isinstance(seconds, int | float) else None,
                verdict=verdicts.get(name, ""),
                content=content,
            )
        )
    return found


def _from_records(concluded: bool) -> tuple[str, str]:
    if concluded:
        return ENDED_WELL, ""
    return "unfinished", "It left records but no verdict, and no executed copy: stopped, or still running."


def _content(path: Path | None) -> tuple[Any, str]:
    """The executed notebook, or why there is none."""
    if path is None:
        return None, ""
    try:
        return nbformat.read(path, as_version=4), ""  # type: ignore[no-untyped-call]
    except Exception as error:  # nbformat lets through whatever its JSON reader and its validator raise
        return None, f"its executed copy cannot be read ({type(error).__name__})"


def _outcome(entry: Mapping[str, Any] | None, content: Any) -> tuple[str, str]:
    """Status and reason: what ``run.json`` says, unless the notebook itself shows otherwise."""
    status = str(entry["status"]) if entry and entry.get("status") else ""
    reason = str(entry.get("reason") or "") if entry else ""
    if content is None:
        return status or "unfinished", reason
    seen, why = _as_executed(content)
    if not status:
        return seen, why
    if status == ENDED_WELL and seen != ENDED_WELL:
        return "failed", why.replace("Stopped, or still running,", "It ended early,")
    return status, reason or ("" if status == ENDED_WELL else why)


def _as_executed(content: Any) -> tuple[str, str]:
    """Status and reason as the notebook's own cells show them."""
    cells = [cell for cell in content.cells if cell.cell_type == "code" and cell.source.strip() and not hidden(cell)]
    for number, cell in enumerate(cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return "failed", f"{output.ename}: {output.evalue}"
        if cell.get("execution_count") is None:
            return "unfinished", f"Stopped, or still running, before code cell {number} of {len(cells)}."
    return ENDED_WELL, ""


def hidden(cell: Any) -> bool:
    """Whether the report leaves a cell out: injected parameters (they can hold secrets), papermill's own marks."""
    return bool(_HIDDEN & set(cell.metadata.get("tags", [])))
