"""One trace file in a process of its own: ``python -m perfbook.trace.worker FILE [RULES]`` writes a pickle.

A plain child process, not a fork: the caller may be a notebook kernel full of threads.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from perfbook.errors import BadInput
from perfbook.trace.kernels import user_rules
from perfbook.trace.rank import RankTrace, summarise_file


def main(path: str, rules: str | None = None) -> None:
    """Reduce one file and write the outcome, or the error that explains why not, to standard output."""
    outcome: list[RankTrace] | BadInput
    try:
        outcome = summarise_file(Path(path), user_rules(Path(rules)) if rules else ())
    except BadInput as bad:
        outcome = bad
    sys.stdout.buffer.write(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    main(*sys.argv[1:])
