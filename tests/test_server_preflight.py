"""What would fail, before it does: options, variables, checkpoints (pure), and whole checks without an engine."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from perfbook.errors import BadInput
from perfbook.params import Variant, make_variant
from perfbook.record.devices import Gpu
from perfbook.server import catalog, launch, ports, preflight
from perfbook.server.catalog import Answer, Option
from perfbook.server.checkpoint import Checkpoint, check_checkpoint, read_checkpoint
from perfbook.server.engine import _parse_problem
from perfbook.server.flags import check_flags, groups, retired
from perfbook.server.problems import Problem
from perfbook.server.surroundings import check_devices
from perfbook.server.variables import check_conf_files, check_variables, nccl_variables


def option(*flags: str, nargs: int | str | None = None, dest: str | None = None, deprecated: bool = False) -> Option:
    return Option(flags, dest or flags[0].lstrip("-").replace("-", "_"), nargs, None, deprecated)


ANSWER = Answer(
    version="0.32.0",
    options=(
        option("--max-model-len"),
        option("--max-num-seqs"),
        option("--max-num-batched-tokens"),
        option("--tensor-parallel-size", "-tp"),
        option("--enforce-eager", "--no-enforce-eager", nargs=0),
        option("--headless", nargs=0),
        option("--enable-log-requests", "--no-enable-log-requests", nargs=0),
        option("--cudagraph-capture-sizes", nargs="+"),
        option("--compilation-config"),
        option("--log-config-file", deprecated=True),
    ),
    variables=("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"),
    refused_variables={"VLLM_CPU_KVCACHE_SPACE": "invalid literal for int() with base 10: 'two'"},
)


def flags(**args: Any) -> list[tuple[str, str, str]]:
    found = check_flags({key.replace("__", "-"): value for key, value in args.items()}, ANSWER)
    return [(one.level, one.what, one.do) for one in found]


def test_good_options_pass():
    assert (
        flags(
            max__model__len=2048, enforce__eager=False, headless=True, max_num_seqs=8, compilation__config={"mode": 3}
        )
        == []
    )
    assert check_flags({"compilation-config.mode": 3, "O": 2}, ANSWER) == []


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("num-scheduler-steps", "remove it; V1 overlaps"),
        ("disable-log-requests", "remove it, or set enable-log-requests: false"),
        ("swap-space", "remove it; preempted"),
        ("cuda-graph-sizes", "cudagraph-capture-sizes"),
        ("max-seq-len-to-capture", "remove it"),
        ("use-v2-block-manager", "remove it"),
        ("preemption-mode", "remove it"),
        ("enable-reasoning", "remove it and keep reasoning-parser"),
        ("guided-decoding-backend", "structured-outputs-config"),
        ("speculative-model", "speculative-config"),
        ("rope-scaling", "hf-overrides"),
        ("calculate-kv-scales", "remove it"),
        ("task", "runner"),
        ("disable-cascade-attn", "remove it"),
    ],
)
def test_retired_options_are_named_with_their_fate(name: str, instead: str):
    [problem] = check_flags({name: 8}, ANSWER)
    assert (problem.level, problem.what, problem.where) == ("error", f"--{name} was retired", f"server.args.{name}")
    assert problem.do.startswith(f"use: {instead}")
    [with_underscores] = check_flags({name.replace("-", "_"): 8}, ANSWER)
    assert with_underscores.what == f"--{name} was retired"


def test_retired_settings_inside_of_json_however_they_are_given():
    for args in (
        {"compilation-config": {"level": 3}},
        {"compilation-config": '{"level": 3}'},
        {"compilation-config.level": 3},
    ):
        [problem] = check_flags(args, ANSWER)
        assert problem.what == "compilation-config 'level' was retired"
        assert problem.do == "use: compilation-config: {mode: 3}"


def test_every_retired_entry_says_fate_replacement_and_source():
    tables = retired()
    entries = [
        *tables["flags"].values(),
        *tables["variables"].values(),
        *tables["settings"]["compilation-config"].values(),
    ]
    assert all(
        {"fate", "instead", "source"} <= set(entry) <= {"fate", "instead", "source", "gone"} for entry in entries
    )


def test_misspelt_abbreviated_doubled_and_swallowed():
    assert flags(enforce__egaer=True) == [
        ("error", "--enforce-egaer does not exist in vLLM 0.32.0", "did you mean enforce-eager?")
    ]
    assert flags(max__model=5) == [("error", "--max-model is an abbreviation", "write max-model-len")]
    assert flags(max__model__len=5, max_model_len=6) == [
        ("error", "max-model-len and max_model_len are the same option", "keep one of them")
    ]
    assert flags(max__model__len=5, max_model_len=5)[0][0] == "warning"
    assert flags(enforce__eager=1) == [("error", "--enforce-eager takes no value", "set it to true, or leave it out")]
    assert flags(headless=False) == [("error", "--headless has no --no- form", "leave the key out")]
    [unknown] = check_flags({"banana-split": 3}, ANSWER)
    assert "its value would be taken for the model's name" in unknown.why
    [deprecated] = check_flags({"log-config-file": "x"}, ANSWER)
    assert (deprecated.level, deprecated.do) == ("warning", "use: the variable VLLM_LOGGING_CONFIG_PATH")


def test_an_option_that_a_later_version_drops_is_warned_of_while_it_is_there():
    there = Answer(version="0.32.0", options=(option("--disable-cascade-attn", nargs=0),))
    [problem] = check_flags({"disable-cascade-attn": True}, there)
    assert (problem.level, problem.what) == ("warning", "--disable-cascade-attn is deprecated")
    assert (problem.why, problem.do) == ("still there in vLLM 0.32.0, removed in 0.33", "use: remove it")


@pytest.mark.parametrize(
    ("message", "where", "why"),
    [
        ("argument --seed: invalid int value: 'x'", "server.args.seed", "invalid int value: 'x'"),
        (
            "argument --compilation-config/-cc: 1 validation error for CompilationConfig\nlevel\n"
            "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=3, input_type=int]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/unexpected_keyword_argument",
            "server.args.compilation-config",
            "level: Unexpected keyword argument",
        ),
        ("the following arguments are required: x", "server.args", "the following arguments are required: x"),
    ],
)
def test_the_parsers_words_become_one_line(message: str, where: str, why: str):
    problem = _parse_problem(message)
    assert (problem.where, problem.why) == (where, why)
    assert "\n" not in str(problem)


def test_groups_keep_options_and_their_values_together():
    assert groups({"seed": 1, "gone": None, "sizes": [1, 2], "conf": {"x": 1}, "O": 2}) == [
        ["--seed", "1"],
        ["--sizes", "1", "2"],
        ["--conf", '{"x":1}'],
        ["-O", "2"],
    ]


def variables(**values: str) -> list[tuple[str, str]]:
    return [(one.level, one.what) for one in check_variables(values, ANSWER, "server.env")]


def test_vllm_variables():
    assert variables(VLLM_LOGGING_LEVEL="INFO", OTHER="x") == []
    assert variables(VLLM_LOGING_LEVEL="INFO") == [("warning", "VLLM_LOGING_LEVEL is unknown to vLLM 0.32.0")]
    assert variables(VLLM_CPU_KVCACHE_SPACE="two") == [
        ("error", "VLLM_CPU_KVCACHE_SPACE has a value that vLLM refuses")
    ]
    for name in ("VLLM_TORCH_PROFILER_DIR", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1"):
        assert variables(**{name: "1"}) == [("error", f"{name} was retired")]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NCCL_P2P_LEVEL", "SYS", []),
        ("NCCL_P2P_LEVEL", "sys", []),
        ("NCCL_P2P_LEVEL", "SYSS", [("error", "did you mean SYS?")]),
        ("NCCL_MAX_NCHANNELS", "8", []),
        ("NCCL_MAX_NCHANNELS", "banana", [("error", "give a number")]),
        ("NCCL_BUFFSIZE", "4M", []),
        ("NCCL_PROTO", "LL,Simple", []),
        ("NCCL_PROTO", "^LL128", []),
        ("NCCL_PROTO", "LL129", [("error", "did you mean LL128?")]),
        ("NCCL_PROTO", "LL128", [("warning", "check the result of every collective before believing its speed")]),
        ("NCCL_ALGO", "Ring", []),
        ("NCCL_ALGO", "Ring,Tree", []),
        ("NCCL_ALGO", "^Tree", []),
        ("NCCL_ALGO", "Tree", [("error", "name the collective: NCCL_ALGO='allreduce:Tree'")]),
        ("NCCL_ALGO", "allreduce:tree", []),
        ("NCCL_ALGO", "ring,tree;allreduce:tree", []),
        ("NCCL_ALGO", "Tre,Ring", [("error", "did you mean Tree?")]),
        ("NCCL_MAX_CHANNELS", "4", [("warning", "did you mean NCCL_MAX_NCHANNELS?")]),
    ],
)
def test_nccl_variables(name: str, value: str, expected: list[tuple[str, str]]):
    assert [(one.level, one.do) for one in check_variables({name: value}, ANSWER, "server.env")] == expected


def test_nccl_table_is_whole():
    for name, entry in nccl_variables().items():
        assert name.startswith("NCCL_")
        assert entry["kind"] in ("choice", "list", "integer", "text")
        assert ("values" in entry) == (entry["kind"] in ("choice", "list"))


def test_nccl_conf_files_are_seen():
    found = check_conf_files(
        {Path("/etc/nccl.conf"): "# ours\nNCCL_P2P_LEVEL=PHBB\n", Path("/home/x/.nccl.conf"): "# nothing\n"}
    )
    assert [(one.level, one.where) for one in found] == [("warning", "/etc/nccl.conf"), ("error", "/etc/nccl.conf")]
    assert "NCCL_P2P_LEVEL=PHBB" in found[0].why


# --- checkpoints ------------------------------------------------------------------------------------------------------

LLAMA = {"num_attention_heads": 9, "max_position_embeddings": 8192}
CARD = Gpu(0, "RTX PRO 6000", 96 * 2**30, 0, (12, 0), ())
OLD_CARD = Gpu(0, "A100", 80 * 2**30, 0, (8, 0), ())


def in_use(*gpus: Gpu, **args: Any) -> list[tuple[str, str, str]]:
    return [(one.level, one.what, one.why) for one in check_devices(gpus, args) if one.level != "skipped"]


def test_gpus_that_others_hold():
    full = Gpu(3, "RTX PRO 6000", 96 * 2**30, 90 * 2**30, (12, 0), (4711, 4712))
    some = Gpu(0, "RTX PRO 6000", 96 * 2**30, 2 * 2**30, (12, 0), (4711,))
    ghost = Gpu(1, "RTX PRO 6000", 96 * 2**30, 60 * 2**30, (12, 0), ())
    assert in_use(CARD) == []
    assert in_use(full) == [("error", "GPU 3 is in use", "pid 4711, pid 4712; 6.0 of 96.0 GiB are free")]
    assert in_use(some) == [("warning", "GPU 0 is in use", "pid 4711; 94.0 of 96.0 GiB are free")]
    assert in_use(ghost)[0][2] == "a process that the driver does not name; 36.0 of 96.0 GiB are free"
    assert in_use(ghost, **{"gpu-memory-utilization": 0.3}) == []


def model(config: dict[str, Any], *, size: int = 10**9, quantisation: dict[str, Any] | None = None) -> Checkpoint:
    return Checkpoint(Path("/nowhere"), config, config, quantisation or {}, size)


def found(
    checkpoint: Checkpoint, gpus: list[Gpu], available: int = 64 * 2**30, flags: str = "avx2 avx512f", **args: Any
) -> list[tuple[str, str]]:
    dashed = {key.replace("_", "-"): value for key, value in args.items()}
    return [(one.level, one.what) for one in check_checkpoint(checkpoint, dashed, gpus, available, flags.split())]


def test_parallelism_and_context():
    assert found(model(LLAMA), [], tensor_parallel_size=3, max_model_len=8192) == []
    assert found(model(LLAMA), [], tensor_parallel_size=2) == [
        ("error", "tensor-parallel-size 2 does not divide the model's 9 attention heads")
    ]
    assert found(model(LLAMA), [], max_model_len=8193) == [
        ("error", "max-model-len 8193 exceeds the model's 8192 positions")
    ]
    assert found(model({**LLAMA, "rope_scaling": {"factor": 4}}), [], max_model_len=9000) == []
    assert found(model(LLAMA), [CARD], tensor_parallel_size=3) == [("error", "3 GPUs are asked for, 1 are visible")]


def test_checkpoint_that_asks_for_an_fp8_cache():
    """Both places where the campaign's NVFP4 checkpoint asked for one."""
    asks = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    scheme = {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert found(model(LLAMA, quantisation=asks), [CARD]) == [
        ("warning", "the checkpoint asks for a quantised KV cache")
    ]
    assert found(model(scheme), [CARD])[0][0] == "warning"
    assert found(model(scheme), [OLD_CARD])[0][0] == "error"
    assert found(model(scheme), [OLD_CARD], kv_cache_dtype="bfloat16") == []


def test_size_against_memory():
    assert found(model(LLAMA, size=100 * 2**30), []) == [("error", "the weights (100.0 GiB) exceed the free memory")]
    assert found(model({}, size=547 * 10**9), [CARD] * 8, tensor_parallel_size=8) == []
    assert found(model({}, size=547 * 10**9), [CARD] * 4, tensor_parallel_size=4) == [
        ("error", "127.4 GiB of weights per GPU do not fit")
    ]


def test_products_that_the_cpu_lacks():
    """Seen with vLLM 0.32 on a CPU with AVX2: "Failed to create oneDNN linear, fallback to torch linear"."""
    slow = [("warning", "this CPU multiplies bfloat16 slowly")]
    assert found(model(LLAMA), [], flags="sse2 avx2") == slow
    assert found(model({**LLAMA, "torch_dtype": "float32"}), [], flags="sse2 avx2") == slow  # vLLM halves it
    assert found(model(LLAMA), [], flags="sse2 avx2", dtype="half") == [
        ("warning", "this CPU multiplies float16 slowly")
    ]
    assert found(model(LLAMA), [], flags="sse2 avx2", dtype="float32") == []
    assert found(model(LLAMA), [CARD], flags="sse2 avx2") == []
    assert found(model(LLAMA), [], flags="asimd bf16") == []


def test_reading_a_folder(tmp_path: Path):
    assert "holds no config.json" in str(read_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in str(read_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_attention_heads": 64}}))
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (tmp_path / "1.safetensors").write_bytes(b"x" * 10)
    read = read_checkpoint(tmp_path)
    assert isinstance(read, Checkpoint)
    assert (read.config["num_attention_heads"], read.weights_bytes) == (64, 10)
    assert found(read, []) == [("error", "1 of 2 weight files are missing")]


# --- whole checks, without an engine ----------------------------------------------------------------------------------


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "installed", lambda: None)


def make(**server: Any) -> Variant:
    return make_variant({"variant": "v", "server": {"model": "org/model", "port": 0, **server}}, "test")


def levels(problems: list[Problem], level: str) -> list[str]:
    return [one.what for one in problems if one.level == level]


@pytest.mark.usefixtures("no_engine")
def test_what_cannot_be_checked_here_is_skipped_and_not_failed():
    problems = preflight.require(make())
    assert levels(problems, "skipped") == ["org/model is not on this disk", "engine arguments and VLLM_ variables"]


@pytest.mark.usefixtures("no_engine")
def test_missing_model_folder_and_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        problems = preflight.check(make(model="/no/such/folder", port=port))
    assert levels(problems, "error") == ["the model is not there", f"port {port} is taken"]
    text = preflight.render_text(problems)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1].startswith("2 errors,")
    with pytest.raises(BadInput, match=r"^server\.model: the model is not there; .*no folder /no/such/folder"):
        preflight.require(make(model="/no/such/folder"))


@pytest.mark.usefixtures("no_engine")
def test_missing_prompts_are_found_before_the_load():
    attached = make_variant(
        {
            "variant": "v",
            "server": {"base_url": "http://127.0.0.1:9"},
            "workload": {"dataset": "/none/prompts.jsonl"},
        },
        "test",
    )
    found = [one for one in preflight.check(attached) if one.where == "workload.dataset"]
    assert [(one.level, one.why) for one in found] == [
        ("error", "prompt file /none/prompts.jsonl cannot be read: No such file or directory")
    ]


@pytest.mark.usefixtures("no_engine")
def test_things_that_are_allowed_are_pointed_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    problems = preflight.check(
        make(
            args={"trust-remote-code": True},
            env={"LD_PRELOAD": "/no/lib.so"},
            host="0.0.0.0",
            commands={"stop": ["no-such-program-x", "vllm"]},
        )
    )
    assert levels(problems, "warning") == [
        "0.0.0.0 can be reached from other machines",
        "the checkpoint's own Python code will run",
        "/no/lib.so does not exist",
        "'no-such-program-x' is not a program here",
    ]
    assert levels(preflight.check(make(api_key_env="NO_SUCH_KEY")), "error") == ["the variable NO_SUCH_KEY is not set"]


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("port", [0, 1])
@pytest.mark.parametrize(
    ("host", "errors", "warnings"),
    [
        ("127.0.0.1", [], []),
        ("127.0.0.7", [], []),
        ("localhost", [], []),
        ("::1", [], []),
        ("0.0.0.0", [], ["0.0.0.0 can be reached from other machines"]),
        ("::", [], [":: can be reached from other machines"]),
        ("", [], ["every network can be reached from other machines"]),
        ("nope.invalid", ["'nope.invalid' is no address"], []),
        ("[::1]", ["'[::1]' is no address"], []),
        ("a" * 64 + ".example", [f"'{'a' * 64}.example' is no address"], []),
        ("127.0.0.1:8000", ["'127.0.0.1:8000' is no address"], []),
        ("http://127.0.0.1", ["'http://127.0.0.1' is no address"], []),
        ("192.0.2.1", ["192.0.2.1 cannot be bound"], ["192.0.2.1 can be reached from other machines"]),
    ],
)
def test_address_to_bind(monkeypatch: pytest.MonkeyPatch, host: str, port: int, errors: list[str], warnings: list[str]):
    monkeypatch.setattr(ports, "is_free", lambda host, port, free=ports.is_free: free(host, 0))  # 1 is for root only
    problems = preflight.check(make(host=host, port=port))
    assert levels(problems, "error") == errors
    assert levels(problems, "warning") == warnings


def test_a_free_port_is_none_that_a_connection_could_take_before_the_server_does():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {ports.free_port("127.0.0.1") for _ in range(20)}
    assert all(not low <= port <= high and ports.is_free("127.0.0.1", port) for port in found)
    assert len(found) > 10  # two that start at once do not choose the same
    with pytest.raises(OSError, match="Cannot assign requested address"):
        ports.free_port("192.0.2.1")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("key", ["port", "host", "model", "served_model_name"])
def test_options_that_have_their_own_key(key: str):
    with pytest.raises(BadInput, match="an option has its own key"):
        preflight.require(make(args={key: 1}))


@pytest.mark.usefixtures("no_engine")
def test_setting_to_try_is_checked_too():
    assert levels(preflight.check(make(), extra_env={"NCCL_P2P_LEVEL": "PHBB"}), "error") == [
        "NCCL_P2P_LEVEL=PHBB is not a value of it"
    ]


def test_attached_server_that_is_not_there():
    variant = make_variant({"variant": "v", "server": {"base_url": "http://127.0.0.1:1"}}, "test")
    problems = preflight.check(variant)
    assert levels(problems, "error") == ["the server cannot be used"]
    for url, why in (
        ("http://nope.invalid:8000", "http://nope.invalid:8000/v1/models: nobody knows a host of this name"),
        (
            f"http://{'a' * 64}.example",
            f"http://{'a' * 64}.example/v1/models: the request cannot be sent; is the address right, "
            "and the key plain text?",
        ),
        ("http://[::1]:1", "http://[::1]:1/v1/models: connection refused"),
    ):
        unreachable = make_variant({"variant": "v", "server": {"base_url": url}}, "test")
        assert [one.why for one in preflight.check(unreachable) if one.level == "error"] == [why]
    assert "arguments, environment, devices and memory of the server" in levels(problems, "skipped")


def test_torchs_profiler_options_go_with_torchs_profiler_alone(tmp_path: Path) -> None:
    """vLLM refuses ``torch_profiler_dir`` beside ``profiler: cuda``; without a word torch's is armed."""
    assert launch._profiler({"profiler": "cuda"}, tmp_path) == {"profiler": "cuda"}
    assert launch._profiler(None, tmp_path)["torch_profiler_dir"] == str(tmp_path)
    assert launch._profiler({"profiler": "torch", "torch_profiler_with_stack": True}, tmp_path) == {
        "profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": True,
        "ignore_frontend": True,
    }  # fmt: skip
