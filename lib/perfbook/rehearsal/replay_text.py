"""The bytes that the ground-truth server sends: chunks whose text is the moment they were sent.

Everything around the time is prepared per token index, so that a send costs one formatting of one integer.
"""

from __future__ import annotations

import json
from typing import Any

STAMP_DIGITS = 19
"""A token's text is a space and this many digits: CLOCK_MONOTONIC nanoseconds, zero-padded, so lengths are
fixed.
"""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def stamped(now_ns: int) -> bytes:
    """The text of a token sent now."""
    return b" %019d" % now_ns


def sent_ns(text: str) -> list[int]:
    """Read the send times back from the text of one or several tokens."""
    return [int(word) for word in text.split()]


class Script:
    """The chunks of one kind of answer, for one prompt length and output length.

    Parameters
    ----------
    chat : bool
        Chat chunks (a role chunk leads, in the segment of the first token) or completions chunks.
    tokens, prompt_tokens : int
    usage, continuous : bool
        Whether to count at the end, and with every token.
    """

    def __init__(self, chat: bool, tokens: int, prompt_tokens: int, usage: bool, continuous: bool) -> None:
        self.tokens = tokens
        self._chat = chat
        self._prompt = prompt_tokens
        self._continuous = continuous
        self._parts: list[tuple[bytes, bytes]] = []
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        self.head = HEAD + (chunk(self._event(role, 0)) if chat else b"")
        tail = chunk(self._event({"choices": []}, tokens, force=True)) if usage else b""
        self.tail = tail + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def around(self, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after the stamp of token ``index`` (from 0)."""
        while len(self._parts) <= index:
            self._parts.append(self._build(len(self._parts)))
        return self._parts[index]

    def _build(self, index: int) -> tuple[bytes, bytes]:
        mark = stamped(0).decode()
        finish = "length" if index == self.tokens - 1 else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice.update({"delta": {"content": mark}} if self._chat else {"text": mark})
        before, after = chunk(self._event({"choices": [choice]}, index + 1)).split(mark.encode())
        return before, after

    def _event(self, body: dict[str, Any], done: int, force: bool = False) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = {"id": "replay-0123456789abcdef", "object": kind, "created": 1, "model": "replay", **body}
        if self._continuous or force:
            total = self._prompt + done
            body["usage"] = {"prompt_tokens": self._prompt, "completion_tokens": done, "total_tokens": total}
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def answer(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    """A plain HTTP answer."""
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (status, kind, len(body), body)
