"""The HTTP side of a vLLM server: health, models, metrics, tokenizer, profiler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from perfbook import http
from perfbook.errors import ServerFailed
from perfbook.http import Reply
from perfbook.server.metrics import Delta, delta, parse_metrics

CONNECT_S = 3.0
READ_S = 10.0


class Unreachable(ServerFailed):
    """Nothing answered; a server that answers with an error is there."""


@dataclass(frozen=True)
class Endpoints:
    """One server's endpoints.

    Parameters
    ----------
    base_url : str
        Address of the server, with or without ``/v1``.
    api_key : str, optional
        Sent as a bearer token; in no message, record or repr.
    verify_tls : bool
        Check the certificate of an https address.
    profiling_note : Path, optional
        File that exists while a profile is being taken, so that whoever stops the server can end it first.

    Every method raises :class:`ServerFailed` with the address and the reason when the server cannot be
    reached (:class:`Unreachable`) or answers with an error, unless it says otherwise. Redirects are not followed
    and no proxy is used: what is measured is the server named, and a key goes nowhere else.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    verify_tls: bool = True
    profiling_note: Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))

    def health(self) -> bool:
        """Whether ``/health`` answers 200: the front end lives; the engine may hang all the same."""
        try:
            return self._request("GET", "/health").status_code == 200
        except ServerFailed:
            return False

    def version(self) -> str | None:
        """vLLM's version; None when the server does not say."""
        try:
            value = self._json("GET", "/version")
        except ServerFailed:
            return None
        return value.get("version") if isinstance(value.get("version"), str) else None

    def models(self) -> list[str]:
        """Names that requests may use."""
        return [card["id"] for card in self._cards()]

    def context_tokens(self, model: str) -> int | None:
        """Longest context of a model in tokens; None when the server does not say."""
        for card in self._cards():
            length = card.get("max_model_len")
            if card["id"] == model and isinstance(length, int):
                return length
        return None

    def metrics(self) -> dict[str, float]:
        """One number per name without ``vllm:`` (:func:`perfbook.server.metrics.parse_metrics`)."""
        response = self._ok("GET", "/metrics")
        try:
            return parse_metrics(response.text)
        except ValueError as error:
            raise ServerFailed(f"{self.base_url}/metrics: not in the exposition format ({error})") from None

    @staticmethod
    def delta(before: Mapping[str, float], after: Mapping[str, float]) -> Delta:
        """Growth of the counters between two readings of :meth:`metrics`."""
        return delta(before, after)

    def tokenize(self, model: str, text: str, *, add_special_tokens: bool = True) -> list[int] | None:
        """Token numbers of a text as the server counts them; None where there is no ``/tokenize``."""
        body = {"model": model, "prompt": text, "add_special_tokens": add_special_tokens}
        response = self._request("POST", "/tokenize", body)
        if response.status_code in (404, 405, 501):
            return None
        tokens = self._read(self._check(response)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ServerFailed(f"{self.base_url}/tokenize: the answer holds no list of tokens")
        return tokens

    def can_profile(self) -> bool:
        """Whether the profiler was armed at launch; asks the list of routes, starts nothing."""
        try:
            routes = self._json("GET", "/openapi.json").get("paths", {})
        except ServerFailed:
            return False
        return "/start_profile" in routes

    def start_profile(self, *, iterations: int | None = None, prefix: str | None = None) -> None:
        """Start the profiler on every worker.

        Parameters
        ----------
        iterations : int, optional
            The workers stop by themselves after so many engine steps (vLLM 0.32; older versions take the
            bound from their launch). :meth:`stop_profile` is needed all the same.
        prefix : str, optional
            Start of the trace files' names.
        """
        body = {"max_iterations": iterations, "profile_prefix": prefix}
        response = self._request("POST", "/start_profile", {k: v for k, v in body.items() if v is not None}, read_s=120)
        if response.status_code == 404:
            raise ServerFailed(
                f"{self.base_url}: no profiler; it is armed when the server starts (vLLM's --profiler-config)"
            )
        if response.status_code == 409:
            raise ServerFailed(f"{self.base_url}: a profile is already being taken; stop it first")
        self._check(response)
        if self.profiling_note is not None:
            self.profiling_note.touch()

    def stop_profile(self, timeout_s: float = 1800.0) -> None:
        """Stop the profiler; returns when the traces are written, which can take many minutes."""
        self._check(self._request("POST", "/stop_profile", read_s=timeout_s))
        if self.profiling_note is not None:
            self.profiling_note.unlink(missing_ok=True)

    def reset_prefix_cache(self) -> bool | None:
        """Empty the prefix cache: False while blocks are in use, None where there is no such endpoint."""
        response = self._request("POST", "/reset_prefix_cache")
        if response.status_code in (404, 405):
            return None
        try:
            return bool(self._check(response).json().get("success", True))
        except ValueError:
            return True  # versions that answer without a body

    def _cards(self) -> list[dict[str, Any]]:
        cards = self._json("GET", "/v1/models").get("data")
        if not isinstance(cards, list):
            raise ServerFailed(f"{self.base_url}/v1/models: no list of models; is this an OpenAI-compatible server?")
        return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]

    def _json(self, method: str, path: str) -> dict[str, Any]:
        return self._read(self._ok(method, path))

    def _read(self, response: Reply) -> dict[str, Any]:
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerFailed(f"{response.url}: the answer is not a JSON object")
        return value

    def _ok(self, method: str, path: str) -> Reply:
        return self._check(self._request(method, path))

    def _check(self, response: Reply) -> Reply:
        if response.status_code in (401, 403):
            raise ServerFailed(f"{response.url}: {response.status_code}, the key is missing or wrong")
        if response.status_code != 200:
            said = " ".join(response.text[:200].split())
            raise ServerFailed(f"{response.url}: {response.status_code} {said}".rstrip())
        return response

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, read_s: float = READ_S
    ) -> Reply:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True
        try:
            with http.plain_session() as session:
                return http.send(
                    session,
                    method,
                    self.base_url + path,
                    connect_s=CONNECT_S,
                    read_s=read_s,
                    json=body,
                    headers=headers,
                    verify=bundle if self.verify_tls else False,
                )
        except requests.RequestException as error:
            raise Unreachable(f"{self.base_url}{path}: {_reason(error)}") from None
        except ValueError:
            raise ServerFailed(
                f"{self.base_url}{path}: the request cannot be sent; is the address right, and the key plain text?"
            ) from None


def _reason(error: requests.RequestException) -> str:
    """Why a request failed, in a few words; never the request itself."""
    if isinstance(error, http.OversizedAnswer):
        return f"{error}; is this a vLLM server?"
    if isinstance(error, requests.exceptions.SSLError):
        return "the certificate was refused (server.verify_tls: false takes any)"
    if isinstance(error, requests.exceptions.ConnectTimeout | requests.exceptions.ReadTimeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ConnectionError):
        if "Failed to resolve" in str(error):
            return "nobody knows a host of this name"
        return "connection refused" if "refused" in str(error) else "cannot connect"
    return type(error).__name__
