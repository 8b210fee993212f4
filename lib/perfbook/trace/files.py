"""Which files of a profile are ranks' traces, and which are something else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfbook.errors import BadInput

_TRACE = re.compile(r"\.(json|json\.gz|sqlite|sqlite3)$")
_STAMP = re.compile(r"\.(\d{9,})\.pt\.trace\.json")
_NOT_A_RANK = (
    (re.compile(r"\.tmp$"), "left behind by a profiler that did not finish"),
    (re.compile(r"graph_capture|capture_traces"), "the capture of graphs, not the workload"),
    (re.compile(r"async_llm"), "the front end, not a rank"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Trace files to read, and those that were recognised as something else, with the reason."""

    files: tuple[Path, ...]
    passed_over: tuple[tuple[Path, str], ...]


def find_traces(paths: Sequence[Path]) -> Found:
    """Trace files among ``paths``; a directory is searched, a file named directly is taken as it is.

    In a directory the newest file of each rank counts, as one file per rank is written for each profile.

    Raises
    ------
    BadInput
        A path does not exist, or no trace is found.
    """
    files: list[Path] = []
    passed: list[tuple[Path, str]] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            ranks: dict[str, Path] = {}
            for file in inside:
                where = str(file.relative_to(path))
                if reason := next((why for what, why in _NOT_A_RANK if what.search(where)), None):
                    passed.append((file, reason))
                elif _TRACE.search(file.name):
                    key = _STAMP.sub("", where)
                    if key in ranks:
                        older, newer = sorted((ranks[key], file), key=_age)
                        passed.append((older, f"an older profile; {newer.name} is newer"))
                        file = newer
                    ranks[key] = file
            files += sorted(ranks.values())
        else:
            raise BadInput(f"{path}: no such file or directory.")
    if not files:
        seen = f" ({passed[0][0].name} is {passed[0][1]})" if passed else ""
        raise BadInput(
            f"{', '.join(map(str, paths)) or 'no path'}: no trace files (.json, .json.gz, .sqlite) found{seen}."
        )
    once: dict[Path, Path] = {}
    for file in files:  # a folder and a file in it, say, are not two ranks
        once.setdefault(file.resolve(), file)
    return Found(tuple(once.values()), tuple(passed))


def _age(path: Path) -> tuple[int, float]:
    stamp = _STAMP.search(path.name)
    return (int(stamp[1]) if stamp else 0, path.stat().st_mtime)
