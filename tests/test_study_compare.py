"""Comparing runs: verdicts over launches, refusals, and what is said beside them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfbook import cli
from perfbook.errors import BadInput
from perfbook.params import make_variant
from perfbook.record.run import Run
from perfbook.stats import Label
from perfbook.study.compare import (
    Measured,
    compare_measured,
    compare_runs,
    conclusion,
    difference_table,
    metric_table,
    render_text,
    side_table,
)

ABOUT = {"host": "box", "hardware": "8 × GPU", "vLLM": "0.32.0", "answers": "verified", "rehearsed": "no"}


def launch(side: str, index: int, tpot_ms: float, rate: float = 100.0, asked: str = "w", **about: str) -> Measured:
    return Measured(
        f"{side}/{index}", side, {"tpot_ms": tpot_ms, "tok_s at 8": rate}, {"tpot_ms": asked, "tok_s at 8": asked},
        {**ABOUT, **about},
    )  # fmt: skip


BASE = [12.40, 12.44, 12.38, 12.41, 12.43, 12.39]


def test_several_launches_of_each_side_carry_verdicts() -> None:
    runs = [launch("a", i, ms, 100 + i) for i, ms in enumerate(BASE)]
    runs += [launch("b", i, 0.9 * ms, 112 + i) for i, ms in enumerate(BASE)]
    got = compare_measured(runs)
    assert {row.metric: row.verdict and row.verdict.label for row in got.rows} == {
        "tpot_ms": Label.FASTER, "tok_s at 8": Label.FASTER
    }  # fmt: skip
    tpot, rate = got.rows
    assert tpot.verdict is not None
    assert tpot.verdict.effect_pct == pytest.approx(-10.0, abs=0.5)
    assert rate.verdict is not None
    assert rate.verdict.effect_pct == pytest.approx(11.7, abs=0.5)
    assert got.sides == {"a": tuple(f"a/{i}" for i in range(6)), "b": tuple(f"b/{i}" for i in range(6))}
    assert got.differences == ()
    assert conclusion(got).startswith("b is faster in TPOT of one stream (−10")


def test_a_difference_that_the_client_can_make_is_not_called_real() -> None:
    """1.24 ms are far outside the chance of six launches, and inside the error of a client that is 2 ms off."""
    errors = {"mean": 0.0, "p99": 2.0, "max": 3.0}
    null_run = {
        "concurrency": 1, "tick_ms": 12.4, "tok_s": 80.0, "tokens": 160, "arrival_error_ms": errors,
        "ttft_error_ms": errors, "gap_error_ms": errors, "merged_share": 0.0, "outside_interval": 0,
        "server_late_p99_ms": 0.1, "clock": "user", "relayed": False,
    }  # fmt: skip
    runs = [launch("a", i, ms) for i, ms in enumerate(BASE)] + [launch("b", i, 0.9 * ms) for i, ms in enumerate(BASE)]
    got = compare_measured([replace(run, null_runs=[null_run]) for run in runs])
    tpot = next(row for row in got.rows if row.metric == "tpot_ms")
    assert tpot.label == "within the client's noise"
    assert tpot.sentence.endswith("is within the client's own noise of 2.000 ms (gap, null run)")
    assert "b is faster" not in conclusion(got)
    assert got.to_json()["metrics"][0]["label"] == "within the client's noise"


def test_one_launch_each_is_too_few() -> None:
    got = compare_measured([launch("a", 0, 12.4), launch("b", 0, 11.9)])
    assert {row.verdict.label for row in got.rows if row.verdict} == {Label.TOO_FEW}
    assert conclusion(got) == "2 of 2 comparisons have too few launches."


def test_different_work_is_refused_and_said() -> None:
    got = compare_measured([launch("a", 0, 12.4), launch("b", 0, 11.9, asked="longer answers")])
    assert [row.verdict for row in got.rows] == [None, None]
    assert "asked for different work" in got.rows[0].why
    assert "not comparable" in render_text(got)
    assert conclusion(got) == "2 were refused."


def test_a_metric_of_one_side_only_is_not_compared() -> None:
    other = Measured("b/0", "b", {"tpot_ms": 11.9}, {"tpot_ms": "w"}, ABOUT)
    rows = {row.metric: row for row in compare_measured([launch("a", 0, 12.4), other]).rows}
    assert rows["tok_s at 8"].why == "not measured by b"
    assert rows["tpot_ms"].verdict is not None


def test_other_hosts_and_unchecked_answers_are_said() -> None:
    got = compare_measured([launch("a", 0, 12.4), launch("b", 0, 11.9, host="other", answers="wrong")])
    assert got.differences == ("host differs: box, other", "answers differs: verified, wrong")
    assert "beware: host differs: box, other" in render_text(got)
    unchecked = compare_measured([launch(side, 0, 12.4, answers="unchecked") for side in "ab"])
    assert unchecked.differences == ("the answers are unchecked in every run",)


def test_the_json_is_plain() -> None:
    got = compare_measured([launch("a", 0, 12.4), launch("b", 0, 11.9, asked="x")], {"b": "args.x: 1 → 2"})
    said = json.loads(json.dumps(got.to_json(), allow_nan=False))
    assert (said["schema"], said["baseline"]) == (1, "a")
    assert said["sides"]["b"] == {"runs": ["b/0"], "changes": "args.x: 1 → 2"}
    assert said["metrics"][0] == {
        "metric": "tpot_ms", "unit": "ms", "better": "lower", "side": "b", "baseline": [12.4], "candidate": [11.9],
        "label": "not comparable", "effect_pct": None, "low_pct": None, "high_pct": None, "adjusted_p": None,
        "comparisons": None, "why": got.rows[0].why,
    }  # fmt: skip


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path))
    return tmp_path


def finished(variant: str, args: dict[str, object], rates: dict[int, float], prompt_tokens: int = 64) -> Run:
    checked = make_variant(
        {"variant": variant, "server": {"model": "/m", "args": args}, "sweep": {"prompt_tokens": prompt_tokens}}, "test"
    )
    run = Run.start(checked)
    run.write_header({"provenance": {"host": "box", "hardware": "cpu", "versions": {"vllm": "0.32.0"}}})
    run.append("02_verify", "verdict_on_answers", {"ok": True})
    run.append("03_single_stream", "single_stream", {"ttft_ms": 50.0, "tpot_ms": 30.0})
    for concurrency, rate in rates.items():
        cell = {"concurrency": concurrency, "output_tok_s_plateau": rate}
        run.append("04_sweep", "sweep_cell", cell, key=str(concurrency))
    run.append("04_sweep", "sweep", {"best_tok_s": max(rates.values())})
    return run


def test_runs_of_one_server_are_launches_of_one_side(outputs: Path) -> None:
    base = [finished("v", {"max-num-seqs": 64}, {1: 30.0, 8: 200.0 + i}) for i in range(2)]
    other = [finished("v", {"max-num-seqs": 64, "enforce-eager": True}, {1: 33.0, 8: 230.0 + i}) for i in range(2)]
    got = compare_runs([run.path for run in (*base, *other)])
    assert {side: len(runs) for side, runs in got.sides.items()} == {"v": 2, "v (2)": 2}
    assert got.changes["v (2)"] == "args.enforce-eager: not set → true"
    assert [row.metric for row in got.rows] == ["ttft_ms", "tpot_ms", "tok_s at 1", "tok_s at 8"]
    assert got.rows[3].candidate == (230.0, 231.0)
    assert side_table(got).texts()[1][:3] == ["v (2)", "2", "args.enforce-eager: not set → true"]
    assert metric_table(got).texts()[3][:4] == ["throughput at 8", "v (2)", "200 tok/s", "230 tok/s"]
    assert (
        difference_table(got)
        == "Nothing else differs: same workload, host, hardware, versions and state of the answers."
    )


def test_runs_of_one_side_alone_are_compared_one_by_one(outputs: Path) -> None:
    first, second = (finished("v", {}, {1: 30.0}) for _ in range(2))
    assert list(compare_runs([first.path, second.path]).sides) == [first.path.name, second.path.name]


def test_other_prompts_are_not_compared(outputs: Path) -> None:
    got = compare_runs([finished("v", {}, {8: 200.0}).path, finished("w", {}, {8: 150.0}, prompt_tokens=512).path])
    assert {row.metric: bool(row.why) for row in got.rows} == {
        "ttft_ms": False, "tpot_ms": False, "tok_s at 8": True
    }  # fmt: skip


def test_the_command(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished("v", {}, {8: 200.0})
    finished("w", {"enforce-eager": True}, {8: 150.0})
    assert cli.call(["compare", "v", "w", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["baseline"] == "v"
    assert cli.call(["compare", "v", "w"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert cli.call(["compare", "v"]) == 2
    assert "name at least two" in capsys.readouterr().err
    assert cli.call(["compare", "v", "nowhere"]) == 2


def test_a_name_that_is_no_run(outputs: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: not a run's folder"):
        compare_runs(["nowhere", "v"])
