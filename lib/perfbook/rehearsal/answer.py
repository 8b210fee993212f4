"""One answer on its way: tokens from the engine become events of a stream, or one whole body at the end."""

from __future__ import annotations

import time
import uuid

from perfbook.rehearsal.ask import Ask
from perfbook.rehearsal.engine import Generation
from perfbook.rehearsal.http import Exchange
from perfbook.rehearsal.law import Text
from perfbook.rehearsal.text import write
from perfbook.rehearsal.wire import Envelope


class Answer:
    """Ties a generation to the exchange that waits for it."""

    def __init__(self, exchange: Exchange, ask: Ask, number: int, served_name: str, text: Text, now_ns: int) -> None:
        self.exchange = exchange
        self._stream = ask.stream
        self._reasoning_field = text.reasoning_field
        self._script = write(ask.question, text, thinks=ask.chat)
        self._texts: dict[str, str] = {}
        natural = max(self._script.spoken_tokens, ask.min_tokens)
        self.generation = Generation(
            number=number,
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            stop_after=None if ask.ignore_eos else natural,
            arrival_ns=now_ns,
        )
        self._envelope = Envelope(
            chat=ask.chat,
            request_id=f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=served_name,
            prompt_tokens=len(ask.prompt),
            include_usage=ask.include_usage,
            continuous_usage=ask.continuous_usage,
        )
        if ask.stream:
            exchange.open()

    def token(self) -> None:
        """Deliver the generation's newest token; with the last one, end the answer.

        The first token of a chat goes out in one write with the role chunk, a last one with its usage and end
        mark, so that one send stands for one token. A token without text makes no event unless it is the
        last.
        """
        generation = self.generation
        channel, text = self._newest()
        if not self._stream:
            self._texts[channel] = self._texts.get(channel, "") + text
            if generation.finish_reason:
                body = self._envelope.whole(
                    self._texts, self._reasoning_field, generation.generated, generation.finish_reason
                )
                self.exchange.respond(200, body)
            return
        events = self._envelope.role() if generation.generated == 1 else b""
        if text or generation.finish_reason:
            events += self._envelope.text(channel, text, generation.generated, generation.finish_reason)
        if generation.finish_reason:
            events += self._envelope.end(generation.generated)
        if events:
            self.exchange.send(events)
        if generation.finish_reason:
            self.exchange.close()

    def _newest(self) -> tuple[str, str]:
        if self.generation.finish_reason == "stop":
            return "content", ""  # the end-of-sequence token: counted, never shown
        channel, text = self._script.token(self.generation.generated - 1)
        return (self._reasoning_field if channel == "reasoning" else channel), text
