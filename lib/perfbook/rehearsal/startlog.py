"""The start-up log, in vLLM 0.32's words as far as a log parser reads them; and the words of a start that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from perfbook.rehearsal.launch import Launch

MARK = "perfbook rehearsal: a stand-in that obeys a law, not a vLLM server; its figures are not measurements"
PROGRESS_LINES = 4
FAILS_AT = 0.9  # where a dead launch dies: after the weights, when the cache is made


@dataclass(frozen=True)
class Line:
    """A log line; ``at`` is its place in the load, 0 (start) to 1 (ready). Without a process it is printed bare."""

    at: float
    text: str
    process: str = ""
    source: str = ""
    level: str = "INFO"

    def rendered(self, pid: int) -> str:
        """The line as vLLM prints it, with the wall time of now."""
        if not self.process:
            return self.text
        prefix = f"({self.process} pid={pid}) {self.level} {time.strftime('%m-%d %H:%M:%S')} [{self.source}] "
        return "\n".join(prefix + part for part in self.text.split("\n"))


def startup(launch: Launch) -> Iterator[Line]:
    """All lines from the banner to ready, in order; times in them are the law's nominal ones."""
    law, model = launch.law, launch.law.model
    api, core = "APIServer", "EngineCore"
    yield Line(0.0, MARK)
    yield Line(
        0.0,
        f"rehearsal: launch {launch.number}; load {law.load.seconds:.0f} s shortened to {launch.load_s:g} s",
    )
    yield Line(0.0, f"  version {law.vllm_version}", api, "api_utils.py:347")
    yield Line(0.0, f"  model   {launch.model}", api, "api_utils.py:347")
    shown = {"host": launch.host, "port": launch.port, "model": launch.model}
    shown |= {key.replace("-", "_"): value for key, value in launch.args.items()}
    shown["served_model_name"] = [launch.served_name]
    yield Line(0.0, f"non-default args: {shown}", api, "api_utils.py:286")
    yield Line(0.01, f"Resolved architecture: {model.architecture}", api, "model.py:733")
    yield Line(0.01, f"Using max model len {model.max_model_len}", api, "model.py:2152")
    budget = law.limits.max_num_batched_tokens
    yield Line(0.01, f"Chunked prefill is enabled with max_num_batched_tokens={budget}.", api, "scheduler.py:307")
    if launch.eager:
        eager = "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup."
        yield Line(0.01, eager, api, "vllm.py:1703", "WARNING")
    yield Line(0.03, _banner(launch), core, "core.py:133")
    yield from _communication(launch)
    attention = model.attention_backend
    backend = f"Using {attention} attention backend out of potential backends: ['{attention}']."
    yield Line(0.08, backend, "Worker_TP0", "cuda.py:506")
    if model.moe_backend_line:
        yield Line(0.08, model.moe_backend_line, "Worker_TP0", "layer.py:431")
    yield from _weights(launch)
    yield from _compile(launch)
    tokens = law.limits.kv_cache_tokens
    yield Line(0.9, f"Available KV cache memory: {law.load.kv_cache_gib} GiB", "Worker_TP0", "gpu_worker.py:759")
    concurrency = tokens / model.max_model_len
    size = f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {model.max_model_len:,} tokens per request: "
    yield Line(0.9, f"{size}{concurrency:.2f}x", core, "kv_cache_utils.py:2327")
    if not launch.eager:
        graphs = f"Graph capturing finished in {law.load.graph_capture_s:.0f} secs, took 1.84 GiB"
        yield Line(0.96, graphs, "Worker_TP0", "gpu_model_runner.py:6581")
    warm = law.load.compile_s + law.load.graph_capture_s + 12.0
    yield Line(0.98, f"init engine (profile, create kv cache, warmup model) took {warm:.2f} s", core, "core.py:402")
    if launch.profile_dir is not None:
        armed = (
            "Profiler with mode 'torch' is enabled in the API server. This should ONLY be used for local development!"
        )
        yield Line(0.99, armed, api, "api_router.py:59", "WARNING")
    yield Line(1.0, f"Starting vLLM server on http://{launch.host}:{launch.port}", api, "entry.py:140")


def ready(pid: int) -> Iterator[Line]:
    """What uvicorn prints when the port answers."""
    yield Line(1.0, f"INFO:     Started server process [{pid}]")
    yield Line(1.0, "INFO:     Waiting for application startup.")
    yield Line(1.0, "INFO:     Application startup complete.")


