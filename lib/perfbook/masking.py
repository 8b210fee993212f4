"""Secrets: recognised by the names of their variables, and masked wherever values are shown or recorded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from perfbook.errors import BadInput

MASKED = "***"
_SECRET = re.compile(r"apikey|key|token|secret|passw(or)?d|passphrase|credentials?|auth|authorization|bearer|cookie")
#: Names with such a word whose values are no secrets: counts, and the name of the variable that holds a key.
_HARMLESS = re.compile(
    r"(max|min|num|new|total|batched|output|prompt)_\w*token|token_(per|count)|per_token|key_(cache|value)|_env$", re.I
)


def mask(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which the values of names that look secret are masked, at any depth.

    >>> mask({"HF_TOKEN": "hf_x", "max_tokens": 8, "server": {"api_key": "k"}})
    {'HF_TOKEN': '***', 'max_tokens': 8, 'server': {'api_key': '***'}}
    """
    masked: dict[str, Any] = {}
    for key, value in values.items():
        if value is not None and value != "" and is_secret(key):
            masked[key] = MASKED
        elif isinstance(value, Mapping):
            masked[key] = mask(value)
        elif isinstance(value, list):
            masked[key] = [mask(item) if isinstance(item, Mapping) else item for item in value]
        else:
            masked[key] = value
    return masked


def is_secret(name: str) -> bool:
    """Whether a name says that its value should not be shown."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", "_", name).lower()
    return any(_SECRET.fullmatch(word) for word in words.split("_")) and not _HARMLESS.search(words)


def read_secret(variable: str, named_in: str) -> str:
    """The value of an environment variable that holds a key; ``named_in`` says who asks for it, for the error.

    Raises
    ------
    BadInput
        It is not set, or empty.
    """
    value = os.environ.get(variable)
    if not value:
        raise BadInput(f"{named_in}: the variable {variable} is not set; export it before you start")
    return value
