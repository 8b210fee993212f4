"""Processes that can be told apart from a later owner of the same number, and the tree that a server is.

A process is named by its pid together with its start time in clock ticks since boot: numbers are reused, the
pair is not (within one boot, which :func:`boot_id` names). vLLM's engine core and workers overwrite their
environment when they set their title, so a mark in the environment finds only the API server; the tree is
therefore followed through parents, through the session that the server was started in, and through what was
seen before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_children: dict[int, subprocess.Popen[bytes]] = {}
_GONE = frozenset("ZXx")
_CLOCK_SLACK_S = 2.0


@dataclass(frozen=True, order=True)
class Process:
    """A process that was seen: its number, when it started (ticks since boot), and its title."""

    pid: int
    start_ticks: int
    title: str = ""

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; a zombie does not, nor does a newcomer with its number."""
        now = _stat(self.pid)
        return now is not None and now.start_ticks == self.start_ticks and now.state not in _GONE

    def made(self, path: Path) -> bool:
        """Whether a file that carries this number can be this process's: one of an earlier owner is older."""
        try:
            return path.stat().st_mtime >= _booted_s() + self.start_ticks / os.sysconf("SC_CLK_TCK") - _CLOCK_SLACK_S
        except OSError:
            return False

    def send(self, number: signal.Signals) -> bool:
        """Signal this very process, through a descriptor; False when it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


@dataclass(frozen=True)
class _Stat:
    pid: int
    state: str
    parent: int
    session: int
    start_ticks: int


def boot_id() -> str:
    """Tells boots of a machine apart; start times count from it."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def process(pid: int) -> Process | None:
    """The process that has this number now, or None."""
    now = _stat(pid)
    return None if now is None or now.state in _GONE else Process(pid, now.start_ticks, title(pid))


def adopt(child: subprocess.Popen[bytes]) -> Process:
    """A child of this program that goes on without it; :func:`reap` collects it should it end earlier."""
    _children[child.pid] = child
    return process(child.pid) or Process(child.pid, -1)


def reap() -> None:
    """Collect adopted children that ended, so that they do not stay in the process table."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            del _children[pid]


def title(pid: int) -> str:
    """Command line of a process, shortened; empty when it is gone or not readable."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    return " ".join(words.split())[:120]


def tree_of(leader: Process, seen: Iterable[Process] = (), home: Path | None = None) -> list[Process]:
    """Living processes of a server that was started as leader of its own session.

    What was seen before and still lives, all their descendants, and the members of the session. The session's
    number proves nothing once everybody of ours is gone (it may have been reused); then only those members count
    that work in ``home``, the folder that the leader was started in.
    """
    table = _table()
    ours = {one.pid for one in (leader, *seen) if one.pid in table and table[one.pid].start_ticks == one.start_ticks}
    session = {now.pid for now in table.values() if now.session == leader.pid and now.start_ticks >= leader.start_ticks}
    ours |= session if ours else {pid for pid in session if home is not None and _works_in(pid, home)}
    children: dict[int, list[int]] = {}
    for now in table.values():
        children.setdefault(now.parent, []).append(now.pid)
    queue = list(ours)
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in ours:
                ours.add(child)
                queue.append(child)
    ours.discard(os.getpid())
    return sorted(Process(pid, table[pid].start_ticks, title(pid)) for pid in ours)


def marked(variable: str, value: str) -> Process | None:
    """The oldest process whose environment holds ``variable=value``."""
    wanted = f"{variable}={value}".encode()
    found = []
    for pid in _table():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and pid != os.getpid():
            found.append(process(pid))
    return min((one for one in found if one is not None), key=lambda one: one.start_ticks, default=None)


def wait_gone(
    processes: Iterable[Process], timeout_s: float, hurry: Callable[[], bool] = lambda: False
) -> list[Process]:
    """Wait until all are gone, time is up or ``hurry`` says so; the survivors."""
    waiting = [one for one in processes if one.alive]
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline and not hurry():
        time.sleep(0.05)
        waiting = [one for one in waiting if one.alive]
    return waiting


def shared_memory(processes: Iterable[Process]) -> set[str]:
    """Files under /dev/shm that these processes have mapped or open, or that carry their number (OpenMP)."""
    found: set[str] = set()
    for one in processes:
        folder = _PROC / str(one.pid)
        with suppress(OSError):
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                _, slash, rest = line.partition(" /dev/shm/")
                if slash and not rest.endswith(" (deleted)"):
                    found.add(rest)
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    target = str(link.readlink())
                    if target.startswith("/dev/shm/") and not target.endswith(" (deleted)"):
                        found.add(target.removeprefix("/dev/shm/"))
        found |= {path.name for path in openmp_files(one.pid) if one.made(path)}
    return found


def openmp_files(pid: int) -> Iterator[Path]:
    """What Intel's OpenMP runtime registers itself with: files that nobody holds open, named by the process."""
    return Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*")


def _booted_s() -> float:
    """When the machine started, in seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def resident_bytes(processes: Iterable[Process]) -> int:
    """Sum of the resident memory; shared pages count once per process."""
    total = 0
    for one in processes:
        with suppress(OSError, IndexError, ValueError):
            total += int((_PROC / str(one.pid) / "statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def _table() -> dict[int, _Stat]:
    """All processes that run."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            now = _stat(int(entry.name))
            if now is not None and now.state not in _GONE:
                found[now.pid] = now
    return found


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return (_PROC / str(pid) / "cwd").readlink() == folder.resolve()
    except OSError:
        return False


def _stat(pid: int) -> _Stat | None:
    """One line of the process table (see proc_pid_stat(5)); the name in it may hold spaces and brackets."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))
