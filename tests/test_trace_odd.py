"""Traces that other writers, other engines and accidents produce, each with its literal truth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from perfbook import cli
from perfbook.errors import BadInput
from perfbook.trace import analyse
from perfbook.trace.files import find_traces
from perfbook.trace.report import TraceReport

Event = dict[str, Any]
GEMM, REDUCE = "nvjet_tst_64x16_64x16_4x1_v_bz_TNT", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
DECODE = "execute_context_0(0)_generation_4(4)"


def kernel(ts: float, dur: float, name: str = GEMM, stream: int = 7, correlation: int = 0, **args: object) -> Event:
    args = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def host(category: str, name: str, ts: float, dur: float, **args: object) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur, "args": args}


def steps(
    count: int = 5, base: float = 1000.0, annotation: str = DECODE, reduce_us: float = 200.0, launch: str = "cuda"
) -> list[Event]:
    """Steps of 1 ms: a GEMM of 0.4 ms, an all-reduce of 0.2 ms, launched one by one."""
    events: list[Event] = []
    for i in range(count):
        at = base + 1000 * i
        events += [
            host("user_annotation", annotation, at, 300.0),
            host("cuda_runtime", f"{launch}LaunchKernel", at + 10, 2.0, correlation=2 * i + 1),
            kernel(at + 20, 400.0, GEMM, 7, 2 * i + 1),
            host("cuda_runtime", f"{launch}LaunchKernel", at + 30, 2.0, correlation=2 * i + 2),
            kernel(at + 450, reduce_us, REDUCE, 7, 2 * i + 2),
        ]
    return events


def text(events: object, **beside: object) -> str:
    return json.dumps({"schemaVersion": 1, **beside, "traceEvents": events})


def written(tmp_path: Path, data: bytes | str, name: str = "rank0.json") -> Path:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def is_the_law(report: TraceReport, phase: str = "decode", counted: int = 4) -> None:
    found = report.phases[phase]
    assert found.steps == counted
    assert found.step_mean_ms == pytest.approx(1.0)
    parts = {p.category: (p.ms_per_step, p.calls_per_step) for p in found.categories}
    assert parts == {"gemm": (pytest.approx(0.4), 1), "all_reduce": (pytest.approx(0.2), 1)}


def in_quotes(event: Event) -> Event:
    quoted = {key: str(value) for key, value in event["args"].items()}
    return event | {"ts": str(event["ts"]), "dur": str(event["dur"]), "args": quoted}


def test_numbers_in_quotes(tmp_path: Path) -> None:
    report = analyse([written(tmp_path, text([in_quotes(e) for e in steps()]))])
    is_the_law(report)
    assert report.ranks[0].warnings == ()
    floats = [e | {"args": {k: float(v) for k, v in e["args"].items()}} for e in steps()]
    is_the_law(analyse([written(tmp_path, text(floats))]))
    far = [in_quotes(e) | {"ts": f"{1796093873779498 + round(e['ts'])}.125"} for e in steps()]
    is_the_law(analyse([written(tmp_path, text(far))]))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_text_that_a_shell_has_encoded_anew(tmp_path: Path, encoding: str) -> None:
    data = text(steps()).encode(encoding)
    is_the_law(analyse([written(tmp_path, data)]))
    is_the_law(analyse([written(tmp_path, gzip.compress(data), "rank0.json.gz")]))


@pytest.mark.parametrize("base", [0.0, 5236847421341.312, 1682725898236567.0, -50_000.0])
def test_wherever_time_begins(tmp_path: Path, base: float) -> None:
    is_the_law(analyse([written(tmp_path, text(steps(base=base)))]))


def test_times_that_no_clock_has_are_said(tmp_path: Path) -> None:
    report = analyse([written(tmp_path, text(steps(base=1.7e18)))])
    assert report.phases == {}
    assert "25 events have no usable start or duration" in report.ranks[0].warnings[0]


def test_windows_line_ends_and_deep_indents(tmp_path: Path) -> None:
    data = json.dumps({"traceEvents": steps(), "distributedInfo": {"rank": 3, "world_size": 4}}, indent=9)
    report = analyse([written(tmp_path, data.replace("\n", "\r\n"))])
    is_the_law(report)
    assert report.ranks[0].rank == 3


@pytest.mark.parametrize(
    ("annotation", "phase"),
    [
        ("step[DECODE bs=32]", "decode"),
        ("step[EXTEND bs=4 toks=4096]", "prefill"),
        ("step[TARGET_VERIFY bs=2]", "decode"),
        ("execute_context_0(sq4sk99sqsq4sqsk99)_generation_4(sq4sk99)", "decode"),
        ("execute_new_0_cached_4", "decode"),
    ],
)
def test_annotations_of_other_engines(tmp_path: Path, annotation: str, phase: str) -> None:
    is_the_law(analyse([written(tmp_path, text(steps(annotation=annotation)))]), phase)


@pytest.mark.parametrize("annotation", ["ProfilerStep#7", "execute_32", "my own loop"])
def test_a_phase_that_is_not_said_is_not_guessed(tmp_path: Path, annotation: str) -> None:
    report = analyse([written(tmp_path, text(steps(annotation=annotation)))])
    assert set(report.phases) == {"all"}
    is_the_law(report, "all", 5)


def test_rocm_names_calls_and_copies(tmp_path: Path) -> None:
    events = steps(launch="hipExtModule")
    events += [kernel(1700.0 + 1000 * i, 10.0, "__amd_rocclr_copyBuffer", 0, 2 * i + 1) for i in range(5)]
    found = analyse([written(tmp_path, text(events))]).phases["decode"]
    parts = {p.category: (p.ms_per_step, p.calls_per_step) for p in found.categories}
    copy = (pytest.approx(0.01), 1)
    assert parts == {"gemm": (pytest.approx(0.4), 1), "all_reduce": (pytest.approx(0.2), 1), "memcpy": copy}


def test_the_generic_kernel_is_what_its_arguments_say(tmp_path: Path) -> None:
    generic = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    said = {"Collective name": "allreduce", "In msg nelems": 4096, "dtype": "BFloat16"}
    events = [e | {"name": generic, "args": e["args"] | said} if e["name"] == REDUCE else e for e in steps()]
    report = analyse([written(tmp_path, text(events))])
    is_the_law(report)
    assert report.phases["decode"].collectives[0].message_bytes == 8192
    assert not any("serves any collective" in w for w in report.ranks[0].warnings)
    silent = analyse([written(tmp_path, text([e | {"name": generic} if e["name"] == REDUCE else e for e in steps()]))])
    assert {p.category for p in silent.phases["decode"].categories} == {"gemm", "send_recv"}
    assert any("its kind is not said" in w for w in silent.ranks[0].warnings)


def test_one_launch_replays_a_graph_on_two_streams_after_its_annotation(tmp_path: Path) -> None:
    events: list[Event] = []
    for i in range(6):
        at = 1000.0 + 1000 * i
        launch = host("cuda_runtime", "cudaGraphLaunch", at + 10, 5.0, correlation=i + 1)
        events += [host("user_annotation", DECODE, at, 50.0), launch]
        events += [kernel(at + 100 + 100 * j, 100.0, GEMM, 7, i + 1) for j in range(4)]
        events.append(kernel(at + 300, 300.0, REDUCE, 20, i + 1))
    decode = analyse([written(tmp_path, text(events))]).phases["decode"]
    assert decode.steps == 5
    assert {p.category: p.ms_per_step for p in decode.categories} == pytest.approx({"gemm": 0.4, "all_reduce": 0.3})
    assert decode.busy_ms == pytest.approx(0.5)
    assert decode.busy_share == pytest.approx(0.5) and decode.idle_reliable
    assert (decode.hidden_communication_ms, decode.exposed_communication_ms) == pytest.approx((0.2, 0.1))
    assert decode.idle.host_ms == pytest.approx(0.5)


@pytest.mark.parametrize(("inner", "counted"), [(100.0, 4), (950.0, 9)])
def test_an_annotation_inside_another_is_no_step_but_one_that_reaches_beyond_it_is(
    tmp_path: Path, inner: float, counted: int
) -> None:
    """The host prepares the next step while one is open: both count. A draft model's range inside one does not."""
    events = [e | {"dur": 900.0} if e["cat"] == "user_annotation" else e for e in steps()]
    events += [host("user_annotation", DECODE, 1440.0 + 1000 * i, inner) for i in range(5)]
    # the second half's launch moves behind the second annotation
    events = [
        e | {"ts": e["ts"] + 415} if e["args"].get("correlation", 1) % 2 == 0 and e["pid"] == 9 else e for e in events
    ]
    phase = analyse([written(tmp_path, text(events))]).phases["decode"]
    assert phase.steps == counted
    assert phase.device_ms * phase.steps == pytest.approx(4 * 0.6 + (0.2 if counted == 9 else 0))


