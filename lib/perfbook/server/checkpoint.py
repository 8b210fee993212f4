"""What a checkpoint's own files ask for, against the arguments and the devices."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from perfbook.record.devices import Gpu
from perfbook.server.problems import Problem

_FP8_CAPABILITY = (8, 9)
_DTYPES = {"half": "float16", "float16": "float16", "float": "float32", "float32": "float32"}


@dataclass(frozen=True)
class Checkpoint:
    """A model's folder, as far as the checks need it.

    Attributes
    ----------
    folder : Path
        Where it lies.
    config : mapping
        ``config.json``, the text model's part where a multimodal one nests it.
    whole_config : mapping
        ``config.json`` as it stands.
    quantisation : mapping
        ``hf_quant_config.json``; empty without one.
    weights_bytes : int
        Sum of the weight files.
    """

    folder: Path
    config: Mapping[str, Any]
    whole_config: Mapping[str, Any]
    quantisation: Mapping[str, Any]
    weights_bytes: int


def read_checkpoint(folder: Path) -> Checkpoint | Problem:
    """The folder's facts, or why it is no model."""
    where = "server.model"
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Problem(
            "error",
            f"{folder} holds no config.json",
            where,
            "vLLM takes a folder for a model by it",
            "name the model's folder",
        )
    except (OSError, ValueError) as error:
        return Problem("error", f"{folder / 'config.json'} cannot be read", where, str(error), "repair the download")
    if not isinstance(whole, dict):
        return Problem(
            "error",
            f"{folder / 'config.json'} is not an object",
            where,
            "it is JSON of another kind",
            "repair the download",
        )
    nested = whole.get("text_config")
    config = {**whole, **nested} if isinstance(nested, dict) else whole
    quantisation: Any = {}
    with suppress(OSError, ValueError):
        quantisation = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(pattern)]
    return Checkpoint(
        folder,
        config,
        whole,
        quantisation if isinstance(quantisation, dict) else {},
        sum(path.stat().st_size for path in weights if path.is_file()),
    )


def check_checkpoint(
    model: Checkpoint,
    args: Mapping[str, Any],
    gpus: Sequence[Gpu],
    available_bytes: int,
    cpu_flags: Collection[str],
) -> Iterator[Problem]:
    """Parallelism, context, cache format, size, and whether a CPU multiplies what it is given.

    Parameters
    ----------
    model : Checkpoint
        The model.
    args : mapping
        ``server.args`` with dashes.
    gpus : sequence of Gpu
        The devices that the server would use; empty for the CPU.
    available_bytes : int
        Host memory that is free; counts without GPUs.
    cpu_flags : collection of str
        What the CPU can do, as :func:`perfbook.record.devices.cpu_flags` says; counts without GPUs.
    """
    yield from _missing_shards(model)
    yield from _parallel(model, args, gpus)
    yield from _context(model, args)
    yield from _cache_format(model, args, gpus)
    yield from _size(model, args, gpus, available_bytes)
    if not gpus:
        yield from _products(model, args, cpu_flags)


