"""Readings of the law's micro-benchmarks and telemetry; tokens and texts of the stand-in."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.rehearsal.law import Law, Text, make_law
from perfbook.rehearsal.micro import all_reduce, devices, gemm, gemm_us, memory_bandwidth_gb_s
from perfbook.rehearsal.text import known_answer, write
from perfbook.rehearsal.tokens import Tokenizer, pieces


def law(**sections: object) -> Law:
    return make_law(
        {
            "step": {"decode_ms": [[1, 10.0]]},
            "model": {"tensor_parallel": 8},
            "communication": {"latency_us": 40.0, "busbw_gb_s": 20.0},
            **sections,
        },
        "test",
    )


def test_all_reduce_readings_scatter_around_the_law_and_repeat_with_the_seed() -> None:
    sizes = [14_336, 1 << 20]
    small, large = all_reduce(law(), sizes, {}, repeats=400)
    assert statistics.fmean(small.latency_us) == pytest.approx(40 + 14_336 * 1.75 / 20_000, rel=0.003)
    assert statistics.fmean(large.latency_us) == pytest.approx(40 + (1 << 20) * 1.75 / 20_000, rel=0.003)
    assert small.busbw_gb_s[0] == pytest.approx(14_336 / small.latency_us[0] / 1e3 * 1.75)
    assert all_reduce(law(), sizes, {}) == all_reduce(law(), sizes, {})
    assert all_reduce(law(), sizes, {}, seed=1) != all_reduce(law(), sizes, {})


def test_what_a_setting_does_to_the_screen() -> None:
    known = law(
        settings=[
            {"env": {"S": "good"}, "all_reduce": {"latency_factor": 0.5}},
            {"env": {"S": "ignored"}, "all_reduce": {"latency_factor": 0.5, "outcome": "ignored"}},
            {"env": {"S": "wrong"}, "all_reduce": {"latency_factor": 0.5, "outcome": "wrong sums"}},
            {"env": {"S": "hangs"}, "all_reduce": {"outcome": "hangs"}},
            {"args": {"enforce-eager": True}, "all_reduce": {"latency_factor": 9.0}},
        ]
    )
    readings = {
        name: all_reduce(known, [16], {"S": name}, repeats=50)[0] for name in ("good", "ignored", "wrong", "hangs")
    }
    assert statistics.fmean(readings["good"].latency_us) == pytest.approx(20.0, rel=0.01)
    assert statistics.fmean(readings["ignored"].latency_us) == pytest.approx(40.0, rel=0.01)
    assert [(reading.taken, reading.sums_right, reading.hangs) for reading in readings.values()] == [
        (True, True, False),
        (False, True, False),
        (True, False, False),
        (True, True, True),
    ]
    assert readings["hangs"].latency_us == ()


def test_gemm_is_bound_by_arithmetic_traffic_or_launch() -> None:
    known = law(device={"gemm_tflop_s": 100.0, "read_gb_s": 1000.0, "launch_us": 2.0})
    assert gemm_us(known, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e8)
    assert gemm_us(known, 1, 4096, 4096, weight_bits=4) == pytest.approx((2 * 8192 + 4096 * 4096 / 2) / 1e6)
    assert gemm_us(known, 1, 8, 8) == 2.0
    [readings] = gemm(known, [(1, 8, 8)], repeats=7)
    assert len(readings) == 7
    assert all(1.9 < reading < 2.1 for reading in readings)


def test_bandwidth_and_devices_tell_the_laws_figures() -> None:
    rates = memory_bandwidth_gb_s(law(), repeats=200)
    assert statistics.fmean(rates["read"]) == pytest.approx(1500, rel=0.005)
    assert statistics.fmean(rates["copy"]) == pytest.approx(1350, rel=0.005)
    idle, busy = devices(law(), 0.0), devices(law(), 1.0)
    assert [sample.index for sample in busy] == list(range(8))
    assert statistics.fmean(sample.power_w for sample in idle) == pytest.approx(35, rel=0.02)
    assert statistics.fmean(sample.power_w for sample in busy) == pytest.approx(420, rel=0.02)


@given(st.text())
def test_any_text_is_cut_into_pieces_that_join_to_it(text: str) -> None:
    tokenizer = Tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(pieces(text))
    assert "".join(pieces(text)) == text
    assert all(1_000 <= token < 163_840 for token in ids)


def test_a_word_more_is_one_token_more() -> None:
    tokenizer = Tokenizer()
    counts = [len(tokenizer.encode(" the" * words)) for words in range(5)]
    assert counts == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France? Answer in one sentence.", "The capital of France is Paris."),
        ("Count from 3 to 6.", "3, 4, 5, 6."),
        ("What is 12 x 12?", "12 x 12 is 144."),
        ("What is the capital of Atlantis?", None),
    ],
)
def test_known_answers(question: str, answer: str | None) -> None:
    assert known_answer(question) == answer


def test_a_script_has_its_thinking_first_and_goes_on_past_its_end() -> None:
    script = write("Count from 1 to 2.", Text(reasoning_tokens=3), thinks=True)
    assert script.spoken_tokens == 3 + 4
    assert [script.token(index)[0] for index in range(8)] == ["reasoning"] * 3 + ["content"] * 5
    assert script.token(2) == ("reasoning", "")
    assert "".join(script.token(index)[1] for index in range(3, 7)) == "1, 2."
    assert script.token(50)[1].startswith(" ")
    assert len(pieces("".join(script.token(index)[1] for index in range(7, 500)))) == 493
    assert write("Count from 1 to 2.", Text(reasoning_tokens=3), thinks=False).spoken_tokens == 4