def test_durations_below_zero_and_events_twice_in_one_place(tmp_path: Path) -> None:
    bad = [kernel(3000.0, -5.0, GEMM, 7, 1), kernel(3000.0, float("nan"), GEMM, 7, 1)]
    report = analyse([written(tmp_path, text([*steps(), *bad]))])
    is_the_law(report)
    assert any("2 events have no usable start or duration" in w for w in report.ranks[0].warnings)


def test_a_rank_whose_clock_is_off_still_splits(tmp_path: Path) -> None:
    for rank, (off_us, reduce_us) in enumerate([(0.0, 200.0), (9e9, 150.0)]):
        about = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": 10**18 + rank * 7 * 10**9}
        written(tmp_path, text(steps(base=1000 + off_us, reduce_us=reduce_us), **about), f"worker{rank}.json")
    (reduce,) = analyse([tmp_path]).phases["decode"].collectives
    assert reduce.transfer_us == pytest.approx(150)
    assert reduce.skew_us == pytest.approx({0: 50, 1: 0})
    assert reduce.slowest_rank == 1


def test_ranks_that_do_not_correspond_are_not_split(tmp_path: Path) -> None:
    for rank in range(2):
        about = {"distributedInfo": {"rank": rank, "world_size": 2}, "baseTimeNanoseconds": 10**18 + rank * 10**12}
        written(tmp_path, text(steps(5 + rank), **about), f"worker{rank}.json")
    report = analyse([tmp_path])
    assert report.phases["decode"].collectives[0].transfer_us is None
    assert any("do not correspond in decode steps" in w for w in report.warnings)


