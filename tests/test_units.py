"""What people read: literal strings, and no NaN for any input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook import units

ANY_NUMBER = st.one_of(st.none(), st.floats(), st.integers(-(10**15), 10**15))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1536.2, "1536"),
        (12.43, "12.4"),
        (12.0, "12.0"),
        (9.996, "10.0"),
        (0.01234, "0.0123"),
        (-5.7, "−5.70"),
        (131072, "131,072"),
        (5, "5"),
        (0.0, "0"),
        (-0.0, "0"),
        (4.2e-9, "4.20e−9"),
        (None, "unknown"),
        (math.nan, "unknown"),
        (math.inf, "unknown"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert units.number(value) == text


def test_quantity_prints_the_label_of_a_key_suffix() -> None:
    assert units.quantity(81.4, "tok_s") == "81.4 tok/s"
    assert units.quantity(1.2199, "us_per_token", sign=True) == "+1.22 µs/token"
    assert units.quantity(51.5, "pct") == "51.5 %"
    assert units.quantity(3, "launches") == "3 launches"
    assert units.quantity(None, "ms") == "unknown"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((12.43, 12.12, 12.91, "ms"), "12.4 ms [12.1, 12.9]"),
        ((12.4312, 12.4301, 12.4326, "ms"), "12.431 ms [12.430, 12.433]"),
        ((5.0, 5.0, 5.0, "tok_s"), "5.00 tok/s [5.00, 5.00]"),
        ((5.0, None, 7.0, "ms"), "5.00 ms […, 7.00]"),
        ((5.0, None, None, "ms"), "5.00 ms"),
        ((5.0, math.nan, math.nan, "ms"), "5.00 ms"),
        ((math.nan, 1.0, 2.0, "ms"), "unknown"),
    ],
)
def test_interval(arguments: tuple[float, float | None, float | None, str], text: str) -> None:
    assert units.interval(*arguments) == text


def test_interval_says_its_size_and_an_unusual_level() -> None:
    assert units.interval(12.43, 12.12, 12.91, "ms", n=5) == "12.4 ms [12.1, 12.9], n = 5"
    assert units.interval(3.54, -1340.0, 1347.07, "us_per_token") == "4 µs/token [−1340, 1347]"
    assert units.interval(3.2, 3.0, 3.5, "s", n=3, confidence=0.75) == "3.20 s [3.00, 3.50] (75 %), n = 3"
    assert units.interval(0.61, -0.2, 1.4, "pct", sign=True) == "+0.610 % [−0.200, +1.400]"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (523, "8 min 43 s"),
        (2160, "36 min"),
        (8.5, "8.50 s"),
        (0.01117, "11.2 ms"),
        (1.2e-6, "1.20 µs"),
        (0.99996, "1 s"),
        (119.6, "2 min"),
        (5000, "1 h 23 min"),
        (7200, "2 h"),
        (-523, "−8 min 43 s"),
        (0, "0 s"),
        (None, "unknown"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


def test_bytes_and_rates() -> None:
    assert units.byte_size(547e9) == "547 GB"
    assert units.byte_size(14336, binary=True) == "14 KiB"
    assert units.byte_size(1023.9, binary=True) == "1 KiB"
    assert units.byte_size(999_950) == "1 MB"
    assert units.byte_size(None) == "unknown"
    assert units.byte_rate(31.52e9) == "31.5 GB/s"
    assert units.flop_rate(1.23e12) == "1.23 TFLOP/s"


def test_p_value() -> None:
    assert [units.p_value(p) for p in (2 / 70, 1e-5, None)] == ["p = 0.029", "p < 0.001", "p unknown"]


def test_finite() -> None:
    assert [units.finite(value) for value in (None, math.nan, -math.inf, 2)] == [None, None, None, 2.0]


@given(ANY_NUMBER, ANY_NUMBER, ANY_NUMBER, st.integers(1, 6))
def test_nothing_prints_nan_or_fails(value: float | None, low: float | None, high: float | None, digits: int) -> None:
    texts = [
        units.number(value, digits),
        units.quantity(value, "ms", digits, sign=True),
        units.interval(value, low, high, "ms", digits=digits),
        units.percent(value, digits),
        units.byte_size(value, digits),
        units.byte_size(value, digits, binary=True),
        units.byte_rate(value, digits),
        units.duration(value, digits),
        units.p_value(value),
    ]
    for text in texts:
        assert text
        assert "nan" not in text.lower()
        assert "inf" not in text.lower()


@given(st.floats(1e-4, 1e4), st.integers(2, 5))
def test_a_printed_number_is_within_half_a_digit(value: float, digits: int) -> None:
    printed = float(units.number(value, digits).replace(",", ""))
    assert abs(printed - value) <= 0.5000001 * 10 ** (math.floor(math.log10(value)) - digits + 1)


def test_a_number_with_its_noun() -> None:
    assert (units.count(1, "stream"), units.count(8, "stream")) == ("1 stream", "8 streams")
