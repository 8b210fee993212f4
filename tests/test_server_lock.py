"""The per-host lock: real processes, real flock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfbook.errors import BadInput, MeasurementFailed
from perfbook.record.lock import WORD_VARIABLE, host_lock

TRY = """
import sys
from perfbook.record.lock import host_lock
from perfbook.errors import PerfbookError
try:
    with host_lock("the child") as held:
        print("nested" if held.nested else "own", flush=True)
        if len(sys.argv) > 1:
            sys.stdin.readline()
except PerfbookError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "host.lock"
    monkeypatch.setenv("PERFBOOK_LOCK", str(path))
    monkeypatch.delenv(WORD_VARIABLE, raising=False)
    return path


def child(*, word: bool = True) -> str:
    environment = dict(os.environ)
    if not word:
        environment.pop(WORD_VARIABLE, None)
    done = subprocess.run([sys.executable, "-c", TRY], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_second_is_told_who_measures_and_what():
    with host_lock("sweep of kimi"):
        refused = child(word=False)
    assert refused.startswith(f"another measurement runs on this host: pid {os.getpid()} (sweep of kimi, since 20")
    assert "\n" not in refused
    assert child() == "own"


def test_children_of_the_holder_measure_on_its_behalf():
    with host_lock("outer"):
        assert child() == "nested"
        with host_lock("inner") as held:
            assert held.nested
    assert WORD_VARIABLE not in os.environ


def test_word_alone_is_not_enough(own_lock: Path, monkeypatch: pytest.MonkeyPatch):
    """The word copied into a process that the holder did not start."""
    holder = subprocess.Popen(
        [sys.executable, "-c", TRY, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "own\n"
        monkeypatch.setenv(WORD_VARIABLE, json.loads(own_lock.read_text())["word"])
        with pytest.raises(MeasurementFailed, match=f"pid {holder.pid}"), host_lock("mine"):
            pass
    finally:
        holder.communicate("\n", timeout=30)


def test_lock_of_a_killed_holder_is_free_and_said_to_be_abandoned():
    holder = subprocess.Popen(
        [sys.executable, "-c", TRY, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "own\n"
    holder.kill()
    holder.communicate(timeout=30)
    with host_lock("next") as held:
        assert held.abandoned is not None
        assert (held.abandoned.pid, held.abandoned.what, held.abandoned.alive) == (holder.pid, "the child", False)
    with host_lock("after a clean end") as held:
        assert held.abandoned is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "\x00" * 5000])
def test_garbage_in_the_file_does_not_matter(own_lock: Path, text: str):
    own_lock.write_text(text)
    with host_lock("mine") as held:
        assert held.abandoned is None
    assert own_lock.read_text() == ""


def test_symlink_is_refused_and_its_target_untouched(own_lock: Path, tmp_path: Path):
    target = tmp_path / "precious"
    target.write_text("text")
    own_lock.symlink_to(target)
    with pytest.raises(BadInput, match=r"host\.lock: cannot be the lock"), host_lock("mine"):
        pass
    assert target.read_text() == "text"


def test_fifo_is_refused_without_waiting(own_lock: Path):
    os.mkfifo(own_lock)
    with pytest.raises(BadInput, match="not a plain file"), host_lock("mine"):
        pass


def test_holder_keeps_the_lock_when_what_it_does_fails():
    with pytest.raises(ZeroDivisionError), host_lock("fails"):
        raise ZeroDivisionError
    assert child() == "own"
