"""make finds a Python that works, and its targets do what the README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAKE = shutil.which("make")
SHIM_WITHOUT_VERSION = "echo 'pyenv: python3.11: command not found' >&2; exit 127"
WITHOUT_VENV = 'case "$*" in *ensurepip*) exit 1;; esac; exit 0'
TOO_OLD = "exit 1"


def put(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    python = folder / name
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def find(cwd: Path, *folders: Path, **env: str) -> tuple[int, str, str]:
    """What setup/python.sh answers where only these folders are on PATH."""
    done = subprocess.run(
        ["/bin/sh", ROOT / "setup" / "python.sh"],
        cwd=cwd,
        env={"PATH": ":".join(map(str, folders)), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_passes_over_pythons_that_do_not_work(tmp_path: Path) -> None:
    put(tmp_path / "shims", "python3.11", SHIM_WITHOUT_VERSION)
    put(tmp_path / "debian", "python3.11", WITHOUT_VENV)
    put(tmp_path / "shims", "python3", TOO_OLD)
    right = put(tmp_path / "with a space", "python3.12", f'exec "{sys.executable}" "$@"')
    folders = [tmp_path / name for name in ("shims", "debian", "with a space")]
    assert find(tmp_path, *folders) == (0, str(right), "")


def test_prefers_3_11_wherever_it_is_on_the_path(tmp_path: Path) -> None:
    put(tmp_path / "first", "python3.13", "exit 0")
    put(tmp_path / "first", "python3", "exit 0")
    right = put(tmp_path / "second", "python3.11", "exit 0")
    assert find(tmp_path, tmp_path / "first", tmp_path / "second") == (0, str(right), "")


def test_an_existing_environment_keeps_its_python(tmp_path: Path) -> None:
    put(tmp_path / "bin", "python3.11", "exit 0")
    (tmp_path / ".venv").mkdir()
    put(tmp_path / ".venv" / "bin", "python", "exit 0")
    assert find(tmp_path, tmp_path / "bin") == (0, ".venv/bin/python", "")


def test_debian_python_without_venv_is_told(tmp_path: Path) -> None:
    bare = put(tmp_path / "bin", "python3.11", WITHOUT_VENV)
    status, out, said = find(tmp_path, tmp_path / "bin")
    assert (status, out) == (1, "")
    assert said == (
        f"{bare} has no venv module: install it (Debian, Ubuntu: apt install python3-venv), or set PYTHON=/path"
    )


def test_no_python_is_told(tmp_path: Path) -> None:
    put(tmp_path / "bin", "python3", TOO_OLD)
    status, out, said = find(tmp_path, tmp_path / "bin")
    assert (status, out) == (1, "")
    assert said.startswith("no Python 3.11 to 3.14 on PATH: install one")


def test_python_that_is_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    wished = put(tmp_path / "bin", "mine", "exit 0")
    assert find(tmp_path, PYTHON=str(wished)) == (0, str(wished), "")
    status, _, said = find(tmp_path, PYTHON="/nowhere/python")
    assert status == 1
    assert said.startswith("PYTHON=/nowhere/python does not run, is not CPython 3.11 to 3.14, or lacks")


def make(*arguments: str, **env: str) -> str:
    if MAKE is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        [MAKE, *arguments], cwd=ROOT, env=environment | env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_help_lists_every_target_for_users() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    listed = [line.split()[1] for line in make().splitlines()]
    assert sorted(listed) == sorted(set(targets[1].split()) - {"setup-test"})


def test_engine_chooses_packages_and_variant() -> None:
    gpu = make("-n", "report", "ENGINE=cuda")
    assert '--engine "cuda"' in gpu
    assert 'perfbook run "params/smollm2-135m-cuda.yaml"' in gpu
    own = make("-n", "report", "ENGINE=cpu", "VARIANT=mine")
    assert '--engine "cpu"' in own
    assert 'perfbook run "params/mine.yaml"' in own
    assert "--tests" not in own


def test_a_driver_on_the_path_means_gpu(tmp_path: Path) -> None:
    put(tmp_path, "nvidia-smi", "exit 0")
    assert "smollm2-135m-cpu" in make("-n", "report", PATH=f"{os.environ['PATH']}")
    put(tmp_path, "nvidia-smi", "echo 'GPU 0: some device'")
    assert "smollm2-135m-cuda" in make("-n", "report", PATH=f"{tmp_path}:{os.environ['PATH']}")
