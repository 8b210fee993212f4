"""Everything a run's folder holds, read without ever failing: what is missing or broken is itself reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        ``completed``, ``failed``, ``interrupted``, ``skipped`` or ``not run``.
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
        value = self.summary.get(name)
        return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def read(run: Run) -> Evidence:
    """Read a run's folder; never raises for what is in it."""
    problems: list[str] = []

    def attempt(what: str, action: Callable[[], T], otherwise: T) -> T:
        try:
            return action()
        except Exception as error:  # a report must come out of any wreck
            problems.append(f"{what} could not be read ({type(error).__name__}: {error})")
            return otherwise

    header: dict[str, Any] = attempt("run.json", lambda: run.header, {})
    records = {str(record.get("id")): record for record in attempt("records.jsonl", run.records, [])}
    numbers = attempt("The records", lambda: summary.summarise(run), {}) if records else {}
    if not numbers and (run.path / "summary.json").exists():
        numbers = attempt("summary.json", lambda: _object(run.path / "summary.json"), {})
    torn = attempt("records.jsonl", lambda: _torn(run.path / "records.jsonl"), 0)
    if torn:
        problems.append(f"{torn} torn line in records.jsonl was left out: a crash while it was written")
    return Evidence(
        path=run.path,
        header=header,
        summary=numbers,
        findings=attempt("findings.jsonl", lambda: findings.current(run), []),
        records=records,
        notebooks=_notebooks(run.path, header, records, problems),
        problems=problems,
    )


def _object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _torn(path: Path) -> int:
    """Lines that are not whole."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.exists() else []
    return len(lines) - len(jsonl.read(path))


def _notebooks(
    run: Path, header: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]], problems: list[str]
) -> list[Notebook]:
    """Those that ``run.json`` names, in its order, and those that only left a file."""
    listed = header.get("notebooks")
    entries: dict[str, Mapping[str, Any]] = {}
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and entry.get("notebook"):
            entries[Path(str(entry["notebook"])).stem] = entry
    files = {path.stem: path for path in sorted((run / "notebooks").glob("*.ipynb"))}
    verdicts = {
        r["notebook"]: str(r.get("sentence", "")) for r in records.values() if r.get("kind") == "verdict"
    }
    found = []
    for name in sorted({*entries, *files}):
        content, reason = _content(files.get(name))
        if reason:
            problems.append(f"{name}: {reason}")
        status, why = _outcome(entries.get(name), content)
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


def _content(path: Path | None) -> tuple[Any, str]:
    """The executed notebook, or why there is none."""
    if path is None:
        return None, ""
    try:
        return nbformat.read(path, as_version=4), ""
    except Exception as error:  # nbformat lets through whatever its JSON reader and its validator raise
        return None, f"the executed notebook cannot be read ({type(error).__name__})"


def _outcome(entry: Mapping[str, Any] | None, content: Any) -> tuple[str, str]:
    """Status and reason: what ``run.json`` says, unless the notebook itself shows otherwise."""
    status = str(entry["status"]) if entry and entry.get("status") else ""
    reason = str(entry.get("reason") or "") if entry else ""
    if content is None:
        return status or "not run", reason
    seen, why = _as_executed(content)
    if not status:
        return seen, why
    if status == ENDED_WELL and seen != ENDED_WELL:
        return "failed", why
    return status, reason or ("" if status == ENDED_WELL else why)


def _as_executed(content: Any) -> tuple[str, str]:
    """Status and reason as the notebook's own cells show them."""
    cells = [
        cell
        for cell in content.cells
        if cell.cell_type == "code" and cell.source.strip() and not hidden(cell)
    ]
    for number, cell in enumerate(cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return "failed", f"{output.ename}: {output.evalue}"
        if cell.get("execution_count") is None:
            return "interrupted", f"stopped before code cell {number} of {len(cells)} had run"
    return ENDED_WELL, ""


def hidden(cell: Any) -> bool:
    """Whether the report leaves a cell out: injected parameters (they can hold secrets), papermill's own marks."""
    return bool(_HIDDEN & set(cell.metadata.get("tags", [])))
