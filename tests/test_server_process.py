"""Start, find, stop and every way in which it goes wrong, on a cheap process tree with a real server's habits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from perfbook.cli import call
from perfbook.desk import Desk
from perfbook.errors import BadInput, ServerFailed
from perfbook.params import Variant, make_variant
from perfbook.record import findings
from perfbook.record.run import Run
from perfbook.server import launch, ports, preflight, process, state, tree

STANDIN = Path(__file__).parent / "data" / "standin_tree.py"
SHM = Path("/dev/shm")


def make(habits: str = "", **server: object) -> Variant:
    section = {"model": "org/standin", "port": 0, "env": {"STANDIN": habits}, "stop_grace_s": 5, **server}
    return make_variant({"variant": "standin", "server": section}, "test")


@pytest.fixture(autouse=True)
def cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in instead of vLLM, and at the end nothing of it left on the machine."""
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(launch, "entry_point", lambda: [sys.executable, "-S", str(STANDIN), "--model"])
    monkeypatch.setattr(preflight, "require", lambda variant, **settings: [])
    yield
    for run in Run.every():
        process.stop(run)
    assert leftovers(str(tmp_path)) == []
    for path in SHM.glob("psm_standin_*"):  # of an engine that its own parent killed before anybody had seen it
        if tree.process(int(path.name.rpartition("_")[2])) is None:
            path.unlink(missing_ok=True)


def leftovers(outputs: str) -> list[str]:
    """Processes, temporary folders and shared memory of this test's servers; others on this machine have their own."""
    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    titles = {pid: title for pid in pids if STANDIN.name in (title := full_title(pid)) and outputs in title}
    known = [one for run in Run.every() if (one := state.read(run.path)) is not None]
    return [
        *titles.values(),
        *(one.tmpdir for one in known if Path(one.tmpdir).name.startswith("pb-") and Path(one.tmpdir).exists()),
        *(str(SHM / name) for one in known for name in one.shared_memory if (SHM / name).exists()),
        *(str(path) for pid in titles for path in SHM.glob(f"psm_standin_{pid}")),
    ]


def full_title(pid: str) -> str:
    """The whole command line: it names the run's folder, as the place of the traces."""
    try:
        return (Path("/proc") / pid / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def members(run: Run) -> list[tree.Process]:
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    return tree.tree_of(known.leader, known.tree)


def wait_for(condition: object, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def settled(run: Run) -> list[tree.Process]:
    """API server, engine core and worker, once all three of it are there and have made their shared memory."""
    wait_for(lambda: len(members(run)) == 3 and len(tree.shared_memory(members(run))) == 2)
    return sorted(members(run), key=lambda one: len(psutil.Process(one.pid).parents()))  # numbers may have wrapped


# --- the normal way ---------------------------------------------------------------------------------------------------


def test_start_find_stop_leaves_nothing():
    variant = make()
    run = Run.start(variant)
    said: list[str] = []
    handle = process.start(variant, run, progress=said.append)
    assert (handle.model, handle.owned, handle.alive()) == ("standin", True, True)
    assert process.find(run) == handle
    assert handle.endpoints.models() == ["standin"]
    assert said[-1].startswith("ready after")
    settled(run)
    report = process.stop(run)
    assert report.was_running
    assert report.clean
    assert len(report.removed) == 3  # two shared-memory files and the temporary folder
    assert (process.find(run), handle.alive()) == (None, False)
    assert process.stop(run).note == "no server to stop"
    assert process.stop(handle).note == "no server to stop"
    assert [path.name for path in run.path.glob("server-*.log")] == ["server-01.log"]


def test_server_json_is_complete_before_ready_and_masked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "sesame-open-8731")
    variant = make("silent", api_key_env="MY_KEY", ready_timeout_s=1.0)
    run = Run.start(variant)
    with pytest.raises(ServerFailed, match=r"not ready after 1 s \(server.ready_timeout_s\), last: starting; log: "):
        process.start(variant, run, extra_env={"HF_TOKEN": "hf_sesame"})
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    assert known.stage == "stopped"
    assert known.reason.startswith("not ready after 1 s")
    assert known.environment["HF_TOKEN"] == "***"
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != "run.json")
    assert b"sesame" not in written


