"""What one streamed payload of an OpenAI-compatible server says, for both endpoints, decoded into types.

Unknown fields are skipped without being built; a field of a type that the protocol does not know raises
``msgspec.DecodeError``. Text may come on four channels (``content``, ``reasoning``, ``reasoning_content``,
tool calls); the first of them to speak is the first token.
"""

from __future__ import annotations

import msgspec

DONE = b"[DONE]"


class Function(msgspec.Struct, gc=False):
    """A piece of a tool call: its name comes once, its arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    """One entry of ``delta.tool_calls``."""

    function: Function | None = None


class Delta(msgspec.Struct, gc=False):
    """What a chat chunk adds; null and missing mean the same."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct, gc=False):
    """One choice of a chunk: ``delta`` from chat, ``text`` from completions."""

    index: int | None = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, gc=False):
    """Prompt tokens that the server took from its cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    """Token counts as the server counted them; with continuous usage, so far."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


_NO_ERROR = msgspec.Raw(b"null")


class Chunk(msgspec.Struct, gc=False):
    """One payload of the stream; ``error`` in any form makes it a failure report."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = _NO_ERROR


class _ErrorObject(msgspec.Struct):
    """The form in which the payload itself is the error."""

    object: str | None = None
    message: str | None = None


decode = msgspec.json.Decoder(Chunk).decode


_decode_error = msgspec.json.Decoder(_ErrorObject).decode


def failure(chunk: Chunk, data: bytes) -> str | None:
    """The error text that a server put inside a 200 stream; None when there is none. ``data`` is the chunk's
    payload.
    """
    if chunk.error is _NO_ERROR and chunk.choices:
        return None
    if bytes(chunk.error) != b"null":
        return error_text(bytes(chunk.error))
    if not chunk.choices and b'"error"' in data:
        whole = _decode_error(data)
        if whole.object == "error":
            return whole.message or "error object without a message"
    return None


def channels(chunk: Chunk) -> tuple[str, str]:
    """Return (answer text, reasoning text) of the chunk, all choices joined.

    Tool calls count as answer. Servers that send the same reasoning under both names are not counted twice.
    """
    answer = reasoning = ""
    for choice in chunk.choices or ():
        if choice.text:
            answer += choice.text
        delta = choice.delta
        if delta is None:
            continue
        if delta.content:
            answer += delta.content
        if thought := delta.reasoning or delta.reasoning_content:
            reasoning += thought
        if delta.tool_calls:
            answer += _calls(delta.tool_calls)
    return answer, reasoning


def _calls(calls: list[ToolCall]) -> str:
    functions = [call.function for call in calls if call.function is not None]
    return "".join((one.name or "") + (one.arguments or "") for one in functions)


def error_text(body: bytes, limit: int = 300) -> str:
    """The message of an error body, whatever its form: JSON object, JSON string, HTML, plain text."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        value = body.decode("utf-8", "replace")
    for _ in range(3):
        if not isinstance(value, dict):
            break
        value = value.get("error") or value.get("message") or value.get("detail") or str(value)
    return " ".join(str(value).split())[:limit]
