"""The engine's banner: a Python repr, JSON in older versions.

Nothing parses it whole (it holds ``<CompilationMode.VLLM_COMPILE: 3>``, and logs cut it), so each value is
picked out.
"""

from __future__ import annotations

import re
from typing import Any

BANNER = re.compile(r"^Initializing an? (?:(V\d) )?LLM engine \(v(\S+?)\) with config: ?")
ARGS = re.compile(r"^(?:non-default )?args: ?(.*)$")

#: Compilation levels of versions before the modes had names.
MODES = {0: "NONE", 1: "STOCK_TORCH_COMPILE", 2: "DYNAMO_TRACE_ONCE", 3: "VLLM_COMPILE"}
GRAPH_MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL", 3: "FULL_DECODE_ONLY", 4: "FULL_AND_PIECEWISE"}

_TEXT = {"model": r"\bmodel=(?:'([^']*)'|\"([^\"]*)\")"}
_WORDS = {
    "dtype": r"(?<!cache_)\bdtype=(?:torch\.)?(\w+)",
    "quantization": r"\bquantization=([\w.-]+)",
    "kv_cache_dtype": r"\bkv_cache_dtype=([\w.-]+)",
    "device": r"\bdevice_config=(\w+)",
}
_NUMBERS = {
    "max_model_len": r"\bmax_seq_len=(\d{1,12})",
    "tensor_parallel_size": r"\btensor_parallel_size=(\d{1,6})",
    "pipeline_parallel_size": r"\bpipeline_parallel_size=(\d{1,6})",
    "data_parallel_size": r"\bdata_parallel_size=(\d{1,6})",
}
_EAGER = re.compile(r"\benforce_eager=(True|False)")
_MODE = re.compile(r"['\"](?:mode|level)['\"]: ?(?:<CompilationMode\.(\w+)|['\"]?(\d)\b)")
_GRAPHS = re.compile(
    r"['\"]cudagraph_mode['\"]: ?"
    r"(?:<CUDAGraphMode\.(\w+)|['\"]?(\d)\b|['\"](?:CUDAGraphMode\.)?([A-Z_]+)['\"])"
)
_USE_GRAPHS = re.compile(r"['\"]use_cudagraph['\"]: ?(true|false|True|False)")


def read_banner(text: str) -> dict[str, Any]:
    """Values that the banner states; what it does not state is missing, what it states as None is None."""
    found: dict[str, Any] = {}
    head = BANNER.match(text)
    if head is None:
        return found
    found["engine"] = head[1] or "V0"
    found["vllm_version"] = head[2]
    body, _, compilation = text[head.end() :].partition("compilation_config=")
    rest = body + compilation
    for key, pattern in (_TEXT | _WORDS).items():
        match = re.search(pattern, rest)
        if match:
            value = next((group for group in match.groups() if group is not None), None)
            found[key] = None if value == "None" else value
    for key, pattern in _NUMBERS.items():
        match = re.search(pattern, rest)
        if match:
            found[key] = int(match[1])
    eager = _EAGER.search(rest)
    if eager:
        found["enforce_eager"] = eager[1] == "True"
    mode = _MODE.search(compilation)
    if mode:
        found["compile_mode"] = mode[1] or MODES.get(int(mode[2]))
    graphs = _GRAPHS.search(compilation)
    if graphs:
        found["graph_mode"] = graphs[1] or (GRAPH_MODES.get(int(graphs[2])) if graphs[2] else graphs[3])
    elif (use := _USE_GRAPHS.search(compilation)) and use[1].lower() == "false":
        found["graph_mode"] = "NONE"
    return found


def read_args(text: str) -> dict[str, Any]:
    """Model and parallelism from the front end's list of arguments, for a log that ends before the banner."""
    found: dict[str, Any] = {}
    model = re.search(r"'model(?:_tag)?': '([^']*)'", text)
    if model:
        found["model"] = model[1]
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len"):
        match = re.search(rf"'{key}': (\d{{1,12}})", text)
        if match:
            found[key] = int(match[1])
    return found
