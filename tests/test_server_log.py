"""What a vLLM log says: recorded logs, hand-made excerpts of other versions and devices, and any byte salad."""

from __future__ import annotations

import json
import re
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfbook.cli import call
from perfbook.server.findings import CONDITIONS, rules
from perfbook.server.log import EngineFacts, first_error, first_error_in, parse_log, read_log, render_text

LOGS = Path(__file__).parent / "data" / "logs"
RECORDED = {
    path.stem.removeprefix("vllm_0.32_cpu_"): path.read_text(encoding="utf-8") for path in LOGS.glob("vllm_*.log")
}

#: Made by hand from the texts in vLLM's source: eight PCIe GPUs with interleaved ranks and colours; two old versions.
GPU, V0, V08 = ((LOGS / f"handmade_{name}.log").read_bytes().decode() for name in ("gpu_tp8", "0.6_v0", "0.8"))
GPU_LINES = GPU.rstrip("\n").split("\n")
GPU_BANNER = next(line for line in GPU_LINES if "Initializing" in line)


def test_eager_log():
    facts = parse_log(RECORDED["eager"])
    assert (facts.vllm_version, facts.engine, facts.model) == ("0.32.0", "V1", "/models/smollm2-135m-instruct")
    assert (facts.dtype, facts.quantization, facts.device) == ("bfloat16", None, "cpu")
    assert (facts.tensor_parallel_size, facts.pipeline_parallel_size, facts.data_parallel_size) == (1, 1, 1)
    assert (facts.max_model_len, facts.kv_cache_tokens, facts.max_concurrency) == (2048, 46592, 22.75)
    assert (facts.weights_s, facts.init_s) == (0.51, 2.53)
    assert (facts.compile.mode, facts.compile.active) == ("NONE", False)
    assert (facts.cuda_graphs.mode, facts.cuda_graphs.active) == ("NONE", False)
    assert facts.first_error is None
    row = facts.throughput[0]
    assert (row.prompt_tok_s, row.generation_tok_s, row.running, row.waiting) == (3.1, 43.7, 0, 0)
    assert [finding.rule for finding in facts.findings] == ["eager", "tcmalloc_missing"]


def test_a_cpu_without_products_for_its_type():
    """AVX2, bfloat16: the server says it once, between two others' warnings, and is six times slower."""
    facts = parse_log(RECORDED["avx2"])
    assert "onednn_products" in [finding.rule for finding in facts.findings]
    (line,) = next(finding.evidence for finding in facts.findings if finding.rule == "onednn_products")
    assert line.text.startswith("Failed to create oneDNN linear, fallback to torch linear. ")
    assert line.text in RECORDED["avx2"].split("\n")[line.line - 1]


def test_compiled_cpu_log_is_compiled_although_it_says_inductor_was_disabled():
    facts = parse_log(RECORDED["compiled"])
    assert "Inductor compilation was disabled by user settings" in RECORDED["compiled"]
    assert (facts.compile.mode, facts.compile.active) == ("DYNAMO_TRACE_ONCE", True)
    assert "saved AOT compiled function" in facts.compile.evidence[-1].text
    assert facts.cuda_graphs.active is False
    assert facts.init_s == 58.63


def test_evidence_lines_are_where_it_says():
    for text in (*RECORDED.values(), GPU, V08):
        facts, lines = parse_log(text), text.split("\n")
        for one in (*facts.compile.evidence, *facts.cuda_graphs.evidence):
            assert one.text[:40] in lines[one.line - 1]


def test_tensor_parallel_log():
    facts = parse_log(RECORDED["tp3"])
    assert (facts.tensor_parallel_size, facts.kv_cache_tokens, facts.max_concurrency) == (3, 139776, 68.25)
    assert [row.running for row in facts.throughput] == [4, 4, 4, 0]


@pytest.mark.parametrize(
    ("log", "line", "process", "message"),
    [
        (
            "no_kv_memory",
            80,
            "EngineCore",
            "ValueError: To serve at least one request with the model's max seq len (8192)",
        ),
        ("bad_model_path", 54, "", "huggingface_hub.errors.HFValidationError: Repo id must be in the form"),
        (
            "bad_tensor_parallel",
            53,
            "",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig: Value error, "
            "Total number of "
            "attention heads (9) must be divisible by tensor parallel size (2).",
        ),
        ("bad_flag", 11, "", "unrecognized arguments: --num-scheduler-steps"),
    ],
)
def test_first_error_is_the_cause(log: str, line: int, process: str, message: str):
    error = parse_log(RECORDED[log]).first_error
    assert error is not None
    assert error.message.startswith(message)
    assert (error.line, error.process) == (line, process)
    assert "\n" not in error.message


