"""From paths to a report, on all cores where there is enough to read."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from perfbook.errors import BadInput, PerfbookError
from perfbook.trace.breakdown import ALL, Phase, counted, phases
from perfbook.trace.files import find_traces
from perfbook.trace.kernels import user_rules as read_user_rules
from perfbook.trace.rank import RankTrace, attempt
from perfbook.trace.report import TraceReport

_WORTH_PROCESSES_BYTES = 16 << 20
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""For a child's glibc, which otherwise returns each chunk's buffers to the system and faults the pages of the next one
in again: a sixth of a child's time.
"""


def analyse(paths: Sequence[Path], *, user_rules: Path | None = None) -> TraceReport:
    """Break down the traces of one or more ranks.

    Parameters
    ----------
    paths : trace files (torch.profiler JSON, plain or gzip; Nsight Systems SQLite), or directories of them.
    user_rules : a TOML file of kernel rules to try before the standard ones.

    Raises
    ------
    BadInput
        Nothing there, unreadable, or not a trace.
    """
    found = find_traces([Path(p) for p in paths])
    rules = read_user_rules(user_rules) if user_rules else ()
    if len(found.files) > 1 and sum(f.stat().st_size for f in found.files) > _WORTH_PROCESSES_BYTES:
        cores = min(len(found.files), len(os.sched_getaffinity(0)))
        shares = [found.files[i::cores] for i in range(cores)]
        with ThreadPoolExecutor(cores) as pool:
            done = list(pool.map(lambda share: _summarise_in_child(share, user_rules), shares))
        outcomes = [done[i % cores][i // cores] for i in range(len(found.files))]
    else:
        outcomes = [attempt(f, rules) for f in found.files]
    warnings = [f"{path.name} is not read: {reason}" for path, reason in found.passed_over]
    read: list[RankTrace] = []
    problems: list[BadInput] = []
    for path, outcome in zip(found.files, outcomes, strict=True):
        if not isinstance(outcome, BadInput):
            read += outcome
        elif path in found.searched:
            problems.append(outcome)
            warnings.append(f"{path.name} is not read: {str(outcome).removeprefix(str(path)).lstrip(': ')}")
        else:
            raise outcome
    if not read:
        raise problems[0]
    ranks, about_ranks = _numbered(read)
    found_phases, means = phases(ranks), counted(ranks)
    if outside := [str(r.rank) for r in ranks if means and all(r is not m for m in means)]:
        about_ranks.append(f"nothing is recorded on the device of rank {', '.join(outside)}: not part of any mean")
    return TraceReport(tuple(ranks), found_phases, (*about_ranks, *warnings, *_unsplit(means, found_phases)))


def _summarise_in_child(paths: Sequence[Path], rules: Path | None) -> list[list[RankTrace] | BadInput]:
    """What :func:`attempt` returns for each file, computed one after the other in a child process.

    Raises
    ------
    PerfbookError
        As in the child; or it died.
    """
    library = str(Path(__file__).parents[2])
    known = [library, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "perfbook.trace.worker", str(rules or ""), *map(str, paths)]
    environment = os.environ | _KEEP_FREED_MEMORY | {"PYTHONPATH": os.pathsep.join(known)}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise PerfbookError(f"{paths[0].parent}: reading the traces failed: {last}")
    outcomes: list[list[RankTrace] | BadInput] = pickle.loads(done.stdout)
    return outcomes


def _numbered(ranks: list[RankTrace]) -> tuple[list[RankTrace], list[str]]:
    """Ranks in order, each with a number of its own, and what is missing.

    One rank may have several files of different phases, as SGLang writes them on request.
    """
    warnings = []
    numbers = [r.rank for r in ranks]
    phases_of = [(r.rank, s.phase) for r in ranks for s in {s.phase: s for s in r.steps}.values()]
    if None in numbers or (len(set(numbers)) < len(numbers) and len(set(phases_of)) < len(phases_of)):
        if len(ranks) > 1:
            warnings.append("which rank is which is not said, or said twice: numbered in order of file names")
        ranks = [replace(r, rank=i) for i, r in enumerate(ranks)]
    ranks = sorted(ranks, key=lambda r: r.rank or 0)
    world = max((r.world_size or 0 for r in ranks), default=0)
    if missing := sorted(set(range(world)) - {r.rank for r in ranks}):
        some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        warnings.append(f"{len(missing)} of {world} ranks are missing: {some}")
    return ranks, warnings


def _unsplit(ranks: Sequence[RankTrace], found: Mapping[str, Phase]) -> list[str]:
    """Why collectives are not split into transfer and waiting, where they are not."""
    unsplit = [n for n, p in found.items() if n != ALL and any(c.transfer_us is None for c in p.collectives)]
    if not any(phase.collectives for phase in found.values()):
        return []
    if len(ranks) == 1:
        return ["one rank: the time of a collective cannot be split into transfer and waiting for other ranks"]
    if not unsplit and (set(found) != {ALL} or all(c.transfer_us is not None for c in found[ALL].collectives)):
        return []
    where = f" in {' and '.join(unsplit)} steps" if unsplit else ""
    return [f"the ranks' calls do not correspond{where}: some collectives cannot be split into transfer and waiting"]
