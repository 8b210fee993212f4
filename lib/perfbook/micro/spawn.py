"""Run measuring processes: a job as JSON in, a result as JSON out, and nobody left when the time is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOK_S = 0.02


@dataclass(frozen=True)
class Ended:
    """How the processes of a job ended.

    Attributes
    ----------
    outcome : str
        ``ok``, ``fails`` (one of them ended with an error) or ``hangs`` (time was up).
    detail : str
        The last line of the first one that failed.
    results : tuple of mappings
        What each wrote, in the order of the jobs; empty unless ok.
    """

    outcome: str
    detail: str = ""
    results: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Elsewhere:
    """Other nodes that take part.

    Attributes
    ----------
    host : str
        This node's address, where they meet.
    here : int
        Jobs of this node, the first ones; the others have as many each.
    begin : callable
        ``begin(module, jobs of each node, env, timeout_s)`` starts them; what it returns waits for them.
    """

    host: str
    here: int
    begin: Callable[
        [str, Sequence[Sequence[Mapping[str, Any]]], Mapping[str, str], float], Callable[[], Sequence[Ended]]
    ]


def joined(parts: Sequence[Ended]) -> Ended:
    """Several nodes' ends as one: the first that is not ok, else all results in order."""
    broken = next((part for part in parts if part.outcome != "ok"), None)
    return broken or Ended("ok", "", tuple(result for part in parts for result in part.results))


def run_jobs(
    module: str, jobs: Sequence[Mapping[str, Any]], *, env: Mapping[str, str], timeout_s: float, folder: Path
) -> Ended:
    """Run one process per job side by side and wait for all of them.

    Each runs ``python -m module JOB RESULT`` (two files in `folder`) in a session of its own, so that whatever it
    starts goes with it. The first failure ends the rest: ranks wait for each other forever.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index, job in enumerate(jobs):
            (folder / f"job-{index}.json").write_text(json.dumps(job))
            with (folder / f"output-{index}.txt").open("wb") as output:
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-P", "-m", module, f"job-{index}.json", f"result-{index}.json"],
                        cwd=folder,
                        env=dict(env),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in running):
            if any(process.poll() not in (None, 0) for process in running):
                break
            if time.monotonic() > deadline:
                return Ended("hangs", f"not done after {timeout_s:g} s")
            time.sleep(_LOOK_S)
        failed = next((i for i, process in enumerate(running) if process.poll() not in (None, 0)), None)
        if failed is not None:
            return Ended("fails", _last_line(folder / f"output-{failed}.txt", running[failed].returncode))
        return Ended("ok", "", tuple(json.loads((folder / f"result-{i}.json").read_text()) for i in range(len(jobs))))
    finally:
        for process in running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def working_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for jobs, results and the ranks' meeting point."""
    return tempfile.TemporaryDirectory(prefix="pb-micro-")


def _last_line(path: Path, code: int) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else f"exit code {code}"
