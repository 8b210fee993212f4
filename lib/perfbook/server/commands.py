"""Commands with which the owner of an attached server lets perfbook stop it, start it, and fetch its files.

They come from the parameter file (``server.commands``), are argument lists that no shell sees, are shown before they
run, need ``--allow-commands``, and never run while the server works for somebody else.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from perfbook.errors import BadInput, ServerFailed
from perfbook.params import Variant
from perfbook.record.run import Run
from perfbook.server.endpoints import Endpoints
from perfbook.server.handle import api_key

Name = Literal["stop", "start", "collect_traces", "read_log"]
ALLOWED = "PERFBOOK_ALLOW_COMMANDS"
"""Environment variable, ``1`` when commands may run: ``--allow-commands`` sets it for the notebooks of a campaign. No
parameter file reaches perfbook's own environment."""
_DEADLINE_S = 600.0
_ASK_S = 1.0


@contextmanager
def allowed(yes: bool) -> Iterator[None]:
    """Whether the notebooks that are executed in the block may run commands."""
    before = os.environ.pop(ALLOWED, None)
    if yes:
        os.environ[ALLOWED] = "1"
    try:
        yield
    finally:
        os.environ.pop(ALLOWED, None)
        if before is not None:
            os.environ[ALLOWED] = before


def refusal(variant: Variant, name: Name, run: Run) -> str:
    """Why a command will not run, in one line that shows it; empty when it will."""
    server = variant.server
    if server.base_url is None:
        return f"server.commands.{name}: for a server that somebody else owns; this one perfbook starts itself"
    words = _words(variant, name, run)
    if not words:
        return f"server.commands.{name} is missing: the owner of {server.base_url} gave no such command"
    if os.environ.get(ALLOWED) != "1":
        return f"server.commands.{name} would run {' '.join(words)!r}: allow it with --allow-commands"
    return ""


def run_command(variant: Variant, name: Name, run: Run, *, say: Callable[[str], None] = lambda text: None) -> str:
    """Run one of the owner's commands; ``start`` returns when the server serves its model again.

    Parameters
    ----------
    variant : Variant
        Attached (``server.base_url``); ``{traces}`` in a word stands for the run's folder of traces.
    name : str
        Which command.
    run : Run
        Where fetched files go.
    say : callable
        Gets the command before it runs, and progress.

    Returns
    -------
    str
        What the command wrote to its standard output.

    Raises
    ------
    BadInput
        There is no such command, or it is not allowed (:func:`refusal`).
    ServerFailed
        The server works for others, the command failed, or the server did not come back in time.
    """
    if reason := refusal(variant, name, run):
        raise BadInput(reason)
    words = _words(variant, name, run)
    assert variant.server.base_url is not None
    endpoints = Endpoints(variant.server.base_url, api_key(variant), variant.server.verify_tls)
    if name == "stop":
        _refuse_while_busy(endpoints)
    say(f"running: {' '.join(words)}")
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_DEADLINE_S
        )
    except OSError as error:
        raise ServerFailed(f"server.commands.{name}: {words[0]} cannot be run ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise ServerFailed(f"server.commands.{name}: {words[0]} did not end within {_DEADLINE_S:.0f} s") from None
    if done.returncode:
        last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        raise ServerFailed(f"server.commands.{name}: {words[0]} ended with {done.returncode}: {last[:300]}")
    if name == "start":
        _wait_until_served(variant, endpoints, say)
    return done.stdout


def _words(variant: Variant, name: Name, run: Run) -> list[str]:
    """The argument list, the place of the traces filled in; empty without such a command."""
    words = getattr(variant.server.commands, name) or []
    return [word.replace("{traces}", str(run.path / "traces")) for word in words]


def _refuse_while_busy(endpoints: Endpoints) -> None:
    """Others' requests are not ours to break off; a server whose load cannot be seen is not stopped either."""
    metrics = endpoints.metrics()
    if "num_requests_running" not in metrics:
        raise ServerFailed(f"{endpoints.base_url} does not say whether it works for others; not stopped")
    busy = int(metrics["num_requests_running"] + metrics.get("num_requests_waiting", 0.0))
    if busy:
        raise ServerFailed(f"{endpoints.base_url} works on {busy} requests of others; not stopped")


def _wait_until_served(variant: Variant, endpoints: Endpoints, say: Callable[[str], None]) -> None:
    """Healthy, and our model is served."""
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) <= variant.server.ready_timeout_s:
        if endpoints.health():
            try:
                served = endpoints.models()
            except ServerFailed:
                served = []
            if served and (not variant.server.name or variant.server.name in served):
                say(f"ready after {elapsed:.0f} s")
                return
        time.sleep(_ASK_S if elapsed > _ASK_S else 0.05)
    raise ServerFailed(
        f"{endpoints.base_url}: not ready {variant.server.ready_timeout_s:.0f} s after server.commands.start "
        "(server.ready_timeout_s); read its log on its own host"
    )
