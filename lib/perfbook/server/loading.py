"""Signs of life while a server loads: the stage from its log, the time, the memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from perfbook.server import tree
from perfbook.server.lines import clean, split_lines

_EVERY_S = 5.0
_STAGES = [
    (re.compile(r"Initializing a V\d LLM engine|Initializing an LLM engine"), "starting the engine"),
    (re.compile(r"rank \d+ in world size (\d+)"), "connecting {0} ranks"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (
        re.compile(r"Loading \S+ checkpoint shards:\s+(\d+)% Completed \| (\d+/\d+)"),
        "loading weights, {1} shards",
    ),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "preparing the weights"),
    (re.compile(r"Start compiling|Dynamo bytecode transform|Compiling a graph|Cache the graph"), "compiling"),
    (re.compile(r"KV cache size|# \w+ blocks:"), "warming up"),
    (re.compile(r"Warming up model for the compilation"), "compiling"),
    (re.compile(r"Capturing (?:CUDA|cuda) ?graphs?.*?(\d+%)"), "capturing graphs, {0}"),
    (re.compile(r"init engine .* took"), "starting the front end"),
    (re.compile(r"Application startup complete"), "answering"),
]


class Loading:
    """Follows a growing log and says what is going on.

    Parameters
    ----------
    log : Path
        The server's log; may not exist yet.
    say : callable
        Gets a line of text when the stage changes and every few seconds.
    """

    def __init__(self, log: Path, say: Callable[[str], None]) -> None:
        self.log = log
        self.say = say
        self.stage = "starting"
        self._offset = 0
        self._said = ("", -_EVERY_S)

    def look(self) -> None:
        """Read what was added to the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._offset)
                added = file.read(1 << 20)
        except OSError:
            return
        whole = max(added.rfind(b"\n"), added.rfind(b"\r")) + 1
        if not whole and len(added) < 1 << 20:
            return
        whole = whole or len(added)
        self._offset += whole
        for line in split_lines(added[:whole].decode("utf-8", errors="replace")):
            self.stage = stage_of(line) or self.stage

    def report(self, elapsed_s: float, members: Iterable[tree.Process]) -> None:
        """Say the stage, when it is new or some time has passed."""
        now = time.monotonic()
        stage, when = self._said
        if stage == self.stage and now - when < _EVERY_S:
            return
        self._said = (self.stage, now)
        self.say(f"{elapsed_s:4.0f} s  {self.stage}; {tree.resident_bytes(members) / 1e9:.1f} GB resident")


def stage_of(line: str) -> str | None:
    """What a log line says the server is doing; None when it does not."""
    text = clean(line)
    for pattern, stage in _STAGES:
        found = pattern.search(text)
        if found:
            return stage.format(*found.groups())
    return None
