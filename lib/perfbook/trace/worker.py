"""Trace files in a process of their own: ``python -m perfbook.trace.worker RULES FILE…`` writes a pickle to stdout.

A plain child process, not a fork: the caller may be a notebook kernel full of threads.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from perfbook.errors import BadInput
from perfbook.trace.kernels import user_rules
from perfbook.trace.rank import RankTrace, summarise_file


def main(rules: str, *paths: str) -> None:
    """Reduce the files and write the outcome, or the error that explains why not, to standard output."""
    outcome: list[list[RankTrace]] | BadInput
    try:
        own = user_rules(Path(rules)) if rules else ()
        outcome = [summarise_file(Path(path), own) for path in paths]
    except BadInput as bad:
        outcome = bad
    sys.stdout.buffer.write(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    main(*sys.argv[1:])