def test_gpu_log():
    facts = parse_log(GPU, planned_concurrency=128)
    assert (facts.vllm_version, facts.engine, facts.tensor_parallel_size) == ("0.16.0rc2", "V1", 8)
    assert (facts.quantization, facts.max_model_len) == ("compressed-tensors", 131072)
    assert (facts.attention_backend, facts.moe_backend) == ("TRITON_MLA", "MARLIN")
    assert (facts.all_reduce_backends, facts.nccl_version) == (("SYMM_MEM", "PYNCCL"), "2.28.9")
    assert (facts.kv_cache_tokens, facts.kv_cache_gib, facts.max_concurrency) == (186432, 11.42, 1.42)
    assert (facts.weights_s, facts.weights_gib, facts.compile_s) == (2133.5, 70.35, 51.2)
    assert (facts.graph_capture_s, facts.init_s) == (31.0, 106.9)
    assert (facts.compile.mode, facts.compile.active) == ("VLLM_COMPILE", True)
    assert (facts.cuda_graphs.mode, facts.cuda_graphs.active) == ("PIECEWISE", True)
    assert (facts.throughput[0].waiting, facts.throughput[0].kv_usage_pct) == (96, 97.5)
    assert {finding.rule for finding in facts.findings} == {
        "custom_all_reduce_pcie",
        "nccl_not_first",
        "graphs_lowered",
        "cache_small",
        "waiting_for_cache",
    }


def test_v0_log():
    facts = parse_log(V0)
    assert (facts.vllm_version, facts.engine, facts.model) == ("0.6.3.post1", "V0", "meta-llama/Llama-3-8B")
    assert (facts.kv_cache_tokens, facts.kv_cache_blocks, facts.max_concurrency) == (None, 27793, 54.28)
    assert (facts.attention_backend, facts.weights_gib) == ("XFormers", 14.9595)
    assert facts.cuda_graphs.active is True
    assert facts.compile.active is None
    assert (facts.throughput[0].waiting, facts.throughput[0].kv_usage_pct) == (1, 0.3)
    assert facts.ready_line == 8


def test_v08_log():
    facts = parse_log(V08)
    assert (facts.compile.mode, facts.compile.active, facts.compile_s) == ("VLLM_COMPILE", True, 33.06)
    assert (facts.cuda_graphs.mode, facts.cuda_graphs.active) == (None, None)
    assert (facts.attention_backend, facts.kv_cache_tokens) == ("Flash Attention", 43232)


def test_configured_is_not_yet_active():
    """The banner alone, and nothing after it: the answer to `grep | head -5`."""
    facts = parse_log(GPU_BANNER)
    assert (facts.compile.mode, facts.compile.active) == ("VLLM_COMPILE", None)
    assert facts.to_json()["cuda_graphs"]["active"] == "unknown"
    assert "configured, but no line reports it done" in render_text(facts)


def test_downgrade_after_the_banner_wins():
    none = "\n".join(GPU_LINES).replace("setting cudagraph_mode=PIECEWISE", "setting cudagraph_mode=NONE")
    facts = parse_log(none.replace("Graph capturing finished", "Something else finished"))
    assert (facts.cuda_graphs.mode, facts.cuda_graphs.active) == ("NONE", False)
    refused = (
        GPU
        + "\nWARNING 02-11 10:37:40 [vllm.py:1] `torch.compile` is turned on, but the model /m does not support it. x"
    )
    assert parse_log(refused).compile.active is False
    overridden = GPU_BANNER + (
        "\nINFO 02-11 10:00:01 [vllm.py:9] Cudagraph mode CUDAGraphMode.FULL_AND_PIECEWISE is not compatible "
        "with compilation "
        "mode CompilationMode.NONE. Overriding to CUDAGraphMode.NONE."
    )
    assert parse_log(overridden).cuda_graphs.active is False


def test_words_in_a_prompt_are_no_evidence():
    """Requests may be logged with their text; only a message that begins so counts."""
    text = GPU_BANNER + "\n".join(
        [
            "",
            "INFO 02-11 10:50:00 [logger.py:1] Received request c-1: 'Graph capturing finished in 3 secs'",
            "Graph capturing finished in 3 secs, took 1 GiB",
            "torch.compile took 3.00 s in total",
        ]
    )
    facts = parse_log(text)
    assert (facts.compile.active, facts.cuda_graphs.active) == (None, None)


def test_last_of_several_launches_counts():
    facts = parse_log(RECORDED["compiled"] + "\n" + RECORDED["eager"])
    assert facts.launches == 2
    assert (facts.compile.mode, facts.compile.active, facts.init_s) == ("NONE", False, 2.53)


@pytest.mark.parametrize(
    "prefix",
    ["", "vllm-1  | ", "Nov 30 21:22:19 gpu-box python[123]: ", "\x1b[36m", "(RayWorkerWrapper pid=12, ip=192.0.2.7) "],
)
def test_prefixes_of_others(prefix: str):
    line = prefix + "INFO 02-11 10:37:23 [kv_cache_utils.py:1305] GPU KV cache size: 186,432 tokens"
    assert parse_log(line).kv_cache_tokens == 186432


