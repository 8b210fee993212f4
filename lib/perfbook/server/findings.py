"""Findings in a log, from the rules in ``log_rules.toml``."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from perfbook.server.facts import EngineFacts, Evidence, Finding
from perfbook.server.lines import Line

_SHOWN = 3
_READ = 4000  # characters of a line: what the patterns look for stands near its beginning
_FOR_CONDITIONS = {"all_reduce_order": "all-reduce backends", "cache_room": "Maximum concurrency for"}
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


class Matches:
    """Lines that the rules' patterns hit, collected while a log goes by; of each rule the first few distinct ones."""

    def __init__(self) -> None:
        self._hits: dict[str, dict[str, Evidence]] = {}
        self._counts: Counter[str] = Counter()

    def feed(self, line: Line, *, ready: bool) -> None:
        """A logged line, and whether the server was ready by then."""
        if not _any_pattern().search(line.text, 0, _READ):
            return
        for name, pattern, after_ready in _patterns():
            if (ready or not after_ready) and pattern.search(line.text, 0, _READ):
                self._counts[name] += 1
                kept = self._hits.setdefault(name, {})
                if len(kept) < _SHOWN:
                    kept.setdefault(line.text, _evidence(line))  # ranks repeat each other

    def of(self, name: str, at_least: int = 1) -> list[Evidence] | None:
        """Evidence for a pattern that hit so often; None when it did not."""
        return list(self._hits[name].values()) if self._counts[name] >= at_least else None


def judge(facts: EngineFacts, matches: Matches, planned_concurrency: int | None = None) -> tuple[Finding, ...]:
    """What the rules find, the severest first."""
    found = []
    for rule in rules():
        evidence = (
            CONDITIONS[rule.when](facts, matches, planned_concurrency)
            if rule.when is not None
            else matches.of(rule.name, rule.at_least)
        )
        if evidence is not None:
            found.append(
                Finding(rule.name, rule.severity, rule.title, rule.meaning, rule.advice, tuple(evidence[:_SHOWN]))
            )
    return tuple(sorted(found, key=lambda finding: _SEVERITIES[finding.severity]))


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str], bool], ...]:
    """Name, pattern and whether only lines after the server was ready count."""
    own = [(rule.name, rule.pattern, rule.after_ready) for rule in rules() if rule.pattern is not None]
    return (*own, *((name, re.compile(text), False) for name, text in _FOR_CONDITIONS.items()))


@cache
def _any_pattern() -> re.Pattern[str]:
    """Nearly every line of a long log hits none of them: one search tells."""
    return re.compile("|".join(f"(?:{pattern.pattern})" for _, pattern, _ in _patterns()))


def _evidence(line: Line) -> Evidence:
    return Evidence(line.number, line.text[:240])


def _eager(facts: EngineFacts, matches: Matches, planned: int | None) -> list[Evidence] | None:
    if facts.enforce_eager or (facts.compile.active is False and facts.cuda_graphs.active is False):
        return list(facts.compile.evidence)
    return None


def _graphs_lowered(facts: EngineFacts, matches: Matches, planned: int | None) -> list[Evidence] | None:
    """A line that changed the graph mode, unless everything is off anyhow."""
    changed = [
        one for one in facts.cuda_graphs.evidence if re.search(r"setting cudagraph_mode=|Overriding to", one.text)
    ]
    return changed if changed and not facts.enforce_eager else None


def _compile_refused(facts: EngineFacts, matches: Matches, planned: int | None) -> list[Evidence] | None:
    refused = [
        one
        for one in facts.compile.evidence
        if "does not support it" in one.text or "TORCH_COMPILE_DISABLE" in one.text
    ]
    return refused or None


def _nccl_second(facts: EngineFacts, matches: Matches, planned: int | None) -> list[Evidence] | None:
    """All-reduce is offered to another backend before NCCL."""
    order = facts.all_reduce_backends
    if order and order[0] != "PYNCCL":
        return matches.of("all_reduce_order") or []
    return None


def _cache_small(facts: EngineFacts, matches: Matches, planned: int | None) -> list[Evidence] | None:
    """Fewer full-length requests fit than will run at once."""
    if planned is None or facts.max_concurrency is None or facts.max_concurrency >= planned:
        return None
    return matches.of("cache_room") or []


def _waiting(facts: EngineFacts, matches: Matches, planned: int | None) -> list[Evidence] | None:
    """Requests queued while the cache was nearly full."""
    full = [row for row in facts.throughput if row.waiting > 0 and (row.kv_usage_pct or 0.0) >= 90.0]
    return [Evidence(row.line, f"{row.waiting} waiting, cache {row.kv_usage_pct} % full") for row in full] or None


CONDITIONS: dict[str, Callable[[EngineFacts, Matches, int | None], list[Evidence] | None]] = {
    "eager": _eager,
    "graphs lowered": _graphs_lowered,
    "compile refused": _compile_refused,
    "nccl second": _nccl_second,
    "cache small": _cache_small,
    "waiting for cache": _waiting,
}
