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

from perfbook.stream import chunks, sse


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

    def feed(self, data: bytes | memoryview) -> None:
        """Raise ``httptools.HttpParserError`` when the bytes are not an HTTP response."""
        self.parser.feed_data(data)


class HttpBody(HttpFraming):
    """The same, keeping the body in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.body_length = 0

    def on_body(self, data: bytes) -> None:
        """Keep the next piece of the body."""
        self.pieces.append(data)
        self.body_length += len(data)


@dataclass(slots=True)
class Parsed:
    """What one response said. Event columns are parallel lists, one entry per event with text, usage or an
    end.

    Attributes
    ----------
    status : int or None
        HTTP status; None when no complete header arrived.
    error, detail : str or None, str
        Error class (see ``perfbook.stream.load``) and what the server or parser said; None for a success.
    read : list of int
        Index of the read that completed the event.
    later : list of bool
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
    read: list[int] = field(default_factory=list)
    later: list[bool] = field(default_factory=list)
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
    http = HttpBody()
    body_ends: list[int] = []
    view = memoryview(raw)
    start = 0
    try:
        for end in read_ends:
            http.feed(view[start:end])
            body_ends.append(http.body_length)
            start = end
    except httptools.HttpParserError as error:
        out.fail("bad_http", f"not a valid HTTP response: {error}")
        body_ends += [http.body_length] * (len(read_ends) - len(body_ends))
    finally:
        view.release()
        del http.parser  # it refers back to its owner, and so would keep the body
    out.status = http.status
    body = b"".join(http.pieces)
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


def _read_events(out: Parsed, body: bytes, body_ends: Sequence[int]) -> None:
    parser = sse.SseParser()
    try:
        events = parser.feed(body)
    except sse.EventTooLongError as error:
        out.fail("oversized", str(error))
        return
    last = parser.finish()
    if last is not None and last.data == chunks.DONE:
        events.append(last)
    read = 0
    reads, later = out.read, out.later
    decode, channels, fails = chunks.decode, chunks.channels, chunks.failure
    for data, end, name in events:
        while body_ends[read] < end:
            read += 1
        if reads and reads[-1] == read:
            later[-1] = True
        if data == chunks.DONE:
            out.done = True
            break
        if not data:
            continue
        try:
            chunk = decode(data)
            failure = fails(chunk, data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if name == b"error":
                out.fail("stream_error", chunks.error_text(data))
            else:
                out.fail("bad_event", f"{error} in {data[:80]!r}")
            continue
        if failure is None and name == b"error":
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
        for choice in chunk.choices or ():
            if choice.finish_reason is not None:
                finished = True
                if not choice.index:
                    out.finish_reason = choice.finish_reason
        reads.append(read)
        later.append(False)
        out.answer.append(answer)
        out.reasoning.append(reasoning)
        out.counted.append(counted)
        out.has_choices.append(bool(chunk.choices))
        out.finished.append(finished)
