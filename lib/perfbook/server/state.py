"""``server.json``: what is known about the server that a run started, for whoever comes next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from perfbook.record import jsonl
from perfbook.server.tree import Process, boot_id, process

FILE = "server.json"
Stage = Literal["starting", "ready", "stopped", "failed"]


@dataclass(frozen=True)
class ServerState:
    """One launch.

    Attributes
    ----------
    stage : str
        ``failed``: it was ready and then found hanging; still to be stopped, not to be used.
    mark : str
        Stands in the server's environment; finds it when the starter died before it could write the pid.
    boot, host : str
        Where process numbers mean something.
    leader : Process or None
        The API server; leads its own session.
    tree : tuple of Process
        Every process of the server that was ever seen alive.
    shared_memory : tuple of str
        Files under /dev/shm that those processes used.
    """

    mark: str
    boot: str
    host: str
    stage: Stage
    base_url: str
    port: int
    model: str
    tmpdir: str
    log: str
    command: list[str]
    environment: dict[str, str]
    started: str
    leader: Process | None = None
    tree: tuple[Process, ...] = ()
    shared_memory: tuple[str, ...] = ()
    ready_s: float | None = None
    reason: str = ""
    schema: int = field(default=1)

    @property
    def here(self) -> bool:
        """Whether the process numbers are of this boot of this machine."""
        return self.boot == boot_id()

    @property
    def alive(self) -> bool:
        """Whether the API server runs; a later process with its number does not count."""
        return self.here and self.leader is not None and self.leader.alive

    @property
    def usable(self) -> bool:
        """Whether it became ready, lives, and was not found to hang."""
        return self.stage == "ready" and self.alive

    def seen(self, processes: list[Process], files: set[str]) -> ServerState:
        """With more processes and shared-memory files known."""
        titled = {(one.pid, one.start_ticks): one for one in (*self.tree, *processes)}
        return replace(
            self,
            tree=tuple(sorted(titled.values())),
            shared_memory=tuple(sorted({*self.shared_memory, *files})),
        )


def write(folder: Path, state: ServerState) -> None:
    """Replace ``server.json`` in one step."""
    jsonl.write_atomically(folder / FILE, json.dumps(jsonl.plain(asdict(state)), indent=1) + "\n")


def read(folder: Path) -> ServerState | None:
    """The last launch of a run; None when there was none or the file cannot be understood."""
    try:
        value = json.loads((folder / FILE).read_text(encoding="utf-8"))
        known = {one.name for one in fields(ServerState)}
        kept: dict[str, Any] = {key: item for key, item in value.items() if key in known}
        kept["leader"] = Process(**value["leader"]) if value.get("leader") else None
        kept["tree"] = tuple(Process(**one) for one in value.get("tree", ()))
        kept["shared_memory"] = tuple(value.get("shared_memory", ()))
        return ServerState(**kept)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def newcomer(state: ServerState) -> Process | None:
    """The process that has the API server's number now but is not it; it must be left alone."""
    if state.leader is None or state.leader.alive:
        return None
    return process(state.leader.pid)
