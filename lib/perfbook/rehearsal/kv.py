"""The KV cache: blocks held by sequences, and the prefixes that a later prompt can reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class KVCache:
    """Counts blocks per sequence; remembers the prefixes of prompts, the least recently used forgotten first.

    Remembered prefixes take no room from sequences, as in vLLM, where a cached block without an owner is
    free.
    """

    def __init__(self, tokens: int) -> None:
        self.total_blocks = tokens // BLOCK_TOKENS
        self.used_blocks = 0
        self.queried_tokens = self.hit_tokens = 0
        self._held: dict[int, int] = {}
        self._prefixes: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.used_blocks / self.total_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the queried prompt tokens that were in the cache."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def grow(self, owner: int, tokens: int) -> bool:
        """Make room for ``tokens`` of a sequence in all; false, and nothing changed, without the blocks."""
        more = blocks_for(tokens) - self._held.get(owner, 0)
        if more > self.total_blocks - self.used_blocks:
            return False
        if more > 0:
            self._held[owner] = self._held.get(owner, 0) + more
            self.used_blocks += more
        return True

    def release(self, owner: int) -> None:
        """Give a sequence's blocks back."""
        self.used_blocks -= self._held.pop(owner, 0)

    def match(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt in the cache: whole blocks, never the last token, which must be computed."""
        hit = 0
        for place, key in enumerate(self._keys(prompt), start=1):
            if key not in self._prefixes or place * BLOCK_TOKENS >= len(prompt):
                break
            self._prefixes.move_to_end(key)
            hit = place * BLOCK_TOKENS
        return hit

    def remember(self, prompt: Sequence[int]) -> None:
        """Keep the prompt's whole blocks for later prompts."""
        for key in self._keys(prompt):
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > self.total_blocks:
            self._prefixes.popitem(last=False)

    def forget(self) -> bool:
        """Drop all prefixes; refused while blocks are held."""
        if self.used_blocks:
            return False
        self._prefixes.clear()
        return True

    @staticmethod
    def _keys(prompt: Sequence[int]) -> list[int]:
        """One key per whole block, which stands for all tokens up to its end."""
        keys, key = [], 0
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = hash((key, *prompt[start : start + BLOCK_TOKENS]))
            keys.append(key)
        return keys
