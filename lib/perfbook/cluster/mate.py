"""A node's part of a server that is larger than a node: started, watched and ended at the word of the first node."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfbook.cluster.node import POLL_BYTES
from perfbook.micro import spawn
from perfbook.micro.spawn import Ended
from perfbook.params import Variant
from perfbook.record import carry, provenance
from perfbook.record.carry import Piece, State
from perfbook.server.launch import build_command, build_environment, headless_entry_point, local_model
from perfbook.server.log import first_error_in

_PATIENCE_S = 30.0  # for a part that was asked to go
_LAST_BYTES = 4096


class Mate:
    """Becomes a Ray actor on each node of the server but the first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder = Path(tempfile.mkdtemp(prefix="perfbook-node-"))
        self._running: subprocess.Popen[bytes] | None = None
        self._log = self._folder / "none"

    def about(self) -> dict[str, Any]:
        """What kind of node this is."""
        return {"node_rank": self._rank, **provenance.of_node()}

    def launch(self, variant: Variant, log: str, args: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start this node's part: the variant's options, with ``args`` and ``env`` on top, and no port of its own."""
        self.stop()
        tmpdir = self._folder / "tmp"
        tmpdir.mkdir(exist_ok=True)
        assert variant.server.model is not None
        model = local_model(variant.server.model)
        own = {**args, "node-rank": self._rank, "headless": True}
        traces = self._folder / "traces"
        entry = headless_entry_point()
        command = build_command(variant, port=1, model=model, traces=traces, extra_args=own, entry=entry)
        mark = secrets.token_hex(8)
        environment = build_environment(variant, tmpdir=tmpdir, mark=mark, local=isinstance(model, Path), extra_env=env)
        self._log = self._folder / f"{Path(log).stem}-node{self._rank}.log"
        leash = [sys.executable, "-P", "-m", "perfbook.cluster.leash", str(_PATIENCE_S), *command]
        with self._log.open("wb") as output:
            self._running = subprocess.Popen(
                leash, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=self._folder
            )

    def failure(self) -> str:
        """Why this node's part ended; empty while it runs."""
        if self._running is None or not self._over():
            return ""
        error = first_error_in(self._log)
        said = error.message if error else "its log names no error"
        return f"its part of the server ended: {said} (log: {self._log.name})"

    def stop(self) -> str:
        """End this node's part; what is left of it, empty when nothing is."""
        if self._running is None:
            return ""
        assert self._running.stdin is not None
        self._running.stdin.close()
        waiting = threading.Event()
        for _ in range(int(10 * (_PATIENCE_S + 10))):
            if self._over():
                self._running.wait()
                self._running = None
                return ""
            waiting.wait(0.1)
        return "its part of the server did not end"

    def pieces(self, sent: Mapping[str, State]) -> tuple[list[Piece], bool]:
        """New bytes of traces and logs, and whether there are more."""
        found: list[Piece] = []
        for piece in carry.changes(self._folder, sent):
            if piece.name.startswith("tmp/"):
                continue
            if sum(len(one.data) for one in found) > POLL_BYTES:
                return found, True
            found.append(piece)
        return found, False

    def run_jobs(
        self, module: str, jobs: Sequence[Mapping[str, Any]], env: Mapping[str, str], timeout_s: float
    ) -> Ended:
        """Measuring processes on this node, as :func:`perfbook.micro.spawn.run_jobs`."""
        with spawn.working_folder() as name:
            whole = {**os.environ, **env}
            return spawn.run_jobs(module, jobs, env=whole, timeout_s=timeout_s, folder=Path(name))

    def leave(self) -> None:
        """Stop, and remove everything from the node."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _over(self) -> bool:
        """Whether the leash said, among the last lines, how its command ended; others may write after it."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LAST_BYTES))
                return re.search(rb"^exit -?\d+$", log.read(), re.MULTILINE) is not None
        except OSError:
            return False
