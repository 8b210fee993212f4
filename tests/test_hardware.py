"""A run's numbers come from this machine or, rehearsed, from its law: never from both."""

from pathlib import Path

import pytest

from perfbook import paths
from perfbook.batch.campaign import Options, run_campaign
from perfbook.desk import open_desk
from perfbook.errors import BadInput
from perfbook.hardware import Rehearsed, ThisMachine, hardware_of
from perfbook.params import Variant, load_variant, make_variant
from perfbook.record.run import Run
from perfbook.rehearsal.law import law_of
from perfbook.study import bench
from perfbook.study.tuning.screen import OK, screen

FOUR = ("glm-5-nvfp4", "kimi-k2.5-int4", "kimi-k2.5-nvfp4", "minimax-m2.5-fp8")


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    return tmp_path / "outputs"


@pytest.fixture
def int4() -> Variant:
    return load_variant(paths.params() / "kimi-k2.5-int4.yaml")


@pytest.mark.parametrize("name", FOUR)
def test_the_four_variants_have_a_law_and_serve_eight_ranks(name: str) -> None:
    variant = load_variant(paths.params() / f"{name}.yaml")
    assert variant.variant == name
    assert variant.server.args["tensor-parallel-size"] == law_of(variant).model.tensor_parallel == 8


def test_only_a_rehearsed_run_asks_its_law(int4: Variant) -> None:
    measured, rehearsed = Run.start(int4), Run.start(int4, rehearsed=True)
    assert isinstance(hardware_of(measured), ThisMachine)
    machine = hardware_of(rehearsed)
    assert isinstance(machine, Rehearsed)
    assert machine.law == law_of(int4)
    assert [gpu.name for gpu in machine.gpus()] == ["NVIDIA RTX PRO 6000 Blackwell Server Edition"] * 8
    found = machine.provenance(int4)
    assert found["hardware"] == "8 × NVIDIA RTX PRO 6000 Blackwell Server Edition, rehearsed"
    assert "cpu" not in found


def test_the_law_of_a_run_is_whole_and_fixed_at_its_start(int4: Variant) -> None:
    run = Run.start(int4, rehearsed=True)
    other = make_variant({**int4.sections(), "rehearsal": {"step": {"decode_ms": [[1, 1.0]]}}}, "test")
    run.write_header({}, other)
    machine = hardware_of(run)
    assert isinstance(machine, Rehearsed)
    assert machine.law == law_of(int4)


def test_measured_and_rehearsed_runs_never_go_on_in_one_another(int4: Variant) -> None:
    rehearsed = Run.start(int4, rehearsed=True)
    assert Run.latest("kimi-k2.5-int4") is None
    assert Run.open("kimi-k2.5-int4") == rehearsed  # where nothing was measured, a name means the rehearsal
    measured = Run.start(int4)
    later = Run.start(int4, rehearsed=True)
    assert Run.latest("kimi-k2.5-int4") == Run.open("kimi-k2.5-int4") == measured
    assert Run.latest("kimi-k2.5-int4", rehearsed=True) == later
    assert open_desk("04_sweep", "kimi-k2.5-int4").run == measured
    assert open_desk("04_sweep", "kimi-k2.5-int4", str(later.path)).run == later


def test_a_rehearsal_cannot_be_attached_to_a_server(int4: Variant) -> None:
    run = Run.start(int4, rehearsed=True)
    with pytest.raises(BadInput, match=r"attaches to a server; to rehearse, name a server\.model"):
        open_desk("04_sweep", "kimi-k2.5-int4", str(run.path), server={"base_url": "http://127.0.0.1:1"})


def test_without_a_law_nothing_starts(outputs: Path) -> None:
    with pytest.raises(BadInput, match="nothing to rehearse with: the file has no rehearsal: section"):
        run_campaign([paths.params() / "smollm2-135m-cpu.yaml"], Options(rehearse=True))
    assert not outputs.exists()


def test_the_model_is_the_laws(int4: Variant) -> None:
    """Of its experts one stream takes 8 of 384; its compressed KV cache is 61 x (512 + 64) values of two bytes."""
    served = bench.served_model(int4, hardware_of(Run.start(int4, rehearsed=True)))
    shape = served.shape
    assert (served.ranks, shape.layers, shape.hidden, served.unknown) == (8, 61, 7168, "")
    assert (shape.dense_bytes, shape.expert_bytes, shape.experts, shape.experts_per_token) == (21.1e9, 571e9, 384, 8)
    assert shape.kv_bytes_per_token == 70_272
    assert bench.served_model(int4).shape.hidden is None  # this machine has no such checkpoint


def test_the_screen_of_a_rehearsal_reads_the_law(int4: Variant) -> None:
    machine = hardware_of(Run.start(int4, rehearsed=True))
    settings = {"ll": {"NCCL_PROTO": "LL"}, "bad-level": {"NCCL_P2P_LEVEL": "SYSTEM"}}
    found = screen(settings, [14336], 8, reduce=machine.all_reduce, backend="nccl", rounds=4)
    assert [found[name].status for name in ("baseline", "ll", "bad-level")] == [OK, OK, "not taken"]
    truth_us = 40.0 + 14336 * 2 * 7 / 8 / 20e3
    readings = found["baseline"].latencies_us[14336]
    assert len(set(readings)) == 4  # every round scatters by itself
    assert all(abs(reading / truth_us - 1) < 0.03 for reading in readings)
