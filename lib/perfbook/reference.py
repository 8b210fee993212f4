"""The reference of parameter files, written from the validated sections themselves.

``python -m perfbook.reference > docs/parameters.md``; a test holds the file to this.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from perfbook.params import Variant

_HEAD = """# Parameter files

One YAML file per model variant, under `params/`. Every key is listed here with its default; only `variant` and
`server` are required. Unknown keys, wrong types and impossible values are refused before anything starts, with
the line and the nearest valid key. `--set section.key=value` overrides one from the command line.

This page is written from the code: `python -m perfbook.reference > docs/parameters.md`.
"""


def render() -> str:
    """The page, as Markdown."""
    parts = [_HEAD]
    loose = [(name, field) for name, field in Variant.model_fields.items() if _section(field) is None]
    parts.append("## Top level\n\n" + _table(loose))
    for name, field in Variant.model_fields.items():
        section = _section(field)
        if section is not None:
            parts += _pages(name, section)
    return "\n".join(parts)


def _pages(name: str, section: type[BaseModel]) -> Iterator[str]:
    about = " ".join((section.__doc__ or "").split())
    yield f"## `{name}`\n\n{about}\n\n{_table(list(section.model_fields.items()))}"
    for key, field in section.model_fields.items():
        inner = _section(field)
        if inner is not None:
            yield from _pages(f"{name}.{key}", inner)


def _table(fields: list[tuple[str, FieldInfo]]) -> str:
    rows = [f"| `{key}` | {_default(field)} | {field.description or ''} |" for key, field in fields]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=False)
    if value is PydanticUndefined:
        return "required" if _section(field) is None else "see below"
    if isinstance(value, BaseModel):
        return "see below"
    plain = (
        [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
        if isinstance(value, list)
        else value
    )
    return f"`{json.dumps(plain, ensure_ascii=False)}`".replace("|", "\\|")


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, also as a list or mapping of them; None for a plain value."""
    for candidate in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


if __name__ == "__main__":
    sys.stdout.write(render())
