"""Profiles of the stand-in: vLLM's rules for start and stop, and traces that hold the law's shares, calls and skew."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from perfbook.rehearsal.ask import Refused
from perfbook.rehearsal.engine import Step
from perfbook.rehearsal.law import Law, load_law, make_law
from perfbook.rehearsal.profiler import Profiler
from perfbook.rehearsal.traces import nearest_regime, write_traces
from rehearsal_probe import standin

LAWS = Path(__file__).parents[1] / "params"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
MS = 1_000_000


def step(start_ms: float, length_ms: float, decoding: int = 1, prefill: int = 0) -> Step:
    start_ns = round(start_ms * MS)
    return Step(start_ns, start_ns + round(length_ms * MS), (), decoding, 100.0, prefill, int(prefill > 0), (), 0)


def small_law(skew_us: list[float]) -> Law:
    kernels = [{"name": ALL_REDUCE, "calls": 10, "share": 0.5}, {"name": "gemm", "calls": 40, "share": 0.3}]
    return make_law(
        {
            "step": {"decode_ms": [[1, 10.0]]},
            "model": {"tensor_parallel": 2, "hidden_size": 100},
            "profile": {"regimes": [{"batch": 1, "kernels": kernels}], "skew_us": skew_us},
        },
        "test",
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace by plain json, not by perfbook's reader."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def time_us(events: list[dict[str, Any]]) -> dict[str, float]:
    """Summed duration per kernel name."""
    times: dict[str, float] = defaultdict(float)
    for event in events:
        if event["cat"] == "kernel":
            times[event["name"]] += event["dur"]
    return times


def test_shares_and_calls_are_the_laws_as_means_over_ranks(tmp_path: Path) -> None:
    paths = write_traces(small_law([0.0, 40.0]), tmp_path / "new", "", [step(0, 20), step(20, 20)])
    ranks = [time_us(read(path)) for path in paths]
    assert sum(rank[ALL_REDUCE] for rank in ranks) / 2 == pytest.approx(2 * 10_000, rel=1e-4)
    assert sum(rank["gemm"] for rank in ranks) / 2 == pytest.approx(2 * 6_000, rel=1e-4)
    # rank 0 is first at each of the 20 all-reduces and waits 40 us longer, rank 1 spends them in its other kernels
    assert ranks[0][ALL_REDUCE] - ranks[1][ALL_REDUCE] == pytest.approx(20 * 40, rel=1e-3)
    assert ranks[1]["gemm"] - ranks[0]["gemm"] == pytest.approx(20 * 40, rel=1e-3)
    for path in paths:
        events = read(path)
        assert sum(event["name"] == ALL_REDUCE for event in events) == 20
        starts = [event["ts"] for event in events if event["cat"] == "user_annotation"]
        assert starts[1] - starts[0] == pytest.approx(20_000, rel=1e-3)


def test_steps_are_annotated_as_vllm_does_and_only_decode_is_a_graph(tmp_path: Path) -> None:
    path = write_traces(small_law([]), tmp_path, "", [step(0, 30, 3, 200), step(30, 20, 4), step(50, 9, 0, 64)])[0]
    events = read(path)
    assert [event["name"] for event in events if event["cat"] == "user_annotation"] == [
        "execute_context_1(200)_generation_3(3)",
        "execute_context_0(0)_generation_4(4)",
        "execute_context_1(64)_generation_0(0)",
    ]
    assert sum(event["name"] == "cudaGraphLaunch" for event in events) == 1
    sizes = [event["args"].get("In msg nelems") for event in events if event["name"] == ALL_REDUCE]
    assert sizes == [203 * 100] * 10 + [None] * 10 + [64 * 100] * 10


def test_files_are_named_as_vllm_names_them(tmp_path: Path) -> None:
    names = [path.name for path in write_traces(small_law([]), tmp_path, "knee", [step(0, 20)])]
    for rank, name in enumerate(names):
        front, stamp, *rest = name.split(".")
        assert front == f"knee_dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}"
        assert stamp.isdecimal()
        assert rest == ["pt", "trace", "json", "gz"]


def test_int4_profile_is_the_campaigns(tmp_path: Path) -> None:
    int4 = load_law(LAWS / "kimi-k2.5-int4.yaml")
    paths = write_traces(int4, tmp_path, "", [step(0, 21.69)])
    assert len(paths) == 8
    ranks = [read(path) for path in paths]
    kernel = int4.profile.regimes[0].kernels[0].name
    for events in ranks:
        assert sum(event["name"] == kernel for event in events) == 122
    mean_ms = sum(time_us(events)[kernel] for events in ranks) / 8 / 1e3
    assert mean_ms == pytest.approx(11.17, abs=0.01)
    quickest = min(time_us(events)[kernel] for events in ranks) / 122
    slowest = max(time_us(events)[kernel] for events in ranks) / 122
    assert slowest - quickest == pytest.approx(15.0, abs=0.01)


def test_the_nearest_regime_in_ratio_applies() -> None:
    int4 = load_law(LAWS / "kimi-k2.5-int4.yaml")
    assert [nearest_regime(int4, tokens).batch for tokens in (1, 8, 11, 12, 256)] == [1, 1, 1, 128, 128]


def test_a_session_records_whole_steps_up_to_its_limit() -> None:
    profiler = Profiler(Path("unused"), iterations=2)
    assert not profiler.recording
    profiler.start(5 * MS, "", None)
    for start_ms in (0, 10, 20, 30):
        profiler.record(step(start_ms, 10))
    assert not profiler.recording
    with pytest.raises(Refused, match="already active"):
        profiler.start(50 * MS, "", None)
    assert [each.start_ns for each in profiler.stop()[1]] == [10 * MS, 20 * MS]
    assert profiler.stop() == ("", [])


def test_profile_of_a_running_server(tmp_path: Path) -> None:
    law = {
        "model": {"max_model_len": 1024, "tensor_parallel": 2},
        "step": {"decode_ms": [[1, 5.0]], "prefill_floor_ms": 5.0},
        "limits": {"kv_cache_tokens": 4096},
        "profile": {"overhead_ms": 3.0},
    }
    folder = tmp_path / "traces"
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder), "max_iterations": 4})
    ask = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
    with standin(tmp_path, law, "--profiler-config", config) as server:
        server.json("POST", "/v1/completions", ask)
        assert server.call("POST", "/start_profile")[0] == 200
        assert server.call("POST", "/start_profile")[0] == 409
        server.json("POST", "/v1/completions", ask)
        assert server.call("POST", "/start_profile")[0] == 409
        assert server.call("POST", "/stop_profile")[0] == 200
        assert server.call("POST", "/stop_profile")[0] == 200
        times = [round((end - start) / MS) for start, end, *_ in server.json("GET", "/rehearsal")["steps"]]
        assert times == [5] * 10 + [8] * 4 + [5] * 6
        files = sorted(path.name.split(".")[0] for path in folder.iterdir())
        assert files == [f"dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}" for rank in range(2)]
        names = [event["name"] for event in read(next(folder.iterdir())) if event["cat"] == "user_annotation"]
        assert names == ["execute_context_1(1)_generation_0(0)", *["execute_context_0(0)_generation_1(1)"] * 3]
        assert server.call("POST", "/start_profile", {"profile_prefix": "again", "max_iterations": 1})[0] == 200
        server.json("POST", "/v1/completions", ask)
        assert server.call("POST", "/stop_profile")[0] == 200
        assert len([path for path in folder.iterdir() if path.name.startswith("again_")]) == 2
