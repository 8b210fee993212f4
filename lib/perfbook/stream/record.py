"""What the hot path keeps of one request: bytes and times, nothing else; and where bytes go when they
grow.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import IO

Progress = Callable[[int, float, float], str | None]
"""Called about once a second with (requests finished, seconds since the start, seconds since any stream that waits got
a byte); a text ends the cell, and is the reason."""


class Recorded:
    """One request as it went over the wire.

    Attributes
    ----------
    index : int
        Which of the cell's requests.
    due_ns, start_ns, finished_ns : int
        CLOCK_MONOTONIC: scheduled start (-1 in a closed loop), last byte handed to the kernel (-1: never
        sent), last thing seen of it.
    error, detail : str or None, str
        Transport failure; what the bytes themselves say is found when they are parsed.
    fresh : list of bytes
        Reads since the framing was last looked at.
    blocks : list of bytes
        The reads before them, joined: many small objects would take more memory than their bytes.
    ends : array of int64
        For each read in the blocks, bytes received by its end.
    user_ns : array of int64
        For each read, the time in user space.
    stamps : bytearray
        For each read, 16 bytes of kernel timespec; zeros where there was none.
    closed : bool
        The server closed the connection.
    spilled : list of (int, int)
        Where in the spool the first bytes lie: offset and length.
    """

    __slots__ = (
        "blocks", "closed", "detail", "due_ns", "ends", "error", "finished_ns", "fresh", "index", "spilled",
        "stamps", "start_ns", "user_ns",
    )  # fmt: skip

    def __init__(self, index: int, due_ns: int = -1) -> None:
        self.index = index
        self.due_ns = due_ns
        self.start_ns = -1
        self.finished_ns = -1
        self.error: str | None = None
        self.detail = ""
        self.fresh: list[bytes] = []
        self.blocks: list[bytes] = []
        self.ends: array[int] = array("q")
        self.user_ns: array[int] = array("q")
        self.stamps = bytearray()
        self.closed = False
        self.spilled: list[tuple[int, int]] = []

    def join(self) -> bytes:
        """The fresh reads as one block, which is no longer fresh."""
        sizes = list(accumulate(map(len, self.fresh), initial=self.size))
        self.ends.extend(sizes[1:])
        block = b"".join(self.fresh)
        self.blocks.append(block)
        self.fresh.clear()
        return block

    @property
    def size(self) -> int:
        """Bytes in the blocks so far, spilled ones included."""
        return self.ends[-1] if self.ends else 0

    @property
    def held_bytes(self) -> int:
        """Memory that the record holds now (buffers, without object headers)."""
        return sum(map(len, self.blocks)) + len(self.stamps) + 16 * len(self.ends)


class Spool:
    """Keeps the response bytes of a cell under a limit: above it they go to an unlinked temporary file."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.spilled_bytes = 0
        self._file: IO[bytes] | None = None

    def spill(self, record: Recorded) -> int:
        """Move the record's blocks to the file; how many bytes that were."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="perfbook-", buffering=0)  # noqa: SIM115 (closed by close)
        moved = b"".join(record.blocks)
        os.pwrite(self._file.fileno(), moved, self.spilled_bytes)
        record.spilled.append((self.spilled_bytes, len(moved)))
        record.blocks.clear()
        self.spilled_bytes += len(moved)
        return len(moved)

    def read(self, record: Recorded) -> bytes:
        """All bytes of the record."""
        fd = self._file.fileno() if self._file is not None else -1
        return b"".join([*(os.pread(fd, size, at) for at, size in record.spilled), *record.blocks])

    def close(self) -> None:
        """Drop the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests start and when to stop.

    Attributes
    ----------
    concurrency : int
        Connections, and so the most requests outstanding.
    due_ns : sequence of int, optional
        Open loop: start of each request, in ns from the cell's start, ascending. Without it a stream's next
        request starts when its last one ended.
    seconds : float, optional
        Start no request later than this after the cell's start.
    enough : callable, optional
        Called with each finished request's duration in ns; true means start no more.
    start_at_ns : callable, optional
        Called when all connections stand; returns the CLOCK_MONOTONIC ns at which to begin (processes that
        share a cell begin together).
    """

    concurrency: int
    due_ns: Sequence[int] | None = None
    seconds: float | None = None
    enough: Callable[[int], bool] | None = None
    start_at_ns: Callable[[], int] | None = None


@dataclass(slots=True)
class Recording:
    """The raw outcome of a cell: one ``Recorded`` per request that was begun, and the clock's readings."""

    spool: Spool
    responses: list[Recorded] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    hot_cpu_ns: int = 0
    other_cpu_ns: int = 0
    process_cpu_begin_ns: int = 0
    offset_before_ns: int = 0
    offset_after_ns: int = 0
    connect_failures: int = 0


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    """No garbage collection inside: it would stop the reader for milliseconds, and go through a million events for
    nothing. What runs inside must leave no cycle that holds much.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
