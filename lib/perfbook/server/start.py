"""Start a server and wait until it serves the model.

A server outlives the notebook that started it: it leads its own session, writes to a log file in the run's folder, and
everything needed to find and stop it stands in ``server.json`` before anybody waits for it.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfbook.errors import BadInput, ServerFailed
from perfbook.masking import mask
from perfbook.params import Variant
from perfbook.record.run import Run, now_utc
from perfbook.server import ports, preflight, ranks, state, tree
from perfbook.server.endpoints import Endpoints
from perfbook.server.handle import ServerHandle, api_key, handle_of
from perfbook.server.interrupts import Interrupts
from perfbook.server.launch import build_command, build_environment, local_model, own_environment, stand_in
from perfbook.server.leftovers import MARK_FILE
from perfbook.server.loading import Loading
from perfbook.server.log import first_error
from perfbook.server.state import ServerState
from perfbook.server.stop import stop_known, stop_run

_LOOK_S = 0.25
_ASK_S = 1.0
_GIVE_UP_S = 5.0


def start(
    variant: Variant,
    run: Run,
    *,
    progress: Callable[[str], None] | None = None,
    extra_args: Mapping[str, Any] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> ServerHandle:
    """Start a variant's server, in a rehearsal its stand-in, and wait until it serves the model.

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
    tree.reap()
    known = state.read(run.path)
    if known is not None and known.stage == "ready" and known.alive:
        raise BadInput(f"{run.name} has a server running; use it, or stop it first (perfbook stop {run.name})")
    left = stop_run(run)
    if not left.clean:
        raise ServerFailed(f"{run.name}: its last server could not be removed: {', '.join(left.left)}")
    mates = ranks.require(variant, rehearsed=run.rehearsed)
    preflight.require(variant, rehearsed=run.rehearsed, extra_args=extra_args, extra_env=extra_env)
    log = _next_log(run.path)
    entry, model = None, server.model if run.rehearsed else local_model(server.model)
    if run.rehearsed:  # the stand-in serves loopback only, and another program may have the port on this machine
        variant = variant.model_copy(update={"server": server.model_copy(update={"host": "127.0.0.1", "port": 0})})
        entry = stand_in(run.law_path, int(log.stem.rpartition("-")[2]))
    port = _port(variant.server.host, variant.server.port)
    args = dict(extra_args or {})
    if mates is not None:
        meeting = {"master-addr": mates.host, "master-port": ports.free_port(mates.host)}
        args = {**meeting, **variant.server.args, **args, "node-rank": 0}
    command = build_command(variant, port=port, model=model, traces=run.path / "traces", extra_args=args, entry=entry)
    with Interrupts() as interrupts:
        launch = _Launch(variant, run, port, log, progress or _silent, interrupts, mates)
        try:
            if mates is not None:  # the first node waits for them, and they for it
                mates.start(variant, log.name, args, extra_env or {})
            launch.spawn(command, extra_env, local=isinstance(model, Path))
            launch.wait()
            interrupts.raise_if_any()
        except BaseException as error:
            launch.give_up(error)
            if isinstance(error, OSError):
                what = f"{error.filename or run.path}: {error.strerror or error}"
                raise ServerFailed(f"{what}; nothing was left running") from None
            raise
    return handle_of(run, launch.known, variant)


