"""One recorded response → status, events with their read, and whether it succeeded.

A response is what the hot path kept: its raw bytes, and for every read where in the bytes it ended. Here,
after the cell, HTTP/1.1 is taken off (chunked, content-length or until close), then SSE, then JSON; each
event is tied to the read that brought its completing byte, and so to a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import httptools
import msgspec
import numpy as np
from numpy.typing import NDArray

from perfbook.stream import chunks, sse

_LAST_CHUNK = b"\r\n0\r\n\r\n"


class HttpFraming:
    """Follows one response's framing through httptools without keeping its body.

    Informational (1xx) responses before the real one are passed over.
    """

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[bytes, bytes] = {}
        self.status: int | None = None
        self.complete = False
        self.keep_alive = False
        self.headers_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the header; trailers come the same way, after the body."""
        if not self.headers_complete:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note the status; an informational response is forgotten again."""
        status = self.parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        self.headers_complete = True

    def on_message_complete(self) -> None:
        """The server said that the response ends here."""
        if self.headers_complete:
            self.complete = True
            self.keep_alive = self.parser.should_keep_alive()

    @property
    def chunked(self) -> bool:
        """Whether the body is framed in chunks."""
        return b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()

    @property
    def until_close(self) -> bool:
        """Whether the body ends where the connection ends."""
        return self.headers_complete and not self.chunked and b"content-length" not in self.headers

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Raise ``httptools.HttpParserError`` when the bytes are not an HTTP response."""
        self.parser.feed_data(data)


class HttpBody(HttpFraming):
    """The same, keeping the body in pieces."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.on_body = self.pieces.append  # found by the parser that is made next
        super().__init__()

    @property
    def body(self) -> bytes:
        """The body so far."""
        return b"".join(self.pieces)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each piece."""
        return np.fromiter(map(len, self.pieces), np.int64, len(self.pieces))


def _read_http(raw: bytes | bytearray, read_ends: Sequence[int]) -> tuple[HttpBody, NDArray[np.int64], str]:
    """The response without its framing, for each read the bytes of body that had come by then, and what broke it."""
    http = HttpBody()
    try:
        http.feed(raw)
        body_ends = _plain_body_ends(raw, np.asarray(read_ends), http)
        if body_ends is not None:
            return http, body_ends, ""
    except httptools.HttpParserError:
        pass  # it breaks again below, where it shows in which read
    http, taken, broken = HttpBody(), [], ""
    start = 0
    with memoryview(raw) as view:
        try:
            for end in read_ends:
                http.feed(view[start:end])
                taken.append(len(http.pieces))
                start = end
        except httptools.HttpParserError as error:
            broken = str(error)
            taken += [len(http.pieces)] * (len(read_ends) - len(taken))
    return http, np.concatenate(([0], np.cumsum(http.sizes)))[taken], broken


def _plain_body_ends(raw: bytes | bytearray, read_ends: NDArray[np.int64], http: HttpBody) -> NDArray[np.int64] | None:
    """For each read, bytes of the body so far, from the lengths of the chunks; None where they do not tell.

    A chunk's framing is its length in hexadecimal and two line ends. Extensions and leading zeros can only add to
    that, so a response of exactly the bytes that this makes has none, and where its chunks lie is known.
    """
    header = raw.find(b"\r\n\r\n") + 4
    if not (http.complete and http.chunked and http.pieces) or header < 4:
        return None
    sizes = http.sizes
    digits = np.floor(np.log2(sizes)).astype(np.int64) // 4 + 1
    begin = header + np.cumsum(sizes + digits + 4) - sizes - 2
    if begin[-1] + sizes[-1] + len(_LAST_CHUNK) != len(raw):
        return None
    before = np.concatenate(([0], np.cumsum(sizes)))
    chunk = np.maximum(np.searchsorted(begin, read_ends, "right") - 1, 0)
    ends: NDArray[np.int64] = before[chunk] + np.clip(read_ends - begin[chunk], 0, sizes[chunk])
    return ends


@dataclass(slots=True)
class Parsed:
    """What one response said. Event columns are parallel, one entry per event with text, usage or an
    end.

    Attributes
    ----------
    status : int or None
        HTTP status; None when no complete header arrived.
    error, detail : str or None, str
        Error class (see ``perfbook.stream.load``) and what the server or parser said; None for a success.
    read : array of int64
        Index of the read that completed the event.
    later : array of bool
        Whether the same read completed a later event too: then the read's time is only an upper bound.
    answer, reasoning : list of str
        Text of the event per channel.
    counted : list of int
        ``usage.completion_tokens`` of the event, -1 where it carried none.
    has_choices, finished : list of bool
        Whether the event held choices; whether one of them ended.
    """

    status: int | None = None
    error: str | None = None
    detail: str = ""
    done: bool = False
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    read: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    later: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    answer: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    has_choices: list[bool] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)

    def fail(self, error: str, detail: str) -> None:
        """Record the first failure; later ones are its consequences."""
        if self.error is None:
            self.error, self.detail = error, detail


