"""An engine that hangs or dies under a measured cell: the cell ends as failed with the reason, and the launch is not
used again. Real servers: the stand-in, which has faults on request, and vLLM itself."""

from __future__ import annotations

import gzip
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfbook import paths
from perfbook.desk import Desk
from perfbook.errors import ServerFailed
from perfbook.params import Variant, load_variant, make_variant
from perfbook.record import findings
from perfbook.record.run import Run
from perfbook.server import catalog, liveness, process, state, tree
from perfbook.stream.cell import Cell
from perfbook.stream.workload import fixed_prompts
from perfbook.study import relaunch, sweep
from perfbook.study.load import LoadRequest, run_load

LAW: dict[str, Any] = {
    "model": {"max_model_len": 1024, "tensor_parallel": 1},
    "step": {"decode_ms": [[1, 2.0]], "prefill_floor_ms": 2.0},
    "limits": {"kv_cache_tokens": 4096},
    "load": {"compressed_s": 0.1},
}
HUNG = r"^the server is hung: requests are out and no engine step for \d+ s, though /metrics answers$"


@pytest.fixture(autouse=True)
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same watch with less patience; at the end nothing is left."""
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(liveness.Watch.__init__, "__kwdefaults__", {"patience_s": 1.5, "quiet_s": 0.5, "every_s": 0.2})
    monkeypatch.setattr("perfbook.stream.reconcile._POLLS", 3)  # a hung server's counters are never settled
    yield
    for run in Run.every():
        assert process.stop(run, grace_s=5).clean


def rehearsed(*faults: dict[str, Any]) -> tuple[Variant, Run]:
    """A stand-in with faults, in a run of its own."""
    sections = {
        "variant": "faulty",
        "server": {"model": "org/model", "port": 0, "stop_grace_s": 5},
        "workload": {"endpoint": "completions"},
        "sweep": {"concurrency": [1, 2], "repeats": 1, "prompt_tokens": 8, "output_tokens": 20},
        "rehearsal": {**LAW, "faults": list(faults)},
    }
    variant = make_variant(sections, "test")
    return variant, Run.start(variant, rehearsed=True)


def measure(desk: Desk, requests: int = 4) -> Cell:
    return desk.measure(
        fixed_prompts("count", requests), desk.shape(20), key="one", concurrency=2, requests=requests, warmup=1
    )


def test_an_engine_that_stalls_in_a_measured_cell() -> None:
    """20 tokens of warm-up and the first wave are answered; then no step, though /health and /metrics answer 200."""
    variant, run = rehearsed({"kind": "stall", "after_tokens": 65})
    desk = Desk("04_sweep", variant, run)
    handle = desk.server()
    with pytest.raises(ServerFailed, match=HUNG):
        measure(desk)
    assert handle.endpoints.health()
    [failed] = run.records("failed_cell")
    assert (failed["key"], failed["ok"], failed["errors"]) == ("one", 2, {"given_up": 2})
    assert failed["validity"]["verdict"] == "invalid"
    assert failed["reason"].startswith("the server is hung")
    assert (run.path / "requests.parquet").exists()
    # Nobody goes on with it: not this notebook; the next one starts another launch, and says so.
    assert (process.find(run), handle.alive()) == (None, False)
    with pytest.raises(ServerFailed, match=r"the server is hung.*run the notebook again to go on with a new launch"):
        desk.server()
    second = Desk("06_profiler_breakdown", variant, run).server()
    assert second.pid != handle.pid
    assert [one["title"] for one in findings.current(run)] == ["The server had failed and was started again"]


def test_an_engine_that_stalls_under_a_question() -> None:
    """02 does not wait ten minutes for each answer that cannot come."""
    variant, run = rehearsed({"kind": "stall", "after_tokens": 30})
    desk = Desk("02_verify", variant, run)
    shape = desk.shape(20, exact=False)
    assert desk.ask("count", shape).token_count == 20
    with pytest.raises(ServerFailed, match=HUNG):
        desk.ask("count", shape)
    assert process.find(run) is None


def test_an_engine_that_dies_under_a_question() -> None:
    variant, run = rehearsed({"kind": "die", "after_tokens": 5})
    desk = Desk("02_verify", variant, run)
    with pytest.raises(
        ServerFailed, match=r"^the server is dead: its process \d+ ended: torch\.AcceleratorError: CUDA"
    ):
        desk.ask("count", desk.shape(20, exact=False))
    assert process.find(run) is None


def test_a_question_refused_is_an_answer_with_its_error() -> None:
    variant, run = rehearsed()
    desk = Desk("02_verify", variant, run)
    answer = desk.ask("count", desk.shape(5000, exact=False))  # beyond max_model_len
    assert answer.error == "http_400"
    assert process.find(run) is not None


def test_a_sweep_ends_with_the_reason_and_keeps_what_it_has() -> None:
    variant, run = rehearsed({"kind": "stall", "after_tokens": 120})
    desk = Desk("04_sweep", variant, run)
    sweep.measure(desk, lambda text: None)
    assert [cell["concurrency"] for cell in run.records("sweep_cell")] == [1]
    [skipped] = run.records("sweep_skipped")
    assert [(cell["concurrency"], cell["repeat"]) for cell in skipped["cells"]] == [(2, 0)]
    assert skipped["ended"].startswith("the server is hung")
    said = repr(sweep.conclude(desk, sweep.load(desk)))
    assert said.startswith("The sweep ended early: the server is hung: requests are out and no engine step for ")
    titles = [one["title"] for one in findings.current(run)]
    assert "The server failed during the sweep: 1 cells were not measured" in titles
    assert not [title for title in titles if title.startswith("Nothing usable")]


def test_an_engine_that_dies_in_a_measured_cell() -> None:
    variant, run = rehearsed({"kind": "die", "after_tokens": 65})
    desk = Desk("04_sweep", variant, run)
    desk.server()
    with pytest.raises(
        ServerFailed, match=r"^the server is dead: its process \d+ ended: torch\.AcceleratorError: CUDA"
    ):
        measure(desk, requests=40)
    [failed] = run.records("failed_cell")
    assert failed["ok"] == 2
    assert process.find(run) is None


def test_failed_requests_alone_do_not_condemn_a_server() -> None:
    variant, run = rehearsed({"kind": "reset", "after_tokens": 2, "every": 2})
    desk = Desk("04_sweep", variant, run)
    cell = measure(desk)
    assert cell.summary["validity"]["verdict"] == "invalid"
    assert run.records("failed_cell") == []
    assert process.find(run) is not None


def test_a_front_end_that_hangs_is_dead_after_three_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfbook.server.endpoints.READ_S", 0.2)
    monkeypatch.setattr(liveness.Endpoints._request, "__kwdefaults__", {"read_s": 0.2})
    variant, run = rehearsed()
    desk = Desk("03_single_stream", variant, run)
    known = state.read(run.path)
    desk.server()
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    stopper = known.leader

    def stop_at_first_sign(text: str) -> None:
        stopper.send(signal.SIGSTOP)

    with pytest.raises(ServerFailed, match=r"the server is dead: no answer to 3 polls in a row: .*no answer in time"):
        desk.measure(
            fixed_prompts("count", 1), desk.shape(900), key="one", concurrency=1, requests=1,
            progress=stop_at_first_sign,
        )  # fmt: skip
    assert process.stop(run, grace_s=0.5).clean


def test_the_load_command_ends_where_a_server_hangs_and_reports_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfbook.study.load._own_error", lambda *measured: None)  # seconds, and not the question here
    variant, run = rehearsed({"kind": "stall", "after_tokens": 120})
    server = Desk("04_sweep", variant, run).server()
    plan = LoadRequest(server.base_url, server.model, [1, 2, 4], requests=4, max_tokens=20, prompt_tokens=8)
    report = run_load(plan)
    assert report.measured
    assert [cell.summary["concurrency"] for cell in report.cells] == [1, 2]
    assert report.cells[1].summary["validity"]["verdict"] == "invalid"
    assert any(note.startswith("ended at 2 streams: the server is hung") for note in report.notes)


def test_a_setting_that_hangs_is_left_out_and_the_baseline_is_up_at_the_end() -> None:
    """Every launch of this stand-in stalls after 50 tokens; the baseline's first cell is measured before."""
    variant, run = rehearsed({"kind": "stall", "after_tokens": 50})
    tuned = {"settings": {"hangs": {"env": {"NCCL_PROTO": "LL"}}}, "launches": 1, "requests_per_stream": 2}
    variant = make_variant({**variant.sections(), "tuning": tuned}, "test")
    desk = Desk("05_nccl_tuning", variant, run)
    desk.server()
    launches = relaunch.schedule(["hangs"], 1)
    assert [launch.setting for launch in launches] == ["hangs", "baseline"]
    with pytest.raises(
        ServerFailed, match=HUNG
    ):  # the baseline hangs as well: that ends 05, the setting alone does not
        relaunch.confirm(desk, relaunch.Plan(tuple(launches), 0.0), lambda text: None)
    [failed] = run.records("tuning_failed")
    assert (failed["setting"], failed["error"].partition(":")[0]) == ("hangs", "the server is hung")
    assert process.find(run) is None