class _Launch:
    """One launch, from the command to the answer; what is known of it grows on the way."""

    def __init__(
        self,
        variant: Variant,
        run: Run,
        port: int,
        log: Path,
        say: Callable[[str], None],
        interrupts: Interrupts,
        mates: ranks.Mates | None,
    ) -> None:
        self.variant = variant
        self.run = run
        self.say = say
        self.interrupts = interrupts
        self.mates = mates
        self.log = log
        mark = secrets.token_hex(8)
        self.known = ServerState(
            mark=mark,
            boot=tree.boot_id(),
            host=socket.gethostname(),
            stage="starting",
            base_url=f"http://{ports.reachable(variant.server.host)}:{port}",
            port=port,
            model=variant.server.name,
            tmpdir=str(Path(_short_temporary()) / f"pb-{mark}"),
            log=self.log.name,
            command=[],
            environment={},
            started=now_utc(),
        )

    def spawn(self, command: list[str], extra_env: Mapping[str, str] | None, *, local: bool) -> None:
        """Start the process; ``server.json`` is written before and after, so that nobody is ever lost."""
        tmpdir = Path(self.known.tmpdir)
        tmpdir.mkdir(mode=0o700)
        (tmpdir / MARK_FILE).write_text(self.known.mark)
        (self.run.path / "traces").mkdir(exist_ok=True)
        own = {**own_environment(self.variant, extra_env), "TMPDIR": str(tmpdir)}
        self._learn(replace(self.known, command=command, environment=mask(own)))
        environment = build_environment(
            self.variant,
            tmpdir=tmpdir,
            mark=self.known.mark,
            local=local,
            extra_env=extra_env,
        )
        with self.log.open("xb") as output:
            child = subprocess.Popen(
                command,
                env=environment,
                cwd=self.run.path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        leader = tree.adopt(child)
        self.known = replace(self.known, leader=leader)  # known even if it cannot be written
        self._learn(replace(self.known, tree=(leader,)))

    def wait(self) -> None:
        """Until the child is healthy, owns the port and serves our name; its death ends the wait."""
        leader = self.known.leader
        assert leader is not None
        endpoints = Endpoints(self.known.base_url, api_key(self.variant))
        loading = Loading(self.log, self.say)
        begun = time.monotonic()
        timeout_s = self.variant.server.ready_timeout_s
        ask_at = begun
        while True:
            self.interrupts.raise_if_any()
            loading.look()
            if not leader.alive:
                raise ServerFailed(_died(self.log, loading))
            elapsed = time.monotonic() - begun
            if begun + elapsed >= ask_at:
                members = tree.tree_of(leader, self.known.tree, self.run.path)
                self._learn(self.known.seen(members, tree.shared_memory(members)))
                if self.mates is not None and (lost := self.mates.look()):
                    raise ServerFailed(f"died while {loading.stage}: {lost}")
                loading.report(elapsed, members)
                if _serves(endpoints, self.known, members):
                    break
                ask_at = begun + elapsed + min(_ASK_S, elapsed / 10)  # half-hour loads are not asked every moment
            if elapsed > timeout_s:
                raise ServerFailed(_too_late(self.known, timeout_s, loading, self.log))
            time.sleep(min(_LOOK_S, 0.02 + elapsed / 10))
        ready_s = time.monotonic() - begun
        self.say(f"ready after {ready_s:.0f} s")
        self._learn(replace(self.known, stage="ready", ready_s=round(ready_s, 3)))

    def give_up(self, error: BaseException) -> None:
        """Take everything down after a failure, whatever else fails on the way."""
        interrupted = isinstance(error, KeyboardInterrupt)
        stop_known(self.run, self.known, grace_s=_GIVE_UP_S, hurry=lambda: interrupted or self.interrupts.count > 0)
        after = state.read(self.run.path)
        if after is not None and after.mark == self.known.mark:
            with suppress(OSError):
                state.write(self.run.path, replace(after, reason=str(error) or type(error).__name__))
        tree.reap()

    def _learn(self, known: ServerState) -> None:
        """Keep what is new, and write it down."""
        if known != self.known:
            self.known = known
            state.write(self.run.path, known)


def _too_late(known: ServerState, timeout_s: float, loading: Loading, log: Path) -> str:
    """What it was doing when time was up, and who sits on its port."""
    ours = {one.pid for one in known.tree}
    holder = [one for one in ports.listeners(known.port) if one.pid not in ours]
    because = f"; port {known.port} is held by {holder[0]}, which is not ours" if holder else ""
    return f"not ready after {timeout_s:.0f} s (server.ready_timeout_s), last: {loading.stage}{because}; log: {log}"


def _serves(endpoints: Endpoints, known: ServerState, members: Iterable[tree.Process]) -> bool:
    """Healthy, our name is served, and it is our process that listens: a stale server may own the port."""
    holders = {one.pid for one in ports.listeners(known.port)}
    if not holders or (None not in holders and not holders & {one.pid for one in members}):
        return False  # asked first: a stranger on the port may accept a request and never answer it
    if not endpoints.health():
        return False
    try:
        return known.model in endpoints.models()
    except ServerFailed:
        return False


def _died(log: Path, loading: Loading) -> str:
    """Why a child that ended did so: the log's first error, else its last line."""
    tree.reap()
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


def _port(host: str, port: int) -> int:
    if port == 0:
        try:
            return ports.free_port(host)
        except OSError as error:
            raise BadInput(f"server.host: {host!r} is not an address of this machine ({error.strerror})") from None
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


def _silent(text: str) -> None:
    """No progress wanted."""
