"""The matrix products of a decode step, from a model's ``config.json`` (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GemmShape:
    """A layer's product (m, k) × (k, n), and how often a step computes it; ``m`` is the tokens in the step."""

    name: str
    n: int
    k: int
    per_step: int


def gemm_shapes(config: Mapping[str, Any], tensor_parallel: int = 1) -> tuple[GemmShape, ...]:
    """The products on one rank of a dense decoder with grouped-query attention and a gated MLP.

    Empty for what is built otherwise (MLA, experts) or does not say its sizes: better none than another model's.
    vLLM fuses the projections of q, k and v, and of gate and up, and splits heads and MLP over the ranks.
    """
    text = config.get("text_config") or config
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    sizes = [size for name in names if isinstance(size := text.get(name), int)]
    if len(sizes) < len(names) or text.get("kv_lora_rank"):
        return ()
    if any(text.get(name) for name in ("n_routed_experts", "num_local_experts", "num_experts")):
        return ()
    layers, hidden, heads, inner, vocabulary = sizes
    head_dim = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads") or heads
    query = -(-heads // tensor_parallel) * head_dim
    cached = -(-kv_heads // tensor_parallel) * head_dim
    inner = -(-inner // tensor_parallel)
    return (
        GemmShape("qkv", query + 2 * cached, hidden, layers),
        GemmShape("o", hidden, query, layers),
        GemmShape("gate_up", 2 * inner, hidden, layers),
        GemmShape("down", hidden, inner, layers),
        GemmShape("head", -(-vocabulary // tensor_parallel), hidden, 1),
    )
