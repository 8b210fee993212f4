"""A server that answers: what its users hold in hands."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from perfbook.params import Variant
from perfbook.record.run import Run
from perfbook.server import state, tree
from perfbook.server.endpoints import Endpoints
from perfbook.server.state import ServerState
from perfbook.server.stop import PROFILING


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
        tree.reap()
        known = state.read(self.run_path)
        return known is not None and known.usable and known.leader is not None and known.leader.pid == self.pid


def handle_of(run: Run, known: ServerState, variant: Variant) -> ServerHandle:
    """The handle of a launch of ours."""
    return ServerHandle(
        known.base_url,
        known.model,
        owned=True,
        pid=known.leader.pid if known.leader else None,
        log_path=run.path / known.log,
        run_path=run.path,
        ready_s=known.ready_s,
        api_key=api_key(variant),
    )


def api_key(variant: Variant) -> str | None:
    """The key, from the variable that the parameters name; None without one."""
    name = variant.server.api_key_env
    return (os.environ.get(name) or None) if name else None
