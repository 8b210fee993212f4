"""A small tokenizer: pieces of up to five letters or three digits with their leading space, one token each.

Adding a word adds a known small number of tokens, so prompts of an exact length can be built through
``/tokenize``. An id is a checksum of its piece: the same in every process without a vocabulary file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

VOCABULARY = 163_840
SPECIAL = 1_000  # ids below are special tokens, which have no text
_PIECES = re.compile(r" ?[^\W\d_]{1,5}| ?\d{1,3}| ?[^\w\s]|\s|_")

# Few before the message: a cache block of 16 then holds its first words, so that different prompts share none.
TEMPLATE_BEFORE = 4
TEMPLATE_AFTER = 18


def pieces(text: str) -> list[str]:
    """Text cut into tokens; joined they give the text back."""
    return _PIECES.findall(text)


class Tokenizer:
    """Ids of texts, and texts of the ids seen so far."""

    def __init__(self) -> None:
        self._text_of: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids = []
        for piece in pieces(text):
            token = SPECIAL + crc32(piece.encode()) % (VOCABULARY - SPECIAL)
            self._text_of[token] = piece
            ids.append(token)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; those never produced by :meth:`encode` have none."""
        return "".join(self._text_of.get(token, "") for token in ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]], generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the chat template: some special tokens around each message's text."""
        ids: list[int] = []
        for message in messages:
            ids += range(1, 1 + TEMPLATE_BEFORE)
            ids += self.encode(message_text(message))
        return ids + list(range(100, 100 + TEMPLATE_AFTER)) if generation_prompt else ids


def message_text(message: dict[str, Any]) -> str:
    """A message's text; of a list of parts, the text parts."""
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)
