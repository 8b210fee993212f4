"""Turning what a crashed or careless writer left behind into JSON that can be read.

Profilers write ``NaN``, raw control characters and names that are not UTF-8, and a killed process leaves a file that
ends in the middle of an event. Everything here keeps byte positions, so a warning can say where the damage is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

_NON_FINITE = re.compile(rb"-?(?:NaN|Infinity)(?=\s*[,\]}])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_EVENT_START = re.compile(rb'\{\s*"(?:ph|name|cat|ts|pid|tid|id|dur|args)"\s*:')
_BEFORE_A_VALUE = (b":", b" ", b"[", b",", b"\n", b"\t")
_SPACES = bytes.maketrans(bytes(range(32)), b" " * 32)


def sanitise(data: bytes) -> tuple[bytes, list[tuple[str, int]]]:
    """The same text, the same length, as JSON that decoders accept, and what was wrong with it.

    A number that is not finite becomes an empty string (so no time is invented for it), a control character a space,
    a byte that is not UTF-8 a question mark.

    Returns
    -------
    text : bytes of the same length.
    damage : kind and position of the first damage of each kind.
    """
    damage: list[tuple[str, int]] = []
    non_finite = [m for m in _NON_FINITE.finditer(data) if data[m.start() - 1 : m.start()] in _BEFORE_A_VALUE]
    if non_finite:
        damage.append(("a number that is not finite", non_finite[0].start()))
        repaired = bytearray(data)
        for m in non_finite:
            repaired[m.start() : m.end()] = b'""'.ljust(len(m[0]))
        data = bytes(repaired)
    control = _CONTROL.search(data)
    if control:
        damage.append(("a control character", control.start()))
    data = data.translate(_SPACES)
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        damage.append(("bytes that are not UTF-8", bad.start))
        data = data.decode("utf-8", "surrogateescape").encode("utf-8", "replace")
    return data, damage


def pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Slices of damaged text that each seem to hold one event: position, text without the comma after it."""
    starts = [
        m.start()
        for m in _EVENT_START.finditer(data)
        if data[max(0, m.start() - 64) : m.start()].rstrip()[-1:] in (b",", b"[", b"")
    ]
    for start, stop in pairwise([*starts, len(data)]):
        yield start, data[start:stop].rstrip().rstrip(b",")


def first_value(data: bytes) -> tuple[bytes, int] | None:
    """The complete JSON value that ``data`` starts with and where it ends; None when it is not complete."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None
    head = text[:end].encode("utf-8", "surrogateescape")
    return head, len(head)