def parse(raw: bytes | bytearray, read_ends: Sequence[int], *, closed: bool = False) -> Parsed:
    """Parse one recorded response.

    Parameters
    ----------
    raw : bytes
        Everything received for it.
    read_ends : sequence of int
        For each read, the offset in ``raw`` just after its last byte; ascending.
    closed : bool
        Whether the server closed the connection after the last byte (ends a body without framing).
    """
    out = Parsed()
    http, body_ends, broken = _read_http(raw, read_ends)
    if broken:
        out.fail("bad_http", f"not a valid HTTP response: {broken}")
    del http.parser  # it refers back to its owner, and so would keep the body
    out.status = http.status
    body = http.body
    if http.status is None:
        out.fail("incomplete", "the connection ended before a response header was complete")
        return out
    ended = http.complete or (closed and http.until_close)
    if http.status != 200:
        out.fail(f"http_{http.status}", chunks.error_text(body) or "no body")
        return out
    if http.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        out.fail("bad_http", "the body is compressed although identity was asked for")
        return out
    if http.headers.get(b"content-type", b"").lower().startswith(b"application/json"):
        failure = chunks.error_text(body) if b'"error"' in body[:200] else ""
        out.fail(
            "stream_error" if failure else "not_streamed",
            failure or "the server sent one JSON body, no stream",
        )
        return out
    _read_events(out, body, body_ends)
    if not out.done:
        what = "the response ended" if ended else "the connection ended"
        out.fail("incomplete", f"{what} without [DONE] after {len(body)} bytes")
    elif not ended:
        out.fail("incomplete", "the connection ended inside the response, after [DONE]")
    return out


def _read_events(out: Parsed, body: bytes, body_ends: NDArray[np.int64]) -> None:
    named: dict[int, bytes] = {}
    plain = sse.parse_plain(body)
    if plain is not None:
        payloads, ends = plain
    else:
        try:
            events = _any_events(body)
        except sse.EventTooLongError as error:
            out.fail("oversized", str(error))
            return
        payloads, ends = [event.data for event in events], np.array([event.end for event in events], np.int64)
        named = {at: event.name for at, event in enumerate(events) if event.name}
    kept: list[int] = []
    decode, channels, fails = chunks.decode, chunks.channels, chunks.failure
    keep, answers, reasonings = kept.append, out.answer.append, out.reasoning.append
    counts, choosers, finishers = out.counted.append, out.has_choices.append, out.finished.append
    for at, data in enumerate(payloads):
        if data == chunks.DONE:
            out.done = True
            break
        if not data:
            continue
        try:
            chunk = decode(data)
            failure = fails(chunk, data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if named.get(at) == b"error":
                out.fail("stream_error", chunks.error_text(data))
            else:
                out.fail("bad_event", f"{error} in {data[:80]!r}")
            continue
        if failure is None and named and named.get(at) == b"error":
            failure = chunks.error_text(data)
        if failure is not None:
            out.fail("stream_error", failure)
            continue
        counted = -1
        usage = chunk.usage
        if usage is not None and usage.completion_tokens is not None:
            counted = out.completion_tokens = usage.completion_tokens
            out.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                out.cached_tokens = usage.prompt_tokens_details.cached_tokens
        answer, reasoning = channels(chunk)
        finished = False
        choices = chunk.choices or ()
        for choice in choices:
            if choice.finish_reason is not None:
                finished = True
                if not choice.index:
                    out.finish_reason = choice.finish_reason
        keep(at)
        answers(answer)
        reasonings(reasoning)
        counts(counted)
        choosers(bool(choices))
        finishers(finished)
    read = np.searchsorted(body_ends, ends)
    later = np.zeros(len(read), np.bool_)
    later[:-1] = read[1:] == read[:-1]
    out.read, out.later = read[kept], later[kept]


def _any_events(body: bytes) -> list[sse.SseEvent]:
    """By the grammar; a server that closes right after ``[DONE]``, without its blank line, did say it."""
    parser = sse.SseParser()
    events = parser.feed(body)
    last = parser.finish()
    return [*events, last] if last is not None and last.data == chunks.DONE else events
