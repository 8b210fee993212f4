"""Trace files in a process of their own: ``python -m perfbook.trace.worker RULES FILE…`` writes a pickle to stdout.

A plain child process, not a fork: the caller may be a notebook kernel full of threads.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from perfbook.trace.kernels import user_rules
from perfbook.trace.rank import attempt


def main(rules: str, *paths: str) -> None:
    """Write what each file amounts to, or the error that explains why not, to standard output."""
    own = user_rules(Path(rules)) if rules else ()
    outcomes = [attempt(Path(path), own) for path in paths]
    sys.stdout.buffer.write(pickle.dumps(outcomes, pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    main(*sys.argv[1:])