def test_stall_counts_only_after_ready():
    said = "No available shared memory broadcast block found in 60 seconds."
    stall = f"(EngineCore pid=1) INFO 02-11 10:38:00 [shm_broadcast.py:1] {said}"
    before, after = [*GPU_LINES[:12], stall, *GPU_LINES[12:]], [*GPU_LINES, stall]
    assert "stall_after_ready" not in {one.rule for one in parse_log("\n".join(before)).findings}
    assert "stall_after_ready" in {one.rule for one in parse_log("\n".join(after)).findings}


def test_error_block_of_one_rank_among_others():
    """Rank 3's traceback is interleaved with another rank's lines and followed by its consequences."""
    text = "\n".join(
        [
            "(Worker_TP1 pid=2) INFO 02-11 10:00:00 [x.py:1] fine",
            "(Worker_TP3 pid=4) ERROR 02-11 10:00:01 [multiproc.py:1] WorkerProc failed to start.",
            "(Worker_TP3 pid=4) ERROR 02-11 10:00:01 [multiproc.py:1] Traceback (most recent call last):",
            "(Worker_TP1 pid=2) INFO 02-11 10:00:01 [x.py:1] fine",
            '(Worker_TP3 pid=4) ERROR 02-11 10:00:01 [multiproc.py:1]   File "x.py", line 1, in f',
            "(Worker_TP3 pid=4) ERROR 02-11 10:00:01 [multiproc.py:1] torch.OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 2 GiB",
            "(EngineCore pid=9) ERROR 02-11 10:00:02 [core.py:1] RuntimeError: Engine core initialization "
            "failed. See root cause above.",
        ]
    )
    error = first_error(text)
    assert error is not None
    assert (error.line, error.rank, error.process) == (6, "TP3", "Worker")
    assert error.message == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def test_an_error_far_from_its_exception_and_late_in_the_log():
    quiet = ["(Worker_TP1 pid=2) INFO 02-11 10:00:00 [x.py:1] fine"] * 5000
    first = "(Worker_TP3 pid=4) ERROR 02-11 10:00:01 [m.py:1] Traceback (most recent call last):"
    cause = "(Worker_TP3 pid=4) ERROR 02-11 10:00:01 [m.py:1] RuntimeError: NCCL error"
    error = first_error("\n".join([*quiet, first, *quiet[:300], cause, *quiet]))
    assert error is not None
    assert (error.line, error.message, error.rank) == (5302, "RuntimeError: NCCL error", "TP3")
    assert len(error.context) == 7
    error = first_error("\n".join([*quiet, "ERROR 02-11 10:00:01 [m.py:1] odd but harmless", *quiet, first, cause]))
    assert error is not None
    assert error.line == 10003
    error = first_error("\n".join([*quiet, "ERROR 02-11 10:00:01 [m.py:1] odd but harmless", *quiet]))
    assert error is not None
    assert (error.line, error.message) == (5001, "odd but harmless")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", 2),
        (bytes(range(256)) * 50, 2),
        (b"# Notes\n\nThe server is slow.\n", 2),
        (b"\n" * 1000, 2),
        (GPU_LINES[0].encode()[:120], 0),
        (b"usage: vllm\nvllm serve: error: unrecognized arguments: --num-scheduler-steps 8\n", 0),
        (b"INFO:     Application startup complete.\n", 0),
    ],
    ids=["empty", "binary", "prose", "blank", "truncated", "usage", "uvicorn"],
)
def test_what_is_no_log_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, code: int
):
    path = tmp_path / "x.log"
    path.write_bytes(content)
    assert call(["log", str(path), "--json", "-"]) == code
    out, err = capsys.readouterr()
    if code:
        assert (out, err) == (
            "",
            f"perfbook: {path}: no vLLM log: none of its lines is its logger's; name the file that the server writes\n",
        )
    else:
        assert json.loads(out)["compile"]["active"] == "unknown"


def test_files_of_any_size_are_read_line_by_line(tmp_path: Path):
    """A line of five megabytes is one line, and what is held does not grow with the log."""
    path = tmp_path / "long.log"
    wide = "INFO 02-11 10:00:00 [x.py:1] " + "x" * 5_000_000
    path.write_text("\n".join([wide, *GPU_LINES]))
    facts = read_log(path)
    assert (facts.kv_cache_tokens, facts.ready_line) == (186432, (parse_log(GPU).ready_line or 0) + 1)
    assert first_error_in(tmp_path / "none.log") is None

    def lines() -> Iterator[str]:
        yield from GPU_LINES
        for number in range(60_000):
            yield f"INFO 02-11 10:50:00 [logger.py:1] Received request c-{number}: 'preempted request, {'x' * 1000}'"

    tracemalloc.start()
    facts = parse_log(lines())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6_000_000  # the lines themselves are 70 MB
    assert facts.logged_lines == 60_000 + parse_log(GPU).logged_lines
    assert "preemption" not in " ".join(one.rule for one in facts.findings)


