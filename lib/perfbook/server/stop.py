"""Stop a server as a whole tree, only ever our own, and remove what it leaves behind.

vLLM's engine core does not watch the API server: killing only the latter leaves the processes that hold the
devices. So everything that was ever seen of the tree is followed, asked to go, and what does not go is
killed; each signal is sent through a descriptor of that very process, so that a later owner of the number is
never hit.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from perfbook.errors import PerfbookError, ServerFailed
from perfbook.record import devices
from perfbook.record.run import Run
from perfbook.server import ports, ranks, state, tree
from perfbook.server.endpoints import Endpoints
from perfbook.server.launch import MARK
from perfbook.server.leftovers import SHM, abandoned, remove
from perfbook.server.state import ServerState
from perfbook.server.tree import Process
from perfbook.units import count

PROFILING = ".profiling"
_KILLED_WITHIN_S = 10.0
_PROFILE_S = 60.0
_SHOWN = 3


@dataclass(frozen=True)
class StopReport:
    """What stopping found and did.

    Attributes
    ----------
    run : str
        Name of the run, or the address of a server that is not ours.
    was_running : bool
        Whether anything of the server was alive.
    killed : tuple of str
        Processes that did not go when asked.
    removed : tuple of str
        Temporary folder and shared-memory files removed.
    left : tuple of str
        What of ours could not be removed; empty after a clean stop.
    foreign : tuple of str
        What looks like a server's remains, used by nobody alive, but is not known to be ours; untouched.
    seconds : float
        How long it took.
    note : str
        Why nothing was done, when so.
    """

    run: str
    was_running: bool = False
    killed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    seconds: float = 0.0
    note: str = ""

    @property
    def clean(self) -> bool:
        """Nothing of ours is left."""
        return not self.left

    def __str__(self) -> str:
        """One line per thing worth knowing; of what is not ours, the first few."""
        if self.note:
            return f"{self.run}: {self.note}"
        did = f"stopped in {self.seconds:.1f} s" if self.was_running else "was not running"
        lines = [f"{self.run}: {did}" + (f", {count(len(self.removed), 'leftover')} removed" if self.removed else "")]
        lines += [f"  had to be killed: {one}" for one in self.killed]
        lines += [f"  could not be removed: {one}" for one in self.left]
        lines += [f"  not ours, left alone: {one}" for one in self.foreign[:_SHOWN]]
        if len(self.foreign) > _SHOWN:
            lines.append(f"  and {len(self.foreign) - _SHOWN} more that are not ours")
        return "\n".join(lines)


def stop_run(run: Run, *, grace_s: float | None = None, hurry: Callable[[], bool] = lambda: False) -> StopReport:
    """Stop the server that a run started; safe to repeat, from any process.

    Parameters
    ----------
    run : Run
        Whose ``server.json`` counts.
    grace_s : float, optional
        From the polite signal to the hard one; default: the variant's ``server.stop_grace_s``.
    hurry : callable
        When it says so, the grace ends.
    """
    known = state.read(run.path)
    if known is None or known.stage == "stopped":
        return StopReport(run.name, note="no server to stop")
    if not known.here:
        if known.host != socket.gethostname():
            return StopReport(run.name, note=f"its server was started on {known.host}; stop it there")
        state.write(run.path, replace(known, stage="stopped", reason="the machine was restarted"))
        return StopReport(run.name, note="the machine was restarted since; nothing runs")
    return stop_known(run, known, grace_s=_grace(run) if grace_s is None else grace_s, hurry=hurry)


def stop_known(
    run: Run, known: ServerState, *, grace_s: float, hurry: Callable[[], bool] = lambda: False
) -> StopReport:
    """Stop a launch and remove its leftovers, from what is known of it; a full disk does not keep it running."""
    begun = time.monotonic()
    leader = known.leader or tree.marked(MARK, known.mark)
    if leader is None:
        return _finish(run, known, StopReport(run.name), begun)
    members = tree.tree_of(leader, known.tree, run.path)
    known = replace(known, leader=leader).seen(members, tree.shared_memory(members))
    _note(run, known)
    if leader.alive and (run.path / PROFILING).exists():
        _stop_profile(known.base_url, run)
    killed, late = _end_tree(leader, members, run.path, grace_s, hurry)
    known = known.seen([], late)
    elsewhere = _stop_elsewhere(run)
    return _finish(run, known, StopReport(run.name, bool(members), killed, left=elsewhere), begun)


def _end_tree(
    leader: Process, members: Iterable[Process], home: Path, grace_s: float, hurry: Callable[[], bool]
) -> tuple[tuple[str, ...], set[str]]:
    """Ask the leader to go, wait, kill what is left of the tree.

    Names those that had to be killed, and the shared memory that they made since anybody last looked: a server that
    is stopped while it starts goes on making some.
    """
    seen = sorted({*members, *tree.tree_of(leader, members, home)})
    if leader.send(signal.SIGTERM):
        tree.wait_gone([leader], grace_s, hurry)
    else:  # an orphaned rest: nobody is there to hand the signal on
        for one in seen:
            one.send(signal.SIGTERM)
        tree.wait_gone(seen, min(grace_s, 5.0), hurry)
    survivors = tree.tree_of(leader, seen, home)
    if leader not in survivors:
        tree.wait_gone(survivors, 1.0, hurry)
        survivors = tree.tree_of(leader, seen, home)
    killed: dict[int, str] = {}
    files: set[str] = set()
    deadline = time.monotonic() + _KILLED_WITHIN_S
    while survivors and time.monotonic() < deadline:
        for one in survivors:
            one.send(signal.SIGSTOP)
        files |= tree.shared_memory(survivors)
        for one in survivors:
            if one.send(signal.SIGKILL):
                killed[one.pid] = f"pid {one.pid} ({one.title})"
        tree.wait_gone(survivors, 1.0)
        survivors = tree.tree_of(leader, [*seen, *survivors], home)
    return tuple(killed.values()), files


def stop_everything(runs: Iterable[Run]) -> list[StopReport]:
    """Stop the servers of all these runs; reports for those that had something to stop."""
    reports = []
    for run in runs:
        try:
            report = stop_run(run)
        except (PerfbookError, OSError) as error:
            report = StopReport(run.name, left=(str(error),))
        if not report.note or not report.clean:
            reports.append(report)
    return reports


def _finish(run: Run, known: ServerState, report: StopReport, begun: float) -> StopReport:
    """Remove what the dead tree left, look whether anything remains, and write that down."""
    alive = [one for one in known.tree if one.alive]
    left = [*report.left, *(f"pid {one.pid} ({one.title})" for one in alive)]
    pids = {one.pid for one in known.tree}
    left += [f"GPU {card.index} memory of pid {pid}" for card in devices.gpus() for pid in card.holders if pid in pids]
    foreign = [f"port {known.port}: {one}" for one in ports.listeners(known.port) if one.pid not in pids]
    removed: list[str] = []
    if not alive:
        removed, not_removed = remove(known)
        left += not_removed
    foreign += [str(SHM / name) for name in abandoned() if str(SHM / name) not in left]
    with suppress(OSError):
        (run.path / PROFILING).unlink(missing_ok=True)
    if not left:
        _note(run, replace(known, stage="stopped"))
    return replace(
        report,
        removed=tuple(removed),
        left=tuple(left),
        foreign=tuple(foreign),
        seconds=time.monotonic() - begun,
    )


def _note(run: Run, known: ServerState) -> None:
    """Write down what is known; stopping goes on where that fails."""
    with suppress(OSError):
        state.write(run.path, known)


def _stop_elsewhere(run: Run) -> tuple[str, ...]:
    """End the other nodes' parts of the server, whose logs come home; what is left of them."""
    try:
        mates = ranks.mates()
        if mates is None:
            return ()
        left = tuple(mates.stop())
        mates.gather(run.path)
    except (PerfbookError, OSError) as error:  # a lost node has nothing left to stop
        return () if isinstance(error, ServerFailed) else (str(error),)
    return left


def _grace(run: Run) -> float:
    try:
        return run.variant.server.stop_grace_s
    except (PerfbookError, KeyError):
        return 30.0


def _stop_profile(base_url: str, run: Run) -> None:
    """End an active profile, so that its trace is whole; a mute server is stopped all the same."""
    try:
        key = run.variant.server.api_key_env
        Endpoints(base_url, os.environ.get(key) if key else None).stop_profile(_PROFILE_S)
    except (PerfbookError, KeyError):
        pass
