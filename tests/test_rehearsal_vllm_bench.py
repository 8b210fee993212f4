"""vLLM's own benchmark client takes the stand-in for a vLLM server, and its numbers are explained beside perfbook's."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfbook.server import embedded
from perfbook.server.endpoints import Endpoints
from perfbook.stream.client import Endpoint
from perfbook.stream.load import measure
from perfbook.stream.workload import RequestShape, exact_prompts
from rehearsal_probe import standin

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,  # imports vLLM and torch in a process of its own
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM is installed here"),
]

STREAMS, TOKENS = 8, 64
LAW = {
    "model": {"max_model_len": 4096, "tensor_parallel": 1, "hidden_size": 64, "layers": 2},
    "step": {"decode_ms": [[1, 10.0], [8, 20.0]], "prefill_floor_ms": 10.0, "prefill_tok_s": 8000.0},
}
BENCH = (
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; from vllm.benchmarks.serve import *; "
    "p = FlexibleArgumentParser(); add_cli_args(p); main(p.parse_args())"
)


def bench(base_url: str, out: Path) -> dict[str, float]:
    """What ``vllm bench serve`` saves for one burst."""
    command = [
        sys.executable, "-c", BENCH, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", base_url, "--model", "m", "--tokenizer", embedded.resolve_model("embedded:smollm2-135m-instruct"),
        "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", str(TOKENS), "--num-prompts",
        str(STREAMS), "--max-concurrency", str(STREAMS), "--ignore-eos", "--ready-check-timeout-sec", "0",
        "--disable-tqdm", "--save-result", "--result-dir", str(out), "--result-filename", "bench.json",
    ]  # fmt: skip
    there = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "bench.json").read_text())


def test_both_clients_count_the_same_tokens_and_time_the_same_steps(tmp_path: Path) -> None:
    with standin(tmp_path, LAW) as served:
        server = Endpoints(f"http://127.0.0.1:{served.port}")
        said = bench(server.base_url, tmp_path)
        histograms = server.metrics()
        cell = measure(
            Endpoint(server.base_url, "m"), exact_prompts(None, 64, STREAMS, seed=1),
            RequestShape(TOKENS, min_tokens=TOKENS, ignore_eos=True), concurrency=STREAMS, requests=STREAMS, warmup=0,
        )  # fmt: skip
    assert (said["completed"], said["total_output_tokens"]) == (STREAMS, STREAMS * TOKENS)
    assert (cell.summary["ok"], cell.summary["output_tokens"]) == (STREAMS, STREAMS * TOKENS)
    # A client can see a first token only after the server counted it, never before: its own delay comes on top.
    server_ttft_ms = 1e3 * histograms["time_to_first_token_seconds_sum"] / STREAMS
    assert said["mean_ttft_ms"] >= server_ttft_ms
    # Between first and last token the delays cancel: both see the law's 20 ms a step, as far as the stand-in kept it.
    server_tpot_ms = 1e3 * histograms["inter_token_latency_seconds_sum"] / (STREAMS * (TOKENS - 1))
    assert said["mean_tpot_ms"] == pytest.approx(server_tpot_ms, rel=0.05)
    assert said["output_throughput"] == pytest.approx(STREAMS * TOKENS / said["duration"], rel=1e-6)
