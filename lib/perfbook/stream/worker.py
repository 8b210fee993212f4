"""A client process: ``python -m perfbook.stream.worker``, started and fed by ``perfbook.stream.workers``
only.

It reads a pickled job from its parent, connects, says "ready", reads the common start time, measures, and
sends progress and the result back. The pipes are private to the two processes; nothing from a server is ever
unpickled."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
from typing import Any


def main() -> None:
    """Serve one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not break the protocol

    def say(*message: Any) -> None:
        pickle.dump(message, out)
        out.flush()

    from perfbook.errors import PerfbookError
    from perfbook.stream import workers
    from perfbook.stream.client import Schedule

    source = sys.stdin.buffer
    job, concurrency, due_ns, seconds, enough = pickle.load(source)

    def start_at_ns() -> int:
        say("ready")
        return int(pickle.load(source))

    def tell(done: int, after_s: float, silent_s: float) -> str | None:
        say("progress", done, after_s, silent_s)
        asked_to_end, _, _ = select.select([source], [], [], 0)
        return str(pickle.load(source)) if asked_to_end else None

    schedule = Schedule(concurrency, due_ns, seconds, enough, start_at_ns)
    try:
        measured = workers.run(job, schedule, tell)
    except PerfbookError as error:
        say("failed", error)
        return
    say("done", measured)


if __name__ == "__main__":
    main()
