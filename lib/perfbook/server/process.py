"""Start a vLLM server, find it again, attach to one, stop it.

A server outlives the notebook that started it: it leads its own session, writes to a log file in the run's
folder, and everything needed to find and stop it stands in ``server.json`` before anybody waits for it.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfbook.errors import BadInput, ServerFailed
from perfbook.params import Variant
from perfbook.record.provenance import mask
from perfbook.record.run import Run, now_utc
from perfbook.server import ports, preflight, state, tree
from perfbook.server.endpoints import Endpoints
from perfbook.server.interrupts import Interrupts
from perfbook.server.launch import MARK, build_command, build_environment, local_model, own_environment
from perfbook.server.loading import Loading
from perfbook.server.log import first_error
from perfbook.server.state import ServerState
from perfbook.server.stop import MARK_FILE, PROFILING, StopReport, end_tree, stop_everything, stop_run

__all__ = [
    "ServerHandle",
    "StopReport",
    "attach",
    "build_command",
    "find",
    "start",
    "stop",
    "stop_everything",
]

_LOOK_S = 0.25
_ASK_S = 1.0
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class ServerHandle:
    """A server that answers.

    Attributes
    ----------
    base_url : str
        Its address.
    model : str
        The model's name in requests.
    owned : bool
        Whether perfbook started it, and so may stop it.
    pid : int or None
        The API server's process; None when it is not ours.
    log_path, run_path : Path or None
        Its log and the run that it belongs to.
    ready_s : float or None
        From the launch until it served the model, in seconds.
    """

    base_url: str
    model: str
    owned: bool
    pid: int | None = None
    log_path: Path | None = None
    run_path: Path | None = None
    ready_s: float | None = None
    api_key: str | None = field(default=None, repr=False)
    verify_tls: bool = True

    @property
    def endpoints(self) -> Endpoints:
        """Its HTTP side."""
        noted = self.run_path / PROFILING if self.owned and self.run_path else None
        return Endpoints(self.base_url, self.api_key, self.verify_tls, profiling_note=noted)

    def alive(self) -> bool:
        """Whether the process runs (ours) or answers (attached); says nothing about progress."""
        if not self.owned or self.run_path is None:
            return self.endpoints.health()
        _reap()
        known = state.read(self.run_path)
        return known is not None and known.alive and known.leader is not None and known.leader.pid == self.pid


def start(
    variant: Variant,
    run: Run,
    *,
    progress: Callable[[str], None] | None = None,
    extra_args: Mapping[str, Any] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> ServerHandle:
    """Start a variant's server and wait until it serves the model.

    Parameters
    ----------
    variant : Variant
        With ``server.model``; options, environment and deadline are its ``server`` section's.
    run : Run
        Takes log, ``server.json`` and traces.
    progress : callable, optional
        Gets a line when the stage changes and every few seconds.
    extra_args, extra_env : mapping, optional
        A setting to try on top of the variant's own.

    Raises
    ------
    BadInput
        The run's server still runs, or the preflight found an error (:func:`perfbook.server.preflight.require`).
    ServerFailed
        It died or did not get ready in time; the message holds the log's first error and the log's path.
        Nothing of it is left running, as after Ctrl-C.
    """
    server = variant.server
    if server.model is None:
        raise BadInput("server.base_url: this variant attaches to a server; there is none to start")
    if find(run) is not None:
        raise BadInput(f"{run.name} has a server running; use it, or stop it first (perfbook stop {run.name})")
    left = stop_run(run)
    if not left.clean:
        raise ServerFailed(f"{run.name}: its last server could not be removed: {', '.join(left.left)}")
    preflight.require(variant, extra_args=extra_args, extra_env=extra_env)
    model = local_model(server.model)
    port = _port(server.host, server.port)
    command = build_command(variant, port=port, model=model, traces=run.path / "traces", extra_args=extra_args)
    with Interrupts() as interrupts:
        known: ServerState | None = None
        try:
            known = _launch(variant, run, command, port, isinstance(model, Path), extra_env)
            known = _wait(variant, run, known, progress or _silent, interrupts)
            state.write(run.path, known)
            interrupts.raise_if_any()
        except BaseException as error:
            _give_up(run, known, interrupts, error)
            if isinstance(error, OSError):
                raise ServerFailed(
                    f"{error.filename or run.path}: {error.strerror or error}; nothing was left running"
                ) from None
            raise
    return _handle(run, known, variant)


def find(run: Run) -> ServerHandle | None:
    """The run's server if it is ready, alive and ours; None otherwise."""
    _reap()
    known = state.read(run.path)
    if known is None or known.stage != "ready" or not known.alive:
        return None
    return _handle(run, known, run.variant)


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
    key = _key(variant)
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
        _reap()
        interrupts.raise_if_any()
    return report


