"""One question, one answer: to check that a server answers right before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import requests

from perfbook import http
from perfbook.stream import chunks, workers
from perfbook.stream.client import Deadlines, Endpoint, Schedule
from perfbook.stream.tables import Asked
from perfbook.stream.workload import Prompt, RequestShape


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ``token_count`` is the server's count, else the number of events; ``error`` is None for
    a success, else the error class, with ``detail``. Times are None without streaming.
    """

    text: str
    reasoning: str
    finish_reason: str | None
    prompt_tokens: int | None
    token_count: int | None
    error: str | None = None
    detail: str = ""
    ttft_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None

    @property
    def usage(self) -> dict[str, int | None]:
        """The counts under the protocol's names."""
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.token_count}


def ask(
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, Any]] | str,
    shape: RequestShape,
    *,
    stream: bool = True,
    deadlines: Deadlines | None = None,
) -> Answer:
    """Ask one question, streamed through the measuring client or plainly through ``requests``.

    ``messages`` are chat messages, or a text (the only form for a completions endpoint). A failure is an
    ``Answer`` with its ``error``, not an exception; ``ServerFailed`` only when the host name cannot be
    resolved.
    """
    prompt = Prompt(text=messages) if isinstance(messages, str) else Prompt(messages=tuple(messages))
    limits = deadlines or Deadlines()
    if not stream:
        return _plain(endpoint, prompt, shape, limits)
    first: Answer | None = None
    for plainer, _ in shape.ladder():
        answer = _streamed(endpoint, prompt, plainer, limits)
        if answer.error not in ("http_400", "http_422"):
            return answer
        first = first or answer
    assert first is not None
    return first


def _streamed(endpoint: Endpoint, prompt: Prompt, shape: RequestShape, limits: Deadlines) -> Answer:
    job = workers.Job(endpoint, [endpoint.request(shape.body(endpoint, prompt))], [Asked(None, None)], limits, "ask")
    row = workers.run(job, Schedule(1)).requests.to_pylist()[0]
    return Answer(
        row["text"],
        row["reasoning_text"],
        row["finish_reason"],
        row["prompt_tokens"],
        row["output_tokens"],
        row["error"],
        row["detail"] or "",
        row["ttft_ms"],
        row["e2e_ms"],
    )


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Whole(msgspec.Struct):
    choices: list[_Choice]
    usage: chunks.Usage | None = None


def _plain(endpoint: Endpoint, prompt: Prompt, shape: RequestShape, limits: Deadlines) -> Answer:
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    with http.plain_session() as session:
        try:
            reply = http.send(
                session,
                "POST",
                endpoint.url,
                connect_s=limits.connect_s,
                read_s=limits.first_byte_s,
                data=shape.body(endpoint, prompt, stream=False),
                headers=headers,
            )
        except requests.Timeout:
            return _failed("first_byte_timeout", f"no answer within {limits.first_byte_s:g} s")
        except requests.RequestException as error:
            refused = "refused" in str(error)
            return _failed("refused" if refused else "connection", str(error).split("\n")[0])
    if reply.status_code != 200:
        return _failed(f"http_{reply.status_code}", chunks.error_text(reply.content))
    try:
        whole = msgspec.json.decode(reply.content, type=_Whole)
        choice = whole.choices[0]
    except (msgspec.DecodeError, IndexError, RecursionError) as error:
        return _failed("bad_event", f"{error} in {reply.content[:80]!r}")
    message = choice.message or _Message(content=choice.text)
    usage = whole.usage or chunks.Usage()
    return Answer(
        message.content or "",
        message.reasoning or message.reasoning_content or "",
        choice.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
    )


def _failed(error: str, detail: str) -> Answer:
    return Answer("", "", None, None, None, error, detail)
