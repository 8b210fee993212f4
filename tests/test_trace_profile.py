"""From a folder to a report: which files count, what a report says, comparisons, host-only traces, intervals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.errors import BadInput, PerfbookError
from perfbook.rehearsal.kineto import Kernel, StepLaw, decode_annotation, prefill_annotation, write_profile
from perfbook.trace import analyse, beside_unprofiled, diff, render_text
from perfbook.trace.compare import render_diff
from perfbook.trace.files import find_traces
from perfbook.trace.intervals import Union
from perfbook.trace.steps import read_name

GEMM, ALL_REDUCE = "nvjet_tst_64x16_64x16_4x1_v_bz_TNT", "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>"


def steps(all_reduce_ns: int = 50_000, count: int = 6) -> list[StepLaw]:
    kernels = (Kernel(GEMM, 100_000), Kernel(ALL_REDUCE, all_reduce_ns)) * 10
    return [StepLaw(decode_annotation(1), kernels, pause_ns=100_000)] * count


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("execute_context_0(0)_generation_32(32)", ("decode", 32, 32)),
        ("execute_context_1(888_788544)_generation_0(0)", ("prefill", 1, 888)),
        ("execute_context_3(700)_generation_5(5)", ("mixed", 8, 705)),
        ("execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489)", ("mixed", 46, 8192)),
        ("execute_new_0_cached_7", ("decode", 7, None)),
        ("execute_new_2_cached_0", ("prefill", 2, None)),
        ("step[DECODE bs=32]", ("decode", 32, None)),
        ("step[EXTEND bs=4 toks=4096]", ("prefill", 4, 4096)),
        ("execute_32", (None, 32, None)),
        ("gpu_model_runner: forward", None),
        ("execute_context_0(0)_generation_0(0)", (None, 0, 0)),
    ],
)
def test_what_annotations_say(name: str, says: tuple[str | None, int | None, int | None] | None) -> None:
    assert read_name(name) == says


def test_files_that_are_no_ranks_are_named(tmp_path: Path) -> None:
    write_profile(tmp_path, steps(), ranks=2)
    (tmp_path / "host_77.async_llm.1767189312000000000.pt.trace.json.gz").write_bytes(b"x")
    (tmp_path / "dp0_tp0_rank0.1767.pt.trace.json.gz.tmp").write_bytes(b"x")
    (tmp_path / "capture_traces").mkdir()
    (tmp_path / "capture_traces" / "graph_capture_rank_0.json.gz").write_bytes(b"x")
    (tmp_path / "notes.md").write_text("x")
    newest = next(tmp_path.glob("*rank1*"))
    older = tmp_path / newest.name.replace("1767189312000000000", "1767189311000000000")
    older.write_bytes(b"x")
    found = find_traces([tmp_path])
    assert len(found.files) == 2 and newest in found.files
    reasons = {path.name: why for path, why in found.passed_over}
    assert len(reasons) == 4 and "older profile" in reasons[older.name]
    assert find_traces([newest, tmp_path, newest]).files == (newest, next(one for one in found.files if one != newest))
    report = analyse([tmp_path])
    assert [r.rank for r in report.ranks] == [0, 1]
    assert sum("is not read" in w for w in report.warnings) == 4


def test_missing_ranks_and_single_ranks_are_said(tmp_path: Path) -> None:
    paths = write_profile(tmp_path, steps(), ranks=4)
    paths[2].unlink()
    report = analyse([tmp_path])
    assert "1 of 4 ranks are missing: 2" in report.warnings
    assert report.phases["decode"].collectives[0].skew_us == {0: 0.0, 1: 0.0, 3: 0.0}
    alone = analyse([paths[0]])
    assert any("cannot be split" in w for w in alone.warnings)
    assert alone.to_json()["phases"]["decode"]["collectives"] == [
        {"category": "all_reduce", "message_bytes": None, "calls_per_step": 10.0, "transfer_us": None, "skew_us": {}}
    ]


def test_ranks_in_processes_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile(tmp_path, steps(), ranks=2)
    here = analyse([tmp_path]).to_json()
    monkeypatch.setattr("perfbook.trace.pipeline._WORTH_PROCESSES_BYTES", 0)
    assert analyse([tmp_path]).to_json() == here
    broken = next(tmp_path.glob("*rank1*"))
    broken.write_bytes(b"hello")
    assert [r.rank for r in analyse([tmp_path]).ranks] == [0]
    with pytest.raises(PerfbookError, match="not a profiler trace"):
        analyse([*tmp_path.glob("*rank0*"), broken])


def test_the_json_schema(tmp_path: Path) -> None:
    both = [*steps(count=4), StepLaw(prefill_annotation(1, 99), steps()[0].kernels, False, 9_000), *steps(count=3)]
    write_profile(tmp_path, both, ranks=2)
    found = analyse([tmp_path]).to_json()
    assert set(found) == {"schema", "ranks", "phases"} and found["schema"] == 1
    assert all(set(r) == {"rank", "file", "events", "gpu_events", "warnings"} for r in found["ranks"])
    assert set(found["phases"]) == {"decode", "prefill", "all"}
    for phase in found["phases"].values():
        assert set(phase) == {
            "steps", "step_ms", "busy_share", "idle_share", "idle_reliable", "categories", "unclassified_share",
            "collectives",
        }  # fmt: skip
        assert set(phase["step_ms"]) == {"mean", "p50", "p99"}
        for part in phase["categories"]:
            assert set(part) == {"category", "ms_per_step", "share", "share_of_step", "calls_per_step"}
        for part in phase["collectives"]:
            assert set(part) == {"category", "message_bytes", "calls_per_step", "transfer_us", "skew_us"}
    decode = found["phases"]["decode"]
    assert decode["steps"] == 6 and decode["step_ms"]["mean"] == pytest.approx(1.6)
    reduce = next(c for c in decode["categories"] if c["category"] == "all_reduce")
    assert reduce["share"] == pytest.approx(1 / 3) and reduce["share_of_step"] == pytest.approx(0.5 / 1.6)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_nothing_to_read_is_bad_input(tmp_path: Path, path: str) -> None:
    with pytest.raises(BadInput) as caught:
        analyse([tmp_path / path])
    assert "\n" not in str(caught.value)


def test_an_empty_trace_is_a_report_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    report = analyse([tmp_path])
    assert report.phases == {} and "Nothing was recorded" in render_text(report)


def test_what_changed(tmp_path: Path) -> None:
    for name, ns in (("before", 50_000), ("after", 20_000)):
        (tmp_path / name).mkdir()
        write_profile(tmp_path / name, steps(ns))
    before, after = (analyse([tmp_path / n]) for n in ("before", "after"))
    change = diff(before, after)
    first = change.phases["decode"].categories[0]
    assert (first.name, first.before_calls, first.after_calls) == ("all_reduce", 10, 10)
    assert first.ms == pytest.approx(-0.3)
    assert change.phases["decode"].kernels[0].name == ALL_REDUCE
    assert max(map(len, render_diff(change).splitlines())) <= 80
    json.dumps(change.to_json(), allow_nan=False)
    assert all(c.ms == 0 for c in diff(before, before).phases["decode"].kernels)


def test_beside_the_unprofiled_truth(tmp_path: Path) -> None:
    write_profile(tmp_path, steps())
    report = analyse([tmp_path])
    gaps = beside_unprofiled(report, 1.55, 1)
    assert (gaps.placed, gaps.scale, round(gaps.ratio, 6)) == ("gaps", 1.0, round(1.6 / 1.55, 6))
    assert gaps.categories_ms == pytest.approx({"gemm": 1.0, "all_reduce": 0.5})
    kernels = beside_unprofiled(report, 1.2, 64)
    assert kernels.placed == "kernels" and kernels.scale == pytest.approx(0.8)
    assert sum(kernels.categories_ms.values()) == pytest.approx(1.2)
    assert "concurrency 64" in kernels.sentence and "assuming" in kernels.sentence
    assert beside_unprofiled(report, 2.0, 1).placed == "none"
    assert "repeat both" in beside_unprofiled(report, 20.0, 1).sentence
    with pytest.raises(BadInput):
        beside_unprofiled(report, float("nan"), 1)


def host_trace(path: Path) -> Path:
    """Steps of 10 ms on the host: linear(3 ms: addmm 2.5 ms), two all-reduces of 1 ms, the rest not traced."""

    def op(category: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}

    events = []
    shapes = {"Input Dims": [[1, 576], []], "Input type": ["c10::BFloat16", "Scalar"]}
    for step in range(5):
        at = 1000.0 + step * 10_000
        events += [
            op("user_annotation", decode_annotation(1), at, 9_000),
            op("cpu_op", "## Call CompiledFxGraph abc ##", at + 10, 8_000),
            op("cpu_op", "aten::linear", at + 100, 3_000),
            op("cpu_op", "aten::addmm", at + 200, 2_500),
            op("cpu_op", "vllm::all_reduce", at + 4_000, 1_100),
            op("cpu_op", "_C::shm_allreduce", at + 4_050, 1_000, **shapes),
            op("cpu_op", "_C::shm_allreduce", at + 6_000, 1_000, **shapes),
        ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_host_only_trace_is_broken_down_by_self_time(tmp_path: Path) -> None:
    report = analyse([host_trace(tmp_path / "rank0.1767189312000000000.pt.trace.json.gz")])
    assert report.ranks[0].device == "cpu"
    phase = report.phases["decode"]
    assert (phase.steps, phase.step_mean_ms) == (4, pytest.approx(10.0))
    parts = {p.category: (p.ms_per_step, p.calls_per_step) for p in phase.categories}
    assert parts == {"gemm": (pytest.approx(3.0), 1), "all_reduce": (pytest.approx(2.1), 2)}
    kernels = {p.name: p.ms_per_step for p in phase.kernels}
    assert kernels == pytest.approx(
        {"aten::addmm": 2.5, "aten::linear": 0.5, "_C::shm_allreduce": 2.0, "vllm::all_reduce": 0.1}
    )
    assert phase.busy_share == pytest.approx(0.51)
    assert not phase.idle_reliable


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), min_size=1, max_size=20)


@given(intervals, st.integers(0, 80), st.integers(0, 80), st.integers(1, 25))
def test_union_against_counting_instants(spans: list[tuple[int, int]], a: int, b: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("perfbook.trace.columns._BLOCK", block)
        check_union(sorted(spans), a, b)


def check_union(ordered: list[tuple[int, int]], a: int, b: int) -> None:
    start = np.array([s for s, _ in ordered], np.int64)
    end = start + np.array([d for _, d in ordered], np.int64)
    covered = {t for s, d in ordered for t in range(s, s + d)}
    both = Union(start, end - start)
    assert both.total_ns == len(covered) <= end.max() - start.min()
    low, high = min(a, b), max(a, b)
    within = both.before(np.array([low, high]))
    assert within[1] - within[0] == sum(low <= t < high for t in covered)
    gaps = {t for part in both.gaps() for s, e in zip(part.start_ns, part.end_ns, strict=True) for t in range(s, e)}
    assert gaps == set(range(start[0], end.max())) - covered
