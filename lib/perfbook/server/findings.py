"""Findings in a log, from the rules in ``log_rules.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from perfbook.server.facts import EngineFacts, Evidence, Finding
from perfbook.server.lines import Line

_SHOWN = 3
_SEVERITIES = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True)
class Rule:
    """When it applies, and what to say.

    A rule applies when a line matches ``pattern`` (at least ``at_least`` of them, after the server was ready
    when ``after_ready``), or when the condition named ``when`` holds for the facts.
    """

    name: str
    severity: str
    title: str
    meaning: str
    advice: str
    pattern: re.Pattern[str] | None
    when: str | None
    at_least: int
    after_ready: bool


@cache
def rules() -> tuple[Rule, ...]:
    """The rules, in the order of the file."""
    table = tomllib.loads(files("perfbook.server").joinpath("log_rules.toml").read_text(encoding="utf-8"))
    return tuple(
        Rule(
            name=name,
            severity=entry["severity"],
            title=entry["title"],
            meaning=entry["meaning"],
            advice=entry["advice"],
            pattern=re.compile(entry["pattern"]) if "pattern" in entry else None,
            when=entry.get("when"),
            at_least=entry.get("at_least", 1),
            after_ready=entry.get("after_ready", False),
        )
        for name, entry in table.items()
    )


def judge(facts: EngineFacts, lines: Sequence[Line], planned_concurrency: int | None = None) -> tuple[Finding, ...]:
    """What the rules find, the severest first."""
    found = []
    for rule in rules():
        evidence = _evidence(rule, facts, lines, planned_concurrency)
        if evidence is not None:
            found.append(
                Finding(rule.name, rule.severity, rule.title, rule.meaning, rule.advice, tuple(evidence[:_SHOWN]))
            )
    return tuple(sorted(found, key=lambda finding: _SEVERITIES[finding.severity]))


def _evidence(rule: Rule, facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    """Lines that make a rule apply; None when it does not."""
    if rule.when is not None:
        return CONDITIONS[rule.when](facts, lines, planned)
    assert rule.pattern is not None
    if rule.after_ready and facts.ready_line is None:
        return None
    since = facts.ready_line or 0 if rule.after_ready else 0
    hits = [line for line in lines if line.number >= since and line.level and rule.pattern.search(line.text)]
    if len(hits) < rule.at_least:
        return None
    distinct = {line.text: line for line in reversed(hits)}  # ranks repeat each other
    return [Evidence(line.number, line.text[:240]) for line in sorted(distinct.values(), key=lambda line: line.number)]


def _eager(facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    if facts.enforce_eager or (facts.compile.active is False and facts.cuda_graphs.active is False):
        return list(facts.compile.evidence)
    return None


def _graphs_lowered(facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    """A line that changed the graph mode, unless everything is off anyhow."""
    changed = [
        one for one in facts.cuda_graphs.evidence if re.search(r"setting cudagraph_mode=|Overriding to", one.text)
    ]
    return changed if changed and not facts.enforce_eager else None


def _compile_refused(facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    refused = [
        one
        for one in facts.compile.evidence
        if "does not support it" in one.text or "TORCH_COMPILE_DISABLE" in one.text
    ]
    return refused or None


def _nccl_second(facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    """All-reduce is offered to another backend before NCCL."""
    order = facts.all_reduce_backends
    if order and order[0] != "PYNCCL":
        return [Evidence(line.number, line.text[:240]) for line in lines if "all-reduce backends" in line.text]
    return None


def _cache_small(facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    """Fewer full-length requests fit than will run at once."""
    if planned is None or facts.max_concurrency is None or facts.max_concurrency >= planned:
        return None
    return [Evidence(line.number, line.text[:240]) for line in lines if "Maximum concurrency for" in line.text]


def _waiting(facts: EngineFacts, lines: Sequence[Line], planned: int | None) -> list[Evidence] | None:
    """Requests queued while the cache was nearly full."""
    full = [row for row in facts.throughput if row.waiting > 0 and (row.kv_usage_pct or 0.0) >= 90.0]
    return [Evidence(row.line, f"{row.waiting} waiting, cache {row.kv_usage_pct} % full") for row in full] or None


CONDITIONS: dict[str, Callable[[EngineFacts, Sequence[Line], int | None], list[Evidence] | None]] = {
    "eager": _eager,
    "graphs lowered": _graphs_lowered,
    "compile refused": _compile_refused,
    "nccl second": _nccl_second,
    "cache small": _cache_small,
    "waiting for cache": _waiting,
}