def _launch(
    variant: Variant,
    run: Run,
    command: list[str],
    port: int,
    local: bool,
    extra_env: Mapping[str, str] | None,
) -> ServerState:
    """Start the process; ``server.json`` is written before and after, so that nobody is ever lost."""
    mark = secrets.token_hex(8)
    tmpdir = Path(tempfile.mkdtemp(prefix="pb-", dir=_short_temporary()))
    (tmpdir / MARK_FILE).write_text(mark)
    (run.path / "traces").mkdir(exist_ok=True)
    log = _next_log(run.path)
    shown = {**own_environment(variant, extra_env), "TMPDIR": str(tmpdir)}
    known = ServerState(
        mark=mark,
        boot=tree.boot_id(),
        host=socket.gethostname(),
        stage="starting",
        base_url=f"http://{ports.reachable(variant.server.host)}:{port}",
        port=port,
        model=variant.server.name,
        tmpdir=str(tmpdir),
        log=log.name,
        command=command,
        environment=mask(shown),
        started=now_utc(),
    )
    state.write(run.path, known)
    environment = build_environment(variant, tmpdir=tmpdir, mark=mark, local=local, extra_env=extra_env)
    with log.open("xb") as output:
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=run.path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[child.pid] = child
    leader = tree.process(child.pid) or tree.Process(child.pid, -1)
    known = replace(known, leader=leader, tree=(leader,))
    state.write(run.path, known)
    return known


def _wait(
    variant: Variant, run: Run, known: ServerState, say: Callable[[str], None], interrupts: Interrupts
) -> ServerState:
    """Until the child is healthy, owns the port and serves our name; its death ends the wait."""
    assert known.leader is not None
    log = run.path / known.log
    endpoints = Endpoints(known.base_url, _key(variant))
    loading = Loading(log, say)
    begun = time.monotonic()
    deadline = begun + variant.server.ready_timeout_s
    ask_at = begun
    while True:
        interrupts.raise_if_any()
        loading.look()
        if not known.leader.alive:
            raise ServerFailed(_died(log, loading))
        now = time.monotonic()
        if now >= ask_at:
            ask_at = now + _ASK_S
            members = tree.tree_of(known.leader, known.tree)
            seen = known.seen(members, tree.shared_memory(members))
            if seen != known:
                known = seen
                state.write(run.path, known)
            loading.report(now - begun, members)
            if _serves(endpoints, known, members):
                loading.say(f"ready after {now - begun:.0f} s")
                return replace(known, stage="ready", ready_s=round(time.monotonic() - begun, 3))
        if now > deadline:
            holder = [one for one in ports.listeners(known.port) if one.pid not in {member.pid for member in members}]
            because = f"; port {known.port} is held by {holder[0]}" if holder else ""
            raise ServerFailed(
                f"not ready after {variant.server.ready_timeout_s:.0f} s (server.ready_timeout_s), "
                f"last: {loading.stage}{because}; log: {log}"
            )
        time.sleep(_LOOK_S)


def _serves(endpoints: Endpoints, known: ServerState, members: Iterable[tree.Process]) -> bool:
    """Healthy, our name is served, and it is our process that listens: a stale server may own the port."""
    if not endpoints.health():
        return False
    holders = {one.pid for one in ports.listeners(known.port)}
    if None not in holders and not holders & {one.pid for one in members}:
        return False
    try:
        return known.model in endpoints.models()
    except ServerFailed:
        return False


def _give_up(run: Run, known: ServerState | None, interrupts: Interrupts, error: BaseException) -> None:
    """Take the tree down after a failure, whatever else fails on the way."""
    last = state.read(run.path) if known is None else known
    leader = last.leader if last else None
    if leader is None and last is not None and last.stage == "starting":
        leader = tree.marked(MARK, last.mark)
    if leader is not None:
        end_tree(
            leader,
            (),
            5.0,
            lambda: (interrupts.count > 0 and not isinstance(error, ServerFailed)) or interrupts.hurry(),
        )
    with suppress(OSError):
        stop_run(run, grace_s=0.0)
        after = state.read(run.path)
        if after is not None and last is not None and after.mark == last.mark:
            state.write(run.path, replace(after, reason=str(error) or type(error).__name__))
    _reap()


def _died(log: Path, loading: Loading) -> str:
    """Why a child that ended did so: the log's first error, else its last line."""
    _reap()
    loading.look()
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    error = first_error(text)
    if error is not None:
        for line in error.context:
            loading.say(f"  {line}")
        return f"died while {loading.stage}: {error.message} (line {error.line} of {log})"
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "its log is empty")
    return f"died while {loading.stage}: {last[:300]} (log: {log})"


def _handle(run: Run, known: ServerState, variant: Variant) -> ServerHandle:
    return ServerHandle(
        known.base_url,
        known.model,
        owned=True,
        pid=known.leader.pid if known.leader else None,
        log_path=run.path / known.log,
        run_path=run.path,
        ready_s=known.ready_s,
        api_key=_key(variant),
    )


def _key(variant: Variant) -> str | None:
    name = variant.server.api_key_env
    return (os.environ.get(name) or None) if name else None


def _port(host: str, port: int) -> int:
    if port == 0:
        return ports.free_port(host)
    if ports.is_free(host, port):
        return port
    holders = ports.listeners(port)
    who = f"held by {holders[0]}" if holders else "in use"
    raise BadInput(f"server.port: {port} is {who}, which is not this run's server; stop it or set server.port to 0")


def _short_temporary() -> str:
    """Where sockets can live: their paths may not exceed 107 characters."""
    return "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()


def _next_log(folder: Path) -> Path:
    taken = {path.name for path in folder.glob("server-*.log")}
    return next(folder / name for number in range(1, 10_000) if (name := f"server-{number:02d}.log") not in taken)


def _reap() -> None:
    """Collect children that ended, so that they do not stay in the process table."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def _silent(text: str) -> None:
    """No progress wanted."""
