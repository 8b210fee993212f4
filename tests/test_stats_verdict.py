"""Verdicts: literal values against scipy and tables, the labels in their order, and their error rates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sp

from perfbook.errors import BadInput
from perfbook.stats import Label, Verdict, compare, compare_all, holm
from perfbook.stats.ranktest import rank_test

POSITIVE = st.floats(0.1, 1e4, allow_subnormal=False)


def test_p_equals_scipys_exact_one_without_ties() -> None:
    rng = np.random.default_rng(1)
    for n, m in ((4, 4), (5, 5), (7, 3), (12, 9), (25, 30)):
        base, cand = rng.normal(100, 1, n), rng.normal(100.7, 1, m)
        expected = sp.mannwhitneyu(cand, base, method="exact").pvalue
        assert compare(base, cand).p == pytest.approx(expected, rel=1e-9)


def test_p_equals_scipys_approximation_for_many_values() -> None:
    rng = np.random.default_rng(2)
    base, cand = rng.normal(100, 1, 80).round(1), rng.normal(100.3, 1, 70).round(1)
    assert compare(base, cand).p == pytest.approx(sp.mannwhitneyu(cand, base, method="asymptotic").pvalue, rel=1e-9)


def test_p_with_ties_counts_every_assignment() -> None:
    base, cand = [1.0, 2.0, 2.0, 3.0], [2.0, 3.0, 3.0, 4.0, 4.0]
    pooled = np.array(base + cand)

    def twice_u(chosen: tuple[int, ...]) -> int:
        ours = pooled[list(chosen)]
        theirs = np.delete(pooled, list(chosen))
        return int(sum(2 * (ours > x).sum() + (ours == x).sum() for x in theirs))

    every = [twice_u(chosen) for chosen in itertools.combinations(range(9), 5)]
    seen = twice_u((4, 5, 6, 7, 8))
    tail = min(sum(u <= seen for u in every), sum(u >= seen for u in every)) / len(every)
    assert compare(base, cand).p == pytest.approx(2 * tail, rel=1e-12)


def test_the_smallest_p_of_balanced_launches() -> None:
    assert compare([1.0] * 3, [1.0] * 3).smallest_p == pytest.approx(0.1)
    assert compare([1.0] * 4, [1.0] * 4).smallest_p == pytest.approx(0.02857, abs=1e-5)
    assert compare([1.0] * 5, [1.0] * 5).smallest_p == pytest.approx(0.00794, abs=1e-5)


def test_shift_and_interval_of_a_published_example() -> None:
    # Hollander & Wolfe, Nonparametric Statistical Methods, table 4.1 (permeability of membranes): shift of
    # the second sample −0.305, as R's wilcox.test(conf.int = TRUE) prints it. On exponentials the log-ratio
    # is that difference.
    at_term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
    earlier = [1.15, 0.88, 0.90, 0.74, 1.21]
    verdict = compare(np.exp(at_term), np.exp(earlier), alpha=0.05)
    assert math.log1p(verdict.effect_pct / 100) == pytest.approx(-0.305, abs=5e-4)
    assert verdict.p == pytest.approx(0.2544, abs=5e-5)
    assert verdict.low_pct is not None
    assert verdict.high_pct is not None
    assert math.log1p(verdict.low_pct / 100) == pytest.approx(-0.76, abs=5e-3)
    assert math.log1p(verdict.high_pct / 100) == pytest.approx(0.15, abs=5e-3)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_four_launches_each_are_enough_for_one_comparison_and_not_for_two() -> None:
    base, cand = [12.40, 12.42, 12.45, 12.50], [12.00, 12.05, 12.10, 12.12]
    assert compare(base, cand).label is Label.FASTER
    two = compare_all({"proto": (base, cand), "algo": (base, base)})
    assert {verdict.text for verdict in two.values()} == {"too few launches"}
    five = compare_all({"proto": ([*base, 12.44], [*cand, 12.06]), "algo": ([*base, 12.44], [*base, 12.43])})
    assert five["proto"].label is Label.FASTER


def test_one_run_each_is_too_few_with_an_indicative_effect() -> None:
    verdict = compare([81.4], [81.9], better="higher", unit="tok_s")
    assert verdict.text == "too few launches"
    assert verdict.effect_pct == pytest.approx(0.6143, abs=1e-4)
    assert (verdict.low_pct, verdict.high_pct) == (None, None)
    assert verdict.sentence == ("too few launches: 1 + 1 launches reach p = 1.0 at best; indicative effect +0.614 %")


SIX = np.array([100.0, 100.1, 100.2, 100.3, 100.4, 100.5])


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (SIX * 0.95, "faster"),
        (SIX * 1.05, "slower"),
        (SIX * 0.99, "faster, below the minimum effect"),
        (SIX * 1.01, "slower, below the minimum effect"),
        (SIX[::-1] + 0.05, "equivalent within 2 %"),
        (np.array([95.0, 98, 99, 101, 104, 107]), "no difference detected"),
    ],
)
def test_labels(candidate: np.ndarray, text: str) -> None:
    assert compare(SIX, candidate).text == text


def test_for_a_rate_higher_is_faster() -> None:
    assert compare(SIX, SIX * 1.05, better="higher").label is Label.FASTER
    assert compare(SIX, SIX * 0.95, better="higher").label is Label.SLOWER


def test_the_minimum_effect_is_a_parameter() -> None:
    assert compare(SIX, SIX * 0.95, minimum_effect_pct=6).label is Label.FASTER_SMALL
    assert compare(SIX, SIX * 1.0001, minimum_effect_pct=0.1).label is Label.NO_DIFFERENCE


def test_blocks_remove_a_drift_that_hides_the_effect() -> None:
    level = [100.0, 108.0, 95.0, 113.0]
    base = {i: [x, x + 0.2] for i, x in enumerate(level)}
    cand = {i: [0.97 * x, 0.97 * x + 0.2] for i, x in enumerate(level)}
    flat_base, flat_cand = ([x for runs in side.values() for x in runs] for side in (base, cand))
    assert compare(flat_base, flat_cand).label is Label.NO_DIFFERENCE
    blocked = compare(base, cand)
    assert blocked.label is Label.FASTER
    assert blocked.effect_pct == pytest.approx(-3.0, abs=0.1)
    assert blocked.p == pytest.approx(2 / math.comb(4, 2) ** 4)
    assert blocked.blocks == 4


def test_one_block_is_the_unblocked_test() -> None:
    base, cand = [3.0, 5.0, 4.0, 6.0], [4.5, 5.5, 7.0, 8.0]
    assert compare({"a": base}, {"a": cand}).p == compare(base, cand).p


@pytest.mark.parametrize(
    ("base", "cand", "words"),
    [
        ([1.0, 0.0], [1.0], "number 1 is 0"),
        ([1.0, math.nan], [1.0], "not finite"),
        ([], [1.0], "at least one"),
        ({0: [1.0]}, [1.0], "both as block"),
        ({0: [1.0]}, {1: [1.0]}, "every block"),
    ],
)
def test_bad_input_is_said_in_one_line(base: object, cand: object, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        compare(base, cand)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_json_has_the_printed_label_and_only_plain_values() -> None:
    data = compare(SIX, SIX[::-1] + 0.05, unit="ms").to_json()
    assert data["label"] == "equivalent within 2 %"
    assert data["baseline"] == list(SIX)
    assert type(data["p"]) is float
    assert type(data["label"]) is str
    assert compare([1.0], [2.0]).to_json()["low_pct"] is None


@given(st.lists(POSITIVE, min_size=1, max_size=12), st.integers(2, 5))
def test_identical_samples_never_differ(values: list[float], comparisons: int) -> None:
    verdicts = compare_all({str(i): (values, values) for i in range(comparisons)})
    assert all(v.effect_pct == pytest.approx(0, abs=1e-9) for v in verdicts.values())
    differing = {Label.FASTER, Label.SLOWER, Label.FASTER_SMALL, Label.SLOWER_SMALL}
    assert not differing & {v.label for v in verdicts.values()}
    assert {v.p for v in verdicts.values()} == {1.0}


@given(
    st.lists(POSITIVE, min_size=1, max_size=9),
    st.lists(POSITIVE, min_size=1, max_size=9),
    st.floats(0.01, 100),
)
def test_swapping_sides_and_scaling_keep_the_verdict(base: list[float], cand: list[float], scale: float) -> None:
    there, back = compare(base, cand), compare(cand, base)
    assert there.p == pytest.approx(back.p)
    assert (1 + there.effect_pct / 100) * (1 + back.effect_pct / 100) == pytest.approx(1)
    power = 2.0 ** round(math.log2(scale))
    scaled = compare([x * power for x in base], [x * power for x in cand])
    assert scaled.p == there.p
    assert scaled.effect_pct == pytest.approx(there.effect_pct, abs=1e-6)


@settings(max_examples=50)
@given(
    st.lists(POSITIVE, min_size=4, max_size=9, unique=True),
    st.lists(POSITIVE, min_size=4, max_size=9, unique=True),
)
def test_the_interval_excludes_zero_exactly_when_p_is_small(base: list[float], cand: list[float]) -> None:
    if set(base) & set(cand):
        return
    verdict = compare(base, cand)
    if verdict.low_pct is None or verdict.high_pct is None:
        assert verdict.smallest_p > 0.05
    else:
        assert (verdict.low_pct > 0 or verdict.high_pct < 0) == (verdict.p <= 0.05)


# The promises over many simulated campaigns. A binomial bound five standard errors out makes a failure a
# defect.

CAMPAIGNS = 2000


def campaigns(seed: int, launches: int, settings_: int, effect: float, noise: str) -> list[dict[str, Verdict]]:
    rng = np.random.default_rng(seed)

    def launch(size: int) -> np.ndarray:
        match noise:
            case "normal":
                return np.exp(rng.normal(0, 0.01, size))
            case "skewed":
                return 1 + rng.lognormal(-4.5, 1.0, size)
            case "two modes":
                return 1 + 0.03 * (rng.random(size) < 0.4) + rng.normal(0, 0.003, size)
            case "drift":
                return 1 + rng.normal(0, 0.005, size) + np.linspace(0, 0.03, size)[rng.permutation(size)]
        raise AssertionError(noise)

    found = []
    for _ in range(CAMPAIGNS):
        # Launches of a campaign in one shuffled order, so that what drifts falls on every setting alike.
        values = launch(launches * (settings_ + 1)).reshape(settings_ + 1, launches)
        base = 12.4 * values[0]
        found.append(compare_all({str(i): (base, 12.4 * (1 + effect) * values[i]) for i in range(1, settings_ + 1)}))
    return found


def allowed(rate: float) -> float:
    return rate + 5 * math.sqrt(rate * (1 - rate) / CAMPAIGNS)


CLAIMS = {Label.FASTER, Label.SLOWER, Label.FASTER_SMALL, Label.SLOWER_SMALL}


@pytest.mark.parametrize("noise", ["normal", "skewed", "two modes", "drift"])
@pytest.mark.parametrize("settings_", [1, 3])
def test_a_campaign_without_effects_claims_one_at_most_at_alpha(noise: str, settings_: int) -> None:
    found = campaigns(7, 6, settings_, 0.0, noise)
    false_alarms = sum(any(v.label in CLAIMS for v in verdicts.values()) for verdicts in found)
    assert false_alarms / CAMPAIGNS <= allowed(0.05)
    assert not any(v.label is Label.TOO_FEW for verdicts in found for v in verdicts.values())


def test_a_first_launch_outlier_raises_no_false_alarms() -> None:
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(CAMPAIGNS):
        base, cand = 12.4 * np.exp(rng.normal(0, 0.01, (2, 6)))
        base[0] *= 2
        hits += compare(base, cand).label in CLAIMS
    assert hits / CAMPAIGNS <= allowed(0.05)


def test_a_large_effect_is_found_and_never_reversed() -> None:
    labels = [verdicts["1"].label for verdicts in campaigns(8, 6, 1, -0.05, "normal")]
    assert labels.count(Label.FASTER) / CAMPAIGNS >= 0.99
    assert Label.SLOWER not in labels


def test_an_effect_at_the_margin_is_rarely_called_equivalent() -> None:
    labels = [verdicts["1"].label for verdicts in campaigns(9, 8, 1, 0.02, "normal")]
    assert labels.count(Label.EQUIVALENT) / CAMPAIGNS <= allowed(0.025)


def test_no_effect_in_quiet_launches_is_called_equivalent() -> None:
    rng = np.random.default_rng(10)
    labels = [compare(*(12.4 * np.exp(rng.normal(0, 0.005, (2, 8))))).label for _ in range(CAMPAIGNS)]
    assert labels.count(Label.EQUIVALENT) / CAMPAIGNS >= 0.9


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_interval_covers_the_true_shift(blocks: int) -> None:
    rng = np.random.default_rng(12)
    covered = 0
    for _ in range(CAMPAIGNS):
        pairs = []
        for _ in range(blocks):
            level = rng.uniform(90, 110)
            size = 8 // blocks
            pairs.append((level * np.exp(rng.normal(0, 0.01, size)), 1.03 * level * np.exp(rng.normal(0, 0.01, size))))
        test = rank_test(pairs, 0.95)
        assert test.low_pct is not None
        assert test.high_pct is not None
        covered += test.low_pct <= 3.0 <= test.high_pct
    assert 1 - covered / CAMPAIGNS <= allowed(0.05)
