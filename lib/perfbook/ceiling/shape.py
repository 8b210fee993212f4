"""What of a model moves in a decode step: its weights, split by how they are read, and its KV cache per
token.

All of it follows from ``config.json`` and the headers of the checkpoint's files. What does not follow from
them is None and stays unknown; every field can be overridden with :func:`dataclasses.replace`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfbook.errors import BadInput
from perfbook.stats.result import Result

_FLOAT_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_F8: Final = ("F8_E4M3", "F8_E5M2")
_NOT_TEXT: Final = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|audio_tower|multi_modal_projector|mm_projector|mtp)\."
)
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_LARGEST_HEADER: Final = 100_000_000


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: its type as the file names it (``BF16``) and its size in bytes."""

    dtype: str
    size_bytes: int


@dataclass(frozen=True)
class ModelShape(Result):
    """The part of a model's make-up that a decode step's floor depends on; None is unknown.

    Attributes
    ----------
    layers, hidden : int or None
        Decoder layers and the width of their residual stream.
    dense_bytes, dense_params : float or None
        Weights that every step reads whole (attention, dense and shared-expert MLPs, norms, output head), in
        bytes as served and as a count. Not the input embedding: a step reads only a row per token of it.
    expert_bytes, expert_params : float or None
        All routed experts together; 0 for a dense model.
    experts, experts_per_token : int
        Routed experts of a layer, and how many of them a token takes.
    kv_bytes_per_token : float or None
        KV cache of one token, all layers, in bytes.
    kv_heads : int or None
        Heads the cache can be split over: a tensor-parallel rank holds at least one. 1 for MLA, whose
        compressed cache is the same for every head and so replicated on every rank.
    attention_flops : float or None
        Operations of one token's attention per position of context, all layers and heads.
    """

    layers: int | None = None
    hidden: int | None = None
    dense_bytes: float | None = None
    dense_params: float | None = None
    expert_bytes: float | None = 0.0
    expert_params: float | None = 0.0
    experts: int = 0
    experts_per_token: int = 0
    kv_bytes_per_token: float | None = None
    kv_heads: int | None = None
    attention_flops: float | None = None

    @property
    def all_reduces(self) -> int | None:
        """All-reduces of a tensor-parallel step, assumed: two a layer and one for the embedding; trace to know."""
        return None if self.layers is None else 2 * self.layers + 1

    def message_bytes(self, tokens: int, dtype_bytes: int = 2) -> int | None:
        """Size of one all-reduce in bytes: tokens in the step × hidden size × bytes per value."""
        return None if self.hidden is None else tokens * self.hidden * dtype_bytes


def distinct_experts(experts: int, per_token: int, tokens: int) -> float:
    """Return how many experts of a layer `tokens` are expected to touch: E·(1 − (1 − k/E)^T).

    It holds for tokens that choose independently and evenly. Real routing is less even, so fewer experts
    move: the floor that this gives is then a little high for a batch, and exact for one token. (A token misses a
    given expert with chance 1 − k/E, T tokens with that to the power T.)

    Raises
    ------
    BadInput
        When a token cannot choose so many experts, or there is no token.
    """
    if not 0 < per_token <= experts or tokens < 1:
        raise BadInput(f"experts: {per_token} of {experts} for {tokens} tokens is impossible")
    return experts * (1 - (1 - per_token / experts) ** tokens)


