"""Typed trace events: what is decoded of each, which are kept, and what their arguments say."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np

from perfbook.trace.columns import UNKNOWN

Value = int | float | str | None

KINDS = {
    "kernel": "gpu",
    "gpu_memcpy": "gpu",
    "gpu_memset": "gpu",
    "memcpy": "gpu",
    "memset": "gpu",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "hip_runtime": "launch",
    "xpu_runtime": "launch",
    "xpu_driver": "launch",
    "runtime": "launch",
    "user_annotation": "annotation",
    "cpu_op": "op",
    "operator": "op",
    "Trace": "window",
}
GENERIC = "DevKernel_Generic"
"""In the name of the one kernel with which RCCL serves every collective."""
_KEPT_CALLS = re.compile(r"launch|memcpy|memset|moduleload|libraryload|begincapture|graphinstantiate", re.I)
SIZED_OPS = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send|recv", re.I)
_DTYPE_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "uint8": 1, "int8": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "int16": 2,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8,
}  # fmt: skip


class Args(msgspec.Struct, gc=False):
    """The arguments that matter; NCCL's stand on a kernel only when its launch was an eager collective."""

    correlation: Value = None
    stream: Value = None
    device: Value = None
    collective: Value = msgspec.field(name="Collective name", default=None)
    elements: Value = msgspec.field(name="In msg nelems", default=None)
    dtype: Value = None
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"[]"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"[]"))


class Event(msgspec.Struct, gc=False):
    """One trace event; ``ts`` and ``dur`` in microseconds."""

    ph: Value = None
    cat: Value = None
    name: Value = None
    pid: Value = None
    tid: Value = None
    ts: Any = None
    dur: Value = None
    args: Args | None = None


class _FastEvent(Event, gc=False):
    ts: Value = None


class ExactEvent(Event, gc=False):
    """``ts`` as the digits in the text."""

    ts: msgspec.Raw = msgspec.Raw(b"null")


FAST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[_FastEvent])
EXACT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[ExactEvent])
EACH = msgspec.json.Decoder(list[msgspec.Raw])


def starts_work(call: str) -> bool:
    """Whether a host call of this name starts device work, loads code or captures a graph."""
    return bool(_KEPT_CALLS.search(call))


def message_bytes(elements: Value, dtype: Value) -> int:
    """Payload of a collective from its number of elements and their type."""
    size = _DTYPE_BYTES.get(str(dtype).lower().removeprefix("c10::"))
    return elements * size if isinstance(elements, int) and size else UNKNOWN


def largest_input_bytes(args: Args) -> int:
    """Payload of a host collective: its largest tensor, where shapes were recorded."""
    try:
        shapes = msgspec.json.decode(args.shapes)
        types = msgspec.json.decode(args.types)
    except msgspec.DecodeError:
        return UNKNOWN
    sizes = [UNKNOWN]
    for shape, dtype in zip(shapes, types, strict=False):
        if isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], list):
            shape = shape[0]
        if isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
            sizes.append(message_bytes(int(np.prod(shape)), dtype))
    return max(sizes)
