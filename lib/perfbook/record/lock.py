"""One measurement at a time per host.

The lock is the kernel's (``flock``) on a file outside of any run: it goes with its holder, however that ends,
so that a stale lock cannot block anybody. The file's text only says who holds it. Processes that the holder
starts, such as a notebook's kernel, measure on its behalf: they find a word in their environment that only
the holder's file holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from perfbook.errors import BadInput, MeasurementFailed
from perfbook.record.run import now_utc

PATH_VARIABLE = "PERFBOOK_LOCK"
WORD_VARIABLE = "PERFBOOK_LOCK_WORD"


@dataclass(frozen=True)
class Holder:
    """Who holds the lock: process number with its creation time (seconds), what it measures, since when (UTC)."""

    pid: int
    created: float
    what: str
    since: str
    word: str

    def __str__(self) -> str:
        """Text for messages."""
        return f"pid {self.pid} ({self.what}, since {self.since})"

    @property
    def alive(self) -> bool:
        """Whether this very process runs; a later one with its number does not count."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.created) < 1.0
        except psutil.Error:
            return False


@dataclass(frozen=True)
class Held:
    """The lock, held.

    Attributes
    ----------
    nested : bool
        Held by a process above this one, which goes on holding it afterwards.
    abandoned : Holder or None
        Who held it before and ended without giving it back.
    """

    nested: bool
    abandoned: Holder | None = None


def lock_path() -> Path:
    """The lock's file: ``PERFBOOK_LOCK`` when set, else one per host in the system's temporary folder."""
    named = os.environ.get(PATH_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / "perfbook-measuring.lock"


@contextmanager
def host_lock(what: str) -> Iterator[Held]:
    """Keep other measurements on this host away while in the block.

    Parameters
    ----------
    what : str
        What is being measured; a second one is told.

    Raises
    ------
    MeasurementFailed
        Somebody else measures; the message says who, what and since when.
    BadInput
        The file cannot be used as a lock.
    """
    path = lock_path()
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(descriptor)
            if holder is not None and _on_behalf_of(holder):
                yield Held(nested=True)
                return
            raise MeasurementFailed(_refusal(holder, path)) from None
        abandoned = _read(descriptor)
        word = secrets.token_hex(16)
        _write(descriptor, Holder(os.getpid(), psutil.Process().create_time(), what, now_utc(), word))
        before = os.environ.get(WORD_VARIABLE)
        os.environ[WORD_VARIABLE] = word
        try:
            yield Held(nested=False, abandoned=abandoned)
        finally:
            if before is None:
                os.environ.pop(WORD_VARIABLE, None)
            else:
                os.environ[WORD_VARIABLE] = before
            _write(descriptor, None)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """The lock's file, made when missing; never through a symlink that somebody put there."""
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError):
            continue
        except OSError as error:
            raise BadInput(
                f"{path}: cannot be the lock ({error.strerror}); name another file in {PATH_VARIABLE}"
            ) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise BadInput(f"{path}: cannot be the lock (not a plain file); name another file in {PATH_VARIABLE}")
        if flags & os.O_CREAT:
            with suppress(OSError):
                os.fchmod(descriptor, 0o666)  # another user of this host writes its name there, too
        return descriptor
    raise BadInput(f"{path}: cannot be opened or made; name another file in {PATH_VARIABLE}")


def _read(descriptor: int) -> Holder | None:
    try:
        value: Any = json.loads(os.pread(descriptor, 4096, 0))
        return Holder(
            int(value["pid"]), float(value["created"]), str(value["what"]), str(value["since"]), str(value["word"])
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(descriptor: int, holder: Holder | None) -> None:
    """Say who holds the lock; where that cannot be written, the lock holds all the same."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        if holder is not None:
            os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _on_behalf_of(holder: Holder) -> bool:
    """Whether the holder is this process or one above it, and gave it the word."""
    if not holder.alive or os.environ.get(WORD_VARIABLE) != holder.word:
        return False
    with suppress(psutil.Error):
        return holder.pid in {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return False


def _refusal(holder: Holder | None, path: Path) -> str:
    if holder is None:
        return f"another measurement runs on this host (who, {path} does not say); wait for it"
    if not holder.alive:
        return f"the lock {path} is held by a process that {holder} left behind; find it with: fuser {path}"
    return f"another measurement runs on this host: {holder}; wait for it or stop it"
