"""A trace file as a stream of plain bytes, whether or not it is compressed, as far as it can be read."""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from isal import igzip_lib, isal_zlib

from perfbook.errors import BadInput

CHUNK_BYTES = 8 << 20
_READ_BYTES = 1 << 20
_CAREFUL_BYTES = 256
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_FORMAT = 31
_DAMAGED: Any = igzip_lib.IsalError


def plain_chunks(path: Path, warnings: list[str]) -> Iterator[bytes]:
    """Chunks of about ``CHUNK_BYTES`` of UTF-8 text; stops with a warning where the compressed data is bad.

    Text that went through a shell which writes UTF-16 or UTF-32 is turned back; byte positions are then of the UTF-8.

    Raises
    ------
    BadInput
        The file cannot be opened, or is empty.
    """
    decoder: codecs.IncrementalDecoder | None = None
    for i, data in enumerate(_stored_chunks(path, warnings)):
        if not i and (encoding := json.detect_encoding(data)).startswith(("utf-16", "utf-32")):
            decoder = codecs.getincrementaldecoder(encoding)("replace")
        yield decoder.decode(data).encode("utf-8", "replace") if decoder else data


def _stored_chunks(path: Path, warnings: list[str]) -> Iterator[bytes]:
    """The bytes as they were written, decompressed."""
    try:
        with path.open("rb") as file:
            magic = file.read(2)
            file.seek(0)
            if not magic:
                raise BadInput(f"{path} is empty: the profiler wrote nothing; profile again.")
            if magic == _GZIP_MAGIC:
                yield from _inflated(file, warnings)
            else:
                while data := file.read(CHUNK_BYTES):
                    yield data
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None


def _inflated(file: BinaryIO, warnings: list[str]) -> Iterator[bytes]:
    """The text of a gzip file's members."""
    done = 0
    member = isal_zlib.decompressobj(wbits=_GZIP_FORMAT)
    compressed = file.read(_READ_BYTES)
    while compressed:
        try:
            data = member.decompress(compressed, CHUNK_BYTES)
        except _DAMAGED as error:
            yield from _inflated_to_the_damage(file, done, f"{error}", warnings)
            return
        done += len(data)
        if data:
            yield data
        compressed = member.unconsumed_tail or file.read(_READ_BYTES)
        if member.eof:
            compressed = (member.unused_data + compressed).lstrip(b"\0")
            if compressed:
                member = isal_zlib.decompressobj(wbits=_GZIP_FORMAT)
    if not member.eof:
        warnings.append(f"the compressed file ends early, at byte {done} of the text: its writer was interrupted")


def _inflated_to_the_damage(file: BinaryIO, done: int, error: str, warnings: list[str]) -> Iterator[bytes]:
    """Start again in small steps and yield what lies between ``done`` and the damage: isal drops a whole step."""
    file.seek(0)
    position = 0
    member = zlib.decompressobj(wbits=_GZIP_FORMAT)
    compressed = b""
    found = bytearray()
    try:
        while compressed := compressed or file.read(_CAREFUL_BYTES):
            data = member.decompress(compressed)
            position += len(data)
            if position > done:
                found += data[-(position - done) :]
                done = position
            if len(found) > CHUNK_BYTES:
                yield bytes(found)
                found.clear()
            compressed = member.unused_data
            if member.eof:
                member = zlib.decompressobj(wbits=_GZIP_FORMAT)
    except zlib.error:
        pass
    yield bytes(found)
    warnings.append(f"compressed data is damaged ({error}): values may be wrong, and after byte {done} all is lost")
