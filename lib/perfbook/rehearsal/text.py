"""What the stand-in says: known answers to some questions, filler else; equal prompts, equal answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from perfbook.rehearsal.law import Text
from perfbook.rehearsal.tokens import pieces

Channel = Literal["reasoning", "content"]

CAPITALS = {
    "austria": "Vienna", "canada": "Ottawa", "china": "Beijing", "egypt": "Cairo", "france": "Paris",
    "germany": "Berlin", "italy": "Rome", "japan": "Tokyo", "norway": "Oslo", "poland": "Warsaw",
    "portugal": "Lisbon", "spain": "Madrid",
}  # fmt: skip
WORDS = (
    "a", "the", "this", "each", "one", "some", "step", "token", "batch", "layer", "cache", "value", "time",
    "rate", "model", "grid", "word", "count", "point", "line", "is", "has", "gives", "takes", "holds", "moves",
    "grows", "falls", "and", "then", "so", "while", "with", "from", "into", "over", "under", "of", "in", "on",
)  # fmt: skip
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "plus": lambda a, b: a + b, "-": lambda a, b: a - b, "minus": lambda a, b: a - b,
    "*": lambda a, b: a * b, "x": lambda a, b: a * b, "times": lambda a, b: a * b,
}  # fmt: skip


def known_answer(question: str) -> str | None:
    """The answer to a question that has one, else None."""
    if match := re.search(r"capital (?:city )?of ([A-Za-z]+)", question, re.IGNORECASE):
        country = match.group(1)
        if capital := CAPITALS.get(country.lower()):
            return f"The capital of {country} is {capital}."
    if match := re.search(r"count from (\d{1,4}) to (\d{1,4})", question, re.IGNORECASE):
        return ", ".join(str(number) for number in range(int(match.group(1)), int(match.group(2)) + 1)) + "."
    if match := re.search(r"(\d{1,6}) ?(\+|-|\*|x|plus|minus|times) ?(\d{1,6})", question, re.IGNORECASE):
        left, sign, right = match.groups()
        return f"{left} {sign} {right} is {OPERATIONS[sign.lower()](int(left), int(right))}."
    return None


@dataclass(frozen=True)
class Script:
    """An answer, token by token, computed as it is asked for.

    ``reasoning_tokens`` counts the closing tag of the thinking, a token without text, as a reasoning parser withholds
    it. ``answer`` is a known one; empty, the answer is filler. After the natural length comes the end-of-sequence token
    or, when that is ignored, more filler.
    """

    seed: int
    reasoning_tokens: int
    answer: tuple[str, ...]
    answer_tokens: int

    @property
    def spoken_tokens(self) -> int:
        """Tokens before the end-of-sequence token."""
        return self.reasoning_tokens + self.answer_tokens

    def token(self, index: int) -> tuple[Channel, str]:
        """Channel and text of the token at an index; the text is empty for the closing tag."""
        if index < self.reasoning_tokens:
            return "reasoning", self._filler(index) if index < self.reasoning_tokens - 1 else ""
        place = index - self.reasoning_tokens
        return "content", self.answer[place] if place < len(self.answer) else self._filler(place)

    def _filler(self, place: int) -> str:
        """A one-token word that depends on seed and place."""
        word = WORDS[(self.seed + place * place * 7 + place) % len(WORDS)]
        return word if place == 0 else " " + word


def write(question: str, text: Text, thinks: bool) -> Script:
    """The script of an answer; ``thinks`` is false on completions, which have no reasoning channel."""
    known = known_answer(question)
    answer = tuple(pieces(known)) if known else ()
    return Script(
        seed=crc32(question.encode()),
        reasoning_tokens=text.reasoning_tokens if thinks else 0,
        answer=answer,
        answer_tokens=len(answer) or text.filler_tokens,
    )