def test_second_start_is_refused_while_the_first_runs():
    variant = make()
    run = Run.start(variant)
    handle = process.start(variant, run)
    with pytest.raises(BadInput, match="has a server running; use it, or stop it first"):
        process.start(variant, run)
    assert handle.alive()


def test_restart_gets_a_new_log():
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    process.stop(run)
    assert process.start(variant, run).log_path == run.path / "server-02.log"


STARTER = """
import sys
from pathlib import Path
from perfbook.params import make_variant
from perfbook.record.run import Run
from perfbook.server import launch, preflight, process
launch.entry_point = lambda: [sys.executable, "-S", sys.argv[1], "--model"]
preflight.require = lambda variant, **settings: []
run = Run(Path(sys.argv[2]))
{before}
try:
    handle = process.start(run.variant, run, progress=lambda text: print(text, flush=True))
    print("pid", handle.pid, flush=True)
except BaseException as error:
    print(type(error).__name__, error, flush=True)
"""


def starter(run: Run, before: str = "") -> subprocess.Popen[str]:
    """Another interpreter that starts the run's server; so does a notebook's kernel."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER).format(before=before), str(STANDIN), str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_server_outlives_its_starter_and_is_found_and_stopped_from_here():
    run = Run.start(make())
    out, _ = starter(run).communicate(timeout=60)
    handle = process.find(run)
    assert handle is not None
    assert f"pid {handle.pid}" in out
    assert process.stop(run).was_running


def test_attached_server_is_never_stopped():
    variant = make()
    run = Run.start(variant)
    owned = process.start(variant, run)
    theirs = make_variant({"variant": "theirs", "server": {"base_url": owned.base_url + "/v1"}}, "test")
    attached = process.attach(theirs)
    assert (attached.model, attached.owned, attached.pid, attached.alive()) == ("standin", False, None, True)
    assert process.stop(attached).note == "not started by perfbook; left running"
    assert owned.alive()


def test_attach_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    port = ports.free_port("127.0.0.1")
    gone = {"variant": "x", "server": {"base_url": f"http://127.0.0.1:{port}"}}
    with pytest.raises(ServerFailed, match=f"http://127.0.0.1:{port}/v1/models: connection refused"):
        process.attach(make_variant(gone, "test"))
    variant = make()
    owned = process.start(variant, Run.start(variant))
    other = {"variant": "x", "server": {"base_url": owned.base_url, "served_name": "gpt"}}
    with pytest.raises(BadInput, match=r"serves standin, not 'gpt'"):
        process.attach(make_variant(other, "test"))


def test_stop_everything_reports_only_what_was_there():
    variants = [make(), make()]
    runs = [Run.start(variant) for variant in variants]
    process.start(variants[0], runs[0])
    reports = process.stop_everything(runs)
    assert [report.run for report in reports] == [runs[0].name]


def test_stop_from_the_command_line_finds_what_any_run_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    runs = [Run.start(make("silent")), Run.start(make())]
    for run in runs:
        begun = starter(run)
        wait_for(lambda run=run: (known := state.read(run.path)) is not None and len(known.tree) == 3)
        begun.kill()
        begun.communicate()
    assert call(["stop"]) == 0
    out = capsys.readouterr().out
    assert all(f"{run.name}: stopped in " in out for run in runs)
    assert call(["stop"]) == 0
    assert capsys.readouterr().out == "no server of ours is running\n"
    monkeypatch.setattr(process, "stop_everything", lambda runs: [process.StopReport("v/1", left=("pid 7 (x)",))])
    assert call(["stop"]) == 1
    assert "could not be removed: pid 7 (x)" in capsys.readouterr().out


# --- the fault table --------------------------------------------------------------------------------------------------


def test_death_while_loading_is_reported_with_the_logs_first_error():
    variant = make("dies")
    run = Run.start(variant)
    with pytest.raises(
        ServerFailed, match=r"died while starting: ValueError: no room for the cache \(line 2 of .*server-01\.log\)"
    ):
        process.start(variant, run)
    assert process.find(run) is None


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["API server", "engine core", "worker"])
def test_killed_part_of_the_tree(victim: int):
    """vLLM's engine core does not watch its API server: what is orphaned holds the devices."""
    variant = make()
    run = Run.start(variant)
    handle = process.start(variant, run)
    parts = settled(run)
    parts[victim].send(signal.SIGKILL)
    wait_for(lambda: not parts[victim].alive)
    if victim == 0:
        assert (handle.alive(), process.find(run)) == (False, None)
        assert [one.alive for one in parts] == [False, True, True]
    report = process.stop(run)
    assert report.was_running
    assert report.clean
    assert not any(one.alive for one in parts)


