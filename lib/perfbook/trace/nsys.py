"""Nsight Systems SQLite exports (``nsys export --type sqlite``) into the same columns as torch.profiler's JSON.

Tables exist only where something was recorded, and older exports lack columns, so both are looked for before they are
asked. Launch correlation numbers count per process: each process becomes a trace of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from perfbook.errors import BadInput
from perfbook.trace.columns import UNKNOWN, Columns, Trace, narrow
from perfbook.trace.events import starts_work

_MAGIC = b"SQLite format 3\0"
_ROWS = 200_000
_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPY_KIND = (
    "CASE copyKind WHEN 1 THEN 'HtoD' WHEN 2 THEN 'DtoH' WHEN 8 THEN 'DtoD' WHEN 10 THEN 'PtoP' ELSE 'other' END"
)
_PID = "(COALESCE({}, 0) / 16777216) % 16777216"
_SANE = "typeof(start) = 'integer' AND typeof(\"end\") = 'integer' AND \"end\" >= start"
_PUSH_POP, _START_END = 59, 60


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None


def read_nsys(path: Path) -> list[Trace]:
    """One trace per process that used a device, in the order of devices and process numbers; ranks are not known.

    Raises
    ------
    BadInput
        Not an Nsight Systems export, or no device work in it.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            return _Export(db, path).traces()
    except sqlite3.Error as error:
        raise BadInput(f"{path}: the Nsight Systems export cannot be read: {error}.") from None


