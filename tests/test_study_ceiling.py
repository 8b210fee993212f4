"""07: operating points and machine against literals; a whole study from records and a small checkpoint."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from perfbook.ceiling import ModelShape
from perfbook.desk import Desk
from perfbook.errors import OutOfOrder
from perfbook.micro import Bandwidth, DeviceBench, Gemm
from perfbook.params import Ceiling, Variant, make_variant
from perfbook.record import findings
from perfbook.record.run import Run
from perfbook.study import bench, ceiling
from perfbook.study.ceiling.crosscheck import Reading, check

BENCH = DeviceBench(
    "CPU, 2 threads",
    (Bandwidth("read", 2**28, (8.0, 10.0, 9.0)), Bandwidth("copy", 2**28, (12.0, 11.0, 13.0))),
    (Gemm("o", 1, 100, 100, 30, "k", (20.0, 30.0, 40.0)), Gemm("o", 512, 100, 100, 30, "k", (100.0, 110.0, 120.0))),
)


def cell(
    notebook: str, concurrency: int, output: int, tpot_ms: float | None, *, ok: int = 1, prompt: int = 40
) -> dict[str, Any]:
    return {
        "notebook": notebook, "concurrency": concurrency, "ok": ok, "prompt_tokens": prompt * ok,
        "output_tokens": output * ok, "tpot_ms": {"p50": tpot_ms},
    }  # fmt: skip


def test_points_take_the_longest_answers_and_medians() -> None:
    got = ceiling.operating_points(
        [
            cell("03_single_stream", 1, 64, 29.0),
            cell("03_single_stream", 1, 256, 31.0),
            cell("03_single_stream", 1, 256, 35.0),
            cell("03_single_stream", 1, 256, 32.0),
            cell("04_sweep", 1, 48, 28.0),
            cell("04_sweep", 8, 48, 38.0, ok=24, prompt=64),
            cell("04_sweep", 8, 48, 40.0, ok=24, prompt=64),
            cell("04_sweep", 16, 48, None),
        ]
    )
    assert [(p.streams, p.context_tokens, p.tpot_ms, p.source) for p in got] == [
        (1, 40 + 128, 32.0, "03_single_stream"), (8, 64 + 24, 39.0, "04_sweep")
    ]  # fmt: skip


def test_the_machine_is_as_measured_unless_stated() -> None:
    measured = ceiling.machine_of(BENCH, None, 1, Ceiling())
    assert measured.bandwidth_bytes_s == 10e9
    assert measured.flop_s == pytest.approx(2 * 512 * 100 * 100 / 100e-6)
    stated = ceiling.machine_of(BENCH, 30.0, 8, Ceiling(bandwidth_gb_s=1700, gemm_tflop_s=400, all_reduce_us=25))
    assert (stated.bandwidth_bytes_s, stated.flop_s, stated.all_reduce_us, stated.tensor_parallel) == (
        1.7e12, 4e14, 25, 8
    )  # fmt: skip
    unknown = ceiling.machine_of(None, None, 1, Ceiling())
    assert (unknown.bandwidth_bytes_s, unknown.flop_s) == (None, None)


def test_products_add_up_over_the_layers() -> None:
    assert bench.products_ms(BENCH, 1) == pytest.approx(30 * 20 / 1e3)
    assert bench.products_ms(BENCH, 2) is None
    assert bench.products_ms(None, 1) is None


CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": True,
}  # fmt: skip


def write_checkpoint(folder: Path, weights_bytes: int) -> Path:
    """config.json and the header of a file with one tensor: nothing reads further than that."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, weights_bytes]},
    }
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Variant:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    folder = write_checkpoint(tmp_path / "model", 100_000_000)
    return make_variant(
        {"variant": "small", "server": {"model": str(folder)}, "targets": {"single_stream_tok_s": 40}}, "test"
    )


def desk_of(variant: Variant) -> Desk:
    run = Run.start(variant)
    run.append("03_single_stream", "single_stream_cell", cell("03_single_stream", 1, 256, 25.0), key="256/0")
    run.append("04_sweep", "sweep_cell", cell("04_sweep", 8, 48, 30.0, ok=24), key="8/0")
    run.append("05_nccl_tuning", "micro_device", {**BENCH.to_json(), "server": "stopped"})
    return Desk("07_ceiling", variant, run)