def start_error(launch: Launch) -> str | None:
    """Why this launch dies, None when it lives."""
    for setting in launch.active:
        if setting.error is not None:
            return setting.error
    law = launch.law
    longest, room = law.model.max_model_len, law.limits.kv_cache_tokens
    if room >= longest:
        return None
    needed_gib = law.load.kv_cache_gib * longest / room
    return (
        f"ValueError: To serve at least one request with the model's max seq len ({longest}), ({needed_gib:.2f} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({law.load.kv_cache_gib:.2f} GiB). Based "
        f"on the available memory, the estimated maximum model length is {room}. Try increasing "
        "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    )


def failure(error: str) -> Iterator[Line]:
    """A dead start: the engine's traceback, then the API server's, which names no cause."""
    core = ("EngineCore", "core.py:1510", "ERROR")
    yield Line(0.9, f"EngineCore failed to start.\nTraceback (most recent call last):\n{error}", *core)
    yield Line(0.9, "Traceback (most recent call last):")
    yield Line(
        0.9,
        "RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {'EngineCore_DP0': 1}",
    )


def traffic(prompt_tok_s: float, output_tok_s: float, running: int, waiting: int, usage: float, hits: float) -> Line:
    """The line that vLLM prints every ten seconds while it is busy; ``usage`` and ``hits`` are shares, 0 to 1."""
    return Line(
        1.0,
        f"Engine 000: Avg prompt throughput: {prompt_tok_s:.1f} tokens/s, Avg generation throughput: "
        f"{output_tok_s:.1f} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, "
        f"GPU KV cache usage: {100 * usage:.1f}%, Prefix cache hit rate: {100 * hits:.1f}%",
        "APIServer",
        "loggers.py:335",
    )


def _banner(launch: Launch) -> str:
    law, model = launch.law, launch.law.model
    if launch.eager:
        compilation = "{'mode': <CompilationMode.NONE: 0>, 'cudagraph_mode': <CUDAGraphMode.NONE: 0>}"
    else:
        compilation = (
            "{'mode': <CompilationMode.VLLM_COMPILE: 3>, 'backend': 'inductor', "
            "'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}"
        )
    cache = launch.args.get("kv-cache-dtype", "auto")
    return (
        f"Initializing a V1 LLM engine (v{law.vllm_version}) with config: model='{launch.model}', "
        f"speculative_config=None, tokenizer='{launch.model}', skip_tokenizer_init=False, tokenizer_mode=auto, "
        f"revision=None, trust_remote_code={launch.args.get('trust-remote-code') is True}, dtype=torch.{model.dtype}, "
        f"max_seq_len={model.max_model_len}, download_dir=None, load_format=auto, "
        f"tensor_parallel_size={model.tensor_parallel}, pipeline_parallel_size=1, data_parallel_size=1, "
        f"disable_custom_all_reduce={launch.args.get('disable-custom-all-reduce') is True}, "
        f"quantization={model.quantization}, enforce_eager={launch.eager}, kv_cache_dtype={cache}, "
        f"device_config=cuda, seed=0, served_model_name={launch.served_name}, enable_prefix_caching=True, "
        f"enable_chunked_prefill=True, pooler_config=None, compilation_config={compilation}"
    )


def _communication(launch: Launch) -> Iterator[Line]:
    comm, ranks = launch.law.communication, launch.law.model.tensor_parallel
    if ranks == 1:
        return
    yield Line(0.06, f"vLLM is using nccl=={comm.nccl_version}", "Worker_TP0", "pynccl.py:148")
    if comm.custom_all_reduce_disabled:
        text = (
            "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs. "
            "To silence this warning, specify disable_custom_all_reduce=True explicitly."
        )
        for rank in range(ranks):
            yield Line(0.06, text, f"Worker_TP{rank}", "custom_all_reduce.py:271", "WARNING")
    yield Line(
        0.06,
        f"Using {list(comm.backends)} all-reduce backends (in dispatch order) for group 'tp:0' out of potential "
        "backends: ['FLASHINFER', 'NCCL_SYMM_MEM', 'QUICK_REDUCE', 'CUSTOM', 'SYMM_MEM', 'PYNCCL'].",
        "Worker_TP0",
        "cuda_communicator.py:353",
    )


def _weights(launch: Launch) -> Iterator[Line]:
    load = launch.law.load
    for part in range(PROGRESS_LINES + 1):
        done = load.shards * part // PROGRESS_LINES
        share = 100 * part // PROGRESS_LINES
        text = f"Loading safetensors checkpoint shards: {share:3d}% Completed | {done}/{load.shards} [{part:02d}:00]"
        yield Line(0.1 + 0.6 * part / PROGRESS_LINES, text)
    yield Line(0.71, f"Loading weights took {load.seconds:.2f} seconds", "Worker_TP0", "default_loader.py:501")
    for rank in range(launch.law.model.tensor_parallel):
        seconds = load.seconds + 3 + rank / 7
        taken = f"Model loading took {load.weights_gib_per_rank} GiB memory and {seconds:.6f} seconds"
        yield Line(0.72, taken, f"Worker_TP{rank}", "gpu_model_runner.py:5149")


def _compile(launch: Launch) -> Iterator[Line]:
    if launch.eager:
        return
    compile_s = launch.law.load.compile_s
    text = f"Dynamo bytecode transform time: {0.2 * compile_s:.2f} s"
    yield Line(0.78, text, "Worker_TP0", "backends.py:1061")
    yield Line(0.85, f"torch.compile took {compile_s:.2f} s in total", "Worker_TP0", "monitor.py:53")
