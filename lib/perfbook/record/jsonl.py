"""JSON lines that survive a crash: one whole line per write, and a torn last line is skipped on reading."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """What JSON can hold: numpy scalars to Python's, NaN and infinity to null, tuples to lists, paths to text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool | str | None):
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def append(path: Path, value: Mapping[str, Any]) -> None:
    """Append one object as a line and flush it to the disk before returning."""
    line = json.dumps(plain(value), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a crash tore the last line: leave it behind, do not join it
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(28, "No space left on device", str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    """All whole objects, in order; a missing file is an empty list, a torn line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    values = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            values.append(value)
    return values


def count_lines(path: Path) -> int:
    """How many lines a file has, whole or torn before a later append; 0 when it is missing."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # a full disk does not say where; nobody knows the other file
        raise
    finally:
        temporary.unlink(missing_ok=True)
