"""perfbook's own log parser reads the stand-in's start-up log, alive and dead, as that of a real server."""

from __future__ import annotations

from pathlib import Path

from perfbook.rehearsal import startlog
from perfbook.rehearsal.launch import Launch, read_command_line, vllm_options
from perfbook.server.log import parse_log

LAWS = Path(__file__).parents[1] / "params"


def launched(law: str, *options: str) -> Launch:
    return read_command_line(["--law", str(LAWS / f"{law}.yaml"), "--served-model-name", "kimi", *options], {})


def text(launch: Launch) -> str:
    lines = [*startlog.startup(launch), *startlog.ready(77)]
    return "\n".join(line.rendered(77) for line in lines)


def test_int4_start_is_read_in_full() -> None:
    facts = parse_log(text(launched("kimi-k2.5-int4")))
    assert (facts.vllm_version, facts.engine) == ("0.32.0", "V1")
    assert (facts.tensor_parallel_size, facts.max_model_len, facts.dtype) == (8, 131072, "bfloat16")
    assert (facts.compile.mode, facts.compile.active) == ("VLLM_COMPILE", True)
    assert (facts.cuda_graphs.mode, facts.cuda_graphs.active) == ("FULL_AND_PIECEWISE", True)
    assert (facts.attention_backend, facts.moe_backend) == ("TRITON_MLA", "MARLIN")
    assert (facts.all_reduce_backends, facts.nccl_version) == (("PYNCCL",), "2.28.9")
    assert (facts.kv_cache_tokens, facts.kv_cache_gib, facts.max_concurrency) == (213904, 14.0, 1.63)
    assert (facts.weights_s, facts.compile_s, facts.graph_capture_s) == (2160.0, 46.2, 24.0)
    assert facts.ready_line is not None
    assert facts.first_error is None
    assert [finding.rule for finding in facts.findings] == ["custom_all_reduce_pcie"]


def test_eager_is_read_as_off() -> None:
    facts = parse_log(text(launched("kimi-k2.5-int4", "--enforce-eager")))
    assert facts.enforce_eager is True
    assert facts.compile.active is False
    assert facts.cuda_graphs.active is False


def test_a_context_that_does_not_fit_is_the_first_error() -> None:
    launch = launched("kimi-k2.5-nvfp4", "--max-model-len", "262144")
    error = startlog.start_error(launch)
    assert error is not None
    before = [line for line in startlog.startup(launch) if line.at < startlog.FAILS_AT]
    facts = parse_log("\n".join(line.rendered(77) for line in [*before, *startlog.failure(error)]))
    assert facts.first_error is not None
    assert "max seq len (262144)" in facts.first_error.message
    assert facts.ready_line is None


def test_the_fp8_cache_kills_nvfp4_only_when_asked_for() -> None:
    dead = startlog.start_error(launched("kimi-k2.5-nvfp4", "--kv-cache-dtype", "fp8"))
    assert dead is not None
    assert "kv_cache_quant_algo" in dead
    assert startlog.start_error(launched("kimi-k2.5-nvfp4", "--kv-cache-dtype", "auto")) is None


def test_traffic_line_is_read() -> None:
    [row] = parse_log(startlog.traffic(120.5, 1536.25, 128, 3, 0.5, 0.125).rendered(77)).throughput
    assert (row.prompt_tok_s, row.generation_tok_s, row.running, row.waiting) == (120.5, 1536.2, 128, 3)
    assert (row.kv_usage_pct, row.prefix_hit_pct) == (50.0, 12.5)


def test_a_rehearsal_says_so_in_its_first_line() -> None:
    assert text(launched("glm-5-nvfp4")).startswith("perfbook rehearsal: a stand-in")


def test_vllm_options_are_read_as_vllm_reads_them() -> None:
    words = ["org/model", "--max_num_seqs", "8", "--a=b", "--flag", "--json", '{"x": 1}', "--seed", "-1", "-cc.mode=3"]
    model, options = vllm_options(words)
    assert model == "org/model"
    assert options == {"max-num-seqs": 8, "a": "b", "flag": True, "json": {"x": 1}, "seed": -1, "cc.mode": 3}
