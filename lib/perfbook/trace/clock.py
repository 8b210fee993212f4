"""Trace times to integer nanoseconds, and identifiers to integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfbook.trace.columns import UNKNOWN

EXACT_LIMIT_US = 2.0**43
"""Beyond this a float64 holds microseconds too coarsely to tell nanoseconds apart."""


class PrecisionLost(Exception):
    """Times are so large that they must be decoded digit by digit."""


def float_ns(values: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Microseconds to nanoseconds, and which of them are numbers."""
    array = np.asarray(values)
    if array.dtype == np.int64 and len(array) and np.abs(array).max() < 2**53:
        return array * 1000, np.ones(len(array), bool)
    if array.dtype != np.float64:
        array = np.array([_microseconds(v) for v in values], float)
    ok = np.isfinite(array)
    array = np.where(ok, array, 0.0)
    if len(array) and np.abs(array).max() >= EXACT_LIMIT_US:
        raise PrecisionLost
    return np.rint(array * 1000).astype(np.int64), ok


def exact_ns(values: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The same from the digits in the text."""
    array = np.zeros(len(values), np.int64)
    ok = np.ones(len(values), bool)
    for i, digits in enumerate(values):
        try:
            array[i] = round(Decimal(bytes(digits).decode().strip('"')) * 1000)
        except (InvalidOperation, OverflowError, ValueError):
            ok[i] = False
    return array, ok


def int64_ids(values: Sequence[Any]) -> NDArray[np.int64]:
    """Identifiers as integers; what is none, or does not fit, is unknown."""
    array = np.asarray(values)
    if array.dtype == np.int64:
        return array
    return np.array([_identifier(v) for v in values], np.int64)


def _microseconds(value: Any) -> float:
    """A time as a number; some writers put it into quotes. NaN where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if abs(number) < 2**62 else math.nan


def _identifier(value: Any) -> int:
    if (isinstance(value, str) and len(value) < 20 and value.isdecimal()) or (
        isinstance(value, float) and value.is_integer()
    ):
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 2**63 else UNKNOWN
