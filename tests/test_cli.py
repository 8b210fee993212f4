"""The command line's contract: exit codes, one-line errors, JSON on standard output."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from perfbook import paths
from perfbook.cli import app, call

LOG = (
    "INFO 11-30 21:22:19 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='m', enforce_eager=True\n"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def own_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))


LOAD = ["load", "--base-url", "http://127.0.0.1:9", "--model", "m", "--requests", "1", "--max-tokens", "1"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "none.yaml"], 2, "none.yaml: cannot be read (No such file or directory)"),
        (["run"], 2, "Missing argument"),
        (["check", "none.yaml"], 2, "none.yaml: cannot be read"),
        (["fly"], 2, "No such command 'fly'"),
        (["log", "none.log"], 2, "none.log: cannot be read"),
        (["log", "/dev/urandom"], 2, "/dev/urandom: a device, not a log"),
        (["log", "a\udcffb"], 2, "the argument 'a\\udcffb' is not text in this terminal's encoding"),
        (["trace", "none.json"], 2, "none.json"),
        (["stop", "nowhere"], 2, "nowhere: not a run's folder"),
        (["report", "nowhere"], 2, "nowhere: not a run's folder"),
        ([*LOAD, "--concurrency", "1,x"], 2, "--concurrency '1,x': write whole numbers with commas"),
        ([*LOAD, "--concurrency", "0"], 2, "each must be at least 1"),
        ([*LOAD, "--concurrency", "1", "--api-key-env", "PB_NO_SUCH"], 2, "the variable PB_NO_SUCH is not set"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(arguments) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_an_unknown_key_names_line_and_neighbour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("variant: x\nserver:\n  modell: m\n")
    assert call(["run", str(path)]) == 2
    assert capsys.readouterr().err == f"perfbook: {path}:3: unknown key 'server.modell'; did you mean 'model'?\n"


def test_a_base_url_that_is_not_there_fails_with_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    arguments = [url if word.startswith("http") else word for word in LOAD]
    assert call([*arguments, "--concurrency", "1", "--warmup", "0"]) == 1
    said = capsys.readouterr()
    assert "refused" in said.out + said.err


def test_log_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    assert call(["log", str(path), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vllm_version"] == "0.32.0"
    assert facts["compile"]["active"] is False


def test_json_into_a_file_leaves_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG)
    assert call(["log", str(path), "--json", str(tmp_path / "facts.json")]) == 0
    assert json.loads((tmp_path / "facts.json").read_text())["vllm_version"] == "0.32.0"
    assert "0.32.0" in capsys.readouterr().out


def test_nothing_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["stop"]) == 0
    assert capsys.readouterr().out == "no server of ours is running\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "none.yaml"], debug=True) == 2
    assert "Traceback" in capsys.readouterr().err


def test_as_a_process_without_a_reader() -> None:
    """A closed pipe ends it quietly."""
    command = [sys.executable, "-m", "perfbook", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_terminal_that_lacks_a_character_gets_the_rest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perfbook", "log", "/nowhere/é"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "1"}
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (
        2,
        b"perfbook: /nowhere/\\xe9: cannot be read (No such file or directory)\n",
    )
    banner = "Initializing a V1 LLM engine (v0.32.0) with config: model='/models/µ', dtype=torch.bfloat16"
    (tmp_path / "server.log").write_text(f"INFO 12-01 10:00:00 [core.py:1] {banner}\n", encoding="utf-8")
    command = [sys.executable, "-m", "perfbook", "log", str(tmp_path / "server.log")]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=environment)
    assert done.returncode == 0
    assert b"/models/\\xb5" in done.stdout


def test_a_json_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, said in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "cannot be written")):
        assert call([*LOAD, "--concurrency", "1", "--json", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_every_command_is_in_the_readme() -> None:
    readme = (paths.repository() / "README.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        assert re.search(rf"perfbook {command.callback.__name__}\b", readme), command.callback.__name__


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (paths.repository() / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", (paths.repository() / "README.md").read_text(), flags=re.M)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
