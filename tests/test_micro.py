"""Micro-benchmarks: pure parts against literals, and real processes on this machine's CPU."""

import os
import time
from pathlib import Path

import psutil
import pytest

from perfbook.errors import BadInput, MeasurementFailed
from perfbook.micro import (
    AllReduce,
    Bandwidth,
    DeviceBench,
    Gemm,
    GemmShape,
    Message,
    all_reduce,
    gemm_shapes,
    measure_device,
    read_bench,
    read_nccl_log,
)
from perfbook.micro.spawn import run_jobs

LLAMA = {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152,
}  # fmt: skip


def test_products_of_a_small_llama() -> None:
    assert gemm_shapes(LLAMA) == (
        GemmShape("qkv", 960, 576, 30),
        GemmShape("o", 576, 576, 30),
        GemmShape("gate_up", 3072, 576, 30),
        GemmShape("down", 576, 1536, 30),
        GemmShape("head", 49152, 576, 1),
    )


def test_products_are_split_over_ranks() -> None:
    assert [(s.n, s.k) for s in gemm_shapes(LLAMA, 3)] == [
        (320, 576), (576, 192), (1024, 576), (576, 512), (16384, 576)
    ]  # fmt: skip


@pytest.mark.parametrize("other", [{"kv_lora_rank": 512}, {"n_routed_experts": 64}, {"hidden_size": None}])
def test_no_shapes_are_better_than_wrong_ones(other: dict[str, object]) -> None:
    assert gemm_shapes({**LLAMA, **other}) == ()


def test_the_products_read_all_weights_of_the_model() -> None:
    """Together they are SmolLM2-135M's 134.5 million weights, less its 61 norms of 576."""
    assert sum(s.n * s.k * s.per_step for s in gemm_shapes(LLAMA)) == 134_515_008 - 61 * 576


def test_bus_bandwidth_by_hand() -> None:
    """nccl-tests: S/t · 2(n−1)/n; 1 MB in 100 µs over 4 ranks is 10 GB/s · 1.5."""
    assert Message(1_000_000, (90.0, 100.0, 140.0), 4).busbw_gb_s == pytest.approx(15.0)


def test_a_products_rate_by_hand() -> None:
    gemm = Gemm("down", 2, 1000, 500, 1, "k", (10.0, 20.0, 40.0))
    assert gemm.best_flop_s == pytest.approx(2 * 2 * 1000 * 500 / 10e-6)
    assert gemm.us.value == 20.0


NCCL_LOG = """\
box:41:52 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
box:41:52 [0] NCCL INFO NCCL_PROTO set by environment to LL
box:41:52 [0] NCCL INFO NCCL_MIN_NCHANNELS set by environment to 8.
box:41:52 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
box:41:52 [0] NCCL INFO Channel 01/0 : 0[0] -> 7[7] via SHM/direct/direct
box:41:52 [0] NCCL INFO AllReduce: 14336 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}
box:41:52 [0] NCCL INFO AllReduce: 458752 Bytes -> Algo TREE proto LL128 channel{Lo..Hi}={0..7}
"""


def test_what_nccl_says_it_used() -> None:
    log = read_nccl_log(NCCL_LOG)
    assert log.version == "2.27.5+cuda12.9"
    assert log.read == {"NCCL_PROTO": "LL", "NCCL_MIN_NCHANNELS": "8"}
    assert log.chosen == {14336: "RING LL", 458752: "TREE LL128"}
    assert log.transports == ("P2P/IPC", "SHM/direct/direct")
    assert log.took("NCCL_PROTO", "ll")
    assert not log.took("NCCL_P2P_LEVEL", "SYS")


def test_an_empty_log_says_nothing() -> None:
    log = read_nccl_log("")
    assert (log.version, log.read, log.chosen, log.transports) == (None, {}, {}, ())


def test_results_survive_json() -> None:
    bench = DeviceBench(
        "CPU, 2 threads",
        (Bandwidth("read", 1024, (10.0, 12.0, 11.0)),),
        (Gemm("o", 1, 4, 4, 30, "k", (1.0, 2.0, 3.0)),),
    )
    assert read_bench(bench.to_json()) == bench
    assert bench.kind("read") is not None
    assert bench.bandwidth[0].best_gb_s == 12.0
    assert bench.kind("triad") is None


@pytest.mark.parametrize(("sizes", "ranks"), [([1024], 1), ([1023], 2), ([], 2)])
def test_impossible_all_reduces_are_refused(sizes: list[int], ranks: int) -> None:
    with pytest.raises(BadInput, match="is impossible"):
        all_reduce(sizes, ranks, backend="gloo")


SLEEPER = """
import subprocess, sys, pathlib, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[2]).with_suffix(".pid").write_text(str(child.pid))
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_a_job_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = run_jobs("sleeper", [{}, {}], env=env, timeout_s=4.0, folder=tmp_path)
    assert (ended.outcome, ended.results) == ("hangs", ())
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    deadline = time.monotonic() + 10  # a killed process takes a moment to die
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def test_a_job_that_fails_says_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("import sys; print('starting'); sys.exit('no such interface')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = run_jobs("failing", [{}], env=env, timeout_s=30.0, folder=tmp_path)
    assert (ended.outcome, ended.detail) == ("fails", "no such interface")


def test_two_real_ranks_sum_right() -> None:
    got = all_reduce([1152, 65536], 2, backend="gloo", repeats=3, timeout_s=120)
    assert (got.outcome, got.detail) == ("ok", "")
    assert [message.message_bytes for message in got.messages] == [1152, 65536]
    assert all(len(message.repeats_us) == 3 for message in got.messages)
    assert got.latency_us(1152) is not None
    assert got.latency_us(4096) is None


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_this_machine(dtype: str, size: int) -> None:
    bench = measure_device([GemmShape("o", 64, 64, 30)], [1], dtype=dtype, repeats=3, timeout_s=120)
    assert [one.kind for one in bench.bandwidth] == ["read", "copy", "triad"]
    assert all(one.best_gb_s >= (one.gb_s.value or 0) > 0 for one in bench.bandwidth)
    assert [(one.name, one.m) for one in bench.gemms] == [("o", 1), ("o", 512)]
    assert {(one.element_bytes, dtype in one.kernel) for one in bench.gemms} == {(size, True)}


def test_a_device_that_does_not_answer_in_time() -> None:
    with pytest.raises(MeasurementFailed, match="hangs: not done after"):
        measure_device([], [1], timeout_s=0.01)


def test_a_broken_outcome_has_no_latencies() -> None:
    assert AllReduce("hangs", "nccl", 8, "not done after 60 s").latency_us(14336) is None
