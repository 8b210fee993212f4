"""``summary.json``: the headline numbers for machines, put together from the records alone."""

from __future__ import annotations

import json
from typing import Any

from perfbook.record import findings, jsonl
from perfbook.record.run import Run

_ENVELOPE = frozenset({"schema", "id", "time", "notebook", "kind", "key", "rehearsed", "answers"})


def values(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """What was measured, without the envelope that every record has."""
    return None if record is None else {key: value for key, value in record.items() if key not in _ENVELOPE}


def summarise(run: Run) -> dict[str, Any]:
    """The summary of a run; a part that was not run is None.

    Returns
    -------
    dict
        Keys ``schema, variant, run, rehearsed, answers, engine, single_stream, warmup, sweep, tuning, profile, ceiling,
        targets, bottleneck, findings``. ``answers`` is ``verified``, ``wrong`` or ``unchecked``.
    """
    records = run.records()

    def latest(kind: str) -> dict[str, Any] | None:
        return values(next((r for r in reversed(records) if r["kind"] == kind), None))

    def every(kind: str) -> list[dict[str, Any]] | None:
        return [v for r in records if r["kind"] == kind and (v := values(r))] or None

    sweep = latest("sweep")
    if sweep is not None:
        sweep["cells"] = every("sweep_cell") or []
    targets = latest("targets")
    bottlenecks = every("bottleneck") or []
    return {
        "schema": 1,
        "variant": run.path.parent.name,
        "run": run.path.name,
        "rehearsed": run.rehearsed,
        "answers": answers(run),
        "engine": latest("engine"),
        "single_stream": latest("single_stream"),
        "warmup": latest("warmup"),
        "sweep": sweep,
        "tuning": every("tuning"),
        "profile": every("profile"),
        "ceiling": latest("ceiling"),
        "targets": targets["targets"] if targets else None,
        "bottleneck": {b["regime"]: b["sentence"] for b in bottlenecks} or None,
        "findings": findings.current(run) or None,
    }


def answers(run: Run) -> str:
    """What 02_verify found: ``verified``, ``wrong``, or ``unchecked`` when it has not run (to its end)."""
    verdict = run.record("verdict_on_answers")
    if verdict is None:
        return "unchecked"
    return "verified" if verdict["ok"] else "wrong"


def write(run: Run) -> None:
    """Rewrite ``summary.json`` in one step."""
    text = json.dumps(jsonl.plain(summarise(run)), indent=1, ensure_ascii=False, allow_nan=False)
    jsonl.write_atomically(run.path / "summary.json", text + "\n")
