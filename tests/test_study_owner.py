"""An attached server whose owner gave commands: stopped for a measurement and started again, its files fetched."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfbook.desk import Desk
from perfbook.errors import BadInput, ServerFailed
from perfbook.params import make_variant
from perfbook.record.run import Run
from perfbook.server import commands
from perfbook.server.commands import ALLOWED
from perfbook.server.endpoints import Endpoints
from perfbook.server.ports import free_port, listeners
from perfbook.study import deploy, owner, tuning
from test_server_commands import BUSY, IDLE, SERVE

START = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[2:]], stdout=-3, stderr=-3)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""
STOP = "import os, pathlib, sys; os.kill(int(pathlib.Path(sys.argv[1]).read_text()), 9)"
LOG = Path(__file__).parent / "data" / "logs" / "vllm_0.32_cpu_tp3.log"
KEY = "sesame-open-8731"


class Owned:
    """Somebody's server and the parameter file that names its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port("127.0.0.1")

    def desk(self, notebook: str = "05_nccl_tuning", metrics: str = IDLE, **given: Any) -> Desk:
        pid = str(self.folder / "pid")
        words = {
            "start": [sys.executable, "-c", START, pid, SERVE, str(self.port), metrics],
            "stop": [sys.executable, "-c", STOP, pid],
        }
        server = {"base_url": f"http://127.0.0.1:{self.port}", "commands": {**words, **given}}
        tuned = {"settings": {"ll": {"env": {"NCCL_PROTO": "LL"}}}}
        variant = make_variant({"variant": "theirs", "server": server, "tuning": tuned}, "test")
        run = Run.start(variant)
        if not self.up():
            commands.run_command(variant, "start", run)
        return Desk(notebook, variant, run)

    def up(self) -> bool:
        return Endpoints(f"http://127.0.0.1:{self.port}").health()


@pytest.fixture
def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owned]:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    monkeypatch.setenv(ALLOWED, "1")
    made = Owned(tmp_path)
    yield made
    for one in listeners(made.port):
        os.kill(one.pid or 0, signal.SIGKILL)


def silent(text: str) -> None:
    """No progress wanted."""


def test_devices_are_free_inside_and_the_server_is_back_after_it_whatever_happens(owned: Owned) -> None:
    desk = owned.desk()
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), owner.devices_freed(desk, said.append) as kept:
        assert (kept, owned.up()) == ("", False)
        raise ZeroDivisionError
    assert owned.up()
    assert [line.split(":")[0] for line in said] == ["running", "running", "ready after 0 s"]
    assert [record["key"] for record in desk.run.records("owner_command")] == ["stop", "start"]