@pytest.mark.parametrize(
    ("coordinates", "splits"), [("dp0_pp0_tp{}", True), ("dp{}_pp0_tp0", False), ("dp0_pp{}_tp0", False)]
)
def test_engines_and_pipeline_stages_do_not_call_collectives_together(
    tmp_path: Path, coordinates: str, splits: bool
) -> None:
    for rank in range(2):
        name = f"{coordinates.format(rank)}_dcp0_ep0_rank{rank}.1796093873779498046.pt.trace.json"
        written(tmp_path, text(steps(reduce_us=200.0 + rank)), name)
    report = analyse([tmp_path])
    assert (report.phases["decode"].collectives[0].transfer_us is not None) == splits
    assert any("do not correspond" in w for w in report.warnings) != splits


def test_a_trace_beside_its_compressed_self_is_one_rank(tmp_path: Path) -> None:
    data = text(steps(), distributedInfo={"rank": 0, "world_size": 1})
    written(tmp_path, data)
    written(tmp_path, gzip.compress(data.encode()), "rank0.json.gz")
    report = analyse([tmp_path])
    assert len(report.ranks) == 1
    assert any("is not read: the same trace as rank0.json" in w for w in report.warnings)


def test_work_that_belongs_to_no_step_is_said(tmp_path: Path) -> None:
    lost = [e for e in steps() if e["cat"] != "cuda_runtime" or e["args"]["correlation"] % 2]
    report = analyse([written(tmp_path, text(lost))])
    assert {p.category for p in report.phases["decode"].categories} == {"gemm"}
    assert any("33 % of the device time belongs to no step" in w for w in report.ranks[0].warnings)
    assert not any("no step" in w for w in analyse([written(tmp_path, text(steps()))]).ranks[0].warnings)


@pytest.mark.parametrize("other", ["empty", "host"])
def test_a_rank_without_device_events_is_no_part_of_the_means(tmp_path: Path, other: str) -> None:
    host_only = [e for e in steps() if e["cat"] != "kernel"] + [host("cpu_op", "aten::mm", 1500.0, 100.0)]
    for rank, events in enumerate([steps(), host_only if other == "host" else [], steps(reduce_us=200.0)]):
        written(tmp_path, text(events, distributedInfo={"rank": str(rank), "world_size": "3"}), f"worker{rank}.json")
    report = analyse([tmp_path])
    is_the_law(report)
    assert [(r.rank, r.world_size) for r in report.ranks] == [(0, 3), (1, 3), (2, 3)]
    assert report.phases["decode"].collectives[0].skew_us == {0: 0.0, 2: 0.0}
    assert "nothing is recorded on the device of rank 1: not part of any mean" in report.warnings
    assert not any("cannot be split" in w for w in report.warnings)


def test_several_devices_in_one_file_are_said(tmp_path: Path) -> None:
    other = [e | {"args": e["args"] | {"device": 1}} for e in steps() if e["cat"] == "kernel"]
    report = analyse([written(tmp_path, text([*steps(), *other]))])
    assert any("work of 2 devices in one file" in w for w in report.ranks[0].warnings)


