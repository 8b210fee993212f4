"""Prompts of the studies, each distinct from its first token on, so that no prefix cache answers for the server."""

from __future__ import annotations

from perfbook.stream.workload import Prompt, fixed_prompts


def numbered(text: str, count: int, seed: int) -> list[Prompt]:
    """``count`` copies of a prompt, each behind a serial number of its own.

    The number stands in front: a prefix cache compares from the start, and a repeated prompt would be answered from it
    (a time to first token without a prefill).
    """
    return [fixed_prompts(f"No. {seed * 100_003 + index}. {text}", 1)[0] for index in range(count)]