def test_nothing_is_stopped_without_the_flag_and_the_line_names_command_and_flag(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = owned.desk()
    monkeypatch.delenv(ALLOWED)
    with owner.devices_freed(desk, silent) as kept:
        assert owned.up()
    assert kept.startswith(
        "the server was not started here: its devices are its owner's; server.commands.stop would run '"
    )
    assert kept.endswith("': allow it with --allow-commands")


def test_a_busy_server_is_not_stopped(owned: Owned) -> None:
    with owner.devices_freed(owned.desk(metrics=BUSY), silent) as kept:
        assert owned.up()
    assert kept == f"http://127.0.0.1:{owned.port} works on 3 requests of others; not stopped"


def test_a_server_on_another_host_frees_nothing_here(owned: Owned) -> None:
    """Neither by name, nor behind a tunnel: its port is still held after it was stopped."""
    assert owned.desk().server().alive()
    desk = owned.desk(stop=["true"], start=["true"])
    with owner.devices_freed(desk, silent) as kept:
        assert f"its port is still held by pid {listeners(owned.port)[0].pid}" in kept
    server = desk.variant.server.model_copy(update={"base_url": "http://192.0.2.7:8000"})
    far = Desk(desk.notebook, desk.variant.model_copy(update={"server": server}), desk.run)
    assert owner.why_not_freed(far).endswith("its devices are its owner's, and on another host")


def test_05_measures_the_devices_of_a_stopped_server_and_relaunches_nothing(
    owned: Owned, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = owned.desk()
    up: list[bool] = []

    def measured(desk: Desk, served: object, *, freed: bool) -> str:
        up.append(owned.up())
        return "measured"

    monkeypatch.setattr("perfbook.study.bench.measure", measured)
    screening = tuning.measure_devices(desk, silent)
    assert (screening.devices, up, owned.up()) == ("measured", [False], True)
    assert screening.skipped == "not applicable: one rank sums nothing over others"
    [decision] = tuning.decide(desk, screening)
    assert (decision.relaunch, decision.why) == (
        False,
        "a relaunch with a setting needs a server that perfbook starts itself",
    )


def test_01_reads_the_log_that_the_owners_command_prints(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", KEY)
    script = f"import os; print(open({str(LOG)!r}).read()); print('api_key:', os.environ['THEIR_KEY'])"
    desk = owned.desk("01_deploy", read_log=[sys.executable, "-c", script])
    keyed = desk.variant.server.model_copy(update={"api_key_env": "THEIR_KEY"})
    desk = Desk("01_deploy", desk.variant.model_copy(update={"server": keyed}), desk.run)
    facts = deploy.read_log(desk, desk.server())
    assert (facts.tensor_parallel_size, facts.kv_cache_tokens) == (3, 139776)
    assert desk.run.record("engine") is not None
    assert "server-attached.log" in repr(deploy.engine_table(desk, facts))
    assert (desk.run.path / "server-attached.log").read_text().endswith("api_key: ***\n")
    assert not [path for path in desk.run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    described = owner.described(desk).server
    assert (described.model, described.args) == (facts.model, {"tensor-parallel-size": 3, "dtype": "bfloat16"})


def test_01_says_why_it_has_no_log(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = owned.desk("01_deploy", read_log=["journalctl", "-u", "vllm"])
    monkeypatch.delenv(ALLOWED)
    facts = deploy.read_log(desk, desk.server())
    assert not facts.recognised
    line = "server.commands.read_log would run 'journalctl -u vllm': allow it with --allow-commands"
    assert line in repr(deploy.engine_table(desk, facts))
    monkeypatch.setenv(ALLOWED, "1")
    failing = owned.desk("01_deploy", read_log=["sh", "-c", "echo no unit >&2; exit 4"])
    assert owner.read_log(failing) == "server.commands.read_log: sh ended with 4: no unit"


def test_06_fetches_the_traces_and_says_why_where_it_cannot(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import pathlib, sys; pathlib.Path(sys.argv[1], 'r0.pt.trace.json').write_text('{}')"
    desk = owned.desk("06_profiler_breakdown", collect_traces=[sys.executable, "-c", script, "{traces}"])
    assert owner.why_no_traces(desk) == ""
    owner.collect_traces(desk)
    assert [path.name for path in (desk.run.path / "traces").iterdir()] == ["r0.pt.trace.json"]
    monkeypatch.delenv(ALLOWED)
    assert owner.why_no_traces(desk).endswith("allow it with --allow-commands")
    owner.collect_traces(desk)
    monkeypatch.setenv(ALLOWED, "1")
    broken = owned.desk("06_profiler_breakdown", collect_traces=["false"])
    with pytest.raises(ServerFailed, match=r"server\.commands\.collect_traces: false ended with 1: it said nothing"):
        owner.collect_traces(broken)
    bare = owned.desk("06_profiler_breakdown")
    assert owner.why_no_traces(bare).startswith(
        "server.commands.collect_traces is missing: the owner of http://127.0.0.1"
    )


def test_the_flag_reaches_a_notebook_and_no_parameter_file_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "1")
    with commands.allowed(False):
        assert ALLOWED not in os.environ
        with commands.allowed(True):
            assert os.environ[ALLOWED] == "1"
        assert ALLOWED not in os.environ
    assert os.environ[ALLOWED] == "1"
    with pytest.raises(BadInput, match="args and env belong to a server that perfbook starts"):
        make_variant({"variant": "v", "server": {"base_url": "http://127.0.0.1:9", "env": {ALLOWED: "1"}}}, "test")


def test_start_that_never_serves_is_told(owned: Owned) -> None:
    desk = owned.desk()
    server = desk.variant.server.model_copy(update={
        "ready_timeout_s": 0.3, "commands": desk.variant.server.commands.model_copy(update={"start": ["true"]}),
    })  # fmt: skip
    mute = Desk("05_nccl_tuning", desk.variant.model_copy(update={"server": server}), desk.run)
    why = r"not ready 0 s after server\.commands\.start \(server\.ready_timeout_s\)"
    with pytest.raises(ServerFailed, match=why), owner.devices_freed(mute, silent):
        pass
