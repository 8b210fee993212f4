"""Start a vLLM server, find it again, attach to one, stop it: the door to this room."""

from __future__ import annotations

from dataclasses import replace

from perfbook.errors import BadInput, ServerFailed
from perfbook.params import Variant
from perfbook.record.run import Run
from perfbook.server import ranks, state, tree
from perfbook.server.endpoints import Endpoints
from perfbook.server.handle import ServerHandle, api_key, handle_of
from perfbook.server.interrupts import Interrupts
from perfbook.server.launch import build_command
from perfbook.server.log import first_error_in
from perfbook.server.start import start
from perfbook.server.stop import StopReport, stop_everything, stop_run

__all__ = [
    "ServerHandle",
    "StopReport",
    "attach",
    "build_command",
    "condemn",
    "died",
    "find",
    "start",
    "stop",
    "stop_everything",
]


def find(run: Run) -> ServerHandle | None:
    """The run's server if it is ready, alive and ours; None otherwise."""
    tree.reap()
    known = state.read(run.path)
    if known is None or not known.usable:
        return None
    return handle_of(run, known, run.variant)


def died(run: Run) -> str | None:
    """How a server of this run that was ready ended by itself or hung; None where none did."""
    tree.reap()
    known = state.read(run.path)
    if known is not None and known.stage == "failed":
        return known.reason
    if known is None or known.stage != "ready":
        return None
    if known.alive:
        return _died_elsewhere(run)
    error = first_error_in(run.path / known.log)
    return f"the server died ({error.message if error else 'its log names no error'}; log: {known.log})"


def _died_elsewhere(run: Run) -> str | None:
    """How another node's part of the server ended."""
    try:
        mates = ranks.mates() if ranks.node_count(run.variant.server.args) > 1 else None
        return (mates.look() or None) if mates is not None else None
    except ServerFailed as error:
        return str(error)


def condemn(run: Run, reason: str) -> None:
    """Nobody is to measure on the run's server any more: it hangs. It still has to be stopped."""
    known = state.read(run.path)
    if known is not None and known.usable:
        state.write(run.path, replace(known, stage="failed", reason=reason))


def attach(variant: Variant) -> ServerHandle:
    """A server that somebody else owns, at ``server.base_url``; never stopped by us.

    Raises
    ------
    BadInput
        No ``base_url``, the key's variable is empty, or the server does not serve the model asked for.
    ServerFailed
        It cannot be reached.
    """
    server = variant.server
    if server.base_url is None:
        raise BadInput("server.base_url is missing: this variant starts its own server")
    key = api_key(variant)
    if server.api_key_env and not key:
        raise BadInput(f"server.api_key_env: the variable {server.api_key_env} is not set")
    endpoints = Endpoints(server.base_url, key, server.verify_tls)
    served = endpoints.models()
    if not served:
        raise ServerFailed(f"{endpoints.base_url}: serves no model")
    if server.name and server.name not in served:
        raise BadInput(f"server.served_name: {endpoints.base_url} serves {', '.join(served)}, not {server.name!r}")
    return ServerHandle(
        endpoints.base_url,
        server.name or served[0],
        owned=False,
        log_path=server.log_file,
        api_key=key,
        verify_tls=server.verify_tls,
    )


def stop(target: Run | ServerHandle, *, grace_s: float | None = None) -> StopReport:
    """Stop the whole tree of a server of ours and remove its leftovers; repeating it does no harm.

    A second Ctrl-C while it waits ends the grace.
    """
    if isinstance(target, ServerHandle):
        if not target.owned or target.run_path is None:
            return StopReport(target.base_url, note="not started by perfbook; left running")
        target = Run(target.run_path)
    with Interrupts() as interrupts:
        report = stop_run(target, grace_s=grace_s, hurry=interrupts.hurry)
        tree.reap()
        interrupts.raise_if_any()
    return report
