"""Texts of vLLM's log lines, versions 0.6 to 0.33, matched against the message without its prefix.

Numbers are bounded, so that no text can be read as one that Python refuses to convert.
"""

from __future__ import annotations

import re

_N = r"(\d{1,12}(?:\.\d{1,9})?)"
_RATE = r"\d{1,12}(?:\.\d{1,9})?"

SERVER_START = re.compile(r"^(?:non-default )?args: |^vLLM API server version ")
SERVER_VERSION = re.compile(r"^vLLM API server version (\S+)|█ +version (\d\S*)")
#: With the prompt's own words, which are no evidence of anything.
REQUEST = re.compile(r"^(?:Received|Added|Finished|Aborted) request")
READY = re.compile(r"^(?:INFO: +)?(?:Application startup complete|Uvicorn running on )")

THROUGHPUT = re.compile(
    rf"^(?:Engine (?P<engine>\d+): )?Avg prompt throughput: (?P<prompt>{_RATE}) tokens/s, "
    rf"Avg generation throughput: (?P<generation>{_RATE}) tokens/s, Running: (?P<running>\d{{1,9}}) reqs, "
    r"(?:Swapped: \d+ reqs, )?(?:Waiting|Pending): (?P<waiting>\d{1,9}) reqs"
    rf"(?:.*?(?:GPU|CPU|NPU|TPU|XPU|HPU) KV cache usage: (?P<kv>{_RATE})%)?"
    rf"(?:.*?[Pp]refix cache hit rate: (?:GPU: )?(?P<hit>{_RATE})%)?"
)

#: Facts of which the largest value counts: ranks report one each.
LARGEST = [
    ("weights_s", re.compile(rf"^Loading weights took {_N} seconds")),
    ("weights_gib", re.compile(rf"^(?:Model loading took|Loading model weights took) {_N} Gi?B")),
    ("compile_s", re.compile(rf"^(?:\[\w+\] ?)?torch\.compile (?:took|takes) {_N} s in total")),
    ("graph_capture_s", re.compile(rf"^Graph capturing finished in {_N} secs")),
    ("init_s", re.compile(rf"^init engine \(.*?\) took {_N} s")),
]
#: Facts of which the first value counts.
FIRST: list[tuple[str, re.Pattern[str], type]] = [
    ("kv_cache_tokens", re.compile(r"^[\w +]+ KV cache size: (\d[\d,]{0,18}) tokens"), int),
    ("kv_cache_blocks", re.compile(r"^# \w+ blocks: (\d{1,12})"), int),
    ("kv_cache_gib", re.compile(rf"^Available KV cache memory: {_N} GiB"), float),
    ("max_concurrency", re.compile(rf"Maximum concurrency for [\d,]+ tokens per request: {_N}x"), float),
    ("nccl_version", re.compile(r"^vLLM is using nccl==([\d.]+)"), str),
    ("moe_backend", re.compile(r"^Using '?([\w-]+)'? (?:[\w-]+ )*MoE backend"), str),
    ("attention_backend", re.compile(r"^Using (?:AttentionBackendEnum\.)?([\w-]+) attention backend"), str),
    ("attention_backend", re.compile(r"^Using ([\w -]+?) backend(?: on V1 engine)?\.$"), str),
    ("attention_backend", re.compile(r"^Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) backend\b"), str),
]
ALL_REDUCE = re.compile(r"^Using \[([^\]]*)\] all-reduce backends")

COMPILED = re.compile(
    r"^(?:\[\w+\] ?)?(?:"
    r"torch\.compile (?:took|takes) \d+(?:\.\d+)? s in total"
    r"|saved AOT compiled function to \S"
    r"|Directly load AOT compilation from path \S"
    r"|Dynamo bytecode transform time: \d+(?:\.\d+)? s"
    r"|Compiling a graph for .+ takes \d+(?:\.\d+)? s"
    r"|Directly load the compiled graph\(s\) for .+ took \d+(?:\.\d+)? s)"
)
NOT_COMPILED = re.compile(
    r"^(?:Enforce eager set, disabling torch\.compile"
    r"|TORCH_COMPILE_DISABLE is set, disabling torch\.compile"
    r"|`torch\.compile` is turned on, but the model .+ does not support it)"
)
CAPTURED = re.compile(r"^Graph capturing finished in \d+(?:\.\d+)? secs")
GRAPH_MODE_SET = re.compile(
    r"(?:; setting cudagraph_mode=|^Cudagraph mode .*Overriding to (?:CUDAGraphMode\.)?)([A-Z][A-Z_]*[A-Z])\b"
)
NO_GRAPHS = re.compile(
    r"^Enforce eager set, disabling .*CUDAGraphs|disabling cudagraph_mode\.$"
    r"|^CUDA graph is not supported|^Disabling CUDA ?[Gg]raphs?\b"
)
