"""Kernel names to categories, by ordered rules kept as data in ``kernels.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from perfbook.errors import BadInput

CATEGORIES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "gemm", "attention", "moe", "norm",
    "activation", "rope", "kv_cache", "quantize", "cast_copy", "elementwise", "reduction", "sampling", "embedding",
    "memcpy", "memset", "other",
)  # fmt: skip
COMMUNICATION = frozenset(CATEGORIES[:5])
UNCLASSIFIED = "other"


@dataclass(frozen=True, slots=True)
class Rule:
    """Names that contain ``pattern`` are of ``category``; ``example`` is one, seen in ``source``."""

    category: str
    pattern: re.Pattern[str]
    example: str
    source: str


@cache
def standard_rules() -> tuple[Rule, ...]:
    """The rules that come with perfbook, in order."""
    place = files("perfbook.trace") / "kernels.toml"
    return _rules(place.read_text(encoding="utf-8"), "kernels.toml")


def user_rules(path: Path) -> tuple[Rule, ...]:
    """Rules from a file of the same form; ``example`` and ``source`` may be left out.

    Raises
    ------
    BadInput
        The file cannot be read, or a rule in it cannot be used.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: kernel rules cannot be read: {error}.") from None
    return _rules(text, str(path))


def _rules(text: str, where: str) -> tuple[Rule, ...]:
    try:
        entries = tomllib.loads(text).get("rule", [])
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: not valid TOML: {error}.") from None
    rules = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        here = f"{where}, rule {number}"
        if not isinstance(entry, dict) or not {"category", "pattern"} <= set(entry):
            raise BadInput(f"{here}: needs a category and a pattern, under [[rule]].")
        if entry["category"] not in CATEGORIES:
            raise BadInput(f"{here}: no category {entry['category']!r}; use one of {', '.join(CATEGORIES)}.")
        try:
            pattern = re.compile(entry["pattern"])
        except (re.error, TypeError) as error:
            raise BadInput(f"{here}: the pattern is no regular expression: {error}.") from None
        rules.append(Rule(entry["category"], pattern, str(entry.get("example", "")), str(entry.get("source", ""))))
    return tuple(rules)


def classify(name: str, rules: Sequence[Rule] = ()) -> str:
    """The category of a kernel, copy or host operator; ``other`` when no rule knows it.

    Parameters
    ----------
    name : as the trace has it, demangled or not.
    rules : rules to try before the standard ones.
    """
    for rule in (*rules, *standard_rules()):
        if rule.pattern.search(name):
            return rule.category
    return UNCLASSIFIED