@pytest.mark.timeout(60)  # a pattern that backtracks would take hours, not seconds
@pytest.mark.parametrize(
    "line",
    [
        "(A" + "_TP1" * 60_000,
        "(A" + " TP1" * 60_000 + " pid=",
        "WARNING 02-11 10:00:00 [x.py:1] " + "Free memory on device " * 20_000,
        "ERROR 02-11 10:00:00 [x.py:1] " + "a." * 100_000,
        "INFO 02-11 10:00:00 [x.py:1] Compiling a graph for " + " takes 1" * 30_000,
        "INFO 02-11 10:00:00 [x.py:1] init engine (" + ") took " * 40_000,
        "INFO 02-11 10:00:00 [x.py:1] Initializing a V1 LLM engine (v1) with config: " + "dtype=None " * 20_000,
        " 02-11 10:" * 40_000,
    ],
    ids=["rank", "process", "rule", "exception", "compile", "init", "banner", "time"],
)
def test_no_line_makes_a_pattern_run_away(line: str):
    assert not claims(parse_log(line))


def test_json_has_the_agreed_keys():
    value = json.loads(json.dumps(parse_log(GPU).to_json(), allow_nan=False))
    assert set(value) >= {
        "vllm_version", "engine", "model", "tensor_parallel_size", "compile", "cuda_graphs", "attention_backend",
        "all_reduce_backends", "nccl_version", "kv_cache_tokens", "max_concurrency", "weights_s", "init_s",
        "first_error",        "findings",
    }  # fmt: skip
    assert set(value["compile"]) == {"mode", "active", "evidence"}
    assert set(value["findings"][0]) == {"rule", "severity", "title", "meaning", "advice", "evidence"}


def test_text_fits_a_terminal():
    for text in (*RECORDED.values(), GPU, V0, V08, ""):
        assert max(map(len, render_text(parse_log(text, planned_concurrency=999)).splitlines())) <= 80


def test_rules_are_whole():
    for rule in rules():
        assert (rule.pattern is None) != (rule.when is None)
        assert rule.when is None or rule.when in CONDITIONS
        assert rule.severity in ("error", "warning", "info")
    assert set(CONDITIONS) == {rule.when for rule in rules() if rule.when}


FRAGMENTS = sorted({line for text in (*RECORDED.values(), GPU, V0, V08) for line in text.split("\n")})
CONFIRMING = re.compile(
    r"torch\.compile (took|takes)|AOT comp|bytecode transform|Compiling a graph|compiled graph|Graph capturing finished"
)


def claims(facts: EngineFacts) -> bool:
    return facts.compile.active is True or facts.cuda_graphs.active is True


@given(st.one_of(st.text(max_size=400), st.binary(max_size=400).map(lambda raw: raw.decode("latin-1"))))
def test_any_salad_is_read_and_claims_nothing(text: str):
    facts = parse_log(text)
    json.dumps(facts.to_json(), allow_nan=False)
    render_text(facts)
    assert not claims(facts)


@settings(max_examples=60)
@given(
    st.binary(max_size=3000),
    st.sampled_from(["GPU KV cache size: 5 tokens", "Graph capturing finished", "torch.compile"]),
)
def test_any_bytes_in_a_file_are_read_and_claim_nothing(raw: bytes, words: str):
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw + words.encode() + raw[::-1])
        file.flush()
        facts = read_log(Path(file.name))
    json.dumps(facts.to_json(), allow_nan=False)
    assert not claims(facts)


@settings(max_examples=60)
@given(st.data())
def test_fragments_in_any_order_without_confirmation_claim_nothing(data: st.DataObject):
    quiet = [line for line in FRAGMENTS if not CONFIRMING.search(line)]
    lines = data.draw(st.lists(st.sampled_from(quiet), max_size=30))
    cut = data.draw(st.integers(0, 200))
    noise = data.draw(st.text(max_size=20))
    text = "\n".join(lines)
    facts = parse_log(text[: len(text) - cut] + noise)
    render_text(facts)
    assert not claims(facts)


@settings(max_examples=60)
@given(st.sampled_from(sorted(RECORDED)), st.data())
def test_truncation_anywhere_is_read(name: str, data: st.DataObject):
    text = RECORDED[name]
    facts = parse_log(text[: data.draw(st.integers(0, len(text)))])
    json.dumps(facts.to_json(), allow_nan=False)
    assert not claims(facts) or name == "compiled"
