"""torch.profiler (Kineto) JSON into columns, in one pass and in memory that does not grow with the text.

The text is cut into chunks at event boundaries and each chunk is decoded into typed structs that leave out what is
not needed. A cut is a guess (``}, {``) with a certificate: what lies between two cuts must itself be a valid list.
A chunk that will not decode is repaired, then taken apart event by event, and every loss becomes a warning.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from perfbook.errors import BadInput
from perfbook.trace.clock import PrecisionLost
from perfbook.trace.columns import Trace
from perfbook.trace.events import EACH, EXACT, FAST
from perfbook.trace.inflate import plain_chunks
from perfbook.trace.memory import return_free_memory
from perfbook.trace.salvage import first_value, pieces, sanitise
from perfbook.trace.shelves import Shelves

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_AFTER_EVENTS = re.compile(rb'\s*(?:,\s*"|\}|$)')
_COMMA_AT_END = re.compile(rb"\}\s*,\s*$")
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_BLANK = b"\xef\xbb\xbf \t\r\n"
_HEAD_LIMIT_BYTES = 64 << 20
_CUTS_TRIED = 12


def read_trace(path: Path, *, with_python: bool = False) -> Trace:
    """Read one rank's trace file, plain or gzip, whole or cut off.

    Parameters
    ----------
    path : the file.
    with_python : also keep ``python_function`` events (most of a trace recorded with stacks) among the operators.

    Raises
    ------
    BadInput
        The file cannot be read or is not a profiler trace.
    """
    reader = _Reader(path, with_python)
    data = b""
    for data in plain_chunks(path, reader.warnings):
        reader.feed(data)
    trace = reader.finish()
    del reader, data
    return_free_memory()
    return trace


class _Part(Enum):
    """Where in the file the reader is."""

    HEAD, EVENTS, TAIL, DONE = range(4)


class _Reader:
    """One pass over the text of one file."""

    def __init__(self, path: Path, with_python: bool) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.meta: dict[str, Any] = {}
        self.shelves = Shelves(with_python)
        self.decoder = FAST
        self.part = _Part.HEAD
        self.bare = False
        self.pending = b""
        self.offset = 0  # of pending[0] in the text
        self.damage: dict[str, list[int]] = {}

    def feed(self, data: bytes) -> None:
        """Take the next chunk of text."""
        self.pending = self.pending + data if self.pending else data
        if self.part is _Part.HEAD:
            self._look_for_events()
        if self.part is _Part.EVENTS:
            self._decode_chunk(final=False)

    def finish(self) -> Trace:
        """What the whole text amounts to."""
        if self.part is _Part.HEAD:
            self._accept_only_a_cut_off_head()
        if self.part is _Part.EVENTS:
            self._decode_chunk(final=True)
        if self.part is _Part.TAIL:
            self._keep_metadata(b"{" + self.pending.lstrip().removeprefix(b","))
        if self.bare and self.shelves.empty:
            raise BadInput(f"{self.path} is not a profiler trace: a list without trace events.")
        for what, positions in self.damage.items():
            more = f" and {len(positions) - 1} more" if len(positions) > 1 else ""
            self.warnings.append(f"{what} at byte {positions[0]}{more}")
        return self.shelves.trace(self.path, self.meta, self.warnings)

    # Head and tail -------------------------------------------------------------------------------------------------

    def _look_for_events(self) -> None:
        text = self.pending.lstrip(_BLANK)
        if text[:1] == b"[":
            self.bare = True
            start = len(self.pending) - len(text) + 1
        elif key := _EVENTS_KEY.search(self.pending):
            self._keep_metadata(self.pending[: key.start()].lstrip(_BLANK).rstrip().rstrip(b",") + b"}")
            start = key.end()
        elif text[:1] not in (b"{", b"") or len(text) > _HEAD_LIMIT_BYTES:
            raise BadInput(f"{self.path} is not a profiler trace: no traceEvents in it.")
        else:
            return
        self.part = _Part.EVENTS
        self._drop(start)

    def _accept_only_a_cut_off_head(self) -> None:
        if first_value(sanitise(self.pending)[0].lstrip(_BLANK)) is not None:
            raise BadInput(f"{self.path} is not a profiler trace: no traceEvents in it.")
        self.warnings.append(f"the file ends at byte {len(self.pending)}, before its first event")

    def _keep_metadata(self, text: bytes) -> None:
        """Keep the keys that stand beside the events; damage there costs only them."""
        try:
            self.meta.update(msgspec.json.decode(sanitise(text)[0], type=dict[str, Any]))
        except (msgspec.MsgspecError, RecursionError):
            self.warnings.append("the metadata beside the events is incomplete or damaged")

    # Events --------------------------------------------------------------------------------------------------------

    def _decode_chunk(self, *, final: bool) -> None:
        """Decode as much of ``pending`` as is certain; all of it when ``final``."""
        damage = self._decode(final)
        if damage is not None and final and self._decode(final=False) is None:
            damage = self._decode(final)
        if damage is None:
            return
        self.pending, kinds = sanitise(self.pending)
        if not kinds and damage < len(self.pending):
            kinds = [("malformed text", damage)]
        for kind, position in kinds:
            self._note(kind, position)
        if self._decode(final) is not None:
            self._decode_pieces(final)

    def _decode(self, final: bool) -> int | None:
        """Decode up to the last cut that holds; where the damage is when none does."""
        text = self.pending
        cut = len(text)
        for _ in range(_CUTS_TRIED):
            if not final and (cut := _boundary_before(text, cut)) < 0:
                return None
            listed = b"[" + text if final else b"[" + text[:cut] + b"]"
            try:
                self._take(listed)
            except (msgspec.DecodeError, RecursionError) as error:
                where = _AT_BYTE.search(str(error))
                stop = int(where[1]) - 1 if where else cut
                end = stop - 1  # msgspec names the byte after the first one that is too much
                if "trailing" in str(error) and _AFTER_EVENTS.match(text[end : end + 64]):
                    self._take(listed[: end + 1])
                    self.part = _Part.TAIL
                    self._drop(end)
                    return None
                if final or stop < cut:
                    return stop
            else:
                self.part = _Part.DONE if final else self.part
                self._drop(cut + 1)
                return None
        return cut

    def _take(self, listed: bytes) -> None:
        """Put a valid list of events on the shelves; of events with impossible values leave out only those."""
        try:
            events = self.decoder.decode(listed)
        except msgspec.ValidationError:
            position, each = 0, []
            for raw in EACH.decode(listed):
                event = bytes(raw)
                position = listed.index(event, position)
                each.append((position - 1, event))
            self._take_each(each)
            return
        try:
            self.shelves.put(events)
        except PrecisionLost:
            self.decoder = EXACT
            self._take(listed)

    def _take_each(self, found: list[tuple[int, bytes]]) -> None:
        """Put events, each with its position, on the shelves one by one."""
        events = []
        for position, event in found:
            try:
                events += self.decoder.decode(b"[" + event + b"]")
            except (msgspec.MsgspecError, RecursionError):
                self.shelves.events += 1
                self._note("an event with impossible values", position)
        try:
            self.shelves.put(events)
        except PrecisionLost:
            self.decoder = EXACT
            self._take_each(found)

    def _decode_pieces(self, final: bool) -> None:
        """Damaged text: take every piece that is an event by itself."""
        text = self.pending
        found = list(pieces(text))
        keep_from = len(text) if final or not found else found.pop()[0]
        whole: list[tuple[int, bytes]] = []
        cut_off = False
        for position, piece in found:
            value = first_value(piece)
            cut_off = value is None and final and position == found[-1][0]
            if value is None:
                if not cut_off:
                    self._note("a broken event", position)
                continue
            event, length = value
            whole.append((position, event))
            end = position + length
            after = text[end : end + 64].lstrip()
            if after[:1] == b"]" and _AFTER_EVENTS.match(after[1:]):
                self.part = _Part.TAIL
                keep_from = text.index(b"]", end) + 1
                break
        else:
            if final:
                inside = " inside an event" if cut_off else ""
                stop = self.offset + len(text)
                self.warnings.append(f"the file ends{inside} at byte {stop}: its writer was interrupted")
                self.part = _Part.DONE
        self._take_each(whole)
        self._drop(keep_from)

    def _drop(self, count: int) -> None:
        """Forget the first ``count`` bytes of what is pending."""
        self.offset += min(count, len(self.pending))
        self.pending = self.pending[count:]

    def _note(self, what: str, position: int) -> None:
        self.damage.setdefault(what, []).append(self.offset + position)


def _boundary_before(text: bytes, stop: int) -> int:
    """Position of the last comma between two objects before ``stop``; -1 where there is none."""
    while (brace := text.rfind(b"{", 0, stop)) > 0:
        if _COMMA_AT_END.search(text[max(0, brace - 64) : brace]):
            return text.rfind(b",", 0, brace)
        stop = brace
    return -1
