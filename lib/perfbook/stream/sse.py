"""Server-sent events: response bytes in, payloads out, each with the offset of the byte that completed it.

The grammar is the WHATWG one (https://html.spec.whatwg.org/multipage/server-sent-events.html, "Parsing an
event stream"). Three points of it decide whether a benchmark is right:

* only LF, CR and CRLF end a line. U+2028, U+2029 and U+0085 are ordinary text, so ``str.splitlines`` is not
  usable;
* an event is complete with its *blank line*. The byte that ends the blank line is the byte whose arrival
  counts;
* bytes may be cut anywhere, also inside a UTF-8 character or a CRLF. The events must not depend on the cut,
  so the
  completing byte of a CRLF blank line is its CR: that is when a reader already knows.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LINE_END = re.compile(rb"\r\n|\n|\r")
_FIRST, _LAST = b"data: ", b"\n\n"
_BOM = b"\xef\xbb\xbf"

MAX_EVENT_BYTES = 16 * 2**20
"""Longest event that is taken; a longer one is an attack or a bug, and memory must stay bounded."""


class EventTooLongError(ValueError):
    """One event exceeded the byte limit."""


class SseEvent(NamedTuple):
    """One dispatched event.

    Attributes
    ----------
    data : bytes
        The payload: its ``data`` lines joined with LF.
    end : int
        Offset in the body just after the byte that completed the event.
    name : bytes
        The ``event:`` field, empty when there was none.
    """

    data: bytes
    end: int
    name: bytes


class SseParser:
    """Incremental parser: feed bytes in any pieces, get the events that became complete.

    Parameters
    ----------
    max_event_bytes : int
        Raises ``EventTooLongError`` once an unfinished event holds more bytes than this.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._pending = bytearray()
        self._base = 0  # body offset of the first pending byte
        self._scan = 0  # pending bytes already known to hold no blank line
        self._max = max_event_bytes
        self._at_start = True
        self._by_line = False  # a CR was seen: read line by line from here on
        self._skip_lf = False
        self._lines: list[bytes] = []
        self._held = 0

    def feed(self, data: bytes) -> list[SseEvent]:
        """Return the events that ``data`` completes, in order."""
        pending = self._pending
        pending += data
        if self._at_start:
            if len(pending) < 3 and _BOM.startswith(bytes(pending)):
                return []
            if pending.startswith(_BOM):
                self._drop(3)
            self._at_start = False
        if not self._by_line and b"\r" in data:
            self._by_line = True
            self._scan = 0
        events = self._feed_lines() if self._by_line else self._feed_blocks()
        if len(pending) + self._held > self._max:
            raise EventTooLongError(f"an event of more than {self._max} bytes")
        return events

    def finish(self) -> SseEvent | None:
        """Return the last event if the body ended before its blank line.

        The grammar discards such an event; the caller decides, since a server that closes right after
        ``data: [DONE]`` did say that it was done.
        """
        lines = [*self._lines, *_LINE_END.split(bytes(self._pending))]
        return _dispatch(lines, self._base + len(self._pending), self._max)

    def _drop(self, count: int) -> None:
        del self._pending[:count]
        self._base += count

    def _feed_blocks(self) -> list[SseEvent]:
        """Fast path while no CR was seen: everything between two blank lines at once."""
        pending = self._pending
        if pending.find(_LAST, max(0, self._scan - 1)) < 0:
            self._scan = len(pending)
            return []
        *blocks, rest = bytes(pending).split(_LAST)
        end = self._base
        events: list[SseEvent] = []
        for block in blocks:
            end += len(block) + len(_LAST)
            event = _dispatch(block.split(b"\n"), end, self._max)
            if event is not None:
                events.append(event)
        self._drop(len(pending) - len(rest))
        self._scan = len(rest)
        return events

    def _feed_lines(self) -> list[SseEvent]:
        pending = self._pending
        if not pending:
            return []
        if self._skip_lf:
            if pending[0] == 10:
                self._drop(1)
            self._skip_lf = False
        events: list[SseEvent] = []
        start = 0
        for match in _LINE_END.finditer(pending, self._scan):
            at = match.start()
            if at > start:
                line = bytes(memoryview(pending)[start:at])
                self._lines.append(line)
                self._held += len(line)
            elif self._lines:
                event = _dispatch(self._lines, self._base + at + 1, self._max)
                if event is not None:
                    events.append(event)
                self._lines = []
                self._held = 0
            start = match.end()
        self._skip_lf = bool(start) and start == len(pending) and pending[start - 1] == 13
        self._drop(start)
        self._scan = len(pending)
        return events


def _dispatch(lines: list[bytes], end: int, limit: int) -> SseEvent | None:
    """Interpret the lines of one event; None when it carries no data field."""
    data: list[bytes] = []
    name = b""
    for line in lines:
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    if not data:
        return None
    payload = b"\n".join(data)
    if len(payload) > limit:
        raise EventTooLongError(f"an event of more than {limit} bytes")
    return SseEvent(payload, end, name)


def parse(body: bytes) -> list[SseEvent]:
    """Parse a whole body at once; an event cut off by its end is left out."""
    return SseParser().feed(body)


def parse_plain(body: bytes) -> tuple[list[bytes], NDArray[np.int64]] | None:
    """Payloads and their ``SseEvent.end`` of a whole body whose every event is one ``data: `` line; None for any other.

    So do all servers write in practice, and such a body needs no grammar: it is cut at what stands between two
    payloads. That it was such a body shows in the number of its line ends, which is then two per payload.
    """
    if not body.startswith(_FIRST) or not body.endswith(_LAST) or b"\r" in body:
        return None
    data = body[len(_FIRST) : -len(_LAST)].split(_LAST + _FIRST)
    if body.count(b"\n") != len(_LAST) * len(data):
        return None
    size = np.fromiter(map(len, data), np.int64, len(data)) + len(_FIRST)
    return (data, np.cumsum(size + len(_LAST))) if size.max() <= MAX_EVENT_BYTES else None
