"""The notebooks' studies: pure analysis on hand-made data with known answers."""

import pandas as pd
import pytest

from perfbook.errors import MeasurementFailed
from perfbook.params import Question, Slo, Targets
from perfbook.stats import find_slo_limit
from perfbook.stream.ask import Answer
from perfbook.study import doubts, single_stream, sweep, verify
from perfbook.study.conclusion import hold_targets
from perfbook.study.doubts import group_reasons
from perfbook.study.prompts import numbered
from perfbook.study.sweep.measure import BUDGET_SPENT, PRECISE, precise
from perfbook.study.sweep.view import burst_in_words, skipped_in_words, slo_in_words, slo_rule, unusable_in_words

PARIS = Question(ask="Capital of France?", expect=["Paris"])


def answer(
    text: str, *, reasoning: str = "", finish: str | None = "stop", tokens: int = 5, error: str | None = None
) -> Answer:
    return Answer(text, reasoning, finish, 9, tokens, error)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (answer("It is paris."), "right"),
        (answer("Lyon."), "wrong"),
        (answer("Let me think about Fr", finish="length"), "cut off"),
        (answer("Paris, of cou", finish="length"), "right"),
        (answer("", error="http_500"), "failed"),
        (answer("Lyon.", reasoning="Not Paris"), "wrong"),
        (answer("<think>Paris?</think>Lyon."), "wrong"),
        (answer("<think>Lyon?</think>Paris."), "right"),
    ],
)
def test_only_answer_text_is_judged(given: Answer, status: str) -> None:
    assert verify.judge(PARIS, given).status == status


@pytest.mark.parametrize(
    ("one", "other", "at"), [("abc", "abc", None), ("abc", "abd", 2), ("abc", "ab", 2), ("", "x", 0)]
)
def test_where_texts_part(one: str, other: str, at: int | None) -> None:
    assert verify.first_difference(one, other) == at


def test_consistency_of_agreeing_answers() -> None:
    same = answer("one two", tokens=3)
    got = verify.compare(same, same, same, answer("one", finish="length"), lambda text: len(text.split()))
    assert got.counts_agree is True  # two words and the end-of-sequence token
    assert got.truncation_recognised
    assert (got.repeat_parts_at, got.stream_parts_at, got.reasoning_in_answer) == (None, None, False)


def test_consistency_finds_what_differs() -> None:
    got = verify.compare(
        answer("one two", tokens=9),
        answer("one too"),
        answer("one"),
        answer("one two", finish="stop"),
        lambda text: 2,
    )
    assert (got.repeat_parts_at, got.stream_parts_at) == (5, 3)
    assert got.counts_agree is False
    assert not got.truncation_recognised


def test_without_a_tokenizer_counts_are_unknown() -> None:
    same = answer("x")
    assert verify.compare(same, same, same, same, lambda text: None).counts_agree is None


