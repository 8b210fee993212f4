"""Request bodies read into what the engine needs; everything that vLLM would refuse is refused with its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from perfbook.rehearsal.tokens import Tokenizer, message_text
from perfbook.rehearsal.wire import error

COMPLETION_DEFAULT_TOKENS = 16


class Refused(Exception):
    """The request is answered with an HTTP error."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        kinds = {
            400: "BadRequestError",
            404: "NotFoundError",
            409: "ConflictError",
            503: "ServiceUnavailableError",
        }
        self.status = status
        self.body = error(status, message, kinds.get(status, "InternalServerError"), param)
        super().__init__(message)


@dataclass(frozen=True)
class Ask:
    """A request for a generation."""

    chat: bool
    question: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


def read_json(body: bytes) -> dict[str, Any]:
    """The body as an object."""
    try:
        value = msgspec.json.decode(body or b"{}")
    except msgspec.DecodeError as problem:
        raise Refused(400, f"the body is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    return value


def read_ask(body: bytes, chat: bool, tokenizer: Tokenizer, served_name: str, max_model_len: int) -> Ask:
    """A chat or completions request.

    Raises
    ------
    Refused
        Wrong model (404); no JSON, no prompt, wrong types, more than one choice, longer than the context
        (400).
    """
    values = read_json(body)
    check_model(values, served_name)
    if _number(values, "n", 1, 1) != 1:
        raise Refused(400, "the stand-in answers with one choice; leave n out", "n")
    question, prompt = _chat_prompt(values, tokenizer) if chat else _plain_prompt(values, tokenizer)
    room = max_model_len - len(prompt)
    if room < 1:
        raise Refused(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your request has {len(prompt)} "
            "input tokens. Please reduce the length of the input messages.",
            "input_tokens",
        )
    default = room if chat else COMPLETION_DEFAULT_TOKENS
    asked = _number(values, "max_completion_tokens", _number(values, "max_tokens", default, 1), 1)
    if asked > room:
        raise Refused(
            400,
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is "
            f"{max_model_len} tokens and your request has {len(prompt)} input tokens.",
            "max_tokens",
        )
    stream = values.get("stream") is True
    options = values.get("stream_options") or {}
    if options and not stream:
        raise Refused(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    include_usage = bool(options.get("include_usage"))
    return Ask(
        chat=chat,
        question=question,
        prompt=tuple(prompt),
        max_tokens=asked,
        min_tokens=_number(values, "min_tokens", 0, 0),
        ignore_eos=values.get("ignore_eos") is True,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
    )


def check_model(values: Mapping[str, Any], served_name: str) -> None:
    """Refuse another model's name; none is taken as ours."""
    if values.get("model") not in (None, "", served_name):
        raise Refused(404, f"The model `{values['model']}` does not exist.", "model")


def read_messages(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat body."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise Refused(400, "messages must be a list with at least one message", "messages")
    return messages


def _chat_prompt(values: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    messages = read_messages(values)
    return message_text(messages[-1]), tokenizer.encode_chat(messages)


def _plain_prompt(values: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Text or token ids; a list may hold one of either."""
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and token >= 0 for token in prompt):
        return tokenizer.decode(prompt) or str(prompt[:64]), prompt
    raise Refused(400, "prompt must be one text or one list of token ids, not empty", "prompt")


def _number(values: Mapping[str, Any], key: str, default: int, least: int) -> int:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise Refused(400, f"{key} must be a whole number of at least {least}, got {value}", key)
    return value
