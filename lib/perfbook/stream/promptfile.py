"""Prompts from a file: JSON lines of several forms, ShareGPT's among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from perfbook.errors import BadInput
from perfbook.stream.workload import Prompt


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from JSON lines, or from one JSON array (as ShareGPT is shipped).

    Each entry is ``{"prompt": …}``, ``{"text": …}``, ``{"messages": […]}`` or ShareGPT's ``{"conversations":
    [{"from": "human", "value": …}, …]}`` (first human turn); ``output_tokens`` may stand beside it. Entries
    of the last form without a human turn are skipped, as they are in that data set.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"prompt file {path} cannot be read: {error.strerror}") from None
    prompts: list[Prompt] = []
    lines = raw.splitlines() if not raw.lstrip().startswith(b"[") else [raw]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise BadInput(f"prompt file {path} line {number} is not JSON: {error}") from None
        for one in entry if isinstance(entry, list) else [entry]:
            prompt = _prompt_of(one, f"{path} line {number}")
            if prompt is not None:
                prompts.append(prompt)
            if limit is not None and len(prompts) >= limit:
                return prompts
    if not prompts:
        raise BadInput(f"prompt file {path} holds no prompt")
    return prompts


def _prompt_of(entry: Any, where: str) -> Prompt | None:
    if isinstance(entry, dict):
        asked = entry.get("output_tokens")
        output = asked if isinstance(asked, int) and asked > 0 else None
        text = entry.get("prompt", entry.get("text"))
        if isinstance(text, str):
            return Prompt(text=text, output_tokens=output)
        if isinstance(entry.get("messages"), list):
            return Prompt(messages=tuple(entry["messages"]), output_tokens=output)
        if isinstance(entry.get("conversations"), list):
            turns = (t for t in entry["conversations"] if isinstance(t, dict) and t.get("from") in ("human", "user"))
            first = next(turns, {}).get("value")
            return Prompt(text=first, output_tokens=output) if isinstance(first, str) and first else None
    raise BadInput(f"prompt file {where}: an entry needs prompt, text, messages or conversations")
