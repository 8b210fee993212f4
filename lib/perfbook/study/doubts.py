"""What speaks against measured cells, in words: a claim that rests on doubtful cells says so itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfbook.units import count

MARK = "Read with care"
"""How the sentence begins that follows a claim from doubtful cells."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def not_valid(cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that are suspect or invalid."""
    return [cell for cell in cells if _verdict(cell) != "valid"]


def usable(cells: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cells that are not invalid: only they decide anything; a cell without a verdict counts as usable."""
    return [cell for cell in cells if _verdict(cell) != "invalid"]


def _verdict(cell: Mapping[str, Any]) -> str:
    return str((cell.get("validity") or {}).get("verdict", "valid"))


def sentence(cells: Sequence[Mapping[str, Any]], what: str = "cells") -> str:
    """`` Read with care: 10 of 10 cells are suspect or invalid.``, to follow a claim; empty when all are valid."""
    doubtful = len(not_valid(cells))
    return f" {MARK}: {doubtful} of {len(cells)} {what} are suspect or invalid." if doubtful else ""


def clock(cells: Iterable[Mapping[str, Any]]) -> str:
    """Where the times of arrival come from, as the cells say: the kernel's stamps, or the client's own reading."""
    said = {str(cell.get("clock")) for cell in cells}
    if said == {"kernel"}:
        return "times of arrival stamped by the kernel"
    if said == {"user"}:
        return "times of arrival read by the client itself (no kernel stamps)"
    if said <= {"None"}:
        return "clock unknown"
    return "times of arrival partly stamped by the kernel, partly read by the client itself"


def reasons(cells: Iterable[Mapping[str, Any]]) -> str:
    """Why cells are not valid, grouped."""
    return group_reasons(reason for cell in not_valid(cells) for reason in cell["validity"]["reasons"])


def group_reasons(reasons: Iterable[str]) -> str:
    """Reasons that differ only in their numbers as one, with the range of each number and how many cells say it."""
    groups: dict[str, list[list[str]]] = {}
    for reason in reasons:
        groups.setdefault(_NUMBER.sub("{}", reason), []).append(_NUMBER.findall(reason))
    said = []
    for text, rows in groups.items():
        ends = [(min(column, key=float), max(column, key=float)) for column in zip(*rows, strict=True)]
        filled = text.format(*(low if low == high else f"{low} to {high}" for low, high in ends))
        said.append(f"{filled} ({count(len(rows), 'cell')})")
    return "; ".join(said)
