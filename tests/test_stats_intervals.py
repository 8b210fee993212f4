"""Intervals: literal order statistics, coverage, and what few or constant samples allow."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as sp

from perfbook.errors import BadInput
from perfbook.stats import Estimate, bootstrap, mean_interval, median_interval, percentile, show_all
from perfbook.stats.result import plain

FINITE = st.floats(-1e6, 1e6)


def test_median_of_ten_lies_between_the_second_and_the_ninth() -> None:
    # The textbook interval for n = 10: 97.9 % between the 2nd and the 9th of the ordered samples.
    found = median_interval([7, 1, 9, 3, 10, 2, 8, 4, 6, 5], "ms")
    assert (found.value, found.low, found.high, found.n) == (5.5, 2, 9, 10)
    assert found.confidence == 0.95


@pytest.mark.parametrize(("n", "confidence"), [(2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375)])
def test_few_samples_give_the_range_with_its_exact_coverage(n: int, confidence: float) -> None:
    found = median_interval(range(1, n + 1), "ms")
    assert (found.low, found.high) == (1, n)
    assert found.confidence == confidence
    assert median_interval(range(1, 7)).confidence == 0.95


def test_mean_interval_is_students() -> None:
    # t(0.975, 2) = 4.303: 4 ± 4.303 · 2/√3.
    found = mean_interval([2.0, 4.0, 6.0], "tok_s")
    assert found.value == 4.0
    assert found.low == pytest.approx(4 - 4.303 * 2 / math.sqrt(3), abs=1e-3)
    assert found.high == pytest.approx(4 + 4.303 * 2 / math.sqrt(3), abs=1e-3)


def test_one_sample_has_no_interval() -> None:
    for found in (median_interval([12.4], "ms"), mean_interval([12.4], "ms"), bootstrap([12.4], seed=0)):
        assert (found.value, found.low, found.high, found.n) == (12.4, None, None, 1)


@given(st.floats(0.001, 1e6), st.integers(2, 30))
def test_constant_data_give_a_point(value: float, n: int) -> None:
    data = [value] * n
    for found in (median_interval(data), mean_interval(data), bootstrap(data, seed=0, resamples=20)):
        assert found.low == pytest.approx(value)
        assert found.high == pytest.approx(value)


@given(st.lists(FINITE, min_size=1, max_size=40))
def test_the_median_is_inside_its_interval(values: list[float]) -> None:
    found = median_interval(values)
    assert found.value is not None
    if found.low is not None and found.high is not None:
        assert found.low <= found.value <= found.high


@pytest.mark.parametrize("n", [5, 6, 9, 25])
def test_the_median_interval_covers_as_often_as_it_says(n: int) -> None:
    rng = np.random.default_rng(3)
    runs = 300
    found = [median_interval(rng.lognormal(0, 1, n)) for _ in range(runs)]
    covered = sum(e.low is not None and e.high is not None and e.low <= 1 <= e.high for e in found) / runs
    level = found[0].confidence
    assert covered >= level - 5 * math.sqrt(level * (1 - level) / runs)


def test_p99_from_twenty_requests_is_marked() -> None:
    found = percentile(range(1, 21), 99, "ms")
    assert not found.supported
    assert found.needed_n == 368
    assert found.mark == "p99 from 20 samples; 368 are needed to bound it"
    assert found.estimate.high is None
    assert str(found) == "19.8 ms [19.0, …], n = 20 (p99 from 20 samples; 368 are needed to bound it)"


@pytest.mark.parametrize(("pct", "needed"), [(50, 6), (90, 36), (95, 72), (99, 368), (5, 72)])
def test_needed_samples_are_the_fewest_that_bound_both_sides(pct: float, needed: int) -> None:
    enough, short = percentile(range(needed), pct), percentile(range(needed - 1), pct)
    assert enough.needed_n == needed
    assert enough.supported
    assert None not in (enough.estimate.low, enough.estimate.high)
    assert not short.supported
    assert None in (short.estimate.low, short.estimate.high)


def test_a_percentiles_bounds_are_scipys() -> None:
    data = np.random.default_rng(4).exponential(1, 500)
    expected = sp.quantile_test(data, q=0, p=0.95).confidence_interval(0.95)
    found = percentile(data, 95).estimate
    assert (found.low, found.high) == (expected.low, expected.high)
    assert found.value == np.percentile(data, 95)


def test_bootstrap_is_repeatable_and_near_theory() -> None:
    data = np.random.default_rng(5).normal(10, 1, 400)
    found = bootstrap(data, lambda x: float(x.mean()), "ms", seed=1)
    assert found == bootstrap(data, lambda x: float(x.mean()), "ms", seed=1)
    assert found != bootstrap(data, lambda x: float(x.mean()), "ms", seed=2)
    theory = sp.t.interval(0.95, 399, data.mean(), sp.sem(data))
    assert found.low == pytest.approx(theory[0], abs=0.01)
    assert found.high == pytest.approx(theory[1], abs=0.01)


def test_bootstrap_over_launches_is_wider_than_over_their_requests() -> None:
    rng = np.random.default_rng(6)
    launches = [rng.normal(rng.normal(10, 1), 0.1, 50) for _ in range(12)]
    over_launches = bootstrap(launches, seed=0)
    over_requests = bootstrap(np.concatenate(launches), seed=0)
    assert over_launches.n == 12
    assert over_launches.value == over_requests.value

    def width(e: Estimate) -> float:
        assert e.low is not None
        assert e.high is not None
        return e.high - e.low

    assert width(over_launches) > 2 * width(over_requests)


def test_fewer_than_ten_points_are_shown() -> None:
    assert show_all([12.4, 12.35, 13.0], "ms") == "12.4, 12.3, 13.0 ms"
    assert show_all(range(10), "ms") is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: median_interval([]), "at least one number"),
        (lambda: median_interval([1.0, math.inf]), "number 1 is not finite"),
        (lambda: median_interval([1.0], confidence=95), "not between 0 and 1"),
        (lambda: percentile([1.0], 100), "not between 0 and 100"),
        (lambda: bootstrap([], seed=0), "at least one sampling unit"),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()  # type: ignore[operator]


def test_json_has_the_unit_in_the_key_and_no_nan() -> None:
    assert Estimate(12.4, math.nan, np.float64(13.0), "ms", 3, 0.95, "range").to_json() == {
        "value_ms": 12.4,
        "low_ms": None,
        "high_ms": 13.0,
        "n": 3,
        "confidence": 0.95,
        "method": "range",
    }
    nested = percentile(range(20), 99, "ms").to_json()
    assert nested["estimate"] == {
        "value_ms": pytest.approx(18.81),
        "low_ms": 18,
        "high_ms": None,
        "n": 20,
        "confidence": 0.95,
        "method": "order statistics",
    }
    json.dumps(nested, allow_nan=False)


def test_half_width_says_how_precise_an_estimate_is() -> None:
    assert Estimate(50.0, 48.0, 52.0).half_width_pct == pytest.approx(4)
    assert Estimate(50.0, None, 52.0).half_width_pct is None
    assert Estimate(0.0, -1.0, 1.0).half_width_pct is None


def test_plain_refuses_what_json_cannot_hold() -> None:
    assert plain({1: (np.int64(2), np.bool_(True), np.float32("nan"))}) == {"1": [2, True, None]}
    with pytest.raises(TypeError, match="object has no plain form"):
        plain(object())


def test_results_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        median_interval([1.0]).value = 2.0  # type: ignore[misc]
