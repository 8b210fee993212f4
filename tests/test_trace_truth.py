"""Laws drawn at random, written as a profiler writes them, must come back exactly."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfbook.rehearsal.kineto import (
    MAIN_STREAM,
    Kernel,
    Placed,
    StepLaw,
    decode_annotation,
    place,
    prefill_annotation,
    write_profile,
)
from perfbook.trace import analyse
from perfbook.trace.kernels import CATEGORIES, COMMUNICATION
from perfbook.trace.report import TraceReport

ALL_REDUCE = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NAMES = {
    ALL_REDUCE: "all_reduce",
    ALL_GATHER: "all_gather",
    "nvjet_tst_64x16_64x16_4x1_v_bz_TNT": "gemm",
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>": "norm",
    "Memcpy DtoD (Device -> Device)": "memcpy",
    "a_kernel_that_nobody_knows": "other",
}
SIDE_STREAM = 20
RANKS = 3


@st.composite
def laws(draw: st.DrawFn) -> list[StepLaw]:
    """Steps of one decode shape and one prefill shape in any order; times to the nanosecond."""
    rng = random.Random(draw(st.integers(0, 2**32)))

    def shape(size: int) -> tuple[Kernel, ...]:
        kernels = []
        for i in range(size):
            name = rng.choice([n for n in NAMES if i or n != ALL_GATHER])
            on_side = name == ALL_GATHER or (i > 0 and name != ALL_REDUCE and rng.random() < 0.25)
            kernels.append(
                Kernel(
                    name,
                    rng.randint(1_100, 90_000),
                    gap_ns=rng.choice([0, 0, rng.randint(1, 9_000)]),
                    stream=SIDE_STREAM if on_side else MAIN_STREAM,
                    message_bytes=rng.choice([2048, 65536]) if NAMES[name] in COMMUNICATION else None,
                )
            )
        return tuple(kernels)

    def with_waits(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        late = []
        for k in kernels:
            waits = [rng.randint(0, 5_000) for _ in range(RANKS)]
            waits[rng.randrange(RANKS)] = 0
            comm = NAMES[k.name] in COMMUNICATION
            late.append(Kernel(k.name, k.dur_ns, k.gap_ns, k.stream, k.message_bytes, tuple(waits) if comm else ()))
        return tuple(late)

    decode, prefill = shape(draw(st.integers(3, 25))), shape(draw(st.integers(3, 25)))
    steps = []
    for i in range(draw(st.integers(4, 9))):
        graph = draw(st.booleans())
        is_prefill = i == 2 or (i > 3 and rng.random() < 0.3)
        name = prefill_annotation(2, 300) if is_prefill else decode_annotation(16)
        kernels = with_waits(prefill if is_prefill else decode)
        steps.append(StepLaw(name, kernels, graph, pause_ns=rng.randint(5_000, 60_000)))
    return steps


def written(steps: Sequence[StepLaw], ranks: int = RANKS, **how: bool | int) -> TraceReport:
    with tempfile.TemporaryDirectory() as folder:
        write_profile(Path(folder), steps, ranks=ranks, **how)  # type: ignore[arg-type]
        return analyse([Path(folder)])


def covered_ns(intervals: Iterable[tuple[int, int]], low: int, high: int) -> int:
    """Time covered between two instants, by the book: sort, merge, add."""
    total, reach = 0, low
    for start, end in sorted(intervals):
        start, end = max(start, reach), min(end, high)
        total += max(0, end - start)
        reach = max(reach, end)
    return total


class Truth:
    """What a law amounts to for one phase, worked out without the code under test."""

    def __init__(self, steps: Sequence[StepLaw], word: str, ranks: int = RANKS) -> None:
        self.chosen = [i for i, s in enumerate(steps) if i > 0 and word in s.annotation]
        n = len(self.chosen)
        self.ms: dict[str, float] = {}
        self.calls: dict[str, float] = {}
        walls, busy, hidden, exposed = [], [], [], []
        per_rank: list[list[list[Placed]]] = []
        for rank in range(ranks):
            placed = place(steps, rank)
            spans = [(p.start_ns, p.start_ns + p.dur_ns) for p in placed]
            comm = [s for s, p in zip(spans, placed, strict=True) if NAMES[p.kernel.name] in COMMUNICATION]
            rest = [s for s, p in zip(spans, placed, strict=True) if NAMES[p.kernel.name] not in COMMUNICATION]
            firsts = [next(p.start_ns for p in placed if p.step == i) for i in range(len(steps))]
            for p in placed:
                if p.step in self.chosen:
                    category = NAMES[p.kernel.name]
                    self.ms[category] = self.ms.get(category, 0) + p.dur_ns / n / ranks / 1e6
                    self.calls[category] = self.calls.get(category, 0) + 1 / n / ranks
            closed = [i for i in self.chosen if i < len(steps) - 1]
            windows = [(firsts[i], firsts[i + 1]) for i in closed]
            if windows:
                walls += [b - a for a, b in windows]
                busy.append(sum(covered_ns(spans, *w) for w in windows) / len(windows))
                communicating = sum(covered_ns(comm, *w) for w in windows) / len(windows)
                alone = busy[-1] - sum(covered_ns(rest, *w) for w in windows) / len(windows)
                exposed.append(alone)
                hidden.append(communicating - alone)
            per_rank.append([[p for p in placed if p.step == i] for i in self.chosen])
        self.walls_ms = [w / 1e6 for w in walls]
        self.busy_ms = sum(busy) / len(busy) / 1e6 if busy else 0.0
        self.hidden_ms = sum(hidden) / len(hidden) / 1e6 if hidden else 0.0
        self.exposed_ms = sum(exposed) / len(exposed) / 1e6 if exposed else 0.0
        self.per_rank = per_rank


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(laws(), st.booleans(), st.booleans())
def test_the_breakdown_recovers_the_law(steps: list[StepLaw], pretty: bool, metadata_last: bool) -> None:
    report = written(steps, pretty=pretty, metadata_last=metadata_last, host_events=1)
    for phase_name, word in (("decode", "context_0"), ("prefill", "generation_0")):
        truth = Truth(steps, word)
        if not truth.chosen:
            continue
        phase = report.phases[phase_name]
        assert phase.steps == len(truth.chosen)
        assert {p.category: p.ms_per_step for p in phase.categories} == pytest.approx(truth.ms, rel=1e-9)
        assert {p.category: p.calls_per_step for p in phase.categories} == pytest.approx(truth.calls, rel=1e-9)
        assert sum(p.share for p in phase.categories) == pytest.approx(1)
        assert phase.unclassified_share == pytest.approx(truth.ms.get("other", 0) / sum(truth.ms.values()))
        assert all(r.launch_share == 1 for r in report.ranks)
        if truth.walls_ms:
            assert phase.step_mean_ms == pytest.approx(sum(truth.walls_ms) / len(truth.walls_ms), rel=1e-9)
            assert phase.busy_ms == pytest.approx(truth.busy_ms, rel=1e-9)
            assert phase.busy_share == pytest.approx(truth.busy_ms / phase.step_mean_ms, rel=1e-6)
            assert phase.hidden_communication_ms == pytest.approx(truth.hidden_ms, abs=1e-9)
            assert phase.exposed_communication_ms == pytest.approx(truth.exposed_ms, abs=1e-9)
            idle = phase.idle
            waits = idle.host_ms + idle.launch_ms + idle.device_ms + idle.unknown_ms
            assert waits == pytest.approx(phase.step_mean_ms - phase.busy_ms, abs=1e-9)
            assert idle.unknown_ms == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(laws())
def test_transfer_and_skew_come_apart(steps: list[StepLaw]) -> None:
    report = written(steps)
    truth = Truth(steps, "context_0")
    if not truth.chosen:
        return
    sizes = {s.graph for i, s in enumerate(steps) if i in truth.chosen}
    for collective in report.phases["decode"].collectives:
        calls = [
            k
            for i in truth.chosen
            for k in steps[i].kernels
            if NAMES[k.name] == collective.category
            and (None if steps[i].graph else k.message_bytes) == collective.message_bytes
        ]
        assert calls and collective.calls_per_step == pytest.approx(len(calls) / len(truth.chosen))
        assert collective.transfer_us == pytest.approx(sum(k.dur_ns for k in calls) / len(calls) / 1e3, rel=1e-9)
        waits = {r: sum(k.wait_ns[r] for k in calls) / len(calls) / 1e3 for r in range(RANKS)}
        assert collective.skew_us == pytest.approx(waits, abs=1e-9)
        assert collective.slowest_rank == min(waits, key=lambda r: (round(waits[r], 9), r))
    assert sizes <= {True, False}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(laws(), st.integers(1, 4), st.integers(0, 2**32))
def test_damaged_durations_drawn_at_random_are_left_out_and_said(steps: list[StepLaw], wanted: int, seed: int) -> None:
    rng = random.Random(seed)
    whole = [replace(s, kernels=tuple(replace(k, wait_ns=()) for k in s.kernels)) for s in steps * 3]
    broken = [list(s.kernels) for s in whole]
    places = [
        (i, j) for i, s in enumerate(whole[:-6]) for j, k in enumerate(s.kernels) if k.stream == MAIN_STREAM and i > 0
    ]
    for i, j in rng.sample(places, min(wanted, len(places))):
        broken[i][j] = replace(broken[i][j], recorded_ns=rng.randint(10**10, 10**12))
    damaged = [replace(s, kernels=tuple(k)) for s, k in zip(whole, broken, strict=True)]
    clean, report = written(whole, ranks=1), written(damaged, ranks=1)
    count = sum(k.recorded_ns is not None for s in damaged for k in s.kernels)
    assert any(w.startswith(f"{count} of ") and "is not counted" in w for w in report.ranks[0].warnings)
    for name, phase in clean.phases.items():
        found = report.phases[name]
        assert found.steps == phase.steps
        assert (found.step_mean_ms, found.step_p99_ms) == pytest.approx((phase.step_mean_ms, phase.step_p99_ms))
        calls = {p.category: p.calls_per_step for p in phase.categories}
        assert {p.category: p.calls_per_step for p in found.categories} == calls
        lost_ms = 0.0
        for i, s in enumerate(damaged):
            step = report.ranks[0].steps[i]
            if name in ("all", step.phase) and (name == "all" or not step.set_aside):
                lost_ms += sum(k.dur_ns for k in s.kernels if k.recorded_ns is not None) / 1e6
        assert found.device_ms * found.steps == pytest.approx(phase.device_ms * phase.steps - lost_ms, rel=1e-9)


def simple(steps: int = 8, graph: bool = True, **change: int) -> list[StepLaw]:
    """A decode step of a GEMM, an all-reduce and a norm."""
    kernels = (
        Kernel("nvjet_tst_64x16_64x16_4x1_v_bz_TNT", 40_000),
        Kernel(ALL_REDUCE, 30_000, gap_ns=1_000, message_bytes=16384, wait_ns=(0,) * RANKS),
        Kernel("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", 10_000),
    )
    return [StepLaw(decode_annotation(4), kernels * 20, graph, pause_ns=change.get("pause_ns", 20_000))] * steps


def test_idle_is_placed_where_the_device_waited() -> None:
    in_graph = written(simple(graph=True), ranks=1).phases["decode"].idle
    assert (in_graph.host_ms, in_graph.device_ms) == pytest.approx((0.020, 0.020), abs=1e-9)
    assert (in_graph.launch_ms, in_graph.unknown_ms) == (0, 0)
    slow_launch = Kernel("nvjet_tst_64x16_64x16_4x1_v_bz_TNT", 40_000, gap_ns=7_000)
    eager = [StepLaw(decode_annotation(4), (slow_launch,) * 5, graph=False, pause_ns=20_000)] * 5
    waiting = written(eager, ranks=1).phases["decode"].idle
    assert waiting.launch_ms == pytest.approx(4 * 0.007, abs=1e-9)
    assert waiting.host_ms == pytest.approx(0.027, abs=1e-9)
    assert (waiting.device_ms, waiting.unknown_ms) == (0, 0)


def test_a_copy_that_runs_ahead_does_not_start_its_step(tmp_path: Path) -> None:
    (path,) = write_profile(tmp_path, simple())
    trace = json.loads(gzip.decompress(path.read_bytes()))
    before = analyse([path]).phases["decode"].step_mean_ms
    launches = [e for e in trace["traceEvents"] if e["cat"] == "cuda_runtime"]
    for launch in launches[2:]:
        ahead = {**launch["args"], "stream": 9, "device": 0}
        copy = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": launch["ts"] - 900.0, "dur": 1.0}
        trace["traceEvents"].append({**launch, **copy, "args": ahead})
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    phase = analyse([path]).phases["decode"]
    assert phase.step_mean_ms == pytest.approx(before, rel=1e-9)
    assert next(p.calls_per_step for p in phase.categories if p.category == "memcpy") == pytest.approx(6 / 7)


def test_a_damaged_duration_is_not_time() -> None:
    steps = simple()
    broken = list(steps[4].kernels)
    broken[5] = Kernel(broken[5].name, broken[5].dur_ns, recorded_ns=9_000_000_000)
    report = written([*steps[:4], StepLaw(steps[4].annotation, tuple(broken), True, 20_000), *steps[5:]], ranks=1)
    phase = report.phases["decode"]
    norm = next(p for p in phase.categories if p.category == "norm")
    assert norm.ms_per_step == pytest.approx((20 * 7 - 1) * 0.010 / 7, rel=1e-9)
    assert norm.calls_per_step == 20
    assert any("1 of 480 device events" in w and "99." in w for w in report.ranks[0].warnings)
    assert phase.step_mean_ms == pytest.approx(1.640, rel=1e-9)


def test_a_short_overlap_on_a_stream_is_kept() -> None:
    early = (Kernel("nvjet_tst_64x16", 40_000, recorded_ns=40_900), Kernel("void vllm::rms_norm_kernel<c10>", 10_000))
    phase = written([StepLaw(decode_annotation(1), early * 10, pause_ns=5_000)] * 5, ranks=1).phases["decode"]
    assert {p.category: p.ms_per_step for p in phase.categories} == pytest.approx({"gemm": 0.409, "norm": 0.1})
    assert phase.busy_ms == pytest.approx(0.5, rel=1e-9)


def test_launches_without_kernels_make_idle_unreliable(tmp_path: Path) -> None:
    (path,) = write_profile(tmp_path, simple(graph=False))
    assert analyse([path]).phases["decode"].idle_reliable
    trace = json.loads(gzip.decompress(path.read_bytes()))
    kernels = [e for e in trace["traceEvents"] if e["cat"] == "kernel"]
    gone = {id(e) for e in kernels[::3]}
    trace["traceEvents"] = [e for e in trace["traceEvents"] if id(e) not in gone]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    report = analyse([path])
    assert not report.phases["decode"].idle_reliable
    assert any("67 % of the launches" in w for w in report.ranks[0].warnings)


def test_steps_without_annotations_are_found_by_repetition(tmp_path: Path) -> None:
    distinct = tuple(Kernel(name, 20_000 + 1_000 * i) for i, name in enumerate(NAMES))
    steps = [StepLaw(decode_annotation(4), distinct, pause_ns=30_000)] * 6
    (path,) = write_profile(tmp_path, steps)
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["cat"] != "user_annotation"]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    report = analyse([path])
    assert [r.how for r in report.ranks] == ["repeats"]
    assert set(report.phases) == {"all"} and report.phases["all"].steps == 6
    assert report.phases["all"].step_mean_ms == pytest.approx(7 * 0.020 + 21 * 0.001 + 0.030, rel=1e-9)


def without_annotations(path: Path) -> None:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["cat"] != "user_annotation"]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))


def test_replays_of_a_graph_of_equal_layers_are_steps(tmp_path: Path) -> None:
    """Twenty equal layers: the sequence of kernels repeats 160 times, the graph eight times."""
    for path in write_profile(tmp_path, simple(8), ranks=RANKS):
        without_annotations(path)
    report = analyse([tmp_path])
    assert {r.how for r in report.ranks} == {"repeats"}
    assert "no step annotations: 8 steps found by the replays of a graph" in report.ranks[0].warnings
    whole = report.phases["all"]
    assert (whole.steps, whole.step_mean_ms) == (8, pytest.approx(20 * 0.081 + 0.020))
    assert next(p.calls_per_step for p in whole.categories if p.category == "all_reduce") == 20
    assert whole.collectives[0].transfer_us == pytest.approx(30)


def test_graphs_that_are_pieces_of_a_step_are_no_steps(tmp_path: Path) -> None:
    gemm, norm = Kernel("nvjet_tst_64x16", 40_000), Kernel("void vllm::rms_norm_kernel<c10>", 9_000)
    pieces = [(norm, gemm, gemm), *[(gemm, norm, gemm)] * 4, (gemm, gemm, Kernel("_topk_topp_kernel", 5_000))]
    steps = [StepLaw("not an annotation", kernels, pause_ns=20_000) for kernels in pieces] * 5
    (path,) = write_profile(tmp_path, steps)
    without_annotations(path)
    report = analyse([path])
    assert report.phases["all"].steps == 5
    assert any("the repeating sequence of kernels" in w for w in report.ranks[0].warnings)


def test_compiling_and_cut_off_steps_are_set_aside(tmp_path: Path) -> None:
    steps = simple(6)
    cut = StepLaw(steps[0].annotation, steps[0].kernels[:30], True, 20_000)
    (path,) = write_profile(tmp_path, [*steps, cut])
    trace = json.loads(gzip.decompress(path.read_bytes()))
    marks = [e for e in trace["traceEvents"] if e["cat"] == "user_annotation"]
    trace["traceEvents"].append({**marks[2], "cat": "cuda_driver", "name": "cuModuleLoadData", "args": {}})
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    report = analyse([path])
    assert [bool(s.set_aside) for s in report.ranks[0].steps] == [True, False, True, False, False, False, True]
    assert report.ranks[0].steps[2].set_aside == "compiles or loads code: cuModuleLoadData"
    assert "recording ends" in str(report.ranks[0].steps[6].set_aside)
    assert report.phases["decode"].steps == 4


@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 7))
def test_order_does_not_matter_and_scaling_scales(rng: random.Random, factor: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (path,) = write_profile(Path(folder), simple(graph=False))
        before = analyse([path]).to_json()["phases"]["decode"]
        trace = json.loads(gzip.decompress(path.read_bytes()))
        rng.shuffle(trace["traceEvents"])
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
        assert analyse([path]).to_json()["phases"]["decode"] == before
        for event in trace["traceEvents"]:
            event["ts"] = round(event["ts"] * factor, 3)
            event["dur"] = round(event["dur"] * factor, 3)
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
        after = analyse([path]).to_json()["phases"]["decode"]
    assert after["step_ms"] == pytest.approx({k: v * factor for k, v in before["step_ms"].items()}, rel=1e-9)
    assert after["busy_share"] == pytest.approx(before["busy_share"], rel=1e-9)
    for a, b in zip(after["categories"], before["categories"], strict=True):
        assert a["ms_per_step"] == pytest.approx(b["ms_per_step"] * factor, rel=1e-9)
        assert (a["share"], a["calls_per_step"]) == pytest.approx((b["share"], b["calls_per_step"]))


def test_every_name_of_the_generator_has_the_category_it_claims() -> None:
    assert set(NAMES.values()) <= set(CATEGORIES)