def model_shape(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    float_bytes: int = 2,
    kv_dtype_bytes: int = 2,
) -> ModelShape:
    """Return what moves in a decode step of a model.

    Parameters
    ----------
    config : mapping
        The model's ``config.json``; of a multimodal model only the text part counts.
    tensors : mapping
        Name → tensor, as :func:`checkpoint_tensors` reads them.
    float_bytes : int
        Bytes per weight that an unquantised checkpoint is served with (bfloat16: 2).
    kv_dtype_bytes : int
        Bytes per value of the KV cache (fp8: 1).
    """
    text = config.get("text_config") or config
    layers = _integer(text, "num_hidden_layers")
    served = None if config.get("quantization_config") or text.get("quantization_config") else float_bytes
    names = [name for name in tensors if _is_decoded(name, layers)]
    routed = {name for name in names if ".experts." in name and "shared" not in name}
    embeddings = {name for name in names if name.endswith(("embed_tokens.weight", "wte.weight"))}
    # Tied to the output head, the embedding is read whole after all.
    tied = not any("lm_head" in name for name in names)
    dense = [name for name in names if name not in routed and (tied or name not in embeddings)]
    kv_bytes, kv_heads, flops = _attention(text, layers, kv_dtype_bytes)
    return ModelShape(
        layers=layers,
        hidden=_integer(text, "hidden_size"),
        dense_bytes=_bytes(tensors, dense, served) if names else None,
        dense_params=_params(tensors, dense) if names else None,
        expert_bytes=_bytes(tensors, routed, served),
        expert_params=_params(tensors, routed),
        experts=_integer(text, "n_routed_experts", "num_local_experts", "num_experts") or 0 if routed else 0,
        experts_per_token=_integer(text, "num_experts_per_tok", "moe_topk") or 0 if routed else 0,
        kv_bytes_per_token=kv_bytes,
        kv_heads=kv_heads,
        attention_flops=flops,
    )


def checkpoint_tensors(folder: Path) -> dict[str, Tensor]:
    """Read names, types and sizes of all tensors from the headers of a folder's safetensors files.

    Raises
    ------
    BadInput
        When the folder has no such file, or a file's header is not one.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{folder}: no safetensors files; state the model's bytes in the parameters instead")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _LARGEST_HEADER:
                    raise ValueError("header too long")
                text = file.read(length)
            if len(text) < length:
                raise ValueError("header cut off")
            header = json.loads(text)
            for name, entry in header.items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    found[name] = Tensor(str(entry["dtype"]), int(end) - int(start))
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise BadInput(f"{path}: not a safetensors file ({error}); is the download complete?") from error
    return found


def _is_decoded(name: str, layers: int | None) -> bool:
    """Whether a text decode step reads the tensor: no vision tower, no extra prediction layers at the end."""
    layer = _LAYER.search(name)
    extra = layer is not None and layers is not None and int(layer[1]) >= layers
    return not extra and not _NOT_TEXT.search(name)


def _bytes(tensors: Mapping[str, Tensor], names: list[str] | set[str], served: int | None) -> float:
    total = 0.0
    for name in names:
        tensor = tensors[name]
        stored = _FLOAT_BYTES.get(tensor.dtype)
        total += tensor.size_bytes if served is None or stored is None else tensor.size_bytes / stored * served
    return total


def _params(tensors: Mapping[str, Tensor], names: list[str] | set[str]) -> float | None:
    """Count of weights; None as soon as one is stored packed, where the bytes do not tell."""
    total = 0.0
    for name in names:
        tensor = tensors[name]
        size = 1 if tensor.dtype in _F8 else _FLOAT_BYTES.get(tensor.dtype)
        if size is None:
            return None
        total += tensor.size_bytes / size
    return total


def _attention(
    text: Mapping[str, Any], layers: int | None, dtype_bytes: int
) -> tuple[float | None, int | None, float | None]:
    """KV bytes per token, heads to split them over, operations per token and position."""
    heads, hidden = _integer(text, "num_attention_heads"), _integer(text, "hidden_size")
    windowed = text.get("sliding_window") and text.get("use_sliding_window", True)
    mixed = any(kind != "full_attention" for kind in text.get("layer_types") or ())
    # A window, a state-space layer or an index over the cache reads something else than the whole context.
    if layers is None or heads is None or windowed or mixed or text.get("index_topk"):
        return None, None, None
    rank, rope = _integer(text, "kv_lora_rank"), _integer(text, "qk_rope_head_dim")
    if rank and rope:
        # MLA with absorbed projections: scores over rank + rope values, the sum over rank.
        return float(layers * (rank + rope) * dtype_bytes), 1, 2.0 * layers * heads * (2 * rank + rope)
    head_dim = _integer(text, "head_dim") or (hidden // heads if hidden else None)
    if head_dim is None:
        return None, None, None
    kv_heads = _integer(text, "num_key_value_heads") or heads
    return float(2 * layers * kv_heads * head_dim * dtype_bytes), kv_heads, 4.0 * layers * heads * head_dim


def _integer(text: Mapping[str, Any], *keys: str) -> int | None:
    return next((int(text[key]) for key in keys if isinstance(text.get(key), int)), None)
