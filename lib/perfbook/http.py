"""Plain HTTP requests beside the timed streams, to servers that may not be what they should be.

Nothing is followed, neither redirects nor proxies: what answers is the server named, and a key goes nowhere else. An
answer is bounded in size and in time: an address given by mistake can be an endless download.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import requests

MOST_BYTES = 64 * 2**20  # the routes, counters and tokens of a server are a few megabytes at most


class OversizedAnswer(requests.RequestException):
    """The answer is longer than any that is expected here."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    url: str
    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        """The body as UTF-8; what is none is replaced."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body's value; ``ValueError`` when it is not JSON, or nested beyond reason."""
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def plain_session() -> requests.Session:
    """A session that reads neither proxies nor ``.netrc``."""
    session = requests.Session()
    session.trust_env = False
    return session


def send(session: requests.Session, method: str, url: str, *, connect_s: float, read_s: float, **options: Any) -> Reply:
    """Send a request and read its answer, of :data:`MOST_BYTES` at most.

    Raises
    ------
    requests.RequestException
        ``read_s`` passed without a byte, or the whole took longer than both times together (``ReadTimeout``); the
        answer is too long (:class:`OversizedAnswer`); whatever ``requests`` raises.
    """
    deadline = time.monotonic() + connect_s + read_s
    body = bytearray()
    with session.request(
        method, url, timeout=(connect_s, read_s), stream=True, allow_redirects=False, **options
    ) as response:
        for piece in response.iter_content(65536):
            body += piece
            if len(body) > MOST_BYTES:
                raise OversizedAnswer(f"the answer is longer than {MOST_BYTES // 2**20} MiB")
            if time.monotonic() > deadline:
                raise requests.ReadTimeout("the answer does not end")
        return Reply(response.url, response.status_code, bytes(body))
