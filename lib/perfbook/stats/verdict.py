"""Is it faster? A verdict over launches, with an effect, an interval and a label that never says "same".

A launch is the sampling unit: pass one number per launch (say, its median TPOT), never the requests of one
launch as if they were repeats. Several settings judged together share one chance of a false alarm (Holm's
correction).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

import numpy as np

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.ranktest import Block, RankTest, rank_test
from perfbook.stats.result import Result, samples

Launches: TypeAlias = Sequence[float] | Mapping[Hashable, Sequence[float]]
"""One number per launch; or, where launches were interleaved in blocks, block → its numbers."""

MINIMUM_EFFECT_PCT = 2.0


class Label(StrEnum):
    """What can be said, in the order in which it is decided."""

    TOO_FEW = "too few launches"
    FASTER = "faster"
    SLOWER = "slower"
    FASTER_SMALL = "faster, below the minimum effect"
    SLOWER_SMALL = "slower, below the minimum effect"
    EQUIVALENT = "equivalent"
    NO_DIFFERENCE = "no difference detected"


@dataclass(frozen=True)
class Verdict(Result):
    """What a comparison of two settings allows to be said.

    Attributes
    ----------
    label : Label
        The verdict; :attr:`text` is what to print.
    effect_pct : float
        Hodges–Lehmann shift of the candidate in per cent of the baseline, in the metric's own direction
        (TPOT: below zero is faster). Only indicative where the label is ``too few launches``.
    low_pct, high_pct : float or None
        Interval of this one comparison at 1 − `alpha`; None where so few launches cannot bound it.
    p, adjusted_p : float
        Exact two-sided Mann-Whitney p, and after Holm's correction over `comparisons`.
    smallest_p : float
        The smallest `p` that these launches could reach.
    comparisons : int
        Comparisons judged together.
    minimum_effect_pct, alpha : float
        The rule's two constants.
    better : str
        ``lower`` or ``higher``.
    unit : str
        Key suffix of the unit of the launches' numbers.
    baseline, candidate : tuple of float
        Every launch's number.
    blocks : int
        Blocks compared within; 1: not blocked.
    """

    label: Label
    effect_pct: float
    low_pct: float | None
    high_pct: float | None
    p: float
    adjusted_p: float
    smallest_p: float
    comparisons: int
    minimum_effect_pct: float
    alpha: float
    better: Literal["lower", "higher"]
    unit: str
    baseline: tuple[float, ...]
    candidate: tuple[float, ...]
    blocks: int

    @property
    def text(self) -> str:
        """The label as printed: ``equivalent within 2 %`` names its margin."""
        if self.label is Label.EQUIVALENT:
            return f"equivalent within {self.minimum_effect_pct:g} %"
        return str(self.label)

    @property
    def sentence(self) -> str:
        """The label, the effect with its interval, p and the launches."""
        effect = units.interval(
            self.effect_pct, self.low_pct, self.high_pct, "pct", confidence=1 - self.alpha, sign=True
        )
        launches = f"{len(self.baseline)} + {len(self.candidate)} launches"
        if self.label is Label.TOO_FEW:
            reach = units.number(min(1.0, self.smallest_p * self.comparisons), 2)
            over = f" over {self.comparisons} comparisons" if self.comparisons > 1 else ""
            return f"{self.text}: {launches} reach p = {reach}{over} at best; indicative effect {effect}"
        corrected = f" (Holm, {self.comparisons} comparisons)" if self.comparisons > 1 else ""
        return f"{self.text}: {effect}, {units.p_value(self.adjusted_p)}{corrected}, {launches}"

    def to_json(self) -> dict[str, object]:
        """Return the fields; the label as printed."""
        return {**super().to_json(), "label": self.text}


def compare(
    baseline: Launches,
    candidate: Launches,
    *,
    better: Literal["lower", "higher"] = "lower",
    unit: str = "",
    minimum_effect_pct: float = MINIMUM_EFFECT_PCT,
    alpha: float = 0.05,
) -> Verdict:
    """Judge one candidate against its baseline; several share the chance of error in :func:`compare_all`."""
    only = compare_all(
        {"": (baseline, candidate)},
        better=better,
        unit=unit,
        minimum_effect_pct=minimum_effect_pct,
        alpha=alpha,
    )
    return only[""]


def compare_all(
    pairs: Mapping[str, tuple[Launches, Launches]],
    *,
    better: Literal["lower", "higher"] = "lower",
    unit: str = "",
    minimum_effect_pct: float = MINIMUM_EFFECT_PCT,
    alpha: float = 0.05,
) -> dict[str, Verdict]:
    """Judge several comparisons together.

    The label is decided in this order. ``too few launches``: complete separation would not be significant
    after correction. ``faster`` or ``slower``: Holm-adjusted p ≤ `alpha` and a shift of at least
    `minimum_effect_pct`. ``… below the minimum effect``: significant and smaller. ``equivalent within x %``:
    the whole interval lies inside ± the minimum effect. ``no difference detected``: the rest.

    Over all comparisons the chance of any false ``faster`` or ``slower`` is at most `alpha`; the interval and
    equivalence are each comparison's own (a true shift of the minimum effect is called equivalent with a
    chance of at most `alpha` / 2).

    Parameters
    ----------
    pairs : mapping
        Name → (baseline, candidate), each one number per launch, or block → numbers where launches were
        interleaved in blocks; then only launches of one block are compared with each other.
    better : {"lower", "higher"}
        Which direction is faster: lower for times, higher for rates.
    unit : str
        Key suffix of the numbers' unit.
    minimum_effect_pct : float
        The smallest change worth acting on.
    alpha : float
        Chance of a false alarm over all comparisons.

    Raises
    ------
    BadInput
        For a number that is not above zero, or a block that lacks a side.
    """
    if not 0 < alpha < 1 or minimum_effect_pct < 0:
        raise BadInput(f"verdict: alpha {alpha:g} or minimum effect {minimum_effect_pct:g} % is impossible")
    blocks = {name: _blocks(name, *sides) for name, sides in pairs.items()}
    tests = {name: rank_test(pairs_of, 1 - alpha) for name, pairs_of in blocks.items()}
    adjusted = holm([test.p for test in tests.values()])
    return {
        name: Verdict(
            label=_label(test, p, len(tests), better, minimum_effect_pct, alpha),
            effect_pct=test.shift_pct,
            low_pct=test.low_pct,
            high_pct=test.high_pct,
            p=test.p,
            adjusted_p=p,
            smallest_p=test.smallest_p,
            comparisons=len(tests),
            minimum_effect_pct=minimum_effect_pct,
            alpha=alpha,
            better=better,
            unit=unit,
            baseline=tuple(float(x) for base, _ in blocks[name] for x in base),
            candidate=tuple(float(x) for _, cand in blocks[name] for x in cand),
            blocks=len(blocks[name]),
        )
        for (name, test), p in zip(tests.items(), adjusted, strict=True)
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted by Holm's step-down method (Holm 1979): reject where at most alpha."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return [float(one) for one in adjusted]


def _label(
    test: RankTest,
    adjusted_p: float,
    comparisons: int,
    better: Literal["lower", "higher"],
    minimum_effect_pct: float,
    alpha: float,
) -> Label:
    if test.smallest_p * comparisons > alpha:
        return Label.TOO_FEW
    if adjusted_p <= alpha:
        faster = (test.shift_pct < 0) == (better == "lower")
        if abs(test.shift_pct) >= minimum_effect_pct:
            return Label.FASTER if faster else Label.SLOWER
        return Label.FASTER_SMALL if faster else Label.SLOWER_SMALL
    if test.low_pct is not None and test.high_pct is not None:
        widest = max(-test.low_pct, test.high_pct)
        if widest < minimum_effect_pct:
            return Label.EQUIVALENT
    return Label.NO_DIFFERENCE


def _blocks(name: str, baseline: Launches, candidate: Launches) -> list[Block]:
    where = f"comparison {name!r}" if name else "comparison"
    if isinstance(baseline, Mapping) != isinstance(candidate, Mapping):
        raise BadInput(f"{where}: give both sides as numbers, or both as block → numbers")
    if isinstance(baseline, Mapping) and isinstance(candidate, Mapping):
        if set(baseline) != set(candidate) or not baseline:
            raise BadInput(f"{where}: every block needs launches of both sides")
        sides = [(baseline[block], candidate[block]) for block in baseline]
    else:
        assert not isinstance(baseline, Mapping)
        assert not isinstance(candidate, Mapping)
        sides = [(baseline, candidate)]
    return [
        (
            samples(base, f"{where}, baseline", positive=True),
            samples(cand, f"{where}, candidate", positive=True),
        )
        for base, cand in sides
    ]
