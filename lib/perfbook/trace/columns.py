"""What is kept of a trace: a few columns of integers per kind of event, and one table of names.

Times are integer nanoseconds relative to the trace's own base, never rounded to microseconds: a kernel of
1.5 us that is rounded up or down moves by a third. Columns take the smallest integer type that holds their values,
so a kept event costs about 20 bytes and ten million of them fit where the JSON text would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer]

_BLOCK = 1 << 17
UNKNOWN = -1
"""In ``correlation`` and ``message_bytes``: the trace does not say."""


def narrow(values: IntArray) -> IntArray:
    """The same integers in the smallest signed type that holds them all."""
    if not len(values):
        return values.astype(np.int8)
    low, high = int(values.min()), int(values.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    return values.astype(np.int64)


def blocks(length: int) -> Iterator[slice]:
    """Slices that cover ``length`` elements: what is worked out block by block costs no memory for millions."""
    for start in range(0, length, _BLOCK):
        yield slice(start, start + _BLOCK)


@dataclass(frozen=True, slots=True)
class Columns:
    """Events of one kind, one array element per event; all arrays have the same length.

    Attributes
    ----------
    start_ns, dur_ns : start relative to the trace's base, and duration.
    name : index into :attr:`Trace.names`.
    lane : index into :attr:`Trace.lanes` (a device stream, or a host thread).
    correlation : what ties a launch to its kernels; ``UNKNOWN`` where absent.
    message_bytes : payload of a collective; ``UNKNOWN`` where the trace does not say.
    """

    start_ns: IntArray
    dur_ns: IntArray
    name: IntArray
    lane: IntArray
    correlation: IntArray
    message_bytes: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> IntArray:
        """End of each event."""
        return self.start_ns + self.dur_ns.astype(np.int64)

    def take(self, index: NDArray[np.bool_] | IntArray) -> Columns:
        """The events chosen by a mask or by positions, in that order."""
        return Columns(*(getattr(self, f.name)[index] for f in fields(self)))

    def by_start(self) -> Columns:
        """The same events in order of their start; ties by duration, longest first, so parents precede children."""
        if len(self) < 2 or bool(np.all(self.start_ns[1:] > self.start_ns[:-1])):
            return self
        return self.take(np.lexsort((-self.dur_ns.astype(np.int64), self.start_ns)))

    @staticmethod
    def empty() -> Columns:
        """No events."""
        return Columns(*(np.zeros(0, np.int64) for _ in fields(Columns)))

    @staticmethod
    def join(parts: Sequence[Columns]) -> Columns:
        """All events of ``parts``, one after the other."""
        if not parts:
            return Columns.empty()
        if len(parts) == 1:
            return parts[0]
        return Columns(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Columns)))


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's trace.

    Attributes
    ----------
    label : short name of the file, for people.
    rank, world_size : as the trace or its file name says; None where neither does.
    events : events seen, of whatever kind.
    base_ns : what the trace's times are relative to, on the host's wall clock; 0 where it does not say.
    window_ns : start and end of the recording, where the trace says.
    gpu : kernels, copies and memsets on the device.
    launches : host calls that start device work, load code or capture graphs.
    annotations : named ranges on the host.
    ops : operators on the host, kept only for a trace without device events.
    warnings : what was wrong with the file, one line each.
    """

    label: str
    rank: int | None
    world_size: int | None
    events: int
    base_ns: int
    window_ns: tuple[int, int] | None
    names: Sequence[str]
    lanes: Sequence[str]
    gpu: Columns
    launches: Columns
    annotations: Columns
    ops: Columns
    warnings: tuple[str, ...]
