"""Numbers as people read them: value and unit, enough digits, the interval beside it, and ``unknown``.

Everything here returns a string for a table or a sentence. What is missing (``None``), not a number or
infinite reads ``unknown``, so no table ever shows ``nan``. Units are named by the suffix that our keys and
variables carry (``tok_s``, ``us``, ``pct``); :func:`label` turns a suffix into what is printed (``tok/s``).
"""

from __future__ import annotations

import math
from typing import Final

UNKNOWN: Final = "unknown"

_LABELS: Final = {
    "ns": "ns",
    "us": "µs",
    "ms": "ms",
    "s": "s",
    "us_per_token": "µs/token",
    "tok_s": "tok/s",
    "req_s": "req/s",
    "tokens": "tokens",
    "pct": "%",
    "bytes": "B",
    "bytes_s": "B/s",
    "gb_s": "GB/s",
    "flop_s": "FLOP/s",
}
_MOST_DIGITS: Final = 6
_SI: Final = ("", "k", "M", "G", "T", "P")
_IEC: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def label(unit: str) -> str:
    """Return how a unit is printed: ``tok_s`` → ``tok/s``; what is not a known suffix stays as it is."""
    return _LABELS.get(unit, unit)


def finite(value: float | None) -> float | None:
    """Return `value` as a plain float, or None where it is missing, NaN or infinite (for JSON)."""
    if value is None or not math.isfinite(value):
        return None
    return float(value)


def number(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Return `value` to `digits` significant digits, never cutting its integer part.

    1536.2 → ``1536``, 12.43 → ``12.4``, 0.01234 → ``0.0123``; integers are printed in full; five digits and
    more get thousands separators. `sign` writes a plus before what is above zero.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if 0 < abs(value) < 1e-6:
        mantissa, _, exponent = f"{value:{'+' if sign else ''}.{max(digits, 1) - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = 0 if isinstance(value, int) else _decimals(value, digits)
    return _fixed(value, decimals, sign=sign)


def quantity(value: float | None, unit: str, digits: int = 3, *, sign: bool = False) -> str:
    """Return value and unit: ``12.4 ms``, ``81.9 tok/s``, ``51.5 %``, or ``unknown``."""
    text = number(value, digits, sign=sign)
    return text if text == UNKNOWN or not unit else f"{text} {label(unit)}"


def interval(
    value: float | None,
    low: float | None,
    high: float | None,
    unit: str = "",
    *,
    n: int | None = None,
    confidence: float = 0.95,
    digits: int = 3,
    sign: bool = False,
) -> str:
    """Return value, unit, interval and sample size: ``12.4 ms [12.1, 12.9], n = 5``.

    The three numbers share as many decimals as `digits` asks for, or the interval's width where that is more,
    so that two different ends do not print alike; beside an interval ten times its size a value needs no decimals of
    its own. A bound that is not known reads ``…``; with neither, the
    interval is left out. A `confidence` (a fraction) other than 0.95 is said.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    low, high = finite(low), finite(high)
    decimals = _decimals(value, digits)
    if low is not None and high is not None and high > low:
        half = (high - low) / 2
        decimals = max(decimals, min(_decimals(half, 1), _decimals(value, _MOST_DIGITS)))
        if half > 10 * abs(value):
            decimals = min(decimals, _decimals(half, digits))
    text = _fixed(value, decimals, sign=sign) + (f" {label(unit)}" if unit else "")
    if low is not None or high is not None:
        ends = ("…" if end is None else _fixed(end, decimals, sign=sign) for end in (low, high))
        text += f" [{', '.join(ends)}]"
        if not math.isclose(confidence, 0.95):
            text += f" ({number(100 * confidence, 2)} %)"
    return text if n is None else f"{text}, n = {n}"


def percent(value_pct: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Return what is already in per cent: 51.5 → ``51.5 %``; with `sign`, a change: ``+0.614 %``."""
    return quantity(value_pct, "pct", digits, sign=sign)


def byte_size(size_bytes: float | None, digits: int = 3, *, binary: bool = False) -> str:
    """Return bytes in decimal units (``547 GB``), or in binary ones for buffers and messages (``14 KiB``)."""
    return _scaled(size_bytes, 1024 if binary else 1000, _IEC if binary else _SI, "B", digits)


def byte_rate(rate_bytes_s: float | None, digits: int = 3) -> str:
    """Return bytes per second in decimal units, as bandwidths are quoted: ``63 GB/s``."""
    return _scaled(rate_bytes_s, 1000, _SI, "B/s", digits)


def flop_rate(rate_flop_s: float | None, digits: int = 3) -> str:
    """Return floating-point operations per second: ``1.2 TFLOP/s``."""
    return _scaled(rate_flop_s, 1000, _SI, "FLOP/s", digits)


def duration(seconds: float | None, digits: int = 3) -> str:
    """Return a time span in the unit a person would choose: ``11.2 ms``, ``8.50 s``, ``8 min 43 s``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    size = abs(seconds)
    if size >= 119.5:
        sign = "−" if seconds < 0 else ""
        minutes, rest_s = divmod(round(size), 60)
        if minutes < 60:
            return f"{sign}{minutes} min {rest_s} s" if rest_s else f"{sign}{minutes} min"
        hours, rest_min = divmod(round(size / 60), 60)
        return f"{sign}{hours} h {rest_min} min" if rest_min else f"{sign}{hours} h"
    # A value that rounds up to 1000 of a unit belongs to the next one: 999.96 ms is 1 s.
    for unit, factor in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if 0 < size * factor < 999.5:
            return quantity(_shortest(seconds * factor, digits), unit, digits)
    return quantity(_shortest(seconds, digits), "s", digits)


def count(number_of: int, noun: str) -> str:
    """Return a number with its noun: ``1 stream``, ``8 streams``."""
    return f"{number_of} {noun}" if number_of == 1 else f"{number_of} {noun}s"


def p_value(p: float | None) -> str:
    """Return a probability of chance: ``p = 0.029``, ``p < 0.001``, ``p unknown``."""
    if p is None or not math.isfinite(p):
        return f"p {UNKNOWN}"
    return "p < 0.001" if p < 0.001 else f"p = {number(p, 2)}"


def _decimals(value: float, digits: int) -> int:
    """Decimals that show `digits` significant digits of `value` after rounding (9.996 rounds to 10.0)."""
    if value == 0:
        return 0
    exponent = int(f"{abs(value):.{max(digits, 1) - 1}e}".partition("e")[2])
    return max(digits - 1 - exponent, 0)


def _fixed(value: float, decimals: int, *, sign: bool) -> str:
    text = f"{value:{',' if abs(value) >= 9999.5 else ''}.{decimals}f}"
    if not any(digit in text for digit in "123456789"):
        return text.removeprefix("-")
    if text.startswith("-"):
        return "−" + text[1:]
    return "+" + text if sign else text


def _shortest(value: float, digits: int) -> float:
    """An integer where rounding leaves nothing after the point, so that 14.0 reads 14."""
    rounded = round(value, _decimals(value, digits))
    return int(rounded) if rounded == int(rounded) else value


def _scaled(value: float | None, step: int, prefixes: tuple[str, ...], unit: str, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    scaled, power = float(value), 0
    while abs(scaled) >= step * 0.9995 and power < len(prefixes) - 1:
        scaled, power = scaled / step, power + 1
    return quantity(_shortest(scaled, digits), prefixes[power] + unit, digits)