def test_a_server_that_died_is_told_from_one_that_was_stopped():
    """A notebook that used it must not go on with another launch; the next one starts one and says so."""
    variant = make()
    run = Run.start(variant)
    desk = Desk("04_sweep", variant, run)
    first = desk.server()
    assert (process.died(run), desk.counters()) == (None, None)
    parts = settled(run)
    parts[0].send(signal.SIGKILL)
    wait_for(lambda: not parts[0].alive)
    assert process.died(run) == "the server died (its log names no error; log: server-01.log)"
    with pytest.raises(ServerFailed, match="run the notebook again to go on with a new launch"):
        desk.server()
    second = Desk("06_profiler_breakdown", variant, run).server()
    assert second.base_url != first.base_url
    assert [found["title"] for found in findings.current(run)] == ["The server had failed and was started again"]
    process.stop(run)
    assert process.died(run) is None


def test_orphan_that_nobody_had_seen():
    """The API server dies before anybody looked at its tree: what it leaves is known by session and folder."""
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    parts = settled(run)
    known = state.read(run.path)
    assert known is not None
    assert known.leader is not None
    state.write(run.path, dataclasses.replace(known, tree=(known.leader,), shared_memory=()))
    known.leader.send(signal.SIGKILL)
    tree.reap()
    wait_for(lambda: not parts[0].alive)
    report = process.stop(run)
    assert report.was_running
    assert report.clean
    assert not any(one.alive for one in parts)


def test_stopped_process_is_killed_in_the_end():
    """SIGSTOP: a hung process takes no polite signal."""
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    parts = settled(run)
    for one in parts:
        one.send(signal.SIGSTOP)
    report = process.stop(run, grace_s=0.2)
    assert len(report.killed) == 3
    assert not any(one.alive for one in parts)


def test_stubborn_tree_is_killed_after_the_grace():
    variant = make("stubborn")
    run = Run.start(variant)
    process.start(variant, run)
    settled(run)
    report = process.stop(run, grace_s=0.3)
    assert len(report.killed) == 3
    assert report.clean


def test_stale_server_json_does_not_harm_the_new_owner_of_the_number():
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    process.stop(run)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        known = state.read(run.path)
        now = tree.process(bystander.pid)
        assert known is not None
        assert now is not None
        older = tree.Process(bystander.pid, now.start_ticks - 1, "the server that had this number before")
        state.write(run.path, dataclasses.replace(known, stage="ready", leader=older, tree=(older,)))
        assert process.find(run) is None
        report = process.stop(run)
        assert (report.was_running, report.clean, bystander.poll()) == (False, True, None)
    finally:
        bystander.kill()
        bystander.wait()


def test_server_json_of_another_machine_or_boot():
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    process.stop(run)
    known = state.read(run.path)
    assert known is not None
    state.write(run.path, dataclasses.replace(known, stage="ready", boot="another", host="gpu-box"))
    assert process.stop(run).note == "its server was started on gpu-box; stop it there"
    state.write(run.path, dataclasses.replace(known, stage="ready", boot="another"))
    assert process.stop(run).note == "the machine was restarted since; nothing runs"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"leader": {"pid": "x"}}', "\0" * 100])
def test_broken_server_json_is_no_server(text: str):
    run = Run.start(make())
    (run.path / "server.json").write_text(text)
    assert process.find(run) is None
    assert process.stop(run).note == "no server to stop"


def test_killed_starter_leaves_a_server_that_stop_finds():
    run = Run.start(make("silent"))
    begun = starter(run)
    wait_for(lambda: (known := state.read(run.path)) is not None and len(known.tree) == 3)
    begun.kill()
    begun.communicate()
    parts = members(run)
    assert len(parts) == 3
    assert process.find(run) is None  # alive, but it was never ready
    assert process.stop(run).was_running
    assert not any(one.alive for one in parts)