def stream(
    lengths: dict[int, int], *, prefill_ms: float, start_ms: float, slope_us: float
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests and token events that obey: first token after the prefill, then start + slope per position."""
    requests, events = [], []
    order = 0
    for tokens, count in lengths.items():
        for repeat in range(count):
            cell = f"03_single_stream/{tokens}/{repeat}"
            at = [prefill_ms]
            for position in range(1, tokens):
                at.append(at[-1] + start_ms + slope_us * position / 1000)
            requests.append(
                {
                    "cell": cell, "request": 0, "ok": True, "error": None, "asked": tokens, "order": order,
                    "ttft_ms": prefill_ms, "tpot_ms": (at[-1] - at[0]) / (tokens - 1), "e2e_ms": at[-1],
                    "blended_tok_s": tokens / at[-1] * 1000,
                }
            )  # fmt: skip
            events += [
                {"cell": cell, "request": 0, "index": i, "arrival_ns": round(t * 1e6), "tokens": 1}
                for i, t in enumerate(at)
            ]
            order += 1
    return pd.DataFrame(requests), pd.DataFrame(events)


def test_single_stream_recovers_the_law() -> None:
    """The campaign's three-point fit: 28 ms prefill, 11.87 ms per token, +1.22 µs per token of position."""
    requests, events = stream({512: 6, 2048: 6}, prefill_ms=28, start_ms=11.87, slope_us=1.22)
    first = {"blended_tok_s": 16.0, "output_tokens_asked": 512}
    got = single_stream.analyse(requests, events, first)
    assert got.fit is not None
    assert got.fit.slope.value == pytest.approx(1.22, rel=1e-3)
    assert got.fit.start.value == pytest.approx(11.87, rel=1e-3)
    assert [x.tokens for x in got.lengths] == [512, 2048]
    assert got.ttft.value == 28
    assert got.decode.value == pytest.approx(1000 / (11.87 + 1.22 * 1024 / 1000), rel=1e-3)
    assert (got.first_tok_s, got.steady_tok_s) == (16.0, pytest.approx(81.88, abs=0.01))
    assert got.first_is_warm_up
    usual = single_stream.analyse(requests, events, {"blended_tok_s": 81.0, "output_tokens_asked": 512})
    assert not usual.first_is_warm_up  # slower than every later one, by 1 %
    assert got.attribution is not None
    assert got.attribution["prefill"].seconds == pytest.approx(-3 * 0.028)
    assert got.attribution["context slope"].seconds == pytest.approx(1.92, abs=0.01)
    assert sum(part.seconds for part in got.attribution.parts) == pytest.approx(got.attribution.gap_s)
    assert got.drift.detected is False
    assert got.warm_up.over is True


def test_single_stream_without_success_says_why() -> None:
    requests, events = stream({8: 2}, prefill_ms=1, start_ms=1, slope_us=0)
    requests["ok"], requests["error"] = False, "refused"
    with pytest.raises(MeasurementFailed, match=r"no single-stream request succeeded \(refused\)"):
        single_stream.analyse(requests, events, None)


def cell(
    concurrency: int,
    tok_s: float,
    tpot_ms: float,
    *,
    waiting: float = 0.0,
    running: float | None = None,
    share: float = 1.0,
) -> dict[str, object]:
    spread = {"mean": tpot_ms, "p50": tpot_ms}
    return {
        "concurrency": concurrency, "output_tok_s": tok_s, "output_tok_s_plateau": tok_s, "tpot_ms": spread,
        "ttft_ms": {"p50": 10.0, "p95": 12.0}, "gap_ms": {"p99": tpot_ms}, "repeat": 0, "window": "steady",
        "requests": 4, "failed": 0, "goodput": {"share": share}, "reconciliation": [],
        "server": {"running": running or concurrency - waiting, "waiting": waiting, "queue_ms": 1.0, "preemptions": 0},
        "validity": {"verdict": "valid", "reasons": []},
    }  # fmt: skip


def test_a_step_time_limit_is_told_from_queueing() -> None:
    """The same plateau, once because the step doubles, once because half of the streams wait."""
    rising = [cell(32, 800, 40), cell(64, 1200, 53.3), cell(128, 1536, 83.3)]
    step = sweep.analyse([*rising, cell(256, 1536, 166.7)], seed=1, max_num_seqs=1024)
    queue = sweep.analyse([*rising, cell(256, 1536, 83.3, waiting=128)], seed=1, max_num_seqs=128)
    assert (step.knee.concurrency, str(step.limit.limit)) == (128, "step time")
    assert (queue.knee.concurrency, str(queue.limit.limit), queue.limit.cause) == (
        128,
        "queueing",
        "max_num_seqs",
    )


def test_slo_limit_and_failed_cells() -> None:
    cells = [
        cell(1, 10, 10),
        cell(2, 20, 10, share=0.96),
        cell(4, 40, 10, share=0.5),
        {**cell(8, 0, 0), "output_tok_s": None, "output_tok_s_plateau": None},
    ]
    got = sweep.analyse(cells, seed=1, max_num_seqs=None)
    assert got.slo is not None
    assert got.slo.concurrency == 2
    assert got.unusable == (8,)
    assert unusable_in_words(got) == "Nothing usable was measured at 8 streams. "
    assert str(got.limit.limit) == "not reached"


def test_one_concurrency_says_nothing_of_a_plateau() -> None:
    alone = sweep.analyse([cell(1, 10, 10)], seed=1, max_num_seqs=None)
    assert unusable_in_words(alone) == ""
    assert alone.knee.sentence == (
        "Whether there is a plateau is unknown: only one concurrency was measured (10.0 tok/s at 1)."
    )
    assert alone.limit.sentence == "What limits throughput is unknown: only one concurrency was measured."


def test_an_invalid_cell_is_shown_and_decides_nothing() -> None:
    """A cell that lost 9 of 10 requests seems the fastest; the knee, the best and the SLO come from the others."""
    broken = {**cell(8, 400, 1), "validity": {"verdict": "invalid", "reasons": ["9 of 10 requests failed (reset 9)"]}}
    got = sweep.analyse([cell(1, 10, 10), cell(2, 20, 10), cell(4, 20.2, 20), broken], seed=1, max_num_seqs=None)
    assert (got.knee.concurrency, got.knee.best_tok_s, got.unusable) == (2, 20.2, (8,))
    assert len(got.cells) == 4
    with pytest.raises(MeasurementFailed, match="9 of 10 requests failed"):
        sweep.analyse([broken], seed=1, max_num_seqs=None)


def test_repeats_end_when_they_would_tell_nothing() -> None:
    """Student's t for three values: 4.303 x 0.1 / sqrt(3) = 0.248 around 10, so 2.48 %."""
    assert not precise([10.0, 10.0], 2.0)  # two values agree by chance
    assert precise([9.9, 10.0, 10.1], 2.5)
    assert not precise([9.9, 10.0, 10.1], 2.4)
    cells = [{"why": BUDGET_SPENT}] * 2 + [{"why": PRECISE}]
    assert skipped_in_words(cells) == (
        " Planned cells that were not measured: 2, the time budget was spent; 1, known precisely enough."
    )
    assert skipped_in_words([]) == ""


def test_no_throughput_at_all() -> None:
    with pytest.raises(MeasurementFailed, match=r"no cell of the sweep can be used \(no token arrived\)"):
        sweep.analyse([{"concurrency": 1}], seed=1, max_num_seqs=None)


def test_goodput_counts_failures_against_it() -> None:
    rows = [
        {"ok": True, "ttft_ms": 90.0, "tpot_ms": 9.0},
        {"ok": True, "ttft_ms": 110.0, "tpot_ms": 9.0},
        {"ok": True, "ttft_ms": 90.0, "tpot_ms": None},
        {"ok": False, "ttft_ms": 1.0, "tpot_ms": 1.0},
    ]
    assert sweep.within_slo(rows, Slo(ttft_ms=100, tpot_ms=10)) == {"met": 1, "of": 4, "share": 0.25}
    assert sweep.within_slo(rows, Slo(ttft_ms=100)) == {"met": 2, "of": 4, "share": 0.5}
    assert sweep.within_slo(rows, Slo()) is None


def test_the_servers_view_by_littles_law() -> None:
    rows = [
        {"quantity": "queue mean", "server": 500.0},
        {"quantity": "E2E mean", "server": 2500.0},
        {"quantity": "requests finished", "server": 40.0},
        {"quantity": "preemptions", "server": 3.0},
    ]
    assert sweep.server_side(rows, 10.0) == {
        "running": 8.0,
        "waiting": 2.0,
        "queue_ms": 500.0,
        "preemptions": 3.0,
    }
    assert sweep.server_side([], 10.0) == {
        "running": None,
        "waiting": None,
        "queue_ms": None,
        "preemptions": None,
    }


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = ["the client read 20.8 ms late (p99)", "the client read 9 ms late (p99)", "the clock was set"]
    assert group_reasons(reasons) == ("the client read 9 to 20.8 ms late (p99) (2 cells); the clock was set (1 cell)")


def test_targets_are_held_against_the_summary() -> None:
    targets = Targets(single_stream_tok_s=40, ttft_ms=100, best_tok_s=2000)
    got = hold_targets(targets, {"single_stream": {"decode_tok_s": 80.1, "ttft_ms": 120.0}, "sweep": None})
    assert [(t.name, t.met) for t in got] == [
        ("single-stream decode rate", True),
        ("single-stream TTFT", False),
        ("best throughput", None),
    ]
    assert [t.verdict for t in got] == ["met, indicative", "missed, indicative", "not measured"]
    assert got[0].sentence == (
        "single-stream decode rate at least 40 tok/s (measured 80.1 tok/s; too few values for a 95 % interval)"
    )


def test_a_target_inside_the_interval_is_undecided() -> None:
    """A median on the right side decides nothing while its interval reaches the other side."""
    estimates = {
        "decode": {"low_tok_s": 4.9, "high_tok_s": 31.6, "confidence": 0.95},
        "ttft": {"low_ms": 58.0, "high_ms": 394.0, "confidence": 0.95},
        "tpot": {"low_ms": 30.0, "high_ms": 40.0, "confidence": 0.875},
    }
    cells = [
        {"concurrency": 32, "output_tok_s_plateau": rate, "output_tok_s": 1.0, "validity": {"verdict": "valid"}}
        for rate in (280.8, 342.7)
    ]
    measured = {
        "single_stream": {"decode_tok_s": 15.7, "ttft_ms": 183.0, "tpot_ms": 35.0, "estimates": estimates},
        "sweep": {"best_tok_s": 311.8, "best_concurrency": 32, "cells": cells},
    }
    got = hold_targets(Targets(single_stream_tok_s=10, ttft_ms=1000, best_tok_s=300), measured)
    assert [(t.met, t.verdict) for t in got] == [(True, "undecided"), (True, "met"), (True, "undecided")]
    assert got[0].sentence == "single-stream decode rate at least 10 tok/s (measured 15.7 tok/s [4.9, 31.6])"
    assert hold_targets(Targets(ttft_ms=50), measured)[0].verdict == "missed"
    assert hold_targets(Targets(ttft_ms=100), measured)[0].verdict == "undecided"
    assert hold_targets(Targets(tpot_ms=50), measured)[0].verdict == "met, indicative"  # the range of four values
    assert hold_targets(Targets(tpot_ms=20), measured)[0].verdict == "missed, indicative"
    assert hold_targets(Targets(best_tok_s=200), measured)[0].verdict == "met, indicative"  # two repeats


def test_claims_from_doubtful_cells_say_so() -> None:
    valid, suspect = ({"validity": {"verdict": word, "reasons": [word]}} for word in ("valid", "suspect"))
    assert doubts.sentence([valid, valid]) == ""
    assert doubts.sentence([valid, suspect]) == " Read with care: 1 of 2 cells are suspect or invalid."
    assert doubts.clock([{"clock": "kernel"}] * 2) == "times of arrival stamped by the kernel"
    assert doubts.clock([{"clock": "user"}]) == "times of arrival read by the client itself (no kernel stamps)"
    assert doubts.clock([{"clock": "kernel"}, {"clock": "user"}]) == (
        "times of arrival partly stamped by the kernel, partly read by the client itself"
    )
    assert doubts.clock([{"clock": None}]) == "clock unknown"
    assert doubts.reasons([valid, suspect]) == "suspect (1 cell)"


def test_a_best_throughput_from_a_burst_says_so() -> None:
    steady, burst = cell(1, 10, 10), {**cell(2, 20, 10), "window": "burst"}
    assert "comes from a burst" in burst_in_words(sweep.analyse([steady, burst], seed=1, max_num_seqs=None))
    assert burst_in_words(sweep.analyse([cell(1, 10, 10), cell(2, 20, 10)], seed=1, max_num_seqs=None)) == ""


def test_an_slo_met_above_a_miss_decides_nothing() -> None:
    assert slo_rule(find_slo_limit({1: [False], 2: [True]})) == "slo_unclear"
    assert slo_rule(find_slo_limit({1: [False], 2: [False]})) == "slo_missed"
    assert slo_rule(find_slo_limit({1: [True], 2: [False]})) == "slo_met"
    assert slo_in_words(Slo(ttft_ms=2000)) == "SLO TTFT ≤ 2000 ms, for at least 95 % of a cell's requests"


def test_numbered_prompts_differ_from_the_start() -> None:
    texts = [prompt.text for prompt in numbered("Count.", 2, 1)]
    assert texts == ["No. 100003. Count.", "No. 100004. Count."]
