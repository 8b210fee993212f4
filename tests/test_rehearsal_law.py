"""The law: its schema, what it means, and the field campaign's figures out of the four example laws."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.errors import BadInput
from perfbook.rehearsal.law import Law, load_law, make_law
from perfbook.rehearsal.predict import closed_loop_tok_s, running_limit, single_stream
from perfbook.rehearsal.steptime import (
    active_settings,
    all_reduce_us,
    decode_ms,
    on_curve,
    step_ms,
    warmup_extra_ms,
)

LAWS = Path(__file__).parents[1] / "params"


def law(**sections: object) -> Law:
    return make_law({"step": {"decode_ms": [[1, 10.0], [4, 16.0]]}, **sections}, "test")


def test_curve_is_linear_between_flat_before_and_keeps_its_last_slope() -> None:
    curve = law().step.decode_ms
    assert on_curve(curve, 1) == 10.0
    assert on_curve(curve, 2) == 12.0
    assert on_curve(curve, 4) == 16.0
    assert on_curve(curve, 10) == 28.0
    assert on_curve(((8, 5.0), (16, 6.0)), 1) == 5.0


def test_decode_grows_with_batch_and_position() -> None:
    known = law(step={"decode_ms": [[1, 10.0], [4, 16.0]], "context_us_per_token": 2.0})
    assert decode_ms(known, 1, 0) == 10.0
    assert decode_ms(known, 2, 500) == 13.0


def test_prefill_raises_a_step_to_its_floor_and_adds_its_tokens() -> None:
    step = {"decode_ms": [[1, 10.0], [4, 16.0]], "prefill_floor_ms": 12.0, "prefill_tok_s": 1000.0}
    known = law(step=step)
    assert step_ms(known, 0, 0, 30) == 42.0
    assert step_ms(known, 1, 0, 30) == 42.0
    assert step_ms(known, 4, 0, 30) == 46.0
    assert step_ms(known, 0, 0, 0) == 0.0


def test_all_reduce_is_latency_plus_bytes_over_bus_bandwidth() -> None:
    known = law(communication={"latency_us": 40.0, "busbw_gb_s": 20.0}, model={"tensor_parallel": 8})
    assert all_reduce_us(known, 0) == 40.0
    assert all_reduce_us(known, 1_000_000) == pytest.approx(40 + 1_000_000 * 1.75 / 20_000)
    assert all_reduce_us(law(model={"tensor_parallel": 1}), 1_000_000) == 0.0


def test_a_setting_acts_on_the_step_through_its_all_reduces() -> None:
    known = law(
        model={"hidden_size": 1000, "tensor_parallel": 2},
        communication={"calls_per_step": 100, "latency_us": 40.0, "busbw_gb_s": 1.0},
        settings=[
            {"env": {"NCCL_PROTO": "LL"}, "all_reduce": {"latency_factor": 0.5, "bandwidth_factor": 0.5}},
            {"env": {"NCCL_ALGO": "Tree"}, "all_reduce": {"latency_factor": 0.1, "outcome": "ignored"}},
            {"args": {"enforce-eager": True}, "step_pct": [[1, 50.0], [4, 10.0]]},
        ],
    )
    fast = active_settings(known, {"NCCL_PROTO": "LL"}, {})
    # 20 us saved in each of 100 calls; 2000 bytes at half of 1 GB/s cost 2 us more
    assert decode_ms(known, 1, 0, fast) == pytest.approx(10 - 100 * 0.020 + 100 * 0.002)
    assert decode_ms(known, 1, 0, active_settings(known, {"NCCL_ALGO": "Tree"}, {})) == pytest.approx(10.0)
    eager = active_settings(known, {}, {"enforce-eager": True})
    assert decode_ms(known, 1, 0, eager) == pytest.approx(15.0)
    assert decode_ms(known, 10, 0, eager) == pytest.approx(28.0 * 1.1)
    assert active_settings(known, {"NCCL_PROTO": "Simple"}, {}) == ()


def test_warm_up_adds_exactly_its_extra_over_its_steps() -> None:
    known = law(warmup={"prefill_extra_ms": 300.0, "decode_extra_ms": 120.0, "decode_steps": 4})
    assert [warmup_extra_ms(known, 0, n, False) for n in range(6)] == [48.0, 36.0, 24.0, 12.0, 0.0, 0.0]
    assert [warmup_extra_ms(known, n, 0, True) for n in range(2)] == [300.0, 0.0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": {"decode_ms": []}}, "step.decode_ms: a curve needs at least one"),
        ({"step": {"decode_ms": [[4, 1.0], [1, 2.0]]}}, "step.decode_ms: a curve's batches must ascend"),
        ({"stepp": {}}, "stepp: extra inputs"),
        ({"limits": {"max_num_seqs": 0}}, "limits.max_num_seqs: input should be greater"),
        ({"limits": {"max_num_seqs": "8"}}, "limits.max_num_seqs: input should be a valid integer"),
        ({"settings": [{"step_pct": [[1, 1.0]]}]}, "settings.0: a setting needs env or args"),
        (
            {"profile": {"regimes": [{"batch": 1, "kernels": [{"name": "k", "calls": 1, "share": 0.6}] * 2}]}},
            "profile.regimes.0: kernel shares sum to 1.2",
        ),
    ],
)
def test_a_wrong_law_is_refused_in_one_line(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=r"^test: ") as caught:
        law(**change)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_law_is_read_from_a_parameter_files_section(tmp_path: Path) -> None:
    file = tmp_path / "v.yaml"
    file.write_text("variant: x\nrehearsal:\n  step: {decode_ms: [[1, 7.5]]}\n")
    assert load_law(file).step.decode_ms == ((1, 7.5),)


def test_int4_law_gives_the_campaigns_rates() -> None:
    int4 = load_law(LAWS / "kimi-k2.5-int4.yaml")
    assert single_stream(int4, 28, 512).blended_tok_s == pytest.approx(81.9, abs=0.05)
    assert single_stream(int4, 28, 2048).blended_tok_s == pytest.approx(76.2, abs=0.05)
    short = single_stream(int4, 28, 32)
    assert short.ttft_ms + 31 * short.tpot_ms == pytest.approx(32 * 12.4, rel=0.001)
    rates = {streams: closed_loop_tok_s(int4, streams, 128, 256) for streams in (1, 32, 64, 128, 256)}
    assert rates[128] == pytest.approx(1536, rel=0.005)
    assert rates[256] == pytest.approx(1536, rel=0.005)
    assert rates[64] < 0.95 * 1536
    profiled_ms = decode_ms(int4, 1, 60) + int4.profile.overhead_ms
    all_reduce = int4.profile.regimes[0].kernels[0]
    assert (all_reduce.calls, all_reduce.share) == (122, 0.515)
    assert all_reduce.share * profiled_ms == pytest.approx(11.17, abs=0.05)


def test_int4_settings_are_below_the_minimum_effect() -> None:
    int4 = load_law(LAWS / "kimi-k2.5-int4.yaml")
    for env, args in (
        ({"NCCL_PROTO": "LL"}, {}),
        ({"NCCL_ALGO": "Tree"}, {}),
        ({}, {"compilation-config": {"mode": 3}}),
    ):
        active = active_settings(int4, env, args)
        assert len(active) == 1
        for streams in (1, 64, 128):
            change = decode_ms(int4, streams, 256, active) / decode_ms(int4, streams, 256) - 1
            assert abs(change) < 0.01


def test_nvfp4_law_gives_the_first_and_the_later_requests() -> None:
    nvfp4 = load_law(LAWS / "kimi-k2.5-nvfp4.yaml")
    first = single_stream(nvfp4, 38, 107)
    first_s = (first.ttft_ms + 106 * first.tpot_ms + nvfp4.warmup.prefill_extra_ms + nvfp4.warmup.decode_extra_ms) / 1e3
    assert first_s == pytest.approx(6.7, abs=0.05)
    assert 512 / single_stream(nvfp4, 28, 512).blended_tok_s == pytest.approx(8.5, abs=0.05)
    assert 0.65 <= nvfp4.profile.regimes[0].kernels[0].share <= 0.70


def test_minimax_and_glm_laws_give_their_figure() -> None:
    minimax = load_law(LAWS / "minimax-m2.5-fp8.yaml")
    assert closed_loop_tok_s(minimax, 256, 128, 256) == pytest.approx(3950, rel=0.01)
    casts = load_law(LAWS / "glm-5-nvfp4.yaml").profile.regimes[0].kernels[0]
    assert "unrolled_elementwise_kernel" in casts.name
    assert casts.share == 0.69


def test_a_slot_limit_and_a_step_time_limit_can_have_the_same_plateau() -> None:
    by_step = law(step={"decode_ms": [[1, 10.0], [8, 20.0], [16, 40.0]]}, limits={"max_num_seqs": 64})
    by_slots = law(step={"decode_ms": [[1, 10.0], [8, 20.0], [16, 24.0]]}, limits={"max_num_seqs": 8})
    assert closed_loop_tok_s(by_step, 16, 1, 100) == pytest.approx(closed_loop_tok_s(by_slots, 16, 1, 100), rel=0.001)
    assert (running_limit(by_step, 16, 1, 100), running_limit(by_slots, 16, 1, 100)) == (16, 8)


@given(
    base=st.floats(1, 100),
    slope=st.floats(0, 20),
    prompt=st.integers(1, 500),
    output=st.integers(2, 300),
)
def test_single_stream_equals_its_closed_sum(base: float, slope: float, prompt: int, output: int) -> None:
    known = law(step={"decode_ms": [[1, base]], "context_us_per_token": slope})
    mean_position = prompt + output / 2
    assert single_stream(known, prompt, output).tpot_ms == pytest.approx(base + slope * mean_position / 1e3)
