"""Bandwidth and matrix products of one device: :func:`measure_device` starts this module as a process."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from perfbook.errors import MeasurementFailed
from perfbook.micro import spawn
from perfbook.micro.results import Bandwidth, DeviceBench, Gemm
from perfbook.micro.shapes import GemmShape

_LEAST_BYTES = 128 * 2**20  # beyond every cache but the largest servers' L3
_MOST_BYTES = 2 * 2**30
_RATE_TOKENS = 512  # so many rows show the rate of computing, not of reading
_COLD_BYTES = 128 * 2**20  # weights are cycled through this much, so that none is found in a cache


def measure_device(
    gemms: Sequence[GemmShape],
    tokens: Sequence[int],
    *,
    weight_bytes: float | None = None,
    dtype: str = "bfloat16",
    repeats: int = 7,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> DeviceBench:
    """Measure the first visible device in a process of its own.

    Parameters
    ----------
    gemms : sequence of GemmShape
        Products to time, each at every count of `tokens`; the layers' largest also with 512 rows, for the rate.
    tokens : sequence of int
        Tokens in a step (one per stream).
    weight_bytes : float, optional
        What a decode step reads: the arrays are as large (128 MiB to 2 GiB), so that a cache helps as much as there.
    dtype : str
        What weights and activations are served in: ``bfloat16``, ``float16`` or ``float32``.
    repeats : int
        At most; fewer where one takes long.
    env : mapping, optional
        Environment of the process; default: this one's.
    timeout_s : float
        Deadline in seconds.

    Raises
    ------
    MeasurementFailed
        The process failed or did not end in time.
    """
    job = {
        "gemms": [asdict(shape) for shape in gemms],
        "tokens": list(tokens),
        "dtype": dtype,
        "buffer_bytes": int(min(max(weight_bytes or 0, _LEAST_BYTES), _MOST_BYTES)),
        "repeats": repeats,
    }
    with spawn.working_folder() as folder:
        ended = spawn.run_jobs(
            __name__, [job], env=os.environ if env is None else env, timeout_s=timeout_s, folder=Path(folder)
        )
    if ended.outcome != "ok":
        raise MeasurementFailed(f"the device's micro-benchmark {ended.outcome}: {ended.detail}")
    return read_bench(ended.results[0])


def read_bench(said: Mapping[str, Any]) -> DeviceBench:
    """A :class:`DeviceBench` from its JSON."""
    return DeviceBench(
        said["device"],
        tuple(Bandwidth(**{**one, "repeats_gb_s": tuple(one["repeats_gb_s"])}) for one in said["bandwidth"]),
        tuple(Gemm(**{**one, "repeats_us": tuple(one["repeats_us"])}) for one in said["gemms"]),
    )


def _measure(job: Mapping[str, Any]) -> DeviceBench:
    """In the child: everything, on the first device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        name = f"{torch.cuda.get_device_name(0)} (the first of {torch.cuda.device_count()})"
        room = torch.cuda.mem_get_info(0)[0] // 8
    else:
        name, room = f"CPU, {torch.get_num_threads()} threads", job["buffer_bytes"]
    bandwidth = tuple(_bandwidth(device, min(job["buffer_bytes"], room), job["repeats"]))
    dtype: torch.dtype = getattr(torch, job["dtype"])
    multiply, kernel = _linear(device, dtype)
    layers = [shape for shape in job["gemms"] if shape["per_step"] > 1]
    largest = max(layers, key=lambda shape: shape["n"] * shape["k"], default=None)
    gemms = []
    for shape in job["gemms"]:
        for tokens in [*job["tokens"], *([_RATE_TOKENS] if shape is largest else [])]:
            size = dtype.itemsize * shape["n"] * shape["k"]
            copies = 1 if tokens >= _RATE_TOKENS else max(1, min(64, _COLD_BYTES // size))
            weights = [multiply(torch.randn(shape["n"], shape["k"], dtype=dtype, device=device)) for _ in range(copies)]
            x = torch.randn(tokens, shape["k"], dtype=dtype, device=device)
            found = _repeats_us(partial(_all, weights, x), device, job["repeats"])
            times = tuple(us / copies for us in found)
            gemms.append(
                Gemm(shape["name"], tokens, shape["n"], shape["k"], shape["per_step"], kernel, times, dtype.itemsize)
            )
    return DeviceBench(name, bandwidth, tuple(gemms))


def _all(products: Sequence[Callable[[Any], Any]], x: Any) -> None:
    for product in products:
        product(x)


def _bandwidth(device: str, size_bytes: int, repeats: int) -> list[Bandwidth]:
    import torch

    count = size_bytes // 4
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    # On a CPU torch.sum adds in cascades and is slower than the memory; the product of two arrays is not.
    works: dict[str, tuple[Callable[[], object], int]] = {
        "read": ((lambda: torch.dot(a, b)), 2) if device == "cpu" else ((lambda: torch.sum(a)), 1),
        "copy": ((lambda: b.copy_(a)), 2),
        "triad": ((lambda: torch.add(a, b, alpha=3.0, out=c)), 3),
    }
    return [
        Bandwidth(kind, size_bytes, tuple(arrays * size_bytes / us / 1e3 for us in _repeats_us(work, device, repeats)))
        for kind, (work, arrays) in works.items()
    ]


def _repeats_us(work: Callable[[], object], device: str, repeats: int) -> list[float]:
    from perfbook.micro.timing import repeats_us

    return repeats_us(work, device=device, repeats=repeats)


def _linear(device: str, dtype: Any) -> tuple[Callable[[Any], Callable[[Any], Any]], str]:
    """How a weight becomes a product, as vLLM multiplies unquantised weights there; and the kernel's name."""
    import torch

    name = str(dtype).removeprefix("torch.")
    kernel = f"torch's product, {name}"
    if device == "cpu" and _load_vllm_operators():
        operators = torch.ops._C

        def packed(weight: Any) -> Callable[[Any], Any]:
            handler = torch.tensor(operators.create_onednn_mm_handler(weight.t(), 32), dtype=torch.int64)

            def multiply(x: Any) -> Any:
                out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
                operators.onednn_mm(out, x, None, handler)
                return out

            return multiply

        try:
            packed(torch.zeros(64, 64, dtype=dtype))
        except RuntimeError:  # without AVX-512; vLLM's dispatch_cpu_unquantized_gemm takes torch's product then
            kernel += ", as vLLM where oneDNN has none"
        else:
            return packed, f"vLLM's oneDNN product, {name}"
    return (lambda weight: lambda x: torch.nn.functional.linear(x, weight)), kernel


def _load_vllm_operators() -> bool:
    """Load the CPU operators of the installed vLLM without importing it (which takes many seconds)."""
    import torch

    found = importlib.util.find_spec("vllm")
    for folder in found.submodule_search_locations or () if found else ():
        wide = torch.cpu._is_avx512_supported()
        name = "_C" if wide and torch.cpu._is_avx512_bf16_supported() else "_C_AVX512" if wide else "_C_AVX2"
        with suppress(OSError, RuntimeError):
            torch.ops.load_library(str(Path(folder) / f"{name}.abi3.so"))  # type: ignore[no-untyped-call]
            return hasattr(torch.ops._C, "create_onednn_mm_handler")
    return False


if __name__ == "__main__":
    given, output = sys.argv[1:]
    Path(output).write_text(json.dumps(_measure(json.loads(Path(given).read_text())).to_json()))
