"""Events of one trace on shelves, by kind, packed into columns chunk by chunk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perfbook.trace.clock import exact_ns, float_ns, int64_ids
from perfbook.trace.columns import UNKNOWN, Columns, Trace, narrow
from perfbook.trace.events import (
    GENERIC,
    KINDS,
    SIZED_OPS,
    Event,
    ExactEvent,
    Value,
    largest_input_bytes,
    message_bytes,
    starts_work,
)

_HOST = ("host", "")  # which thread launched does not matter

_SMALL_PIECES = 32


class _Shelf:
    """Columns of one kind while they grow."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, Any, int, int, int, int]] = []
        self.small: list[tuple[int, Columns]] = []
        self.large: list[tuple[int, Columns]] = []

    def packed(self, exact: bool) -> tuple[Columns, int]:
        """The rows so far as arrays, and how many had times that cannot be."""
        if not self.rows:
            return Columns.empty(), 0
        ts, dur, *others = zip(*self.rows, strict=True)
        start, ok = (exact_ns if exact else float_ns)(ts)
        length, sane = float_ns(dur)
        ok &= sane & (length >= 0)
        arrays = [int64_ids(values) for values in others]
        return Columns(start[ok], *(narrow(a[ok]) for a in (length, *arrays))), int(len(ok) - ok.sum())

    def add(self, columns: Columns) -> None:
        """Keep packed rows; many small pieces become one, as they would riddle the heap with holes."""
        if not len(columns):
            return
        self.small.append(_relative(columns))
        if len(self.small) == _SMALL_PIECES:
            self.large.append(_relative(_merged(self.small)))
            self.small = []

    def columns(self) -> Columns:
        """Everything, in order of start; empties the shelf."""
        parts = self.large + self.small
        self.large, self.small = [], []
        return _merged(parts).by_start()


def _relative(columns: Columns) -> tuple[int, Columns]:
    """A base and the columns with starts relative to it, which need fewer bytes."""
    base = int(columns.start_ns.min())
    return base, replace(columns, start_ns=narrow(columns.start_ns - base))


def _merged(parts: list[tuple[int, Columns]]) -> Columns:
    """All parts in one, starts absolute again."""
    start = np.zeros(sum(len(part) for _, part in parts), np.int64)
    done = 0
    for base, part in parts:
        np.add(part.start_ns, base, out=start[done : done + len(part)], dtype=np.int64)
        done += len(part)
    rest = [np.concatenate([getattr(p, name) for _, p in parts] or [start]) for name in Columns.__slots__[1:]]
    return Columns(start, *rest)


class Shelves:
    """All kinds of events of one trace while it is read."""

    def __init__(self, with_python: bool = False) -> None:
        kinds = KINDS | ({"python_function": "op"} if with_python else {})
        self.kind_of = {spelt: kind for cat, kind in kinds.items() for spelt in (cat, cat.capitalize(), cat.upper())}
        self.shelves = {kind: _Shelf() for kind in ("gpu", "launch", "annotation", "op", "window")}
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[Value, Value], int] = {}
        self.wanted_call: dict[str, bool] = {}
        self.events = 0
        self.impossible_times = 0

    def put(self, events: Sequence[Event]) -> None:
        """Keep what matters of a list of events.

        Raises
        ------
        PrecisionLost
            Decode the same text again with ``EXACT``; nothing of it was kept.
        """
        exact = bool(events) and isinstance(events[0], ExactEvent)
        rows = {kind: shelf.rows for kind, shelf in self.shelves.items()}
        keep_ops = not (self.shelves["gpu"].small or self.shelves["gpu"].large)
        names, lanes, kind_of = self.names, self.lanes, self.kind_of
        for event in events:
            kind = kind_of.get(event.cat)  # type: ignore[arg-type]
            if kind is None or event.ph != "X" or (kind == "op" and not keep_ops):
                continue
            args = event.args
            name = event.name
            if name.__class__ is not str:
                name = str(name)
            correlation = message = UNKNOWN
            where = (event.pid, event.tid)
            if kind == "gpu":
                if args is not None:
                    correlation = args.correlation  # type: ignore[assignment]
                    if args.stream is not None:
                        where = (args.device, args.stream)
                    if args.elements is not None:
                        message = message_bytes(args.elements, args.dtype)
                    if args.collective is not None and GENERIC in name:
                        name = f"{name} [{args.collective}]"  # else nothing says which collective it is
            elif kind == "launch":
                if not self._wanted(name):
                    continue
                if args is not None:
                    correlation = args.correlation  # type: ignore[assignment]
                where = _HOST
            elif kind == "op" and args is not None and SIZED_OPS.search(name):
                message = largest_input_bytes(args)
            rows[kind].append((event.ts, event.dur, names.setdefault(name, len(names)),
                               lanes.setdefault(where, len(lanes)), correlation, message))  # fmt: skip
        try:
            packed = [shelf.packed(exact) for shelf in self.shelves.values()]
        finally:
            for shelf in self.shelves.values():
                shelf.rows = []
        for shelf, (columns, impossible) in zip(self.shelves.values(), packed, strict=True):
            shelf.add(columns)
            self.impossible_times += impossible
        if not keep_ops:
            self.shelves["op"] = _Shelf()
        self.events += len(events)

    @property
    def empty(self) -> bool:
        """Whether no event was kept."""
        return not any(shelf.small or shelf.large for shelf in self.shelves.values())

    def _wanted(self, call: str) -> bool:
        wanted = self.wanted_call.get(call)
        if wanted is None:
            wanted = self.wanted_call[call] = starts_work(call)
        return wanted

    def trace(self, path: Path, meta: dict[str, Any], warnings: Sequence[str]) -> Trace:
        """The finished trace."""
        columns = {kind: shelf.columns() for kind, shelf in self.shelves.items()}
        early = min((int(c.start_ns[0]) for c in columns.values() if len(c)), default=0)
        if early < 0:  # a base that lies after the first event
            columns = {kind: replace(c, start_ns=c.start_ns - early) for kind, c in columns.items()}
        if len(columns["gpu"]):
            columns["op"] = Columns.empty()
        said = list(warnings)
        if self.impossible_times:
            said.append(f"{self.impossible_times} events have no usable start or duration and are left out")
        window = columns["window"]
        distributed = meta.get("distributedInfo")
        distributed = distributed if isinstance(distributed, dict) else {}
        return Trace(
            label=path.name,
            rank=_rank(distributed.get("rank"), path.name),
            world_size=_whole(distributed.get("world_size")),
            events=self.events,
            base_ns=(_whole(meta.get("baseTimeNanoseconds")) or 0) + min(early, 0),
            window_ns=(int(window.start_ns.min()), int(window.end_ns.max())) if len(window) else None,
            names=list(self.names),
            lanes=[f"{a}/{b}" for a, b in self.lanes],
            gpu=columns["gpu"],
            launches=columns["launch"],
            annotations=columns["annotation"],
            ops=columns["op"],
            warnings=tuple(said),
        )


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _rank(said: object, file_name: str) -> int | None:
    """The rank that the metadata says, or else the file's name."""
    if (rank := _whole(said)) is not None:
        return rank
    named = re.search(r"rank[_-]?(\d+)", file_name)
    return int(named[1]) if named else None
