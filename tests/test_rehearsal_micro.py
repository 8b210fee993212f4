"""Readings of the law's micro-benchmarks and telemetry; tokens and texts of the stand-in."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.micro.nccl_log import read_nccl_log
from perfbook.micro.shapes import GemmShape
from perfbook.rehearsal.law import Law, Text, make_law
from perfbook.rehearsal.micro import all_reduce, devices, gemm_us, measure_device
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
    sizes = [1 << 20, 14_336]
    bench = all_reduce(law(), sizes, {}, repeats=400)
    assert (bench.outcome, bench.backend, bench.ranks) == ("ok", "nccl", 8)
    small, large = bench.messages
    assert (small.message_bytes, large.message_bytes) == (14_336, 1 << 20)
    assert statistics.fmean(small.repeats_us) == pytest.approx(40 + 14_336 * 1.75 / 20_000, rel=0.003)
    assert statistics.fmean(large.repeats_us) == pytest.approx(40 + (1 << 20) * 1.75 / 20_000, rel=0.003)
    assert bench.latency_us(14_336) == pytest.approx(41.25, rel=0.005)
    assert all_reduce(law(), sizes, {}) == all_reduce(law(), sizes, {})
    assert all_reduce(law(), sizes, {}) != all_reduce(law(), sizes, {}, seed=1)


def test_what_a_setting_does_to_the_screen() -> None:
    effects = {
        "Tree": {"latency_factor": 0.5},
        "PAT": {"latency_factor": 0.5, "outcome": "ignored"},
        "NVLS": {"latency_factor": 0.5, "outcome": "wrong sums"},
        "CollNetChain": {"outcome": "hangs"},
        "CollNetDirect": {"outcome": "fails"},
    }
    known = law(
        settings=[
            *({"env": {"NCCL_ALGO": name}, "all_reduce": effect} for name, effect in effects.items()),
            {"args": {"enforce-eager": True}, "all_reduce": {"latency_factor": 9.0}},
        ]
    )
    benches = {name: all_reduce(known, [16], {"NCCL_ALGO": name}, repeats=50) for name in effects}
    outcomes = [bench.outcome for bench in benches.values()]
    assert outcomes == ["ok", "ok", "wrong sums", "hangs", "fails"]
    medians = [bench.latency_us(16) for bench in benches.values()]
    assert medians[:2] == [pytest.approx(20.0, rel=0.01), pytest.approx(40.0, rel=0.01)]
    assert medians[3:] == [None, None]
    logs = {name: read_nccl_log(bench.log) for name, bench in benches.items()}
    assert [log.took("NCCL_ALGO", name) for name, log in logs.items()] == [True, False, True, True, True]
    assert logs["Tree"].chosen == {16: "TREE LL"}
    assert logs["PAT"].chosen == {16: "RING LL"}
    assert logs["PAT"].version == "2.28.9"


def test_gemm_is_bound_by_arithmetic_traffic_or_launch() -> None:
    known = law(device={"gemm_tflop_s": 100.0, "read_gb_s": 1000.0, "launch_us": 2.0})
    assert gemm_us(known, 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e8)
    assert gemm_us(known, 1, 4096, 4096) == pytest.approx(2 * (2 * 4096 + 4096 * 4096) / 1e6)
    assert gemm_us(known, 1, 8, 8) == 2.0


def test_the_device_bench_tells_the_laws_figures_and_that_it_is_rehearsed() -> None:
    bench = measure_device(law(), [GemmShape("o", 4096, 4096, 61)], [1, 64], repeats=200)
    assert bench.device.endswith("(rehearsed)")
    means = {each.kind: statistics.fmean(each.repeats_gb_s) for each in bench.bandwidth}
    assert means == {
        "read": pytest.approx(1500, rel=0.005),
        "copy": pytest.approx(1350, rel=0.005),
        "triad": pytest.approx(1350, rel=0.005),
    }
    assert [(gemm.name, gemm.m, gemm.per_step) for gemm in bench.gemms] == [("o", 1, 61), ("o", 64, 61)]
    assert statistics.fmean(bench.gemms[0].repeats_us) == pytest.approx(gemm_us(law(), 1, 4096, 4096), rel=0.005)


def test_devices_draw_power_between_idle_and_busy() -> None:
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
