"""What 06 shows beside a profile: a step as it ran, waits, collectives, changes, exports. Real runs, drawn traces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from perfbook.desk import Desk
from perfbook.errors import BadInput
from perfbook.figures import Figure
from perfbook.params import make_variant
from perfbook.record.run import Run
from perfbook.rehearsal.kineto import Kernel, StepLaw, decode_annotation, write_profile
from perfbook.report.table import Note, Table
from perfbook.study import profile as study
from perfbook.study.profile.record import concurrencies
from perfbook.trace import analyse, one_step
from test_trace_nsys import export

RECORDED = Path(__file__).parent / "data" / "traces"
GEMM, REDUCE = "nvjet_tst_64x16_64x16_4x1_v_bz_TNT", "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>"


def law(reduce_ns: int, calls: int = 10) -> list[StepLaw]:
    """A GEMM of 100 us and an all-reduce, on which rank 1 waits 4 us; then 100 us of pause."""
    pair = (Kernel(GEMM, 100_000), Kernel(REDUCE, reduce_ns, wait_ns=(0, 4_000)))
    return [StepLaw(decode_annotation(1), pair * calls, pause_ns=100_000)] * 6


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    return another_run()


def another_run() -> Desk:
    variant = make_variant({"variant": "one", "server": {"base_url": "http://127.0.0.1:1"}}, "test")
    return Desk("06_profiler_breakdown", variant, Run.start(variant))


def profiled(desk: Desk, steps: list[StepLaw], name: str = "") -> study.Profile:
    """A profile at one stream as the notebook takes it, from two ranks."""
    folder = desk.run.path / "traces"
    folder.mkdir(exist_ok=True)
    files = tuple(p.rename(p.with_name(f"c1{name}_{p.name}")) for p in write_profile(folder, steps, ranks=2))
    desk.record("profile", {"concurrency": 1, "files": [path.name for path in files]}, key="1")
    return study.Profile(1, files, analyse(files), None)


def only_table(shown: list[Table | Note]) -> Table:
    (table,) = [one for one in shown if isinstance(one, Table)][:1]
    return table


def test_the_first_profile_says_that_there_is_none_before(desk: Desk) -> None:
    (said,) = study.changes(desk, [profiled(desk, law(50_000))])
    assert said == "No earlier profile of this variant at 1 stream whose traces are still there."


@pytest.mark.parametrize("again", [False, True])
def test_what_changed_since_the_last_profile(desk: Desk, again: bool) -> None:
    profiled(desk, law(50_000))
    now = desk if again else another_run()
    shown = study.changes(now, [profiled(now, law(30_000), "b")])
    categories, kernels = (one for one in shown if isinstance(one, Table))
    assert desk.run.path.name in categories.caption and "1.62 ms" in categories.caption
    assert [(row[0], row[3], row[4], row[5]) for row in categories.rows] == [
        ("all_reduce", -0.2, 10, 10),
        ("gemm", 0, 10, 10),
    ]
    assert [row[0] for row in kernels.rows] == [REDUCE]


def test_a_profile_whose_traces_are_gone_is_not_compared_with(desk: Desk) -> None:
    profiled(desk, law(50_000))
    shutil.rmtree(desk.run.path / "traces")
    now = another_run()
    (said,) = study.changes(now, [profiled(now, law(30_000))])
    assert isinstance(said, Note) and "No earlier profile" in said


def test_profiles_are_taken_at_one_stream_and_at_the_knee(desk: Desk) -> None:
    assert concurrencies(desk) == [1]
    desk.run.append("04_sweep", "sweep", {"knee_concurrency": None})
    assert concurrencies(desk) == [1]
    desk.run.append("04_sweep", "sweep", {"knee_concurrency": 64})
    assert concurrencies(desk) == [1, 64]
    stated = make_variant({**desk.variant.sections(), "profile": {"concurrency": [2, 8]}}, "test")
    assert concurrencies(Desk(desk.notebook, stated, desk.run)) == [2, 8]


def test_the_timeline_is_the_median_step(desk: Desk) -> None:
    profile = profiled(desk, law(50_000))
    step = one_step(profile.files[0], "decode")
    assert step is not None
    assert (step.rank, step.device, len(step.bars)) == (0, "gpu", 20)
    assert step.duration_ms == pytest.approx(1.5)
    assert [(b.category, b.stream) for b in step.bars[:2]] == [("gemm", "stream 7"), ("all_reduce", "stream 7")]
    assert step.bars[3].start_ms == pytest.approx(0.25) and step.bars[3].duration_ms == pytest.approx(0.05)
    assert one_step(profile.files[0], "prefill") is None
    (figure,) = study.timelines(desk, [profile])
    assert isinstance(figure, Figure)
    assert "(decode step, 1 stream, rank 0): 20 kernels on 1 stream in 1.50 ms, busy 100 % of it" in figure.alt
    assert (desk.run.path / "figures" / "step_timeline_c1.png").is_file()


def test_a_host_timeline_adds_up_to_the_self_times_of_its_step() -> None:
    (path,) = (RECORDED / "tp1").iterdir()
    step = one_step(path, "prefill")
    assert step is not None and step.device == "cpu"
    kernels = {part.name: part.ms_per_step for part in analyse([path]).phases["prefill"].kernels}
    drawn: dict[str, float] = {}
    for bar in step.bars:
        drawn[bar.name] = drawn.get(bar.name, 0.0) + bar.duration_ms
    assert drawn == pytest.approx({name: ms for name, ms in kernels.items() if ms}, abs=1e-9)
    ends = [bar.start_ms + bar.duration_ms for bar in step.bars]
    assert all(end <= bar.start_ms + 1e-9 for end, bar in zip(ends, step.bars[1:], strict=False))


def test_steps_of_an_unknown_kind_have_plain_words(desk: Desk) -> None:
    plain = [StepLaw("ProfilerStep#1", one.kernels, pause_ns=one.pause_ns) for one in law(50_000)]
    profile = profiled(desk, plain)
    work = "1.00 ms of 1.62 ms as profiled (all kernels together 94.8 %)"
    said = f"At 1 stream gemm is 62.4 % of a step: 10 calls, {work}."
    assert study.top_sentence(profile) == said
    assert study.breakdown_table(profile).caption.startswith("Step at 1 stream: 6 steps, mean 1.62 ms")


def test_waits_and_collectives(desk: Desk) -> None:
    profile = profiled(desk, law(50_000))
    waits = study.waits_table([profile])
    assert isinstance(waits, Table)
    (row,) = waits.rows
    assert row[0] == "decode, 1 stream" and row[7] is True
    assert row[1:7] == pytest.approx((1.62, 1.52, 0.1, 0, 0, 0))
    assert row[8:] == pytest.approx((0.52, 0))
    collectives = study.collectives_table(profile)
    assert isinstance(collectives, Table)
    assert collectives.rows[0][:3] == ["all_reduce", None, 10]
    assert collectives.rows[0][3:] == pytest.approx([52, 50, 4, 0])


def test_every_file_is_listed(desk: Desk) -> None:
    profile = profiled(desk, law(50_000))
    files = study.files_table(desk, [profile])
    assert isinstance(files, Table)
    assert [row[:3] for row in files.rows] == [["1 stream", i, path.name] for i, path in enumerate(profile.files)]


def test_an_export_in_the_folder_is_broken_down(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (said,) = study.exports(desk)
    assert isinstance(said, Note) and "no nsys on the PATH" in said
    folder = desk.run.path / "traces"
    folder.mkdir(exist_ok=True)
    export(folder / "c8.sqlite")
    (folder / "zero.sqlite").write_bytes(b"")
    table, bad = study.exports(desk)
    assert isinstance(table, Table)
    assert table.caption.startswith("Decode step at 8 streams, c8.sqlite: 4 steps, mean 1.00 ms, busy 30.1 %")
    assert "(mean over 2 ranks)" in table.caption
    assert isinstance(bad, Note) and "zero.sqlite" in bad


def test_nothing_profiled_is_said(desk: Desk) -> None:
    for shown in (study.timelines(desk, []), study.changes(desk, [])):
        assert shown == ["Nothing was profiled."]
    assert isinstance(study.files_table(desk, []), Note)
    assert isinstance(study.waits_table([]), Note)
    with pytest.raises(BadInput):
        one_step(desk.run.path / "run.json", "decode")
