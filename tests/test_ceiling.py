"""The floor by hand: bytes, operations and latencies of small models, and of one that exists."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.ceiling import (
    Machine,
    ModelShape,
    Tensor,
    checkpoint_tensors,
    decode_floor,
    distinct_experts,
    implied_bandwidth_bytes_s,
    levers,
    model_shape,
    to_reach,
)
from perfbook.errors import BadInput

# 1 GB of weights at 100 GB/s: 10 ms. 20 kB of cache per token: 1000 tokens are 20 MB, 0.2 ms.
DENSE = ModelShape(
    layers=30,
    hidden=576,
    dense_bytes=1e9,
    dense_params=0.5e9,
    kv_bytes_per_token=20e3,
    kv_heads=4,
    attention_flops=1e5,
)
ALONE = Machine(100e9, 1e12)

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
KIMI: dict[str, Any] = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
}


def test_one_stream_is_bound_by_its_weights() -> None:
    floor = decode_floor(DENSE, ALONE, streams=1, context_tokens=1000)
    assert floor.floor_ms == pytest.approx(10.2)
    assert [(part.name, part.bound) for part in floor.parts] == [("weights", "memory"), ("KV cache", "memory")]
    assert floor.parts[0].intensity_flop_per_byte == pytest.approx(1.0)
    assert ALONE.ridge_flop_per_byte == 10
    assert (floor.missing, floor.assumed) == ((), ())
    assert floor.ratio(12.4) == pytest.approx(12.4 / 10.2)
    assert floor.sentence(12.4) == (
        "At concurrency 1 and 1000 tokens of context a step cannot go below 10.2 ms, 10.0 ms of it weights; "
        "measured 12.4 ms is 1.22 times that."
    )
    assert "lies below it, so one of the numbers is wrong" in floor.sentence(9.0)


def test_many_streams_are_bound_by_computing_and_by_their_cache() -> None:
    # 2 · 0.5e9 · 64 operations at 1e12/s are 64 ms, over the 10 ms of reading; the cache of 64 streams is 12.8 ms.
    floor = decode_floor(DENSE, ALONE, streams=64, context_tokens=1000)
    assert [(part.name, part.bound) for part in floor.parts] == [("weights", "compute"), ("KV cache", "memory")]
    assert floor.floor_ms == pytest.approx(64 + 12.8)


def test_all_reduces_come_on_top_and_are_said_to_be_assumed() -> None:
    ranks = Machine(100e9, 1e12, all_reduce_us=91.6, tensor_parallel=4)
    traced = decode_floor(DENSE, ranks, streams=1, context_tokens=1000, all_reduces=122)
    assert traced.floor_ms == pytest.approx(10.2 / 4 + 122 * 0.0916)
    assert traced.parts[-1].ms == pytest.approx(11.17, abs=0.01)
    assert traced.assumed == ()
    assumed = decode_floor(DENSE, ranks, streams=1, context_tokens=1000)
    assert assumed.parts[-1].ms == pytest.approx(61 * 0.0916)
    assert assumed.assumed == ("61 all-reduces a step, from the layers and not from a trace",)


@pytest.mark.parametrize(("heads", "ranks", "share"), [(4, 4, 1 / 4), (4, 8, 1 / 4), (1, 8, 1.0), (8, 2, 1 / 2)])
def test_a_rank_holds_whole_heads_and_mla_is_replicated(heads: int, ranks: int, share: float) -> None:
    floor = decode_floor(
        replace(DENSE, kv_heads=heads),
        Machine(100e9, all_reduce_us=1.0, tensor_parallel=ranks),
        streams=2,
        context_tokens=500,
    )
    cache = next(part for part in floor.parts if part.name == "KV cache")
    assert cache.moved_bytes == pytest.approx(share * 20e6)


def test_distinct_experts() -> None:
    assert distinct_experts(384, 8, 1) == pytest.approx(8)
    assert distinct_experts(8, 2, 2) == pytest.approx(3.5)
    assert distinct_experts(384, 8, 128) == pytest.approx(358.05, abs=0.01)
    assert distinct_experts(8, 8, 3) == 8


@given(st.integers(1, 512), st.integers(1, 32), st.integers(1, 4096))
def test_distinct_experts_grow_from_k_to_all(experts: int, per_token: int, tokens: int) -> None:
    k = min(per_token, experts)
    found = distinct_experts(experts, k, tokens)
    assert k - 1e-9 <= found <= min(experts, k * tokens) + 1e-9
    assert distinct_experts(experts, k, tokens + 1) >= found


def test_experts_move_as_far_as_they_are_touched() -> None:
    moe = replace(DENSE, expert_bytes=8e9, expert_params=4e9, experts=8, experts_per_token=2)
    one = decode_floor(moe, ALONE, streams=1, context_tokens=0)
    two = decode_floor(moe, ALONE, streams=2, context_tokens=0)
    assert {part.name: part.ms for part in one.parts}["experts"] == pytest.approx(20)
    assert {part.name: part.ms for part in two.parts}["experts"] == pytest.approx(35)
    assert one.assumed == ()
    assert two.assumed == ("tokens choose experts independently and evenly",)
    ranks = Machine(100e9, 1e12, all_reduce_us=1.0, tensor_parallel=4)
    split = decode_floor(moe, ranks, streams=2, context_tokens=0)
    assert {part.name: part.ms for part in split.parts}["experts"] == pytest.approx(35 / 4)


@pytest.mark.parametrize(
    ("shape", "machine", "missing"),
    [
        (DENSE, Machine(None), "memory bandwidth"),
        (replace(DENSE, dense_bytes=None), ALONE, "weights (bytes)"),
        (replace(DENSE, expert_bytes=None), ALONE, "experts (bytes)"),
        (replace(DENSE, expert_bytes=1e9), ALONE, "experts (bytes)"),
    ],
)
def test_without_weights_or_bandwidth_the_floor_is_unknown(shape: ModelShape, machine: Machine, missing: str) -> None:
    floor = decode_floor(shape, machine, streams=1, context_tokens=100)
    assert floor.floor_ms is None
    assert missing in floor.missing
    assert floor.ratio(12.4) is None
    assert floor.sentence(12.4).startswith("The floor is unknown. Not in it, because unknown: ")
    assert to_reach(floor, 5.0) == ()
    assert all(lever.floor_ms is None for lever in levers(shape, machine, streams=1, context_tokens=100))


def test_what_else_is_unknown_is_left_out_and_named() -> None:
    floor = decode_floor(
        replace(DENSE, kv_bytes_per_token=None), Machine(100e9, tensor_parallel=2), streams=1, context_tokens=100
    )
    assert floor.floor_ms == pytest.approx(5.0)
    assert floor.missing == ("KV cache (bytes)", "all-reduces (count or latency)")
    assert floor.assumed == ("memory binds where operations or their rate are unknown",)


@given(st.integers(1, 300), st.floats(0, 1e5), st.integers(1, 16))
def test_more_of_anything_never_lowers_the_floor(streams: int, context: float, ranks: int) -> None:
    machine = Machine(100e9, 1e12, 5.0, ranks)
    moe = replace(DENSE, expert_bytes=8e9, expert_params=4e9, experts=64, experts_per_token=4)

    def of(streams: int, context: float, machine: Machine) -> float:
        floor_ms = decode_floor(moe, machine, streams=streams, context_tokens=context).floor_ms
        assert floor_ms is not None
        return floor_ms

    here = of(streams, context, machine)
    assert of(streams + 1, context, machine) >= here
    assert of(streams, context + 1, machine) >= here
    assert of(streams, context, replace(machine, bandwidth_bytes_s=50e9)) >= here
    assert of(streams, context, replace(machine, all_reduce_us=6.0)) >= here


def test_what_a_target_asks_of_each_part_alone() -> None:
    machine = Machine(100e9, all_reduce_us=50.0, tensor_parallel=2)
    floor = decode_floor(DENSE, machine, streams=1, context_tokens=1000, all_reduces=60)
    assert floor.floor_ms == pytest.approx(5.1 + 3.0)
    memory, reduce = to_reach(floor, 6.0)
    assert (memory.what, memory.factor) == ("bytes moved over bandwidth", pytest.approx(3.0 / 5.1))
    assert (reduce.what, reduce.factor) == ("all-reduce time", pytest.approx(0.9 / 3.0))
    assert reduce.sentence == "all-reduce time: may take 0.900 ms, takes 3.00 ms (0.300 times)"
    assert [r.factor for r in to_reach(floor, 4.0)] == [pytest.approx(1.0 / 5.1), None]
    assert all(r.factor is not None and r.factor > 1 for r in to_reach(floor, 9.0))


def test_levers_and_their_arithmetic() -> None:
    machine = Machine(100e9, all_reduce_us=50.0, tensor_parallel=4)
    found = {
        lever.name: lever
        for lever in levers(
            DENSE,
            machine,
            streams=1,
            context_tokens=1000,
            all_reduces=60,
            all_reduce_us_by_ranks={2: 30.0},
            draft_tokens=1,
            acceptance=0.5,
        )
    }
    # Now: 2.55 + 3.0 ms.
    assert found["weights of half the bytes"].floor_ms == pytest.approx(1.25 + 0.05 + 3.0)
    assert found["KV cache of half the bytes"].floor_ms == pytest.approx(2.5 + 0.025 + 3.0)
    # Half the drafts are right: 1.5 tokens a step.
    assert found["speculative decoding, 1 draft tokens"].floor_ms == pytest.approx(5.55 / 1.5)
    assert found["TP 2 × PP 2"].floor_ms == pytest.approx(5.1 + 60 * 0.030)
    assert found["TP 1 × PP 4"].floor_ms == pytest.approx(10.2)
    assert "no all-reduces" in found["TP 1 × PP 4"].arithmetic
    assert "expert parallel" not in found


def test_a_split_whose_latency_was_not_measured_is_unknown() -> None:
    machine = Machine(100e9, all_reduce_us=50.0, tensor_parallel=4)
    moe = replace(DENSE, expert_bytes=8e9, expert_params=4e9, experts=8, experts_per_token=2)
    found = {lever.name: lever.floor_ms for lever in levers(moe, machine, streams=1, context_tokens=1000)}
    assert found["TP 2 × PP 2"] is None
    assert found["TP 1 × PP 4"] is not None
    assert found["expert parallel"] is None


def test_two_models_imply_the_bandwidth() -> None:
    # 135 and 360 million bfloat16 weights; 4 ms of both are overhead.
    assert implied_bandwidth_bytes_s(0.27e9, 4 + 13.5, 0.72e9, 4 + 36.0) == pytest.approx(20e9)
    with pytest.raises(BadInput, match="more bytes"):
        implied_bandwidth_bytes_s(2.0, 1.0, 1.0, 2.0)


def test_a_dense_models_shape() -> None:
    tensors = {
        "model.embed_tokens.weight": Tensor("BF16", 1000),
        "model.layers.0.mlp.up_proj.weight": Tensor("BF16", 400),
        "model.layers.29.self_attn.q_proj.weight": Tensor("F32", 800),
    }
    tied = model_shape(LLAMA, tensors)
    assert (tied.dense_bytes, tied.dense_params) == (1000 + 400 + 400, 500 + 200 + 200)
    assert tied.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert tied.kv_heads == 3
    assert (tied.experts, tied.expert_bytes) == (0, 0)
    assert tied.all_reduces == 61
    assert tied.message_bytes(32) == 32 * 576 * 2
    untied = model_shape(LLAMA, {**tensors, "lm_head.weight": Tensor("BF16", 1000)})
    assert untied.dense_bytes == 1000 + 400 + 400
    assert model_shape(LLAMA, tensors, kv_dtype_bytes=1).kv_bytes_per_token == 2 * 30 * 3 * 64
    assert model_shape(LLAMA, {}).dense_bytes is None


def test_a_quantised_mixture_of_experts_shape() -> None:
    config = {"text_config": KIMI, "quantization_config": {"quant_method": "compressed-tensors"}}
    tensors = {
        "language_model.lm_head.weight": Tensor("BF16", 10),
        "language_model.model.embed_tokens.weight": Tensor("BF16", 10),
        "language_model.model.layers.1.mlp.experts.0.down_proj.weight_packed": Tensor("I32", 500),
        "language_model.model.layers.1.mlp.experts.383.down_proj.weight_scale": Tensor("BF16", 30),
        "language_model.model.layers.1.mlp.shared_experts.down_proj.weight": Tensor("BF16", 200),
        "language_model.model.layers.1.self_attn.o_proj.weight": Tensor("F32", 80),
        "language_model.model.layers.61.self_attn.o_proj.weight": Tensor("BF16", 7000),
        "vision_tower.encoder.blocks.0.wqkv.weight": Tensor("BF16", 9000),
    }
    shape = model_shape(config, tensors)
    assert (shape.expert_bytes, shape.dense_bytes) == (530, 10 + 200 + 80)
    assert shape.expert_params is None
    assert (shape.experts, shape.experts_per_token) == (384, 8)
    assert (shape.kv_bytes_per_token, shape.kv_heads) == (61 * 576 * 2, 1)
    assert shape.message_bytes(1) == 14 * 1024
    assert shape.all_reduces == 123


@pytest.mark.parametrize(
    "odd",
    [
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"index_topk": 2048},
        {"num_hidden_layers": None},
    ],
)
def test_a_cache_that_is_not_read_whole_is_unknown(odd: dict[str, object]) -> None:
    shape = model_shape({**LLAMA, **odd}, {"w": Tensor("BF16", 2)})
    assert (shape.kv_bytes_per_token, shape.kv_heads) == (None, None)


def test_a_window_that_is_switched_off_counts_for_nothing() -> None:
    config = {**LLAMA, "sliding_window": 32768, "use_sliding_window": False}
    assert model_shape(config, {}).kv_bytes_per_token == 23040


def write_safetensors(path: Path, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_headers_of_several_files_are_read(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "a.safetensors",
        {"__metadata__": {"format": "pt"}, "x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}},
    )
    write_safetensors(tmp_path / "b.safetensors", {"y": {"dtype": "I32", "shape": [3], "data_offsets": [4, 16]}})
    assert checkpoint_tensors(tmp_path) == {"x": Tensor("BF16", 4), "y": Tensor("I32", 12)}


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"{}", struct.pack("<Q", 8) + b'{"x": 1}']
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors: not a safetensors file"):
        checkpoint_tensors(tmp_path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: checkpoint_tensors(Path("/nowhere")), "no safetensors files"),
        (lambda: distinct_experts(8, 9, 1), "9 of 8"),
        (lambda: decode_floor(DENSE, ALONE, streams=0, context_tokens=1), "0 streams"),
        (lambda: decode_floor(DENSE, Machine(0.0), streams=1, context_tokens=1), "bandwidth_bytes_s is 0"),
        (lambda: to_reach(decode_floor(DENSE, ALONE, streams=1, context_tokens=1), 0), "not above zero"),
        (lambda: levers(DENSE, ALONE, streams=1, context_tokens=1, acceptance=1.0), "accepted at 1"),
    ],
)
def test_bad_input(call: object, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        call()  # type: ignore[operator]


def test_json() -> None:
    floor = decode_floor(DENSE, Machine(None), streams=1, context_tokens=1)
    json.dumps([floor.to_json(), DENSE.to_json(), ALONE.to_json()], allow_nan=False)
    assert floor.to_json()["floor_ms"] is None
