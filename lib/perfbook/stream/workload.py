"""Prompts of known length, and the body that asks for an answer of known length.

Prompts of one cell must differ from the first cache block on, and from the cells before: a prompt that the
server has seen is answered from its prefix cache, and the cell then measures that. Give each cell its own
seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from perfbook.errors import BadInput
from perfbook.stream.endpoint import Endpoint
from perfbook.stream.tokenizers import LocalTokenizer, Tokenizer
from perfbook.stream.words import FILLERS, WORDS


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text or as chat messages.

    ``tokens_asked`` is its length without the chat template, None when unknown; ``exact`` says whether a
    tokenizer counted it. ``output_tokens`` overrides the shape's answer length for this prompt.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens_asked: int | None = None
    exact: bool = False
    seed: int | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise BadInput("a prompt is either a text or a list of messages, and one of them")


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What every request of a cell asks for.

    Parameters
    ----------
    output_tokens : int
        ``max_tokens``.
    min_tokens : int, optional
    ignore_eos : bool
        Go on to ``output_tokens`` whatever the model says (vLLM); fixes the lengths.
    temperature : float
    extra_body : mapping
        Further body fields; they win over the ones above.
    continuous_usage : bool
        Ask for the token count with every event (vLLM). Servers that refuse the field get it left out in the
        warm-up.
    """

    output_tokens: int
    min_tokens: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    continuous_usage: bool = True

    def __post_init__(self) -> None:
        if self.output_tokens < 1:
            raise BadInput(f"output_tokens is {self.output_tokens}; ask for at least 1")
        if self.min_tokens is not None and not 0 <= self.min_tokens <= self.output_tokens:
            raise BadInput(f"min_tokens is {self.min_tokens}; it must lie between 0 and output_tokens")

    def ladder(self) -> list[tuple[RequestShape, str]]:
        """This shape, then plainer ones for servers that refuse unknown fields, with what each leaves out."""
        usage, lengths = "stream_options.continuous_usage_stats", "ignore_eos and min_tokens"
        steps = [(self, "")]
        if self.continuous_usage:
            steps.append((replace(self, continuous_usage=False), usage))
        if self.ignore_eos or self.min_tokens is not None:
            plain = replace(self, continuous_usage=False, ignore_eos=False, min_tokens=None)
            steps.append((plain, f"{usage}, {lengths}" if self.continuous_usage else lengths))
        return steps

    def body(self, endpoint: Endpoint, prompt: Prompt, *, stream: bool = True) -> bytes:
        """The JSON body of one request."""
        body: dict[str, Any] = {"model": endpoint.model}
        if endpoint.kind == "chat":
            body["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
        elif prompt.text is None:
            raise BadInput("the completions endpoint takes a text, not chat messages; use kind='chat'")
        else:
            body["prompt"] = prompt.text
        body["max_tokens"] = prompt.output_tokens or self.output_tokens
        body["temperature"] = self.temperature
        if self.min_tokens is not None:
            body["min_tokens"] = min(self.min_tokens, body["max_tokens"])
        if self.ignore_eos:
            body["ignore_eos"] = True
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
            if self.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        body.update(self.extra_body)
        return msgspec.json.encode(body)


def exact_prompts(
    tokenizer: Tokenizer | str | Path | None, tokens: int | Sequence[int], count: int, seed: int
) -> list[Prompt]:
    """Make ``count`` prompts of exactly ``tokens`` tokens, each different within its first four words.

    Parameters
    ----------
    tokenizer : Tokenizer, path or None
        A ``ServerTokenizer``, a model directory, or None: then a word counts as a token and the lengths are
        approximate (``Prompt.exact`` is false).
    tokens : int or sequence of int
        Length, or one length per prompt (see ``draw_lengths``), without chat template and special tokens.
    count : int
    seed : int
        Same seed, same prompts; another seed, other prompts.

    Raises
    ------
    BadInput
        When a length cannot be met with this tokenizer.
    """
    lengths = [tokens] * count if isinstance(tokens, int) else list(tokens)
    if len(lengths) != count or any(n < 1 for n in lengths):
        raise BadInput(f"prompt lengths must be {count} numbers of at least 1; got {lengths[:5]}")
    if isinstance(tokenizer, str | Path):
        tokenizer = LocalTokenizer(tokenizer)
    rng = random.Random(seed)
    seen: set[str] = set()
    prompts = []
    for n in lengths:
        for _ in range(50):
            text = " ".join(rng.choices(WORDS, k=n)) if tokenizer is None else _fit(tokenizer, n, rng)
            if text is not None and (n < 4 or _start(text) not in seen):
                break
        else:
            raise BadInput(f"no prompt of exactly {n} tokens could be made with this tokenizer; try another length")
        seen.add(_start(text))
        prompts.append(Prompt(text=text, tokens_asked=n, exact=tokenizer is not None, seed=seed))
    return prompts


def _start(text: str) -> str:
    """What must differ between two prompts, so that no cache block is shared (blocks hold 16 tokens or
    more).
    """
    return " ".join(text.split(" ", 4)[:4])


def _fit(tokenizer: Tokenizer, n: int, rng: random.Random) -> str | None:
    """Random words cut to at most ``n`` tokens, then filled up to exactly ``n``; None when that fails."""
    words = rng.choices(WORDS, k=n)  # a word is at least one token
    keep = n
    for _ in range(20):
        size = tokenizer.count(" ".join(words[:keep]))
        if size <= n:
            break
        keep = min(keep - 1, int(keep * n / size))
    text = " ".join(words[: max(keep, 1)])
    size = tokenizer.count(text)
    if size > n:
        text, size = "", 0  # even one of the words is too long: fillers only
    tries = 0
    while size < n and tries < 40:
        # Grow by what is missing, then settle the last tokens one filler at a time.
        more = rng.choices(FILLERS, k=max(1, n - size) if tries < 5 else 1)
        longer = text + "".join(more)
        grown = tokenizer.count(longer)
        if grown <= n:
            text, size = longer, grown
        tries += 1
    return text if size == n else None


def draw_lengths(spec: int | Mapping[str, Sequence[float]], count: int, seed: int) -> list[int]:
    """Draw lengths: ``128``, ``{"uniform": [64, 256]}`` or ``{"lognormal": [median, sigma]}``; at least 1
    each.
    """
    if isinstance(spec, int):
        return [spec] * count
    rng = random.Random(seed)
    if set(spec) == {"uniform"} and len(spec["uniform"]) == 2:
        low, high = (int(v) for v in spec["uniform"])
        if 1 <= low <= high:
            return [rng.randint(low, high) for _ in range(count)]
    if set(spec) == {"lognormal"} and len(spec["lognormal"]) == 2:
        median, sigma = spec["lognormal"]
        if median >= 1 and sigma >= 0:
            return [max(1, round(median * rng.lognormvariate(0.0, sigma))) for _ in range(count)]
    raise BadInput(
        f"length {dict(spec)!r} is unknown; use a number, uniform: [low, high] or lognormal: [median, sigma]"
    )


def fixed_prompts(text: str, count: int) -> list[Prompt]:
    """The same text ``count`` times; after the first the server may answer from its prefix cache."""
    return [Prompt(text=text)] * count
