"""What a dead server leaves on the machine: its temporary folder, and files under /dev/shm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from perfbook.server import tree
from perfbook.server.state import ServerState

MARK_FILE = ".perfbook"
SHM = Path("/dev/shm")
_FAMILIAR = ("psm_", "sem.mp-", "vllm", "nccl-", "torch_", "__KMP_REGISTERED_LIB_")


def remove(known: ServerState) -> tuple[list[str], list[str]]:
    """Remove the temporary folder (only with our mark in it) and shared memory that nobody alive uses."""
    removed: list[str] = []
    left: list[str] = []
    folder = Path(known.tmpdir)
    if (folder / MARK_FILE).is_file() and (folder / MARK_FILE).read_text() == known.mark:
        shutil.rmtree(folder, ignore_errors=True)
        (left if folder.exists() else removed).append(str(folder))
    gone = [one for one in known.tree if tree.process(one.pid) is None]
    names = {
        *known.shared_memory,
        *(path.name for one in gone for path in tree.openmp_files(one.pid) if one.made(path)),
    }
    if names:
        for name in sorted(names - _in_use()):
            path = SHM / name
            try:
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    continue
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError:
                left.append(str(path))
            else:
                removed.append(str(path))
    return removed, left


def _familiar() -> list[str]:
    """Files under /dev/shm of the kinds that servers leave."""
    return sorted(path.name for path in SHM.glob("*") if path.name.startswith(_FAMILIAR))


def abandoned() -> list[str]:
    """Those of them that no living process uses."""
    found = _familiar()
    used = _in_use() if found else set()
    return [name for name in found if name not in used]


def _in_use() -> set[str]:
    """Files under /dev/shm that somebody alive uses."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return tree.shared_memory(one for pid in pids if (one := tree.process(pid)) is not None)
