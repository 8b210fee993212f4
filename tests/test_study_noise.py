"""The client's own noise: measured beside a sweep, and what it refuses to call an effect."""

from pathlib import Path
from typing import Any

import pytest

from perfbook.desk import Desk
from perfbook.params import make_variant
from perfbook.record.run import Run
from perfbook.report.table import Table
from perfbook.study import noise

ERRORS = {"mean": 0.01, "p99": 0.05, "max": 0.2}
FLOOR: dict[str, Any] = {
    "concurrency": 8, "tick_ms": 10.0, "tok_s": 800.0, "tokens": 100, "arrival_error_ms": ERRORS,
    "ttft_error_ms": {"mean": 0.3, "p99": 0.4, "max": 0.5}, "gap_error_ms": ERRORS, "merged_share": 0.0,
    "outside_interval": 0, "server_late_p99_ms": 0.1, "clock": "kernel", "relayed": False,
}  # fmt: skip


def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rehearsed: bool = False) -> Desk:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    variant = make_variant({"variant": "v", "server": {"base_url": "http://127.0.0.1:1"}}, "test")
    return Desk("04_sweep", variant, Run.start(variant, rehearsed=rehearsed))


def test_an_effect_within_the_clients_noise_is_refused() -> None:
    record = {"id": "r1", "kind": "null_run", **FLOOR}
    assert noise.refusal([record], 0.04, "gap") == (
        "an effect of 0.040 ms is within the client's own noise of 0.050 ms (gap, null run)"
    )
    assert noise.refusal([record], -0.06, "gap") == ""
    assert noise.refusal([record], 0.39, "ttft").endswith("own noise of 0.400 ms (ttft, null run)")
    assert noise.refusal([], 0.0, "gap") == ""  # without a null run nothing is known against it


def test_null_runs_are_recorded_at_the_cells_own_token_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "_SECONDS", 0.2)
    here = desk(tmp_path, monkeypatch)
    valid = {"validity": {"verdict": "valid", "reasons": []}}
    for streams, gap_ms in ((1, 4.0), (2, 5.0), (4, 8.0)):
        here.record("sweep_cell", {"concurrency": streams, "gap_ms": {"p50": gap_ms}, **valid}, key=str(streams))
    table = noise.measure(here, [4, 1, 1], lambda text: None)
    assert isinstance(table, Table)
    found = here.run.records("null_run")
    assert [(r["concurrency"], r["tick_ms"], r["tokens"]) for r in found] == [(1, 4.0, 50), (4, 8.0, 100)]
    assert all(record["outside_interval"] == 0 for record in found)


def test_no_null_run_in_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = desk(tmp_path, monkeypatch, rehearsed=True)
    assert "another" in noise.measure(here, [1], lambda text: None)
    assert here.run.records("null_run") == []
