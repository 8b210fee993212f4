"""Real traces of public test suites against numbers that were worked out independently."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from perfbook.trace import analyse, render_text
from perfbook.trace.intervals import Union
from perfbook.trace.kernels import COMMUNICATION
from perfbook.trace.read import read_trace
from perfbook.trace.report import TraceReport

SHARED = Path(os.environ.get("PERFBOOK_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "traces"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no folder of real traces at {SHARED}")

FILES = {
    "01": ("01_vllm_decode_fullgraph_mi300x_gptoss", 434, 10.718, None),
    "02": ("02_vllm_mixed_piecewise_mi300x_gptoss", 423, 156.086, None),
    "07": ("07_hf_qwen1.5-0.5b_h100", 1707, 45.647, None),
    "10": ("10_hta_nccl_args_a100_rank0of2", 3774, 165.186, 157.5),
    "12a": ("12a_hta_sampled_rank0of128", 1204, 607.844, 547.656),
    "12b": ("12b_hta_sampled_rank1of128", 1154, 667.530, 580.05),
}


def report(key: str) -> TraceReport:
    return analyse([SHARED / f"{FILES[key][0]}.json.gz"])


@pytest.mark.parametrize("key", FILES)
def test_events_and_times(key: str) -> None:
    name, events, sum_ms, busy_ms = FILES[key]
    trace = read_trace(SHARED / f"{name}.json.gz")
    assert len(trace.gpu) == events
    assert trace.warnings == ()
    assert int(trace.gpu.dur_ns.sum(dtype=np.int64)) / 1e6 == pytest.approx(sum_ms, rel=1e-4)
    if busy_ms is not None:
        assert Union(trace.gpu.start_ns, trace.gpu.dur_ns).total_ns / 1e6 == pytest.approx(busy_ms, rel=1e-4)


def test_a_graph_replay_belongs_to_its_step_though_it_runs_after_the_annotation() -> None:
    trace = read_trace(SHARED / f"{FILES['01'][0]}.json.gz")
    ids, counts = np.unique(trace.gpu.correlation, return_counts=True)
    assert counts.max() == 421
    phase = report("01").phases["decode"]
    assert (phase.steps, phase.requests) == (1, 32)
    assert phase.device_ms == pytest.approx(10.718, rel=1e-3)
    assert phase.step_mean_ms == pytest.approx(10.743, rel=1e-4)
    assert sum(part.calls_per_step for part in phase.categories) == 434
    assert phase.unclassified_share == 0
    assert len(ids) == 14


def test_a_mixed_step() -> None:
    phases = report("02").phases
    assert set(phases) == {"mixed", "all"}
    assert (phases["mixed"].requests, phases["mixed"].tokens) == (46, 8192)
    assert phases["mixed"].device_ms == pytest.approx(156.086, rel=1e-4)


def test_elementwise_and_copies_of_an_eager_model() -> None:
    phase = report("07").phases["all"]
    family = [p for p in phase.kernels if "elementwise_kernel" in p.name]
    assert sum(p.share for p in family) == pytest.approx(0.5437, abs=5e-4)
    copies = [p for p in family if p.category == "cast_copy"]
    assert sum(p.share for p in copies) == pytest.approx(0.1593, abs=5e-5)


def test_nccl_share_and_payloads() -> None:
    phase = report("10").phases["all"]
    assert sum(p.share for p in phase.categories if p.category in COMMUNICATION) == pytest.approx(0.2838, abs=5e-5)
    all_reduces = [c for c in phase.collectives if c.category == "all_reduce"]
    assert sorted(c.message_bytes or 0 for c in all_reduces) == [8196000, 9724160, 26255360, 26550272, 31502336]
    assert all(c.transfer_us is None and c.skew_us == {} for c in phase.collectives)


def test_two_ranks_split_into_transfer_and_skew() -> None:
    for key, share in (("12a", 0.6518), ("12b", 0.5678)):
        phase = report(key).phases["all"]
        assert next(p.share for p in phase.categories if p.category == "send_recv") == pytest.approx(share, abs=5e-5)
    both = analyse([SHARED / f"{FILES[k][0]}.json.gz" for k in ("12a", "12b")])
    assert [(r.rank, r.world_size) for r in both.ranks] == [(0, 128), (1, 128)]
    assert any("126 of 128 ranks are missing" in w for w in both.warnings)
    (exchange,) = both.phases["all"].collectives
    assert exchange.calls_per_step == 5
    assert exchange.transfer_us is not None and exchange.transfer_us < exchange.duration_us
    assert min(exchange.skew_us.values()) >= 0


@pytest.mark.parametrize("key", FILES)
def test_the_report_fits_a_terminal_and_json(key: str) -> None:
    found = report(key)
    assert max(map(len, render_text(found).splitlines())) <= 80
    text = json.dumps(found.to_json(), allow_nan=False)
    for phase in json.loads(text)["phases"].values():
        assert sum(c["share"] for c in phase["categories"]) == pytest.approx(1)
        assert phase["busy_share"] + phase["idle_share"] == pytest.approx(1)
