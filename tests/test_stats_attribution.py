"""The line over positions and the gap between two rates: a real campaign's numbers, and planted laws."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.errors import BadInput
from perfbook.stats import Estimate, Generation, attribute_gap, fit_position, fit_totals


def test_a_campaigns_gap_is_the_context_slope_and_not_prefill() -> None:
    # 512 tokens in 6.25 s, 2048 in 26.88 s, about 30 ms of prefill, and a slope worth 1.9 s.
    found = attribute_gap(
        Generation(512, 6.25, prefill_s=0.03),
        Generation(2048, 26.88, prefill_s=0.03),
        slope=1.9 / 1.572864,
    )
    assert found.ratio == 4
    assert found.gap_s == pytest.approx(1.88)
    assert {part.cause: round(part.seconds, 2) for part in found.parts} == {
        "prefill": -0.09,
        "context slope": 1.90,
        "warm-up": 0.0,
        "remainder": 0.07,
    }
    assert found.gap_tok_s == pytest.approx(2048 / 26.88 - 512 / 6.25)
    assert found.sentence == "Of +1.88 s, context slope accounts for +1.90 s; +0.0700 s is unexplained."


def test_three_blended_rates_give_prefill_start_and_slope() -> None:
    totals = fit_totals([(512, 512 / 81.9), (2048, 2048 / 76.2), (32, 32 * 0.0124)])
    assert totals.ttft_ms == pytest.approx(28, abs=0.5)
    assert totals.start_ms == pytest.approx(11.87, abs=0.005)
    assert totals.slope_us_per_token == pytest.approx(1.22, abs=0.005)


def test_with_the_starting_rate_known_an_exact_law_leaves_no_remainder() -> None:
    totals = fit_totals([(512, 512 / 81.9), (2048, 2048 / 76.2), (32, 32 * 0.0124)])
    prefill_s = totals.ttft_ms / 1e3
    found = attribute_gap(
        Generation(512, 512 / 81.9, prefill_s),
        Generation(2048, 2048 / 76.2, prefill_s),
        slope=totals.slope_us_per_token,
        start_ms=totals.start_ms,
    )
    assert found["first token"].seconds == pytest.approx(3 * 0.011866, abs=1e-5)
    assert found["remainder"].seconds == pytest.approx(0, abs=1e-6)


times = st.floats(0.01, 100)
small = st.floats(0, 5)


@given(st.integers(1, 500), st.integers(1, 500), times, times, small, small, st.floats(-10, 10), small, small)
def test_the_parts_sum_to_the_gap_in_seconds_and_in_rate(
    tokens: int,
    more: int,
    short_s: float,
    long_s: float,
    p1: float,
    p2: float,
    slope: float,
    w1: float,
    w2: float,
) -> None:
    found = attribute_gap(
        Generation(tokens, short_s, p1, w1),
        Generation(tokens + more, long_s, p2, w2),
        slope=slope,
        start_ms=12.0,
    )
    size_s = max(abs(part.seconds) for part in found.parts)
    size_tok_s = max(abs(part.tok_s) for part in found.parts)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.gap_s, abs=1e-9 * (1 + size_s))
    assert sum(part.tok_s for part in found.parts) == pytest.approx(
        found.gap_tok_s, abs=1e-9 * (1 + size_tok_s + found.gap_tok_s**2)
    )


def test_prefill_warm_up_and_slope_carry_their_signs() -> None:
    found = attribute_gap(
        Generation(100, 2.0, prefill_s=0.2, warm_up_s=0.5),
        Generation(300, 4.0, prefill_s=0.2),
        slope=2.0,
    )
    assert found["prefill"].seconds == pytest.approx(-0.4)
    assert found["prefill"].tok_s > 0
    assert found["warm-up"].seconds == pytest.approx(-1.5)
    assert found["context slope"].seconds == pytest.approx(2e-6 * (300**2 - 3 * 100**2) / 2)
    assert found["context slope"].tok_s < 0


def test_the_slopes_interval_carries_over() -> None:
    found = attribute_gap(
        Generation(512, 6.25, 0.03),
        Generation(2048, 26.88, 0.03),
        slope=Estimate(1.2, 1.1, 1.3, "us_per_token", 5),
    )
    slope, rest = found["context slope"], found["remainder"]
    assert slope.low_s == pytest.approx(1.1 * 1.572864)
    assert slope.high_s == pytest.approx(1.3 * 1.572864)
    assert rest.low_s == pytest.approx(1.88 + 0.09 - 1.3 * 1.572864)
    assert rest.high_s == pytest.approx(1.88 + 0.09 - 1.1 * 1.572864)
    assert found["prefill"].low_s is None


def requests(seed: int, count: int, tokens: int, start: float, slope: float, noise: float) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    position = np.arange(1, tokens)
    return [start + slope / 1e3 * position + rng.normal(0, noise, tokens - 1) for _ in range(count)]


@pytest.mark.parametrize(("ttft_ms", "slope"), [(28.0, 1.22), (180.0, 4.0), (60.0, 0.6)])
def test_planted_prefill_and_slope_are_recovered_within_five_per_cent(ttft_ms: float, slope: float) -> None:
    rng = np.random.default_rng(int(ttft_ms))
    lengths = {}
    gaps: list[np.ndarray] = []
    for tokens in (512, 2048):
        runs = requests(tokens, 6, tokens, 11.87, slope, 0.4)
        ttfts = ttft_ms * (1 + rng.normal(0, 0.01, 6))
        total_s = float(np.mean([ttft + run.sum() for ttft, run in zip(ttfts, runs, strict=True)])) / 1e3
        lengths[tokens] = Generation(tokens, total_s, float(ttfts.mean()) / 1e3)
        gaps += runs
    fit = fit_position(gaps)
    found = attribute_gap(lengths[512], lengths[2048], slope=fit.slope, start_ms=fit.start.value)
    assert found["prefill"].seconds == pytest.approx(-3 * ttft_ms / 1e3, rel=0.05)
    assert found["context slope"].seconds == pytest.approx(slope * 1.572864, rel=0.05)
    assert abs(found["remainder"].seconds) < 0.05 * abs(found.gap_s)


def test_an_exact_line_is_found_exactly() -> None:
    fit = fit_position([11.87 + 0.00122 * np.arange(1, n) for n in (40, 80, 200)])
    assert fit.start.value == pytest.approx(11.87)
    assert fit.slope.value == pytest.approx(1.22)
    assert fit.slope.low == pytest.approx(1.22)
    assert fit.slope.high == pytest.approx(1.22)
    assert (fit.requests, fit.gaps) == (3, 39 + 79 + 199)
    assert (fit.first_position, fit.last_position) == (1, 199)
    assert fit.at_ms(1000) == pytest.approx(13.09)
    assert fit.to_json()["slope"]["value_us_per_token"] == pytest.approx(1.22)  # type: ignore[index]


def test_a_prompts_length_may_be_the_first_position() -> None:
    fit = fit_position([[5.1, 5.2, 5.3]] * 2, first_position=101)
    assert fit.start.value == pytest.approx(5.1 - 10.1)
    assert fit.slope.value == pytest.approx(100)


def test_events_that_carry_several_tokens_are_sums_of_steps() -> None:
    step = 11.87 + 0.00122 * np.arange(1, 401)
    counts = [1, 3, 2, 4] * 40
    ends = np.cumsum(counts)
    merged = [float(step[end - m : end].sum()) for m, end in zip(counts, ends, strict=True)]
    fit = fit_position([merged, merged], [counts, counts])
    assert fit.start.value == pytest.approx(11.87)
    assert fit.slope.value == pytest.approx(1.22)
    assert (fit.gaps, fit.last_position) == (320, 400)


def test_one_request_has_no_interval() -> None:
    fit = fit_position(requests(1, 1, 100, 12, 1, 0.1))
    assert (fit.slope.low, fit.slope.high, fit.start.low) == (None, None, None)
    assert fit.slope.value is not None
    json.dumps(fit.to_json(), allow_nan=False)


def test_constant_gaps_have_no_slope() -> None:
    fit = fit_position([[12.5] * 50] * 4)
    assert fit.slope.value == pytest.approx(0, abs=1e-9)
    assert fit.slope.high == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("count", [3, 8])
def test_the_slopes_interval_covers_when_requests_differ(count: int) -> None:
    rng = np.random.default_rng(9)
    covered = 0
    for _ in range(600):
        slopes = rng.normal(1.2, 0.3, count)
        runs = [12 + s / 1e3 * np.arange(1, 60) + rng.normal(0, 0.01, 59) for s in slopes]
        fit = fit_position(runs)
        assert fit.slope.low is not None
        assert fit.slope.high is not None
        covered += fit.slope.low <= 1.2 <= fit.slope.high
    assert covered / 600 >= 0.95 - 5 * (0.95 * 0.05 / 600) ** 0.5


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fit_position([]), "at least two gaps"),
        (lambda: fit_position([[1.0], []]), "at least two gaps"),
        (lambda: fit_position([[1.0, float("nan")]]), "not finite"),
        (lambda: fit_position([[1.0, 1.0]], [[1]]), "one count for every gap"),
        (lambda: fit_totals([(10, 1.0), (20, 2.0), (10, 1.1)]), "three different output lengths"),
        (
            lambda: attribute_gap(Generation(9, 1.0, 0.1), Generation(9, 1.0, 0.1), slope=0.0),
            "must be the shorter",
        ),
        (
            lambda: attribute_gap(Generation(9, 0.0, 0.1), Generation(10, 1.0, 0.1), slope=0.0),
            "above zero",
        ),
        (
            lambda: attribute_gap(Generation(9, 1.0, 0.1), Generation(10, 1.0, 0.1), slope=Estimate(None)),
            "slope is unknown",
        ),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()  # type: ignore[operator]
