"""YAML as parameter files use it: values with the line they stand on, and no silent surprises."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from perfbook.errors import BadInput

KeyPath = tuple[int | str, ...]

_LARGEST_BYTES = 2**18
_MOST_VALUES = 50_000


@dataclass(frozen=True)
class Document:
    """Values, where they came from, and the line of each key."""

    values: dict[str, Any]
    origin: str
    lines: dict[KeyPath, int]

    def where(self, path: KeyPath) -> str:
        """``file:line`` of a key, or of the nearest key above it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.origin}:{self.lines[path[:length]]}"
        return self.origin

    def set(self, override: str) -> None:
        """Apply ``dotted.key=YAML value``, creating sections on the way."""
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise BadInput(f"--set {override!r}: write key=value, such as sweep.repeats=2")
        value = _parse(text, f"--set {dotted}")[0]
        target = self.values
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise BadInput(f"--set {override!r}: {key!r} is a value, not a section")
        target[keys[-1]] = value
        path: KeyPath = tuple(keys)
        for known in [known for known in self.lines if known[: len(path)] == path]:
            del self.lines[known]


def read_yaml(path: Path) -> Document:
    """Read a YAML mapping.

    Raises
    ------
    BadInput
        No such file, far too large, not text, not YAML, not a mapping, a key given twice, a value that would not
        survive the way to a notebook or a program (NaN, dates, keys that are not text, NUL).
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)  # it may be a device, or a log named by mistake
        if len(raw) > _LARGEST_BYTES:
            raise BadInput(f"{path}: larger than {_LARGEST_BYTES // 1024} KiB; is this a parameter file?")
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    values, lines = _parse(text, str(path))
    if not isinstance(values, dict):
        raise BadInput(f"{path}: holds {type(values).__name__}, not keys with values; start from params/template.yaml")
    return Document(values, str(path), lines)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like ``word``, or None when nothing comes close."""
    folded = {name.replace("-", "_").lower(): name for name in known}
    found = difflib.get_close_matches(word.replace("-", "_").lower(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def _parse(text: str, origin: str) -> tuple[Any, dict[KeyPath, int]]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _walk(node, (), lines, origin)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadInput(f"{origin}:{line}: not valid YAML ({error.problem or error.context})") from None
    except RecursionError:
        raise BadInput(f"{origin}: nested too deeply, or within itself") from None
    except (yaml.YAMLError, ValueError) as error:
        raise BadInput(f"{origin}: not valid YAML ({str(error).splitlines()[0]})") from None
    _check_plain(values, (), Document({}, origin, lines))
    return values, lines


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], origin: str) -> None:
    """Record the line of every key; refuse a key that stands twice, of which YAML would keep the last.

    Aliases are followed each time they stand: a few lines of them can mean billions of values.
    """
    if len(lines) > _MOST_VALUES:
        raise BadInput(f"{origin}: more than {_MOST_VALUES} values, aliases (*name) counted each time")
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in lines:
                raise BadInput(
                    f"{origin}:{line}: {'.'.join(map(str, key))!r} stands twice (first in line {lines[key]})"
                )
            lines[key] = line
            _walk(value_node, key, lines, origin)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _walk(item, (*path, index), lines, origin)


def _check_plain(value: Any, path: KeyPath, document: Document) -> None:
    """Only what JSON can say reaches a notebook unchanged."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadInput(f"{document.where((*path, str(key)))}: key {key!r} is not text; put it in quotes")
            _check_plain(key, (*path, key), document)
            _check_plain(item, (*path, key), document)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, (*path, index), document)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadInput(f"{document.where(path)}: {'.'.join(map(str, path))} is {value}; use null for unknown")
    elif isinstance(value, str):
        if odd := _unwritable(value):
            raise BadInput(f"{document.where(path)}: {'.'.join(map(str, path))!r} holds the character {odd}; remove it")
    elif not isinstance(value, int | float | bool | None):
        raise BadInput(
            f"{document.where(path)}: {'.'.join(map(str, path))} was read as a {type(value).__name__}; put it in quotes"
        )


def _unwritable(text: str) -> str:
    """The first character that no program's argument (NUL) or no file (half a surrogate pair) can hold."""
    return next((f"U+{ord(one):04X}" for one in text if one == "\0" or "\ud800" <= one <= "\udfff"), "")