def test_starter_killed_before_it_could_write_the_number():
    """The mark in the environment finds the process; the tree follows from it."""
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    settled(run)
    known = state.read(run.path)
    assert known is not None
    state.write(run.path, dataclasses.replace(known, stage="starting", leader=None, tree=(), shared_memory=()))
    report = process.stop(run)
    assert report.was_running
    assert report.clean


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_loading(times: int):
    run = Run.start(make("silent,stubborn"))
    begun = starter(run)
    wait_for(lambda: (known := state.read(run.path)) is not None and len(known.tree) == 3)
    parts = members(run)
    for _ in range(times):
        begun.send_signal(signal.SIGINT)
    out, _ = begun.communicate(timeout=60)
    assert "KeyboardInterrupt" in out
    assert not any(one.alive for one in parts)
    known = state.read(run.path)
    assert known is not None
    assert (known.stage, known.reason) == ("stopped", "KeyboardInterrupt")


def test_full_disk():
    """The kernel refuses to write more than two kilobytes to any file: neither the record nor the log can be kept."""
    run = Run.start(make())
    limit = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))"
    out, _ = starter(run, limit).communicate(timeout=60)
    assert "ServerFailed" in out
    assert "File too large; nothing was left running" in out


def test_full_disk_after_the_process_started():
    run = Run.start(make())
    limit = textwrap.dedent("""
        import resource
        from perfbook.server import state
        write = state.write
        def count(folder, known, seen=[]):
            seen.append(1)
            if len(seen) == 2:
                resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
            write(folder, known)
        state.write = count
    """)
    out, _ = starter(run, limit).communicate(timeout=60)
    assert "File too large; nothing was left running" in out


def test_taken_port_is_refused_with_who_has_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        variant = make(port=port)
        with pytest.raises(BadInput, match=rf"server\.port: {port} is held by pid {os.getpid()} \("):
            process.start(variant, Run.start(variant))


def test_port_taken_between_check_and_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perfbook.server.start._port", lambda host, port: port)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variant = make(port=taken.getsockname()[1])
        with pytest.raises(ServerFailed, match="Address already in use"):
            process.start(variant, Run.start(variant))


def test_stale_server_on_the_port_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch):
    """Healthy, and it even serves the same name: but the listener is not in our tree."""
    first = make()
    stale = process.start(first, Run.start(first))
    monkeypatch.setattr("perfbook.server.start._port", lambda host, port: port)
    port = int(stale.base_url.rpartition(":")[2])
    variant = make("silent", port=port, ready_timeout_s=1.0)
    with pytest.raises(ServerFailed, match=rf"port {port} is held by pid {stale.pid} \(.*\), which is not ours"):
        process.start(variant, Run.start(variant))
    assert stale.alive()


def test_foreign_shared_memory_is_listed_and_untouched():
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    foreign = SHM / f"psm_foreign_{os.getpid()}"
    foreign.write_bytes(b"x")
    try:
        report = process.stop(run)
        assert str(foreign) in report.foreign
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_openmp_file_of_an_earlier_owner_of_a_number_is_not_ours():
    """Numbers are reused; the runtime's file of a killed process stays, and is older than the newcomer."""
    newcomer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    file = SHM / f"__KMP_REGISTERED_LIB_{newcomer.pid}_7"
    try:
        one = tree.process(newcomer.pid)
        assert one is not None
        file.write_text("x")
        assert tree.shared_memory([one]) == {file.name}
        os.utime(file, (time.time() - 60, time.time() - 60))
        assert tree.shared_memory([one]) == set()
    finally:
        newcomer.kill()
        newcomer.wait()
        file.unlink()


def test_temporary_folder_without_our_mark_is_not_removed(tmp_path: Path):
    """A damaged server.json must not become a way to delete somebody's folder."""
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    process.stop(run)
    precious = tmp_path / "precious"
    precious.mkdir()
    known = state.read(run.path)
    assert known is not None
    state.write(run.path, dataclasses.replace(known, stage="ready", tmpdir=str(precious)))
    assert process.stop(run).clean
    assert precious.exists()


def cycles(count: int) -> None:
    variant = make()
    run = Run.start(variant)
    process.start(variant, run)
    process.stop(run)  # the first one imports and opens what stays
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(count):
        process.start(variant, run)
        assert process.stop(run).clean
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert tree.tree_of(tree.Process(os.getpid(), -1), ()) == []
    assert json.loads((run.path / "server.json").read_text())["stage"] == "stopped"


def test_cycles_leak_nothing():
    cycles(5)


@pytest.mark.long
def test_fifty_cycles_leak_nothing():
    cycles(50)