class _Export:
    """The tables of one export."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self.db, self.path = db, path
        self.impossible_times = 0  # of the process at hand
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {t: {row[1] for row in db.execute(f'PRAGMA table_info("{t}")')} for t in tables}
        if "StringIds" not in self.columns:
            raise BadInput(f"{path} is an SQLite file, but not an Nsight Systems export.")

    def traces(self) -> list[Trace]:
        """One per process with device work."""
        sources = [t for t in (_KERNEL, _MEMCPY, _MEMSET, _GRAPH) if t in self.columns]
        if not sources:
            raise BadInput(f"{self.path}: no CUDA work in this export; record with nsys profile --trace=cuda,nvtx.")
        found: dict[int, int] = {}
        for table in sources:
            pid = _PID.format("globalPid") if "globalPid" in self.columns[table] else "0"
            for process, device in self.db.execute(f"SELECT {pid}, MIN(deviceId) FROM {table} GROUP BY 1"):
                found[process] = min(device, found.get(process, device))
        if not found:
            raise BadInput(f"{self.path}: no CUDA work in this export: nothing ran while it was recorded.")
        return [self._trace(pid, len(found)) for pid in sorted(found, key=lambda p: (found[p], p))]

    def _trace(self, pid: int, processes: int) -> Trace:
        names: dict[str, int] = {}
        lanes: dict[tuple[int, int], int] = {}
        warnings = []
        self.impossible_times = 0
        gpu = [self._device(_KERNEL, self._kernel_name(), pid, names, lanes)]
        gpu.append(self._device(_MEMCPY, f"'Memcpy ' || {_COPY_KIND}", pid, names, lanes))
        gpu.append(self._device(_MEMSET, "'Memset (Device)'", pid, names, lanes))
        if len(graphs := self._device(_GRAPH, "'CUDA graph, as a whole'", pid, names, lanes)):
            gpu.append(graphs)
            warnings.append("CUDA graphs are recorded as wholes: record with nsys profile --cuda-graph-trace=node")
        launches = self._runtime(pid, names, lanes)
        marks = self._nvtx(pid, names, lanes)
        device = Columns.join([c for c in gpu if len(c)]).by_start()
        if self.impossible_times:
            warnings.append(f"{self.impossible_times} events have no usable start or duration and are left out")
        return Trace(
            label=self.path.name if processes == 1 else f"{self.path.name}, process {pid}",
            rank=None,
            world_size=processes if processes > 1 else None,
            events=len(device) + len(launches) + len(marks),
            base_ns=0,
            window_ns=None,
            names=list(names),
            lanes=[f"{a}/{b}" for a, b in lanes],
            gpu=device,
            launches=launches,
            annotations=marks,
            ops=Columns.empty(),
            warnings=tuple(warnings),
        )

    def _kernel_name(self) -> str:
        column = next(c for c in ("demangledName", "shortName") if c in self.columns.get(_KERNEL, {"shortName"}))
        return f"(SELECT value FROM StringIds WHERE id = {column})"

    def _device(
        self, table: str, name: str, pid: int, names: dict[str, int], lanes: dict[tuple[int, int], int]
    ) -> Columns:
        if table not in self.columns:
            return Columns.empty()
        has = self.columns[table]
        correlation = "COALESCE(correlationId, -1)" if "correlationId" in has else "-1"
        where = f"WHERE {_PID.format('globalPid')} = {pid:d}" if "globalPid" in has else ""
        query = f'SELECT start, "end", {name}, deviceId, streamId, {correlation} FROM {table} {where}'
        return self._columns(query, names, lanes)

    def _runtime(self, pid: int, names: dict[str, int], lanes: dict[tuple[int, int], int]) -> Columns:
        if _RUNTIME not in self.columns:
            return Columns.empty()
        wanted = [i for i, text in self.db.execute("SELECT id, value FROM StringIds") if starts_work(text)]
        if not wanted:
            return Columns.empty()
        where = f"AND {_PID.format('globalTid')} = {pid:d}" if "globalPid" in self.columns.get(_KERNEL, ()) else ""
        query = (
            'SELECT start, "end", (SELECT value FROM StringIds WHERE id = nameId), -1, globalTid % 16777216, '
            f"COALESCE(correlationId, -1) FROM {_RUNTIME} WHERE nameId IN ({','.join(map(str, wanted))}) {where}"
        )
        return self._columns(query, names, lanes)

    def _nvtx(self, pid: int, names: dict[str, int], lanes: dict[tuple[int, int], int]) -> Columns:
        has = self.columns.get("NVTX_EVENTS", set())
        if not {"start", "end", "eventType"} <= has:
            return Columns.empty()
        text = "text" if "textId" not in has else "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
        where = f"AND {_PID.format('globalTid')} = {pid:d}" if "globalPid" in self.columns.get(_KERNEL, ()) else ""
        query = (
            f'SELECT start, "end", {text}, -1, globalTid % 16777216, -1 FROM NVTX_EVENTS '
            f'WHERE eventType IN ({_PUSH_POP}, {_START_END}) AND "end" IS NOT NULL {where}'
        )
        return self._columns(query, names, lanes)

    def _columns(self, query: str, names: dict[str, int], lanes: dict[tuple[int, int], int]) -> Columns:
        """Rows of start, end, name, two numbers of a lane, correlation."""
        parts = []
        ((impossible,),) = self.db.execute(f"SELECT COUNT(*) FROM ({query}) WHERE NOT ({_SANE})")
        self.impossible_times += impossible
        for rows in _batches(self.db.execute(f"SELECT * FROM ({query}) WHERE {_SANE}")):
            start, end, name, group, lane, correlation = zip(*rows, strict=True)
            begin = np.array(start, np.int64)
            columns = (
                np.array(end, np.int64) - begin,
                np.array([names.setdefault(str(n), len(names)) for n in name]),
                np.array([lanes.setdefault(key, len(lanes)) for key in zip(group, lane, strict=True)]),
                np.array(correlation, np.int64),
                np.full(len(rows), UNKNOWN),
            )
            parts.append(Columns(begin, *map(narrow, columns)))
        return Columns.join(parts).by_start()


def _batches(cursor: sqlite3.Cursor) -> Iterator[Sequence[tuple[int, int, str, int, int, int]]]:
    while rows := cursor.fetchmany(_ROWS):
        yield rows
