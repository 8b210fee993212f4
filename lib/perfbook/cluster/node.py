"""What happens on a node: one campaign of one variant, in the node's own folder, reported piece by piece."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import perfbook
from perfbook.record import carry
from perfbook.record.carry import Piece, State
from perfbook.server.ranks import MATES

PATIENCE_S = 120.0
"""For a campaign that was interrupted: to stop its server and write its report."""
POLL_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class News:
    """What a node has to say since it was last asked: lines, pieces of the run, and the exit code once it ended.

    ``more`` tells that pieces are left for the next call.
    """

    lines: tuple[str, ...]
    pieces: tuple[Piece, ...]
    code: int | None
    more: bool


def _named(mates: Sequence[str], per_node: int) -> str:
    """What the campaign on this node needs to find the others."""
    import ray

    address, host = ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address()
    return json.dumps({"address": address, "host": host, "per_node": per_node, "names": list(mates)})


class Station:
    """One variant on one node; becomes a Ray actor."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="perfbook-node-"))
        self._running: subprocess.Popen[bytes] | None = None
        self._lines: list[str] = []
        self._code: int | None = None
        self._ended = threading.Event()

    def about(self) -> dict[str, str]:
        """Host and version, to be held against the caller's."""
        return {"host": platform.node(), "perfbook": perfbook.__version__}

    def start(
        self,
        variant: str,
        parameters: str,
        words: Sequence[str],
        earlier: Sequence[tuple[str, Piece]],
        mates: Sequence[str],
        per_node: int,
    ) -> None:
        """Begin: the parameter file's text, further words of ``perfbook run``, an earlier run to go on with.

        ``mates`` are the names of those on the server's other nodes, ``per_node`` the ranks of each.
        """
        outputs = self._folder / "outputs"
        file = self._folder / f"{variant}.yaml"
        file.write_text(parameters, encoding="utf-8")
        for run, piece in earlier:
            carry.write(outputs / variant / run, [piece])
        command = [
            sys.executable, "-m", "perfbook.cluster.leash", str(PATIENCE_S),
            sys.executable, "-m", "perfbook", "run", str(file), *words,
        ]  # fmt: skip
        env = os.environ | {"PERFBOOK_OUTPUTS": str(outputs), "PYTHONUNBUFFERED": "1"}
        if mates:
            env[MATES] = _named(mates, per_node)
        self._running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        threading.Thread(target=self._listen, daemon=True).start()

    def news(self, variant: str, sent: Mapping[str, State], started: None = None) -> News:
        """What is new, after at most a second; names of files begin with the run's.

        ``started`` is what :meth:`start` returned: Ray then hands its failure on to whoever waits for news.
        """
        self._ended.wait(1.0)
        code = self._code if self._ended.is_set() else None  # read before the files: they are complete then
        lines, self._lines = self._lines, []
        pieces: list[Piece] = []
        held = 0
        for piece in carry.changes(self._folder / "outputs" / variant, sent):
            if held > POLL_BYTES:
                return News(tuple(lines), tuple(pieces), None, True)
            pieces.append(piece)
            held += len(piece.data)
        return News(tuple(lines), tuple(pieces), code, False)

    def leave(self) -> None:
        """Remove everything from the node; called when it has come home."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def interrupt(self) -> None:
        """As Ctrl-C would: the server is stopped, the report written."""
        if self._running is not None and self._running.stdin is not None and not self._running.stdin.closed:
            self._running.stdin.close()

    def _listen(self) -> None:
        assert self._running is not None
        assert self._running.stdout is not None
        for raw in self._running.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            if line.startswith("exit ") and line[5:].lstrip("-").isdigit():
                self._code = int(line[5:])
            elif line:
                self._lines.append(line)
        self._running.wait()
        self._code = 1 if self._code is None else self._code
        self._ended.set()