@pytest.mark.parametrize(
    ("dtype", "weights", "kv_per_token", "message"),
    [(None, 1e8, 256, 128), ("bfloat16", 1e8, 256, 128), ("half", 1e8, 256, 128), ("float32", 2e8, 512, 256)],
)
def test_bytes_follow_the_type_that_is_served(
    variant: Variant, dtype: str | None, weights: float, kv_per_token: int, message: int
) -> None:
    """The checkpoint is bfloat16; keys and values: 2 · 2 layers · 2 heads · 16 of them; hidden size 64."""
    server = variant.server.model_copy(update={"args": {} if dtype is None else {"dtype": dtype}})
    served = bench.served_model(variant.model_copy(update={"server": server}))
    assert (served.shape.dense_bytes, served.shape.kv_bytes_per_token) == (weights, kv_per_token)
    assert served.message_bytes(1) == message


def test_a_study_from_records(variant: Variant) -> None:
    """100 MB of weights at 10 GB/s are 10 ms; 168 tokens of context are 2·2·2·16·2 bytes each, 4.3 µs."""
    desk = desk_of(variant)
    measured = ceiling.measure(desk, lambda text: None)
    study = ceiling.compute(desk, measured)
    assert study.floors[0].floor_ms == pytest.approx(10.0 + 168 * 256 / 10e9 * 1e3, rel=1e-6)
    assert study.ratio(0) == pytest.approx(2.5, abs=0.01)
    said = ceiling.conclude(desk, study).sentence
    assert "a step cannot go below 10.0 ms, 10.0 ms of it weights" in said
    assert "measured 25.0 ms is 2.50 times that" in said
    record = desk.run.record("ceiling")
    assert record is not None
    assert (record["concurrency"], [p["concurrency"] for p in record["points"]]) == (1, [1, 8])
    assert [f["id"] for f in findings.current(desk.run)] == ["above_floor"]
    assert ceiling.floor_table(study).texts()[0][-2:] == ["2.50", "03_single_stream"]
    assert ["all-reduces per step", "not applicable", "one rank"] in ceiling.inputs_table(desk, study).texts()


def test_the_target_in_terms_of_the_floor(variant: Variant) -> None:
    """40 tok/s are 25 ms: reading may take two and a half times what it takes at the floor."""
    desk = desk_of(variant)
    table = ceiling.targets_table(desk, ceiling.compute(desk, BENCH))
    assert not isinstance(table, str)
    assert table.rows[0][1] == pytest.approx(2.5, abs=0.01)


def test_without_a_bandwidth_the_floor_is_unknown(variant: Variant) -> None:
    desk = desk_of(variant)
    study = ceiling.compute(desk, "Not measured: the server was not started here.")
    assert study.floors[0].floor_ms is None
    assert (
        ceiling.conclude(desk, study).sentence == "The floor is unknown. Not in it, because unknown: memory bandwidth."
    )
    assert [f["id"] for f in findings.current(desk.run)] == ["floor_unknown"]
    assert isinstance(ceiling.roofline_figure(desk, study), str)


def test_faster_than_the_floor_is_a_warning(variant: Variant) -> None:
    desk = desk_of(variant)
    slow = DeviceBench("CPU", (Bandwidth("read", 2**28, (2.0, 2.0, 2.0)),), ())
    ceiling.conclude(desk, ceiling.compute(desk, slow))
    assert [f["id"] for f in findings.current(desk.run)] == ["below_floor:1", "below_floor:8"]


def test_nothing_measured_names_the_notebooks_to_run(variant: Variant) -> None:
    with pytest.raises(OutOfOrder, match="run 03_single_stream or 04_sweep first"):
        ceiling.compute(Desk("07_ceiling", variant, Run.start(variant)), BENCH)


def test_an_unknown_model_stays_unknown_and_stated_bytes_count(tmp_path: Path) -> None:
    attached = {"variant": "v", "server": {"base_url": "http://127.0.0.1:1"}}
    served = bench.served_model(make_variant(attached, "test"))
    assert served.shape == ModelShape(expert_bytes=None, expert_params=None)
    assert "not started here" in served.unknown
    stated = bench.served_model(make_variant({**attached, "ceiling": {"weight_gb": 547}}, "test"))
    assert stated.shape.dense_bytes == 547e9


def test_an_attached_server_is_not_measured(variant: Variant) -> None:
    attached = make_variant({"variant": "far", "server": {"base_url": "http://127.0.0.1:1"}}, "test")
    desk = Desk("07_ceiling", attached, Run.start(attached))
    assert ceiling.measure(desk, lambda text: None) == (
        "Not measured: the server was not started here: its devices are its owner's."
    )


