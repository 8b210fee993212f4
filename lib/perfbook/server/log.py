"""What a vLLM log says about its engine (pure).

Whether torch.compile and CUDA graphs are on is read in three steps: the banner states the configuration, a
later line may take it back, and only a line that reports the work done (compiled, captured) makes it
``active``. A log that shows neither the work nor a refusal leaves it unknown; nothing is concluded from
silence.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfbook.errors import BadInput
from perfbook.server import log_patterns as texts
from perfbook.server.banner import ARGS, BANNER, read_args, read_banner
from perfbook.server.facts import EngineFacts, Evidence, Finding, Switch, Throughput
from perfbook.server.findings import Matches, judge
from perfbook.server.lines import Line, parse_line, read_lines, split_lines
from perfbook.server.log_text import render_text
from perfbook.server.rootcause import RootError, Search, first_error

__all__ = [
    "EngineFacts",
    "Evidence",
    "Finding",
    "RootError",
    "Switch",
    "first_error",
    "first_error_in",
    "parse_log",
    "read_log",
    "render_text",
]

_MOST_RATES = 100_000
_MOST_EVIDENCE = 100


def parse_log(source: str | Iterable[str], *, planned_concurrency: int | None = None) -> EngineFacts:
    """Read a log; never raises, whatever the text.

    Parameters
    ----------
    source : str or iterable of str
        The text or its lines; process prefixes, colours, progress bars, interleaved ranks and truncation are
        fine. Lines are taken one at a time, and a few hundred of them held.
    planned_concurrency : int, optional
        Requests that will run at once; adds a finding when the cache cannot hold them at full length.
    """
    launch, launches = _Launch(), 0
    for number, raw in enumerate(split_lines(source) if isinstance(source, str) else source, 1):
        line = parse_line(number, raw)
        if line.level and BANNER.match(line.text):
            launch.engine_seen = True
            launches = max(launches, 1)
        elif line.level and texts.SERVER_START.match(line.text):
            if launch.engine_seen:  # a service's log holds many launches: the last one counts
                launch, launches = _Launch(launch.logged), launches + 1
            launches = max(launches, 1)
        launch.feed(line)
    return launch.facts(launches, planned_concurrency)


def read_log(path: Path, *, planned_concurrency: int | None = None) -> EngineFacts:
    """Read a log file of any size.

    Raises
    ------
    BadInput
        The file cannot be read. One that is no vLLM log gives facts that are not ``recognised``.
    """
    return parse_log(read_lines(path), planned_concurrency=planned_concurrency)


def first_error_in(path: Path) -> RootError | None:
    """The first error of a log file; None when it holds none or cannot be read."""
    try:
        return first_error(parse_line(number, raw) for number, raw in enumerate(read_lines(path), 1))
    except BadInput:
        return None


class _Launch:
    """One launch, line by line: what it says, its errors, what the rules look for."""

    def __init__(self, logged: int = 0) -> None:
        self.logged = logged
        self.engine_seen = False
        self._reader, self._search, self._matches = _Reader(), Search(), Matches()

    def feed(self, line: Line) -> None:
        """One more line."""
        self._search.feed(line)
        if not line.level:
            self._reader.plain(line)
            return
        self.logged += 1
        if not self._reader.logged(line):
            self._matches.feed(line, ready="ready_line" in self._reader.values)

    def facts(self, launches: int, planned_concurrency: int | None) -> EngineFacts:
        """All that was said."""
        facts = EngineFacts(
            **self._reader.result(), launches=launches, logged_lines=self.logged, first_error=self._search.result()
        )
        return replace(facts, findings=judge(facts, self._matches, planned_concurrency))


class _Reader:
    """Goes through the lines once; a later statement wins over an earlier one."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.modes: dict[str, str | None] = {"compile": None, "cuda_graphs": None}
        self.done = {"compile": False, "cuda_graphs": False}
        self.evidence: dict[str, list[Evidence]] = {"compile": [], "cuda_graphs": []}
        self.rates: deque[Throughput] = deque(maxlen=_MOST_RATES)

    def plain(self, line: Line) -> None:
        """A line that did not come through the logger."""
        if "ready_line" not in self.values and texts.READY.match(line.text):
            self.values["ready_line"] = line.number

    def result(self) -> dict[str, Any]:
        """All facts as keyword arguments of :class:`EngineFacts`."""
        for name in ("compile", "cuda_graphs"):
            mode = self.modes[name]
            active = False if mode == "NONE" else True if self.done[name] else None
            self.values[name] = Switch(mode, active, tuple(self.evidence[name]))
        self.values["throughput"] = tuple(self.rates)
        return self.values

    def logged(self, line: Line) -> bool:
        """A line of the logger; whether it is of a kind that says nothing else: the bulk of a busy server's log."""
        text = line.text
        if rate := texts.THROUGHPUT.match(text):
            self._rate(line, rate)
            return True
        if texts.REQUEST.match(text):
            return True
        if line.level in ("INFO", "WARNING"):
            self._logged(line)
        return False

    def _logged(self, line: Line) -> None:
        text = line.text
        if BANNER.match(text):
            self._banner(line)
        elif ARGS.match(text):
            self._defaults(read_args(text))
        elif version := texts.SERVER_VERSION.search(text):
            self._defaults({"vllm_version": version[1] or version[2]})
        else:
            self._facts(text)
            self._switches(line)
            if "ready_line" not in self.values and texts.READY.match(text):
                self.values["ready_line"] = line.number

    def _banner(self, line: Line) -> None:
        found = read_banner(line.text)
        for name, key in (("compile", "compile_mode"), ("cuda_graphs", "graph_mode")):
            if key in found:
                self._state(name, found.pop(key), line)
        if found.get("enforce_eager"):
            for name in ("compile", "cuda_graphs"):
                self._state(name, "NONE", line)
        self.values |= found

    def _defaults(self, found: dict[str, Any]) -> None:
        for key, value in found.items():
            self.values.setdefault(key, value)

    def _facts(self, text: str) -> None:
        for key, pattern in texts.LARGEST:
            if match := pattern.search(text):
                self.values[key] = max(self.values.get(key, 0.0), float(match[1]))
        for key, pattern, kind in texts.FIRST:
            if key not in self.values and (match := pattern.search(text)):
                self.values[key] = kind(match[1].replace(",", "")) if kind is not str else match[1]
        if "all_reduce_backends" not in self.values and (match := texts.ALL_REDUCE.match(text)):
            self.values["all_reduce_backends"] = tuple(re.findall(r"[\w-]+", match[1]))

    def _switches(self, line: Line) -> None:
        text = line.text
        if texts.NOT_COMPILED.match(text):
            self._state("compile", "NONE", line)
        elif texts.COMPILED.match(text):
            self.done["compile"] = True
            self._note("compile", line)
        if change := texts.GRAPH_MODE_SET.search(text):
            self._state("cuda_graphs", change[1], line)
        elif texts.NO_GRAPHS.search(text):
            self._state("cuda_graphs", "NONE", line)
        elif texts.CAPTURED.match(text):
            self.done["cuda_graphs"] = True
            self._note("cuda_graphs", line)

    def _state(self, name: str, mode: str | None, line: Line) -> None:
        self.modes[name] = mode
        self.done[name] = self.done[name] and mode != "NONE"
        self._note(name, line)

    def _note(self, name: str, line: Line) -> None:
        text = line.text if len(line.text) <= 240 else _around_mode(line.text, name)
        kept = self.evidence[name]
        if len(kept) < _MOST_EVIDENCE and not any(one.text == text for one in kept):  # ranks repeat each other
            kept.append(Evidence(line.number, text))

    def _rate(self, line: Line, found: re.Match[str]) -> None:
        self.rates.append(
            Throughput(
                line.number,
                line.time,
                found["engine"] or "000",
                float(found["prompt"]),
                float(found["generation"]),
                int(found["running"]),
                int(found["waiting"]),
                float(found["kv"]) if found["kv"] else None,
                float(found["hit"]) if found["hit"] else None,
            )
        )


def _around_mode(text: str, name: str) -> str:
    """The part of a long banner that says it."""
    keys = {
        "compile": ("enforce_eager=", "'mode'", '"level"', "'level'"),
        "cuda_graphs": ("'cudagraph_mode'", "cudagraph"),
    }
    found = [text[at : at + 70].split(", ")[0] for key in keys[name] if (at := text.find(key)) >= 0]
    return f"{text[:60]}… {'; '.join(found)}" if found else text[:240] + "…"
