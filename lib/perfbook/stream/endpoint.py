"""Where requests go, and how long to wait for what."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from perfbook import __version__
from perfbook.errors import BadInput, ServerFailed

PATHS = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server.

    Parameters
    ----------
    base_url : str
        ``http://host:port`` with or without the ``/v1`` (a path that ends in a version is taken as it is).
    model : str
        Served model name.
    api_key : str, optional
        Sent as a bearer token; never part of the repr.
    kind : {"chat", "completions"}
        Which of the two text endpoints.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    kind: Literal["chat", "completions"] = "chat"

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.base_url)
            usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise BadInput(f"base URL {self.base_url!r} is not http(s)://host[:port][/v1]; correct base_url")
        if url.username or url.password:
            raise BadInput("a base URL must not carry a user name or password; give the key as api_key")
        if self.kind not in PATHS:
            raise BadInput(f"endpoint kind {self.kind!r} is unknown; use chat or completions")
        if self.api_key is not None and not self.api_key.isprintable():
            raise BadInput("the API key holds characters that no HTTP header can carry; check its source")

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted; kernel receive times are then of no use."""
        return urlsplit(self.base_url).scheme == "https"

    @property
    def host(self) -> str:
        """Host name or address."""
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        """TCP port, with the scheme's default."""
        return urlsplit(self.base_url).port or (443 if self.tls else 80)

    @property
    def root(self) -> str:
        """The API's base URL including its version, without a slash at the end."""
        base = self.base_url.rstrip("/")
        return base if re.search(r"/v\d+(beta)?$", base) else base + "/v1"

    @property
    def url(self) -> str:
        """The address that requests are posted to."""
        return self.root + PATHS[self.kind]

    def request(self, body: bytes) -> bytes:
        """The complete HTTP/1.1 request for one JSON body."""
        url = urlsplit(self.url)
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = [
            f"POST {url.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            f"User-Agent: perfbook/{__version__}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Accept-Encoding: identity",
            "Connection: keep-alive",
            f"Content-Length: {len(body)}",
        ]
        if self.api_key is not None:
            head.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join(head).encode() + b"\r\n\r\n" + body

    def resolve(self, timeout_s: float) -> tuple[socket.AddressFamily, tuple[object, ...]]:
        """Look the host up once, before anything is timed; with several addresses, the first that answers."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # a label of more than 63 letters is none
            raise ServerFailed(f"host {self.host!r} cannot be resolved: {error}; check base_url") from None
        for family, kind, proto, _, address in found[:-1]:
            with socket.socket(family, kind, proto) as probe:
                probe.settimeout(timeout_s)
                if probe.connect_ex(address) == 0:
                    return family, address
        return found[-1][0], found[-1][4]

    def tls_context(self) -> ssl.SSLContext | None:
        """The system's trust store (``SSL_CERT_FILE`` adds to it); None for plain HTTP."""
        return ssl.create_default_context() if self.tls else None


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait, in seconds, before a request counts as failed.

    ``connect_s`` for a connection, ``first_byte_s`` from the request to the first byte (queueing and prefill
    are in it), ``stall_s`` between two reads, ``total_s`` for a whole request. Checked about four times a
    second.
    """

    connect_s: float = 10.0
    first_byte_s: float = 600.0
    stall_s: float = 120.0
    total_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_byte_s", "stall_s", "total_s"):
            if not getattr(self, name) > 0:
                raise BadInput(f"deadline {name} is {getattr(self, name)!r}; it must be above 0 seconds")
