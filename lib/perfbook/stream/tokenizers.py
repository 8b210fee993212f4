"""Who counts the tokens of a prompt: the tokenizer of a local model, or the measured server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import requests

from perfbook import http
from perfbook.errors import BadInput, ServerFailed
from perfbook.stream.endpoint import Endpoint


class Tokenizer(Protocol):
    """Anything that counts the tokens of a text without special tokens."""

    def count(self, text: str) -> int:
        """Number of tokens."""
        ...


class LocalTokenizer:
    """The tokenizer of a local model directory (its ``tokenizer.json``, else through transformers)."""

    def __init__(self, model_dir: str | Path) -> None:
        path = Path(model_dir)
        self._encode: Callable[[str], Sequence[int]]
        try:
            if (path / "tokenizer.json").is_file():
                from tokenizers import Tokenizer as Fast

                fast = Fast.from_file(str(path / "tokenizer.json"))
                self._encode = lambda text: fast.encode(text, add_special_tokens=False).ids
            else:
                from transformers import AutoTokenizer

                slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
                self._encode = lambda text: slow.encode(text, add_special_tokens=False)
        except Exception as error:  # both libraries raise what they like
            first = str(error).strip().splitlines()[:1]
            raise BadInput(f"no tokenizer can be read from {path}: {''.join(first)}; name a model directory") from None

    def count(self, text: str) -> int:
        """Number of tokens, no special tokens."""
        return len(self._encode(text))


class ServerTokenizer:
    """The server's own ``/tokenize`` (vLLM); use ``find`` to learn whether there is one."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 30.0) -> None:
        self._url = endpoint.root.rsplit("/", 1)[0] + "/tokenize"
        self._model = endpoint.model
        self._timeout_s = timeout_s
        self._session = http.plain_session()
        if endpoint.api_key is not None:
            self._session.headers["Authorization"] = f"Bearer {endpoint.api_key}"

    @classmethod
    def find(cls, endpoint: Endpoint) -> ServerTokenizer | None:
        """The server's tokenizer, None where it does not answer as vLLM does."""
        tokenizer = cls(endpoint)
        try:
            tokenizer.count("one two")
        except ServerFailed:
            return None
        return tokenizer

    def count(self, text: str) -> int:
        """Number of tokens, no special tokens; one HTTP request. ``ServerFailed`` when it has no answer."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            answer = http.send(
                self._session, "POST", self._url, connect_s=self._timeout_s, read_s=self._timeout_s, json=body
            )
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {answer.text[:100]}")
            return int(answer.json()["count"])
        except (requests.RequestException, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ServerFailed(f"{self._url} does not count tokens as vLLM does: {reason}") from None