def test_all_reduces_stated_traced_or_assumed(variant: Variant) -> None:
    desk = desk_of(variant)
    served = bench.served_model(variant)
    assert bench.all_reduce_count(desk, served)[0] == 5  # 2 layers
    for calls, notebook, kind in ((3.0, "04_sweep", "step_trace"), (4.0, "06_profiler_breakdown", "profile")):
        traced = {"concurrency": 1, "categories": [{"category": "all_reduce", "calls_per_step": calls}]}
        desk.run.append(notebook, kind, traced)
        assert bench.all_reduce_count(desk, served) == (calls, "traced at 1 stream")
    stated = make_variant({**variant.sections(), "ceiling": {"all_reduces": 122}}, "test")
    assert bench.all_reduce_count(Desk("07_ceiling", stated, desk.run), served) == (122, "stated in the parameters")


def test_bytes_against_another_size_of_model() -> None:
    """500 MB more in 50 ms more are 10 GB/s; a larger model that takes no longer contradicts at any bandwidth."""
    small, large = Reading("half/1", 5e8, 40.0), Reading("whole/1", 1e9, 90.0)

    def checked(bandwidth: float, here: Reading = large, there: Reading = small) -> tuple[float | None, str]:
        found = check(here, bandwidth, [there])
        assert found is not None
        return found.implied_bytes_s, found.sentence.split(":")[0]

    assert checked(10.5e9) == (pytest.approx(10e9), "Confirmed")
    assert checked(10.5e9, small, large) == (pytest.approx(10e9), "Confirmed")
    assert checked(20e9) == (pytest.approx(10e9), "Not contradicted")
    assert checked(9e9) == (pytest.approx(10e9), "Contradicted")
    assert checked(9e9, there=Reading("half/1", 5e8, 90.0)) == (None, "Contradicted")
    assert check(large, 9e9, [Reading("same/1", 0.9e9, 10.0)]) is None  # too near to say anything
    assert check(large, None, [small]) is None
    assert check(None, 9e9, [small]) is None


def test_the_crosscheck_finds_the_other_run_of_this_machine(variant: Variant, tmp_path: Path) -> None:
    """100 MB in 25 ms here; another run on this host had 50 MB in 20 ms: 10 GB/s, as the memory gives."""
    desk = desk_of(variant)
    desk.run.write_header({"provenance": {"host": "here", "hardware": "2 cores"}})
    study = ceiling.compute(desk, BENCH)
    assert "no other run on this machine" in str(ceiling.crosscheck(desk, study))
    for number, (host, weights, tpot_ms) in enumerate([("here", 50_000_000, 20.0), ("there", 10_000_000, 1.0)]):
        folder = write_checkpoint(tmp_path / f"model{number}", weights)
        other = desk_of(make_variant({"variant": f"other{number}", "server": {"model": str(folder)}}, "test"))
        other.run.write_header({"provenance": {"host": host, "hardware": "2 cores"}})
        other.run.append("03_single_stream", "single_stream_cell", cell("03", 1, 256, tpot_ms), key="256/0")
        ceiling.conclude(other, ceiling.compute(other, BENCH))
    assert "Confirmed: 100 MB in 25.0 ms here, 50 MB in 20.0 ms in other0/" in str(ceiling.crosscheck(desk, study))
    record = desk.run.record("bytes_check")
    assert record is not None
    assert record["implied_bytes_s"] == pytest.approx(10e9, rel=1e-3)
    assert not record["contradicted"]


def test_a_contradiction_is_a_finding(variant: Variant, tmp_path: Path) -> None:
    desk = desk_of(variant)
    desk.run.write_header({"provenance": {"host": "here", "hardware": "2 cores"}})
    folder = write_checkpoint(tmp_path / "larger", 900_000_000)
    other = desk_of(make_variant({"variant": "larger", "server": {"model": str(folder)}}, "test"))
    other.run.write_header({"provenance": {"host": "here", "hardware": "2 cores"}})
    ceiling.conclude(other, ceiling.compute(other, BENCH))  # nine times the bytes, and no longer
    assert "Contradicted" in str(ceiling.crosscheck(desk, ceiling.compute(desk, BENCH)))
    [finding] = findings.current(desk.run)
    assert finding["title"].startswith("The bytes that a step reads are contradicted by larger/")
