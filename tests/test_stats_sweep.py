"""The knee, the SLO and what limits: on rising, saturating, queue-limited, collapsing and flat curves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.errors import BadInput
from perfbook.stats import CellLoad, Knee, Limit, find_knee, find_slo_limit, littles_law, what_limits

POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def server(
    concurrency: int,
    *,
    base_ms: float = 12.0,
    per_stream_ms: float = 0.0,
    seats: int = 10**6,
    thrash: float = 0.0,
    gauges: bool = True,
) -> CellLoad:
    """A server whose step takes base + per_stream · streams, with a limit on the streams in a step.

    `thrash` slows every step by that fraction per stream that has no seat, as preemption and recomputation
    do.
    """
    running = min(concurrency, seats)
    waiting = concurrency - running
    step_ms = (base_ms + per_stream_ms * running) * (1 + thrash * waiting)
    rate = 1000 * running / step_ms
    wait_ms = 512 * step_ms * waiting / running
    return CellLoad(
        concurrency,
        rate,
        tpot_ms=step_ms,
        ttft_ms=30 + 2 * running + wait_ms,
        running=running if gauges else None,
        waiting=waiting if gauges else None,
        kv_usage=1.0 if thrash and waiting else 0.5,
        preemptions=waiting if thrash else 0,
    )


def knee_of(cells: list[CellLoad]) -> Knee:
    return find_knee({cell.concurrency: [cell.throughput_tok_s] for cell in cells}, seed=0)


def test_a_plateau_at_1536_has_its_knee_at_128() -> None:
    rates = dict(zip(POWERS, [81, 150, 280, 490, 780, 1050, 1320, 1536, 1536], strict=True))
    knee = find_knee({c: [rate] for c, rate in rates.items()}, seed=0)
    assert (knee.concurrency, knee.best_concurrency, knee.best_tok_s) == (128, 128, 1536)
    assert (knee.low, knee.high, knee.no_plateau_share) == (None, None, None)
    assert knee.sentence == (
        "95 % of the best (1536 tok/s at 128) is reached at concurrency 128, one run per cell, so without an interval."
    )


def test_the_same_plateau_from_a_seat_limit_is_queueing() -> None:
    # 12 ms steps at one stream, 83.3 ms with 128 in them: 1536 tok/s, and more streams only wait.
    cells = [server(c, base_ms=11.4, per_stream_ms=0.5618, seats=128) for c in POWERS]
    assert cells[-1].throughput_tok_s == pytest.approx(1536, abs=1)
    knee = knee_of(cells)
    assert knee.concurrency == 128
    found = what_limits(cells, knee, max_num_seqs=128)
    assert (found.limit, found.cause, found.queueing_from) == (Limit.QUEUEING, "max_num_seqs", 256)
    assert "128 wait" in found.evidence
    assert any(evidence.startswith("TTFT steps up") for evidence in found.evidence)


def test_the_same_plateau_from_a_saturating_step_is_step_time() -> None:
    rates = dict(zip(POWERS, [81, 150, 280, 490, 780, 1050, 1320, 1536, 1536], strict=True))
    cells = [
        CellLoad(c, rate, tpot_ms=1000 * c / rate, ttft_ms=30 + c, running=c, waiting=0) for c, rate in rates.items()
    ]
    found = what_limits(cells, knee_of(cells), max_num_seqs=1024)
    assert (found.limit, found.cause, found.queueing_from) == (Limit.STEP_TIME, None, None)
    assert found.sentence == (
        "The step time saturates: from concurrency 128 to 256 running requests go from 128 to 256; "
        "TPOT from 83.3 ms to 167 ms."
    )


@pytest.mark.parametrize("gauges", [True, False])
@pytest.mark.parametrize(
    ("law", "knee", "limit"),
    [
        ({}, None, Limit.NOT_REACHED),
        ({"per_stream_ms": 0.5}, None, Limit.NOT_REACHED),
        ({"per_stream_ms": 10.0}, 32, Limit.STEP_TIME),
        ({"seats": 32}, 32, Limit.QUEUEING),
        ({"seats": 100, "per_stream_ms": 0.01}, 128, Limit.QUEUEING),
        ({"seats": 32, "thrash": 0.004}, 32, Limit.QUEUEING),
        ({"seats": 1}, 1, Limit.QUEUEING),
        ({"per_stream_ms": 3000.0}, 1, Limit.STEP_TIME),
    ],
    ids=["rising", "slowing", "saturating", "queueing", "between", "collapsing", "one seat", "flat"],
)
def test_knee_and_cause(law: dict[str, float], knee: int | None, limit: Limit, gauges: bool) -> None:
    cells = [server(c, gauges=gauges, **law) for c in POWERS]  # type: ignore[arg-type]
    found = knee_of(cells)
    assert found.concurrency == knee
    why = what_limits(cells, found)
    assert why.limit == limit
    if not gauges and knee is not None:
        assert "throughput × TPOT" in why.sentence


def test_a_full_cache_is_named_and_the_collapse_said() -> None:
    cells = [server(c, seats=32, thrash=0.004) for c in POWERS]
    knee = knee_of(cells)
    assert knee.collapses
    assert "at the end it has fallen to" in knee.sentence
    found = what_limits(cells, knee, max_num_seqs=256)
    assert found.cause == "KV cache"
    assert "32 preemptions" in found.evidence
    assert found.still_scaling is True
    assert found.sentence.endswith("Lifting that limit may well pay.")


def test_queueing_beyond_a_saturated_step_is_second() -> None:
    cells = [server(c, per_stream_ms=10.0, seats=128) for c in POWERS]
    found = what_limits(cells, knee_of(cells), max_num_seqs=128)
    assert (found.limit, found.queueing_from) == (Limit.STEP_TIME, 256)
    assert found.sentence.endswith("Requests queue from 256 up.")


def test_time_lost_outside_decode_is_unknown() -> None:
    cells = [CellLoad(c, 500.0 if c > 8 else 60.0 * c, tpot_ms=12.0, running=c, waiting=0) for c in POWERS]
    found = what_limits(cells, knee_of(cells))
    assert found.limit is Limit.UNKNOWN
    assert found.sentence.endswith("so the time is lost outside decode.")


def test_missing_streams_without_a_queue_are_unknown() -> None:
    cells = [CellLoad(c, min(c, 16) * 80.0, tpot_ms=12.0, running=min(c, 16), waiting=0) for c in POWERS]
    assert what_limits(cells, knee_of(cells)).limit is Limit.UNKNOWN


def test_without_any_view_of_decode_the_cause_is_unknown() -> None:
    cells = [CellLoad(c, min(c, 16) * 80.0) for c in POWERS]
    found = what_limits(cells, knee_of(cells))
    assert found.limit is Limit.UNKNOWN
    assert "neither" in found.sentence


def test_one_side_without_gauges_falls_back_to_the_client_on_both() -> None:
    cells = [server(c, seats=32, gauges=c < 64) for c in POWERS]
    found = what_limits(cells, knee_of(cells), max_num_seqs=32)
    assert (found.limit, found.cause) == (Limit.QUEUEING, "max_num_seqs")
    assert found.evidence[0] == ("from concurrency 32 to 64 streams in decode (throughput × TPOT) go from 32.0 to 32.0")


def test_no_plateau_in_range() -> None:
    knee = find_knee({1: [80, 81, 82], 2: [158, 160, 161], 4: [300, 302, 310]}, seed=0)
    assert (knee.concurrency, knee.high, knee.no_plateau_share) == (None, None, 1.0)
    assert knee.sentence == "No plateau in range: throughput still rises at the end (302 tok/s at 4)."


def test_close_concurrencies_on_a_rising_line_are_no_plateau() -> None:
    assert find_knee({c: [80.0 * c] for c in (32, 64, 96, 98, 100)}, seed=0).concurrency is None


def test_one_cell_has_no_plateau() -> None:
    assert find_knee({8: [500.0, 501.0]}, seed=0).concurrency is None


def test_constant_repeats_give_a_point() -> None:
    knee = find_knee({1: [80.0] * 3, 2: [100.0] * 3, 4: [101.0] * 3}, seed=0)
    assert (knee.concurrency, knee.low, knee.high, knee.no_plateau_share) == (2, 2, 2, 0.0)


def test_noise_about_the_rule_widens_the_interval() -> None:
    knee = find_knee({16: [900, 960, 930, 990, 955], 32: [990, 1000, 1010], 64: [1000, 990, 1010]}, seed=0)
    assert (knee.low, knee.high) == (16, 32)
    assert knee.concurrency in (16, 32)
    assert knee == find_knee({16: [900, 960, 930, 990, 955], 32: [990, 1000, 1010], 64: [1000, 990, 1010]}, seed=0)


@given(
    st.lists(st.floats(10, 5000), min_size=1, max_size=9),
    st.floats(0.5, 2),
)
def test_the_knee_keeps_its_rule_and_does_not_depend_on_the_unit(rates: list[float], scale: float) -> None:
    cells = dict(zip(POWERS, rates, strict=False))
    knee = find_knee({c: [rate] for c, rate in cells.items()}, seed=0)
    if knee.concurrency is not None:
        assert cells[knee.concurrency] >= 0.95 * max(rates)
        assert all(rate < 0.95 * max(rates) for c, rate in cells.items() if c < knee.concurrency)
        assert knee.concurrency < max(cells)
    power = 2.0 ** round(scale)
    assert find_knee({c: [rate * power] for c, rate in cells.items()}, seed=0).concurrency == knee.concurrency


def test_the_knee_of_noisy_campaigns_is_inside_its_interval() -> None:
    rng = np.random.default_rng(31)
    truth = {1: 80.0, 2: 150.0, 4: 280.0, 8: 470.0, 16: 560.0, 32: 565.0, 64: 566.0}
    inside = 0
    for seed in range(100):
        knee = find_knee({c: rate * (1 + rng.normal(0, 0.01, 5)) for c, rate in truth.items()}, seed=seed)
        assert knee.low is not None
        inside += knee.low <= 16 and (knee.high is None or knee.high >= 16)
    assert inside >= 95


def test_slo_limit_and_its_interval() -> None:
    found = find_slo_limit(
        {1: [True] * 3, 2: [True] * 3, 4: [True, True, False], 8: [True, False, False], 16: [False] * 3}
    )
    assert (found.concurrency, found.low, found.high) == (4, 2, 8)
    assert not found.reached_end
    assert found.sentence == ("The SLO is met up to concurrency 4 (by every repeat up to 2, by some up to 8).")


def test_slo_never_and_always_met() -> None:
    never = find_slo_limit({1: [False], 2: [True]})
    assert (never.concurrency, never.meets_again) == (None, (2,))
    assert never.sentence == "The SLO is missed at the lowest concurrency, yet met at 2: these cells give no limit."
    assert find_slo_limit({1: [False], 2: [False]}).sentence == "The SLO is missed at every concurrency measured."
    sometimes = find_slo_limit({1: [True, False], 2: [False, False]})
    assert sometimes.sentence == (
        "The SLO is missed at every concurrency measured, though some repeats meet it up to 1."
    )
    assert find_slo_limit({1: [True], 2: [True]}).reached_end
    assert find_slo_limit({1: [True], 2: [False], 4: [True]}).meets_again == (4,)


@pytest.mark.parametrize(
    ("running", "waiting", "words"),
    [(60.0, 4.0, "they agree"), (40.0, 0.0, "before the server's queue"), (90.0, 0.0, "not ours")],
)
def test_littles_law_is_held_against_the_server(running: float, waiting: float, words: str) -> None:
    # 8 requests a second of 8 seconds each: 64 in the system.
    found = littles_law(8.0, 8.0, running=running, waiting=waiting)
    assert found.client == 64
    assert found.ratio == (running + waiting) / 64
    assert words in found.sentence


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_knee({}, seed=0), "at least one cell"),
        (lambda: find_knee({0: [1.0]}, seed=0), "concurrencies from 1 up"),
        (lambda: find_knee({4: [0.0]}, seed=0), "throughput at 4: number 0 is 0"),
        (lambda: find_slo_limit({1: []}), "at least one repeat"),
        (lambda: littles_law(0.0, 1.0, running=1, waiting=0), "above zero"),
        (
            lambda: what_limits([], find_knee({1: [5.0], 2: [5.0]}, seed=0)),
            r"needs the cell of the knee \(1\)",
        ),
        (
            lambda: what_limits([CellLoad(1, 5.0)] * 2, find_knee({1: [5.0], 2: [5.0]}, seed=0)),
            "appears twice",
        ),
        (
            lambda: what_limits([CellLoad(1, 5.0)], find_knee({1: [5.0], 2: [5.0]}, seed=0)),
            "and the one above it",
        ),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()  # type: ignore[operator]


def test_json() -> None:
    cells = [server(c, seats=32) for c in POWERS]
    knee = knee_of(cells)
    data = what_limits(cells, knee).to_json()
    assert data["limit"] == "queueing"
    assert type(data["limit"]) is str
    json.dumps([data, knee.to_json(), find_slo_limit({1: [True]}).to_json()], allow_nan=False)