def test_a_profile_that_is_being_taken_is_ended_before_its_server() -> None:
    """The traces are whole, and the note that a profile runs is gone."""
    variant, run = rehearsed()
    desk = Desk("06_profiler_breakdown", variant, run)
    handle = desk.server()
    handle.endpoints.start_profile(iterations=10)
    assert (run.path / ".profiling").exists()
    measure(desk)
    assert process.stop(run).clean
    assert not (run.path / ".profiling").exists()
    [written] = (run.path / "traces").iterdir()
    with gzip.open(written) as file:
        assert json.load(file)["traceEvents"]


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.mark.server
@pytest.mark.skipif(catalog.installed() is None, reason="no vLLM in this environment")
def test_vllm_whose_engine_core_is_stopped_and_then_killed_in_measured_cells() -> None:
    """One launch for both: after the stop it is let go on, and only by hand taken back into use."""
    variant = load_variant(paths.params() / "smollm2-135m-cpu.yaml", ["server.port=0"])
    run = Run.start(variant)
    desk = Desk("04_sweep", variant, run)
    handle = desk.server()
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    [engine] = [one for one in tree.tree_of(known.leader, known.tree) if one.title.startswith("VLLM::EngineCore")]

    def failed_cell(number: signal.Signals, why: str) -> float:
        """Seconds from the signal, sent a second after the cell began, until the cell has ended with the reason."""
        sent: list[float] = []

        def send(text: str) -> None:
            sent.append(time.monotonic())
            engine.send(number)

        with pytest.raises(ServerFailed, match=why):
            desk.measure(
                desk.prompts(16, 4, 1), desk.shape(400), key=number.name, concurrency=2, requests=4, progress=send
            )
        return time.monotonic() - sent[0]

    assert failed_cell(signal.SIGSTOP, HUNG) < 60  # patience is short here; the request's own deadline is ten minutes
    assert handle.endpoints.health()
    assert not handle.alive()
    engine.send(signal.SIGCONT)
    state.write(run.path, known)
    assert handle.alive()
    assert failed_cell(signal.SIGKILL, r"^the server is dead: ") < 60
    stopped, killed = run.records("failed_cell")
    assert (stopped["key"], stopped["errors"]) == ("SIGSTOP", {"given_up": 2})
    assert (killed["key"], killed["ok"]) == ("SIGKILL", 0)
    assert process.stop(run, grace_s=5).clean
    assert [one for one in known.tree if one.alive] == []
