"""The run's folder: nothing measured is lost, and a re-run supersedes without deleting."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from perfbook.errors import BadInput, OutOfOrder
from perfbook.params import Variant, make_variant
from perfbook.record import findings, jsonl, summary, tables
from perfbook.record.run import Run


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Variant:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    return make_variant({"variant": "demo", "server": {"model": "/m"}}, "test")


def test_json_lines_hold_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    jsonl.append(path, {"a": np.float64(1.5), "b": float("nan"), "c": (1, 2), "d": np.array([1, 2]), "e": "ü"})
    assert path.read_text() == '{"a": 1.5, "b": null, "c": [1, 2], "d": [1, 2], "e": "ü"}\n'


def test_a_torn_line_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    jsonl.append(path, {"n": 1})
    with path.open("ab") as file:
        file.write(b'{"n": 2, "to')
    jsonl.append(path, {"n": 3})
    assert [value["n"] for value in jsonl.read(path)] == [1, 3]


def test_cutting_the_file_anywhere_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for number in range(3):
        jsonl.append(path, {"n": number})
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        assert [v["n"] for v in jsonl.read(path)] == list(range(len(jsonl.read(path))))


def test_runs_are_found_and_named(variant: Variant) -> None:
    assert Run.latest("demo") is None
    first, second = Run.start(variant), Run.start(variant)
    assert first.path != second.path
    assert Run.latest("demo") == second
    assert (second.path.parent / "latest").resolve() == second.path
    assert Run.open("demo") == second
    assert Run.open(first.path) == first
    assert Run.every() == [first, second]
    assert first.name == f"demo/{first.path.name}"
    assert second.variant == variant
    assert not second.rehearsed


def test_not_a_run(variant: Variant, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not a run's folder"):
        Run.open(tmp_path)


def test_records_in_force(variant: Variant) -> None:
    run = Run.start(variant)
    run.begin("03")
    run.append("03", "cell", {"x": 1}, key="a")
    run.append("03", "cell", {"x": 2}, key="b")
    run.append("03", "cell", {"x": 3}, key="a")
    run.append("04", "cell", {"x": 9})
    assert [(r["key"], r["x"]) for r in run.records("cell", notebook="03")] == [("b", 2), ("a", 3)]
    run.begin("03")
    assert [r["x"] for r in run.records("cell")] == [9]
    assert len(run.history()) == 6
    assert run.record("cell") == run.history()[4]
    assert len({r["id"] for r in run.history()}) == 6


def test_lines_that_are_no_records_count_for_nothing(variant: Variant) -> None:
    run = Run.start(variant)
    with (run.path / "records.jsonl").open("wb") as file:
        file.write(b'[1]\n5\n\xff\n{"kind": 5}\n{"kind": "cell", "key": [1]}\n{"notebook": null, "kind": "cell"}\n')
    run.append("04", "cell", {"x": 9})
    assert [r["x"] for r in run.records()] == [9]


def test_a_missing_record_names_the_notebook_to_run(variant: Variant) -> None:
    run = Run.start(variant)
    with pytest.raises(OutOfOrder, match="has no sweep record yet: run 04_sweep first"):
        run.need("sweep", "04_sweep")


def test_rehearsed_runs_mark_every_record(variant: Variant) -> None:
    run = Run.start(variant, rehearsed=True)
    run.append("03", "cell", {})
    assert run.records("cell")[0]["rehearsed"] is True
    assert summary.summarise(run)["rehearsed"] is True


def test_tables_replace_a_cell_and_keep_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    for cell, value in (("a", 1), ("b", 2), ("a", 3)):
        tables.append_cell(path, pa.table({"cell": [cell, cell], "x": [value, value]}))
    assert tables.read(path).to_pydict() == {"cell": ["b", "b", "a", "a"], "x": [2, 2, 3, 3]}
    assert [p.name for p in tmp_path.iterdir()] == ["requests.parquet"]


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    path.write_bytes(b"no")
    with pytest.raises(BadInput, match=r"requests\.parquet: cannot be read"):
        tables.read(path)


def test_findings_of_the_latest_attempt_gravest_first(variant: Variant) -> None:
    run = Run.start(variant)
    run.begin("02_verify")
    findings.record(run, findings.make("answers_wrong", "02_verify", right=0, asked=1, evidence="e"))
    run.begin("02_verify")
    findings.record(run, findings.make("answers_right", "02_verify", right=2, asked=2, evidence="e"))
    findings.record(run, findings.make("not_repeatable", "02_verify", position=7, evidence="e"))
    assert [(f["severity"], f["title"]) for f in findings.current(run)] == [
        ("info", "Greedy decoding does not repeat: texts part at character 7"),
        ("good", "The server answers correctly: 2 of 2 known answers"),
    ]


def test_a_finding_with_a_hole_is_refused() -> None:
    with pytest.raises(KeyError):
        findings.make("answers_right", "02_verify", evidence="e")


def test_every_rule_is_found_by_somebody() -> None:
    sources = "".join(path.read_text() for path in Path(findings.__file__).parents[1].rglob("*.py"))
    assert [name for name in findings.rules() if f'"{name}"' not in sources] == []


def test_summary_of_nothing_is_null(variant: Variant) -> None:
    run = Run.start(variant)
    summary.write(run)
    written = json.loads((run.path / "summary.json").read_text())
    assert written == {
        "schema": 1,
        "variant": "demo",
        "run": run.path.name,
        "rehearsed": False,
        "answers": "unchecked",
        "engine": None,
        "single_stream": None,
        "warmup": None,
        "sweep": None,
        "tuning": None,
        "profile": None,
        "ceiling": None,
        "targets": None,
        "bottleneck": None,
        "findings": None,
    }


def test_summary_puts_records_together(variant: Variant) -> None:
    run = Run.start(variant)
    run.append("02_verify", "verdict_on_answers", {"ok": False})
    run.append("04_sweep", "sweep_cell", {"concurrency": 1}, key="1/0")
    run.append("04_sweep", "sweep", {"best_tok_s": 5.0})
    run.append("04_sweep", "bottleneck", {"regime": "plateau", "sentence": "waits"})
    got = summary.summarise(run)
    assert got["answers"] == "wrong"
    assert got["sweep"] == {"best_tok_s": 5.0, "cells": [{"concurrency": 1}]}
    assert got["bottleneck"] == {"plateau": "waits"}
