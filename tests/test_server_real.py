"""The real vLLM, through start → find → profile → faults → stop. Two launches serve all of it.

Nothing here asserts on speed. The last test of each launch ends it, so the order in the file is the order of the story.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from perfbook import paths
from perfbook.errors import BadInput, ServerFailed
from perfbook.params import Variant, load_variant
from perfbook.record.run import Run
from perfbook.server import catalog, ports, preflight, process, state, tree
from perfbook.server.liveness import Watch
from perfbook.server.log import parse_log
from perfbook.server.telemetry import Sampler

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(catalog.installed() is None, reason="no vLLM in this environment"),
]

PARAMS = paths.params() / "smollm2-135m-cpu.yaml"
PATIENCE_S = 240.0
Launched = tuple[Run, process.ServerHandle, list[str]]


def left_behind(run: Run) -> list[str]:
    """What is still there of everything that the run's server was ever seen to have."""
    known = state.read(run.path)
    assert known is not None
    return [
        *(str(one) for one in known.tree if one.alive),
        *(name for name in known.shared_memory if (Path("/dev/shm") / name).exists()),
        *([known.tmpdir] if Path(known.tmpdir).exists() else []),
        *(str(one) for one in ports.listeners(known.port)),
    ]


def variant(*overrides: str) -> Variant:
    return load_variant(PARAMS, ["server.port=0", *overrides])


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An own folder of runs, and at the end every server of it stopped."""
    before = os.environ.get("PERFBOOK_OUTPUTS")
    os.environ["PERFBOOK_OUTPUTS"] = str(tmp_path_factory.mktemp("outputs"))
    yield
    process.stop_everything(Run.every())
    if before is None:
        del os.environ["PERFBOOK_OUTPUTS"]
    else:
        os.environ["PERFBOOK_OUTPUTS"] = before


@pytest.fixture(scope="module")
def launched() -> Launched:
    """The first launch, with a key."""
    os.environ["PERFBOOK_TEST_KEY"] = "sesame-open-8731"
    chosen = variant("server.api_key_env=PERFBOOK_TEST_KEY")
    run = Run.start(chosen)
    said: list[str] = []
    return run, process.start(chosen, run, progress=said.append), said


def ask(handle: process.ServerHandle, tokens: int) -> requests.Response:
    return requests.post(
        f"{handle.base_url}/v1/completions",
        json={"model": handle.model, "prompt": "Count from 1 to 50.", "max_tokens": tokens, "ignore_eos": True},
        headers={"Authorization": f"Bearer {handle.api_key}"},
        timeout=PATIENCE_S,
    )


# --- the preflight against the installed vLLM -------------------------------------------------------------------------


def test_embedded_variant_passes():
    assert [one for one in preflight.check(variant()) if one.level == "error"] == []


def test_every_kind_of_mistake_is_found_in_one_check():
    problems = preflight.check(
        variant(
            "server.args.num-scheduler-steps=8",
            "server.args.swap-space=4",
            "server.args.enforce-egaer=true",
            "server.args.max_num_seqs=8",
            "server.args.tensor-parallel-size=2",
            "server.args.max-model-len=9000",
            "server.args.kv-cache-dtype=banana",
            "server.env.NCCL_P2P_LEVEL=SYSS",
            "server.env.VLLM_USE_V1=1",
            "server.env.VLLM_CPU_KVCACHE_SPACE=two",
        )
    )
    errors = {one.where: one for one in problems if one.level == "error"}
    assert set(errors) == {
        "server.args.num-scheduler-steps",
        "server.args.swap-space",
        "server.args.enforce-egaer",
        "server.args.max_num_seqs",
        "server.args.tensor-parallel-size",
        "server.args.max-model-len",
        "server.args.kv-cache-dtype",
        "server.env.NCCL_P2P_LEVEL",
        "server.env.VLLM_USE_V1",
        "server.env.VLLM_CPU_KVCACHE_SPACE",
    }
    assert errors["server.args.enforce-egaer"].do == "did you mean enforce-eager?"
    assert "invalid choice: 'banana'" in errors["server.args.kv-cache-dtype"].why


def test_engine_configuration_is_asked_and_no_launch_starts_with_an_error():
    chosen = variant("server.args.quantization=banana")
    run = Run.start(chosen)
    with pytest.raises(BadInput, match="vLLM refuses this configuration; Unknown quantization method: banana"):
        process.start(chosen, run)
    assert not (run.path / "server.json").exists()


# --- the first launch -------------------------------------------------------------------------------------------------


def test_started_with_progress_and_found_again(launched: Launched):
    run, handle, said = launched
    assert handle.alive()
    assert process.find(run) == handle
    assert said[-1].startswith("ready after")
    assert any("GB resident" in line for line in said)
    assert handle.endpoints.models() == [handle.model]
    assert handle.endpoints.context_tokens(handle.model) == 2048
    assert handle.endpoints.tokenize(handle.model, "Count from 1")
    with pytest.raises(BadInput, match="has a server running"):
        process.start(run.variant, run)


def test_log_says_what_it_became(launched: Launched):
    _, handle, _ = launched
    assert handle.log_path is not None
    facts = parse_log(handle.log_path.read_text(encoding="utf-8"))
    assert (facts.engine, facts.model, facts.first_error) == ("V1", str(Path(str(facts.model))), None)
    assert (facts.compile.active, facts.cuda_graphs.active) == (False, False)
    assert facts.kv_cache_tokens
    assert facts.ready_line


def test_counters_and_telemetry_of_a_request(launched: Launched):
    _, handle, _ = launched
    before = handle.endpoints.metrics()
    with Sampler(handle, every_s=0.1) as sampler:
        assert ask(handle, 16).status_code == 200
    grown = handle.endpoints.delta(before, handle.endpoints.metrics())
    assert (grown.values["generation_tokens_total"], grown.resets) == (16, ())
    assert sampler.summary["cpu"]["own_cores"] > 0
    json.dumps(sampler.summary, allow_nan=False)


def test_profiler_is_armed_and_writes_into_the_run(launched: Launched):
    run, handle, _ = launched
    assert handle.endpoints.can_profile()
    handle.endpoints.start_profile(iterations=4)
    with pytest.raises(ServerFailed, match="already being taken"):
        handle.endpoints.start_profile()
    assert ask(handle, 8).status_code == 200
    handle.endpoints.stop_profile(PATIENCE_S)
    assert len(list((run.path / "traces").glob("*rank0*.pt.trace.json.gz"))) == 1


def test_key_is_in_no_file_of_the_run(launched: Launched):
    run, handle, _ = launched
    assert requests.get(f"{handle.base_url}/v1/models", timeout=30).status_code == 401
    assert not [path for path in run.path.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]


def test_killed_worker_ends_the_server_and_stop_leaves_nothing(launched: Launched):
    run, handle, _ = launched
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    members = tree.tree_of(known.leader, known.tree)
    [worker] = [one for one in members if one.title.startswith("VLLM::Worker")]
    watch = Watch(handle.endpoints, handle)
    worker.send(signal.SIGKILL)
    wait_for(lambda: watch.look(in_flight=1).failed)
    assert process.stop(run).clean
    assert not any(one.alive for one in members)
    assert left_behind(run) == []
    assert process.stop(run).note == "no server to stop"


# --- the second launch ------------------------------------------------------------------------------------------------


def test_killed_api_server_orphans_the_engine_and_stop_takes_it_down():
    chosen = variant()
    run = Run.start(chosen)
    handle = process.start(chosen, run)
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    members = tree.tree_of(known.leader, known.tree)
    known.leader.send(signal.SIGKILL)
    wait_for(lambda: not handle.alive())
    assert any(one.alive for one in members if one.title.startswith("VLLM::"))
    assert process.find(run) is None
    report = process.stop(run)
    assert report.was_running
    assert report.clean
    assert not any(one.alive for one in members)
    assert left_behind(run) == []


# --- a launch that dies -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_death_for_lack_of_cache_names_the_cause():
    """Passes the preflight, since only the loaded engine knows how much memory there is."""
    chosen = variant("server.args.num-gpu-blocks-override=4", "server.args.max-model-len=4096")
    run = Run.start(chosen)
    with pytest.raises(ServerFailed, match=r"ValueError: To serve at least one request .*server-01\.log\)"):
        process.start(chosen, run)
    assert left_behind(run) == []
