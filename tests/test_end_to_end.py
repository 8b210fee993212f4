"""The main job on the real vLLM: every notebook of the embedded variant, small, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from perfbook import paths
from perfbook.record import jsonl

pytestmark = pytest.mark.server

SMALL = [
    "single_stream={output_tokens: [12, 24], repeats: 2}",
    "sweep={concurrency: [1, 4], prompt_tokens: 32, output_tokens: 12, requests_per_stream: 2, repeats: 1}",
    "profile={concurrency: [1], iterations: 6, output_tokens: 12}",
]


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("vllm_*")}


def serves(pid: int) -> bool:
    """Whether a process is a vLLM that runs; one that has ended and is not reaped yet holds nothing."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "vllm" in " ".join(process.cmdline()).lower()
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One whole run through the command line."""
    folder = tmp_path_factory.mktemp("campaign")
    before = shared_memory()
    command = [sys.executable, "-m", "perfbook", "run", str(paths.params() / "smollm2-135m-cpu.yaml")]
    command += [word for value in SMALL for word in ("--set", value)]
    environment = {"PERFBOOK_OUTPUTS": str(folder / "outputs"), "PERFBOOK_LOCK": str(folder / "lock")}
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )
    path = next((folder / "outputs" / "smollm2-135m-cpu").glob("2*"))
    return {"done": done, "path": path, "shared_memory": shared_memory() - before}


def test_every_notebook_completed(finished: dict[str, Any]) -> None:
    assert finished["done"].returncode == 0, finished["done"].stderr
    entries = json.loads((finished["path"] / "run.json").read_text())["notebooks"]
    assert {entry["status"] for entry in entries} == {"completed"}
    assert [entry["notebook"] for entry in entries] == sorted(path.stem for path in paths.notebooks().glob("0*.ipynb"))


def test_the_reports_path_is_printed_and_the_report_is_whole(finished: dict[str, Any]) -> None:
    report = Path(finished["done"].stdout.strip())
    assert report == finished["path"] / "report.html"
    page = report.read_text()
    assert page.count("<figure") >= 5  # what the notebooks' cells evaluate to is in the page
    assert page.count('<table class="pb-table"') >= 10
    assert str(Path.home()) not in page


def test_the_summary_holds_measured_numbers(finished: dict[str, Any]) -> None:
    summary = json.loads((finished["path"] / "summary.json").read_text())
    assert summary["answers"] == "verified"
    assert summary["rehearsed"] is False
    assert set(summary["single_stream"]["blended_tok_s"]) == {"12", "24"}
    assert summary["single_stream"]["ttft_ms"] > 0
    assert summary["single_stream"]["decode_tok_s"] == pytest.approx(1000 / summary["single_stream"]["tpot_ms"])
    assert [cell["concurrency"] for cell in summary["sweep"]["cells"]] == [1, 4]
    assert summary["profile"][0]["concurrency"] == 1
    assert {target["met"] for target in summary["targets"]} <= {True, False}
    assert summary["engine"]["compile"]["active"] is False
    assert summary["engine"]["vllm_version"]


def test_token_sums_agree_with_the_server(finished: dict[str, Any]) -> None:
    cells = [r for r in jsonl.read(finished["path"] / "records.jsonl") if r["kind"] == "sweep_cell"]
    assert len(cells) == 2
    for cell in cells:
        tokens = next(row for row in cell["reconciliation"] if row["quantity"] == "output tokens")
        assert tokens["client"] == tokens["server"] == cell["concurrency"] * 2 * 12
        assert cell["clock"] == "kernel"


def test_the_tables_hold_every_request_and_token(finished: dict[str, Any]) -> None:
    requests = pq.read_table(finished["path"] / "requests.parquet").to_pandas()
    events = pq.read_table(finished["path"] / "events.parquet").to_pandas()
    measured = requests[requests.cell.str.startswith("04_sweep")]
    assert len(measured) == 2 + 8
    assert (measured.output_tokens == 12).all()
    assert (measured.prompt_tokens_asked == 32).all()
    tokens = events[events.cell.str.startswith("04_sweep")].tokens.sum()
    assert tokens == 12 * len(measured)


def test_nothing_is_left_behind(finished: dict[str, Any]) -> None:
    server = json.loads((finished["path"] / "server.json").read_text())
    pids = {server.get("pid"), *(process["pid"] for process in server.get("tree", []))} - {None}
    assert pids
    assert not [pid for pid in pids if serves(pid)]
    assert finished["shared_memory"] == set()
