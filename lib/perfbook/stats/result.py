"""What every statistic returns: a frozen dataclass that goes to JSON with plain numbers and never NaN."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfbook import units
from perfbook.errors import BadInput

Floats: TypeAlias = NDArray[np.float64]


class Result:
    """Base of the result dataclasses; the names of their fields carry the units."""

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain Python values: NaN and infinity become None, tuples lists."""
        assert dataclasses.is_dataclass(self)
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True)
class Estimate(Result):
    """A number with its interval.

    Attributes
    ----------
    value : float or None
        The point estimate in `unit`.
    low, high : float or None
        The interval's ends in `unit`; None where the data cannot bound that side (always with n = 1).
    unit : str
        Key suffix of the unit: ``ms``, ``tok_s``, ``pct``, ``us_per_token`` …
    n : int
        Number of sampling units behind it: launches, repeats or requests.
    confidence : float
        Coverage of the interval as a fraction.
    method : str
        How the interval was made, in words.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    n: int = 1
    confidence: float = 0.95
    method: str = ""

    @property
    def half_width_pct(self) -> float | None:
        """Half the interval in per cent of the value: whether more repeats are worth their time."""
        if not self.value or self.low is None or self.high is None:
            return None
        return 100 * (self.high - self.low) / 2 / abs(self.value)

    def __str__(self) -> str:
        """``12.4 ms [12.1, 12.9], n = 5``."""
        return units.interval(self.value, self.low, self.high, self.unit, n=self.n, confidence=self.confidence)

    def to_json(self) -> dict[str, object]:
        """Return the numbers with the unit in the key (``value_ms``), ``n``, ``confidence``, ``method``."""
        suffix = f"_{self.unit}" if self.unit else ""
        numbers = {f"{name}{suffix}": plain(getattr(self, name)) for name in ("value", "low", "high")}
        return {**numbers, "n": self.n, "confidence": self.confidence, "method": self.method}


def plain(value: object) -> object:
    """Return `value` as JSON can hold it: numpy numbers as Python's, NaN and infinity as None.

    Raises
    ------
    TypeError
        For what has no such form.
    """
    if isinstance(value, Result):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


def samples(values: Iterable[float], what: str = "samples", *, positive: bool = False) -> Floats:
    """Return `values` as a one-dimensional float array.

    Raises
    ------
    BadInput
        When there are none, one of them is not a finite number, or `positive` is asked for and one is not.
    """
    array = np.asarray(list(values), dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise BadInput(f"{what}: needs a list with at least one number")
    if not np.isfinite(array).all():
        where = int(np.flatnonzero(~np.isfinite(array))[0])
        raise BadInput(f"{what}: number {where} is not finite; leave failed measurements out before")
    if positive and array.min() <= 0:
        where = int(np.flatnonzero(array <= 0)[0])
        raise BadInput(f"{what}: number {where} is {array[where]:g}; only values above zero can be compared")
    return array


def check_confidence(confidence: float) -> None:
    """Raise ``BadInput`` for a coverage that is not a fraction strictly between 0 and 1."""
    if not 0 < confidence < 1:
        raise BadInput(f"confidence: {confidence:g} is not between 0 and 1 (0.95 means 95 %)")
