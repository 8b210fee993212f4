"""The JSON of vLLM's answers: stream chunks, whole answers, errors, models. Bytes out, no sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON, text kept as UTF-8."""
    return msgspec.json.encode(value)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def error(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """vLLM's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts as every chunk or answer carries them."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


@dataclass(frozen=True)
class Envelope:
    """What all chunks of one answer share; completions have no role chunk and no reasoning channel."""

    chat: bool
    request_id: str
    created: int
    model: str
    prompt_tokens: int
    include_usage: bool
    continuous_usage: bool

    def _base(self, kind: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}

    def role(self) -> bytes:
        """The first chunk of a chat stream: a role and no text. Completions have none."""
        if not self.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        chunk = self._base("chat.completion.chunk")
        chunk["choices"] = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]
        if self.continuous_usage:
            chunk["usage"] = usage(self.prompt_tokens, 0)
        return event(chunk)

    def text(self, channel: str, text: str, generated: int, finish_reason: str | None) -> bytes:
        """The chunk of a token; ``generated`` counts all tokens so far."""
        if self.chat:
            chunk = self._base("chat.completion.chunk")
            choice = {"index": 0, "delta": {channel: text}, "logprobs": None, "finish_reason": finish_reason}
        else:
            chunk = self._base("text_completion")
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = None
        chunk["choices"] = [choice]
        if self.continuous_usage:
            chunk["usage"] = usage(self.prompt_tokens, generated)
        return event(chunk)

    def end(self, generated: int) -> bytes:
        """The usage chunk, when asked for, and the end mark."""
        if not self.include_usage:
            return DONE
        chunk = self._base("chat.completion.chunk" if self.chat else "text_completion")
        return event(chunk | {"choices": [], "usage": usage(self.prompt_tokens, generated)}) + DONE

    def whole(self, texts: Mapping[str, str], reasoning_field: str, generated: int, finish_reason: str) -> bytes:
        """The answer of a request without ``stream``; ``texts`` by channel."""
        if self.chat:
            kind = "chat.completion"
            message = {"role": "assistant", "content": texts.get("content", "")}
            message[reasoning_field] = texts.get(reasoning_field) or None  # type: ignore[assignment]
            choice: dict[str, Any] = {"index": 0, "message": message}
        else:
            kind = "text_completion"
            choice = {"index": 0, "text": texts.get("content", "")}
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        return dumps(self._base(kind) | {"choices": [choice], "usage": usage(self.prompt_tokens, generated)})


def model_list(name: str, root: str, created: int, max_model_len: int) -> dict[str, Any]:
    """``/v1/models``."""
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "perfbook-rehearsal",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return {"object": "list", "data": [card]}