def _missing_shards(model: Checkpoint) -> Iterator[Problem]:
    """Files that the index names and the folder lacks: an interrupted download."""
    try:
        index = json.loads((model.folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        wanted = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        if model.weights_bytes == 0:
            yield Problem(
                "error", f"{model.folder} holds no weights", "server.model",
                "no .safetensors, .bin or .gguf file is there", "finish the download",
            )  # fmt: skip
        return
    missing = sorted(name for name in wanted if not (model.folder / str(name)).is_file())
    if missing:
        yield Problem(
            "error", f"{len(missing)} of {len(wanted)} weight files are missing", "server.model",
            f"the first is {missing[0]}", "finish the download",
        )  # fmt: skip


def _parallel(model: Checkpoint, args: Mapping[str, Any], gpus: Sequence[Gpu]) -> Iterator[Problem]:
    tp = args.get("tensor-parallel-size", 1)
    heads = model.config.get("num_attention_heads")
    if not _is_count(tp):
        return
    if isinstance(heads, int) and heads % tp:
        fits = [size for size in range(1, heads + 1) if heads % size == 0]
        yield Problem(
            "error", f"tensor-parallel-size {tp} does not divide the model's {heads} attention heads",
            "server.args.tensor-parallel-size", "vLLM refuses it",
            f"use one of {', '.join(map(str, fits[:8]))}",
        )  # fmt: skip
    pp = args.get("pipeline-parallel-size", 1)
    wanted = tp * pp if _is_count(pp) else tp
    nodes = args.get("nnodes", 1)
    wanted = wanted // nodes if _is_count(nodes) else wanted
    if gpus and wanted > len(gpus):
        yield Problem(
            "error", f"{wanted} GPUs are asked for, {len(gpus)} are visible", "server.args.tensor-parallel-size",
            "the workers would not find their device", "lower it, or check CUDA_VISIBLE_DEVICES",
        )  # fmt: skip


def _context(model: Checkpoint, args: Mapping[str, Any]) -> Iterator[Problem]:
    asked = args.get("max-model-len")
    limit = model.config.get("max_position_embeddings")
    stretched = model.config.get("rope_scaling") or model.config.get("rope_parameters", {}).get("factor")
    if _is_count(asked) and isinstance(limit, int) and asked > limit and not stretched:
        yield Problem(
            "error", f"max-model-len {asked} exceeds the model's {limit} positions", "server.args.max-model-len",
            "beyond it the answers are wrong, and vLLM refuses it", f"at most {limit}",
        )  # fmt: skip


def _cache_format(model: Checkpoint, args: Mapping[str, Any], gpus: Sequence[Gpu]) -> Iterator[Problem]:
    """A checkpoint can ask for an FP8 cache by itself; not every device and attention backend has one."""
    quantisation = model.quantisation.get("quantization")
    algorithm = quantisation.get("kv_cache_quant_algo") if isinstance(quantisation, dict) else None
    inner = model.whole_config.get("quantization_config")
    scheme = inner.get("kv_cache_scheme") if isinstance(inner, dict) else None
    sources = [
        (f"kv_cache_quant_algo = {algorithm} in hf_quant_config.json", algorithm),
        ("kv_cache_scheme in config.json", scheme),
    ]
    asked = [said for said, value in sources if value]
    if not asked or args.get("kv-cache-dtype", "auto") != "auto":
        return
    lacking = [gpu for gpu in gpus if not _has_fp8(gpu)]
    yield Problem(
        "error" if lacking else "warning",
        "the checkpoint asks for a quantised KV cache",
        "server.model",
        f"{' and '.join(asked)}; "
        + (f"{lacking[0].name} has no FP8 arithmetic" if lacking else "some devices and attention backends have none"),
        "set server.args.kv-cache-dtype yourself (bfloat16 works everywhere)",
    )


def _size(model: Checkpoint, args: Mapping[str, Any], gpus: Sequence[Gpu], available_bytes: int) -> Iterator[Problem]:
    gib = model.weights_bytes / 2**30
    if not gpus:
        if model.weights_bytes > available_bytes:
            yield Problem(
                "error", f"the weights ({gib:.1f} GiB) exceed the free memory", "server.model",
                f"{available_bytes / 2**30:.1f} GiB are free on this host", "free memory, or use a smaller model",
            )  # fmt: skip
        return
    tp, pp = args.get("tensor-parallel-size", 1), args.get("pipeline-parallel-size", 1)
    ranks = tp * pp if _is_count(tp) and _is_count(pp) else 1
    share = args.get("gpu-memory-utilization", 0.9)
    room = min(gpu.memory_bytes for gpu in gpus) * (share if isinstance(share, int | float) else 0.9)
    if model.weights_bytes / ranks > room:
        yield Problem(
            "error", f"{gib / ranks:.1f} GiB of weights per GPU do not fit", "server.args.tensor-parallel-size",
            f"the engine may use {room / 2**30:.1f} GiB of each", "use more GPUs or a smaller checkpoint",
        )  # fmt: skip


def _products(model: Checkpoint, args: Mapping[str, Any], cpu_flags: Collection[str]) -> Iterator[Problem]:
    """oneDNN has products of 16 bits from AVX-512 on; vLLM then takes torch's, and only its log says so."""
    dtype = served_dtype(args, model.config)
    if "avx2" in cpu_flags and "avx512f" not in cpu_flags and dtype != "float32":
        yield Problem(
            "warning", f"this CPU multiplies {dtype} slowly", "server.args.dtype",
            "it has no AVX-512, and oneDNN no product of 16 bits without; six times slower was seen at 16 streams",
            "set it to float32",
        )  # fmt: skip


def served_dtype(args: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """``bfloat16``, ``float16`` or ``float32``, as vLLM chooses: what is asked for, else the checkpoint's own, except
    that float32 becomes bfloat16.
    """
    asked = args.get("dtype", "auto")
    if asked != "auto":
        return _DTYPES.get(str(asked), "bfloat16")
    stored = _DTYPES.get(str(config.get("dtype", config.get("torch_dtype"))))
    return "float16" if stored == "float16" else "bfloat16"


def _has_fp8(gpu: Gpu) -> bool:
    return gpu.compute_capability is None or gpu.compute_capability >= _FP8_CAPABILITY


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
