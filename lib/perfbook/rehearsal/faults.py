"""Things that go wrong, each a small function. A law names which, and after how many tokens or on which requests."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

from perfbook.rehearsal.http import Exchange
from perfbook.rehearsal.law import Fault
from perfbook.rehearsal.wire import error, event

NS_PER_S = 1_000_000_000
FOREVER_NS = 1 << 62
HTML = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n"
    b"<body><center><h1>502 Bad Gateway</h1></center></body>\r\n</html>\r\n"
)


def die() -> NoReturn:
    """The engine dies under its requests, and the process with it."""
    said = time.strftime(f"(EngineCore pid={os.getpid()}) ERROR %m-%d %H:%M:%S [core.py:1203] ")
    for line in (
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ):
        sys.stdout.write(f"{said}{line}\n")
    sys.stdout.flush()
    os._exit(1)


def stream_error(exchange: Exchange) -> None:
    """An error object as an event of a 200 stream, then its regular end; a plain 500 where nothing streams."""
    body = error(500, "Internal server error", "InternalServerError")
    if not exchange.opened:
        exchange.respond_json(500, body)
        return
    exchange.send(event(body) + b"data: [DONE]\n\n")
    exchange.close()


def reset(exchange: Exchange) -> None:
    """The connection breaks in the middle of the stream."""
    exchange.reset()


def html(exchange: Exchange) -> None:
    """A proxy's page instead of an answer."""
    exchange.respond(502, HTML, "text/html")


def unavailable(exchange: Exchange) -> None:
    """503 to everything, as some front ends answer while the engine loads."""
    exchange.respond_json(503, error(503, "The model is still loading.", "ServiceUnavailableError"))


MID_STREAM: dict[str, Callable[[Exchange], None]] = {"stream_error": stream_error, "reset": reset}


class Faults:
    """Which fault is due. Request numbers start at 1; each ``die`` and ``stall`` happens once."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._all = tuple(faults)
        self._pending = [fault for fault in self._all if fault.kind in ("die", "stall")]

    @property
    def while_loading(self) -> bool:
        """Whether the port answers 503 while the load lasts, instead of refusing."""
        return any(fault.kind == "loading_503" for fault in self._all)

    def on_request(self, number: int) -> Callable[[Exchange], None] | None:
        """What to do to a new request instead of answering it."""
        return html if any(fault.kind == "html" and number % fault.every == 0 for fault in self._all) else None

    def on_token(self, number: int, generated: int) -> Callable[[Exchange], None] | None:
        """What to do to a request instead of sending it a token, after it got ``generated`` of them."""
        for fault in self._all:
            due = number % fault.every == 0 and generated == fault.after_tokens
            if due and fault.kind in MID_STREAM:
                return MID_STREAM[fault.kind]
        return None

    def on_total(self, generated: int) -> Fault | None:
        """The ``die`` or ``stall`` that is due after so many tokens of all answers."""
        for fault in self._pending:
            if generated >= fault.after_tokens:
                self._pending.remove(fault)
                return fault
        return None


def stall_until_ns(fault: Fault, now_ns: int) -> int:
    """When the engine goes on."""
    return FOREVER_NS if fault.seconds is None else now_ns + round(fault.seconds * NS_PER_S)
