"""Which files of a profile are ranks' traces, and which are something else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfbook.errors import BadInput

_TABLE = re.compile(r"profiler_out.*\.txt$")
_TRACE = re.compile(r"\.(json|json\.gz|sqlite|sqlite3)$")
_STAMP = re.compile(r"\.(\d{9,})\.pt\.trace\.json")
_VLLM = re.compile(r"^(.*?)rank(\d+)\.(\d{9,})\.pt\.trace\.json")
_COORDINATES = re.compile(r"(?:dp\d+_pp\d+_tp\d+(?:_[a-z]+\d+)*_)?$")
_NOT_A_RANK = (
    (re.compile(r"\.tmp$"), "left behind by a profiler that did not finish"),
    (re.compile(r"graph_capture|capture_traces"), "the capture of graphs, not the workload"),
    (re.compile(r"async_llm"), "the front end, not a rank"),
    (re.compile(r"(^|/)merged-"), "all ranks once more in one file"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Trace files to read, and those that were recognised as something else, with the reason.

    ``searched`` are the files that nobody named: they lay in a directory, and may turn out to be something else.
    """

    files: tuple[Path, ...]
    passed_over: tuple[tuple[Path, str], ...]
    searched: frozenset[Path]


def find_traces(paths: Sequence[Path]) -> Found:
    """Trace files among ``paths``; a directory is searched, a file named directly is taken as it is.

    In a directory the newest file of each rank counts, as one file per rank is written for each profile; where
    profiles with different prefixes lie side by side, the newest profile counts.

    Raises
    ------
    BadInput
        A path does not exist, or no trace is found.
    """
    files: list[Path] = []
    passed: list[tuple[Path, str]] = []
    searched: set[Path] = set()
    for path in map(Path, paths):
        if path.is_file():
            if len(paths) > 1 and _TABLE.search(path.name):  # a pattern like c8* catches it
                passed.append((path, "the profiler's own table"))
            else:
                files.append(path)
        elif path.is_dir():
            inside = _search(path, passed)
            files += inside
            searched.update(inside)
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
    return Found(tuple(once.values()), tuple(passed), frozenset(searched))


def _search(folder: Path, passed: list[tuple[Path, str]]) -> list[Path]:
    """Trace files in a folder, and below it; what is none, or is out of date, goes to ``passed``."""
    ranks: dict[str, Path] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        where = file.relative_to(folder).as_posix()
        if reason := next((why for what, why in _NOT_A_RANK if what.search(where)), None):
            passed.append((file, reason))
        elif _TRACE.search(file.name):
            key = _STAMP.sub("", where).removesuffix(".gz")
            if key in ranks:
                older, newer = sorted((ranks[key], file), key=_age)
                same = older.name.removesuffix(".gz") == newer.name.removesuffix(".gz")
                reason = f"the same trace as {newer.name}" if same else f"an older profile; {newer.name} is newer"
                passed.append((older, reason))
                file = newer
            ranks[key] = file
    return _newest_profile(sorted(ranks.values()), passed)


def _newest_profile(files: Iterable[Path], passed: list[tuple[Path, str]]) -> list[Path]:
    """Without profiles of which a newer one, in another folder or with another prefix, has a rank in common."""
    profiles: dict[tuple[Path, str], dict[str, Path]] = {}
    kept = []
    for file in files:
        if named := _VLLM.match(file.name):
            prefix = _COORDINATES.sub("", named[1])
            rank = named[1].removeprefix(prefix) + named[2]
            profiles.setdefault((file.parent, prefix), {})[rank] = file
        else:
            kept.append(file)
    taken: set[str] = set()
    for ranks in sorted(profiles.values(), key=lambda ranks: max(map(_age, ranks.values())), reverse=True):
        if taken.isdisjoint(ranks):
            taken.update(ranks)
            kept += ranks.values()
        else:
            passed += [(file, "of an older profile; name its files to read it") for file in ranks.values()]
    return sorted(kept)


def _age(path: Path) -> tuple[int, float]:
    stamp = _STAMP.search(path.name)
    return (int(stamp[1]) if stamp else 0, path.stat().st_mtime)
