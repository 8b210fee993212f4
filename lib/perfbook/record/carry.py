"""A run's folder in pieces: what has changed on one side since the other looked, and how to write it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perfbook.errors import BadInput

APPENDED = (".jsonl", ".log")  # files that only ever grow: their end is sent, not the whole again
PIECE_BYTES = 8 * 2**20
State = tuple[int, int]
"""How many bytes of a file have been sent, and its modification time in ns then."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one file: where they begin, and what the file was when they were read."""

    name: str
    offset: int
    data: bytes
    state: State

    @property
    def reached(self) -> State:
        """What its receiver has of the file: a large one goes on from here when it is next asked for."""
        return (self.offset + len(self.data), self.state[1])


def changes(folder: Path, sent: Mapping[str, State]) -> Iterator[Piece]:
    """The pieces that ``sent`` lacks, file by file. Links and files that vanish meanwhile are passed over."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        try:
            about = path.stat()
            state = (about.st_size, about.st_mtime_ns)
            before = sent.get(name)
            if before == state:
                continue
            goes_on = before and (name.endswith(APPENDED) or before[1] == about.st_mtime_ns)
            offset = before[0] if before and goes_on and before[0] <= about.st_size else 0
            with path.open("rb") as file:
                file.seek(offset)
                while True:
                    data = file.read(min(PIECE_BYTES, about.st_size - offset))
                    yield Piece(name, offset, data, state)
                    offset += len(data)
                    if not data or offset >= about.st_size:
                        break
        except FileNotFoundError:
            continue


def write(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write pieces under ``folder``, in the order given; a first piece at 0 begins its file anew.

    Raises
    ------
    BadInput
        A name that leads out of the folder.
    """
    for piece in pieces:
        name = PurePosixPath(piece.name)
        if name.is_absolute() or ".." in name.parts:
            raise BadInput(f"a node sent the file {piece.name!r}, which lies outside of its run; it is not written")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() and piece.offset else "wb") as file:
            file.seek(piece.offset)
            file.write(piece.data)
            file.truncate()