def test_a_folder_of_two_profiles_is_the_newer_one(tmp_path: Path) -> None:
    for prefix, stamp, reduce_us in (("c1", 1796093873779498046, 200.0), ("c8", 1796093973779498046, 300.0)):
        for rank in range(2):
            about = {"distributedInfo": {"rank": rank, "world_size": 2}}
            name = f"{prefix}_dp0_pp0_tp{rank}_dcp0_ep0_rank{rank}.{stamp + rank}.pt.trace.json"
            written(tmp_path, text(steps(reduce_us=reduce_us), **about), name)
    found = find_traces([tmp_path])
    assert [p.name[:2] for p in found.files] == ["c8", "c8"]
    assert len(found.passed_over) == 2 and "of an older profile" in found.passed_over[0][1]
    report = analyse([tmp_path])
    assert [r.rank for r in report.ranks] == [0, 1]
    assert report.phases["decode"].collectives[0].transfer_us == pytest.approx(300)
    is_the_law(analyse(sorted(tmp_path.glob("c1_*"))))


def test_a_pattern_may_catch_the_table_that_the_profiler_writes_beside_the_traces(tmp_path: Path) -> None:
    trace, table = written(tmp_path, text(steps())), written(tmp_path, "Self CPU %", "rank0.profiler_out.txt")
    report = analyse([trace, table])
    is_the_law(report)
    assert "rank0.profiler_out.txt is not read: the profiler's own table" in report.warnings
    with pytest.raises(BadInput, match="not a profiler trace"):
        analyse([table])


def test_profiles_in_folders_beside_each_other_are_not_mixed_but_engines_and_nodes_are_kept(tmp_path: Path) -> None:
    def named(rank: str, stamp: int = 1796093873779498046) -> str:
        return f"{rank}.{stamp}.pt.trace.json"

    for folder, names in {
        "old": [named("rank0", 1796093773779498046)],
        "node0": [named("rank0"), named("rank1")],
        "node1": [named("rank2"), named("rank3")],
        "engines": [named("dp0_pp0_tp0_dcp0_ep0_rank0"), named("dp1_pp0_tp0_dcp0_ep0_rank0")],
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            written(tmp_path / folder, text(steps()), name)
    found = find_traces([tmp_path])
    assert [file.parent.name for file in found.files] == ["engines", "engines", "node0", "node0", "node1", "node1"]
    assert [file.parent.name for file, _ in found.passed_over] == ["old"]


def test_decode_and_prefill_of_a_rank_in_files_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        about = {"distributedInfo": {"rank": rank, "world_size": 2}}
        for stage, name in (("DECODE", "step[DECODE bs=4]"), ("EXTEND", "step[EXTEND bs=4 toks=64]")):
            data = text(steps(annotation=name, reduce_us=200.0 + 10 * rank), **about)
            written(tmp_path, data, f"1796093873.5-TP-{rank}-{stage}.trace.json")
    report = analyse([tmp_path])
    assert [r.rank for r in report.ranks] == [0, 0, 1, 1]
    for phase in ("decode", "prefill"):
        assert report.phases[phase].steps == 4
        assert report.phases[phase].collectives[0].transfer_us == pytest.approx(200)
        assert report.phases[phase].collectives[0].skew_us == pytest.approx({0: 0, 1: 10})


def test_what_else_lies_in_a_folder_is_named_and_passed_over(tmp_path: Path) -> None:
    written(tmp_path, text(steps()))
    written(tmp_path, '{"model_type": "llama"}', "config.json")
    written(tmp_path, '[{"graph": 1}]', "execution_details.json")
    written(tmp_path, b"", "rank1.json")
    report = analyse([tmp_path])
    is_the_law(report)
    said = [w for w in report.warnings if "is not read" in w]
    assert [w.split()[0] for w in said] == ["config.json", "execution_details.json", "rank1.json"]
    assert "the profiler wrote nothing" in said[2]
    with pytest.raises(BadInput, match="a list without trace events"):
        analyse([tmp_path / "execution_details.json"])
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(BadInput, match=r"config\.json is not a profiler trace"):
        analyse([tmp_path])


@pytest.mark.parametrize(
    "data",
    [text([]), text([host("user_annotation", DECODE, 1.0, 2.0)]), text(steps(base=1.7e18)), text(steps())[:60]],
)
def test_the_command_line_fails_where_nothing_could_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str
) -> None:
    path = written(tmp_path, data)
    assert cli.call(["trace", str(path), "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["phases"] == {}
    assert "no work is recorded" in captured.err and captured.err.count("\n") == 1


def test_the_command_line_measures_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = gzip.compress(text(steps(40)).encode())
    path = written(tmp_path, packed[: len(packed) // 2], "rank0.json.gz")
    assert cli.call(["trace", str(path), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("ends early" in w for w in found["ranks"][0]["warnings"])
    assert found["phases"]["decode"]["step_ms"]["p50"] == pytest.approx(1.0)
