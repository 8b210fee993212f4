"""Warm-up, drift, modes and outliers: what they find, what they leave alone, how often they are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.stats import find_drift, find_modes, find_outliers, find_warm_up

RUNS = 400
ALPHA = 0.01


def share(check: Callable[[np.ndarray], bool | None], draw: Callable[[np.random.Generator], np.ndarray]) -> float:
    rng = np.random.default_rng(21)
    return sum(bool(check(draw(rng))) for _ in range(RUNS)) / RUNS


def allowed(rate: float) -> float:
    return rate + 5 * math.sqrt(rate * (1 - rate) / RUNS)


def test_outliers_of_a_textbook_sample_are_reported_with_their_place() -> None:
    # Median 12.45, MAD 0.05: 13.9 has a modified z of 0.6745 · 1.45 / 0.05 = 19.6.
    found = find_outliers([12.4, 12.5, 12.45, 13.9, 12.4, 12.5, 12.45])
    assert (found.indices, found.values, found.first, found.n) == ((3,), (13.9,), False, 7)
    assert found.sentence == "1 of 7 samples are outliers (13.9); they are kept."


def test_a_first_outlier_is_pointed_out() -> None:
    found = find_outliers([16.0, 12.4, 12.5, 12.45, 12.4, 12.5, 12.45])
    assert found.first
    assert "was warm-up over?" in found.sentence


def test_outliers_when_more_than_half_are_equal() -> None:
    # MAD is 0; the mean absolute deviation is 1.0 and the cut 3.5 · 1.253 = 4.4.
    assert find_outliers([5.0] * 9 + [15.0]).values == (15.0,)
    assert find_outliers([5.0] * 6).indices == ()


def test_three_samples_have_no_outliers() -> None:
    assert find_outliers([1.0, 1.0, 100.0]).indices == ()


@given(st.lists(st.floats(1, 1e3), min_size=4, max_size=30), st.floats(-10, 10))
def test_outliers_do_not_depend_on_the_origin_of_the_scale(values: list[float], shift: float) -> None:
    whole = [round(v) for v in values]
    assert find_outliers(whole).indices == find_outliers([v + round(shift) for v in whole]).indices


def test_a_warm_up_of_five_requests_is_found() -> None:
    rng = np.random.default_rng(1)
    found = find_warm_up(np.concatenate([rng.normal(15, 0.1, 5), rng.normal(12.4, 0.1, 25)]))
    assert found.over is False
    assert found.steady_from == 5
    assert found.before == pytest.approx(15, abs=0.2)
    assert found.after == pytest.approx(12.4, abs=0.1)
    assert found.sentence.startswith("Warm-up was not over: the first 5 of 30 samples have a median of 15.")


def test_a_slow_first_request_is_warm_up() -> None:
    found = find_warm_up([6.7, 1.41, 1.40, 1.42, 1.40, 1.41, 1.43, 1.40])
    assert (found.over, found.steady_from) == (False, 1)
    assert found.sentence == "The first of 8 samples stands apart: 6.70, against a median of 1.41 of the rest."


def test_a_break_in_the_second_half_is_not_warm_up_but_drift() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.normal(12.4, 0.05, 25), rng.normal(13.5, 0.05, 15)])
    assert find_warm_up(values).over is True
    assert find_drift(values).detected is True


def test_steady_samples_are_steady() -> None:
    values = 12.4 + 0.01 * np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
    assert find_warm_up(values).over is True
    assert find_warm_up(values).steady_from == 0
    assert find_drift(values).detected is False


@pytest.mark.parametrize("n", [8, 30])
def test_constant_samples_have_neither_warm_up_nor_drift_nor_modes_nor_outliers(n: int) -> None:
    values = [12.4] * n
    assert find_warm_up(values).over is True
    assert find_drift(values).detected is False
    assert find_modes(values).detected is False
    assert find_outliers(values).indices == ()


def test_few_samples_are_not_judged() -> None:
    seven = [1.0, 2, 3, 4, 5, 6, 7]
    assert find_warm_up(seven).over is None
    assert find_drift(seven).detected is None
    assert find_modes(seven).detected is None
    assert find_drift(seven).sentence == "Drift unknown: 7 samples, 8 are needed."
    assert find_drift([3.0]).change_pct == 0


def test_drift_is_measured_from_the_first_to_the_last_sample() -> None:
    found = find_drift(np.linspace(98, 102, 21))
    assert found.detected is True
    assert found.change_pct == pytest.approx(4.0)
    assert found.sentence == "Drift of +4.00 % over 21 samples."
    assert find_drift(np.linspace(102, 98, 2000)).change_pct == pytest.approx(-4.0, rel=0.01)


def test_a_drift_too_small_to_matter_is_not_reported() -> None:
    values = np.linspace(100, 100.5, 50)
    assert find_drift(values).detected is False
    assert find_drift(values, material_pct=0.1).detected is True


def test_two_modes_are_found_with_their_centres() -> None:
    rng = np.random.default_rng(3)
    values = rng.permutation(np.concatenate([rng.normal(12.1, 0.05, 14), rng.normal(13.5, 0.05, 10)]))
    found = find_modes(values)
    assert found.detected is True
    assert found.counts == (14, 10)
    assert found.centres == (pytest.approx(12.1, abs=0.05), pytest.approx(13.5, abs=0.05))
    assert found.sentence == ("Two modes, near 12.1 (14 samples) and 13.5 (10): the median may stand for neither.")


def test_one_outlier_is_not_a_mode() -> None:
    values = [*np.random.default_rng(4).normal(12.4, 0.05, 30), 20.0]
    assert find_modes(values).detected is False


def test_modes_closer_than_matters_are_one() -> None:
    values = [100.0] * 10 + [100.5] * 10
    assert find_modes(values).detected is False
    assert find_modes(values, material_pct=0.1).detected is True


@pytest.mark.parametrize("n", [8, 20, 60])
@pytest.mark.parametrize("shape", ["normal", "uniform", "skewed"])
def test_false_alarms_stay_at_their_stated_rate(n: int, shape: str) -> None:
    def draw(rng: np.random.Generator) -> np.ndarray:
        match shape:
            case "normal":
                return rng.normal(100, 5, n)
            case "uniform":
                return rng.uniform(80, 120, n)
        return 100 + 10 * rng.exponential(1, n)

    assert share(lambda x: find_modes(x).detected, draw) <= allowed(ALPHA)
    assert share(lambda x: find_drift(x).detected, draw) <= allowed(ALPHA)
    # A first sample that is the farthest outlier comes on top: in a skewed sample of 8, with every eighth
    # outlier.
    first = share(lambda x: find_outliers(x).first and int(np.argmax(np.abs(x - np.median(x)))) == 0, draw)
    assert share(lambda x: find_warm_up(x).over is False, draw) <= allowed(ALPHA) + first


def test_what_is_there_is_found() -> None:
    n = 24
    ramp, early = np.linspace(0, 5, n), np.where(np.arange(n) < n // 4, 5.0, 0.0)

    def level(rng: np.random.Generator) -> np.ndarray:
        return 100 + rng.normal(0, 1, n)

    assert share(lambda x: find_drift(x).detected, lambda rng: ramp + level(rng)) >= 0.99
    assert share(lambda x: find_warm_up(x).over is False, lambda rng: early + level(rng)) >= 0.95
    assert share(lambda x: find_modes(x).detected, lambda rng: 10 * (rng.random(n) < 0.4) + level(rng)) >= 0.98


def test_ten_thousand_samples_are_no_burden() -> None:
    values = np.random.default_rng(5).normal(100, 1, 10_000)
    assert find_warm_up(values).over is True
    assert find_drift(values).detected is False
    assert find_modes(values).detected is False
