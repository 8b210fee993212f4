"""The stand-in as a process: ``python -m perfbook.rehearsal.server --law FILE --port N --served-model-name NAME``.

vLLM's own options may follow; those that the law knows about (limits, profiler, settings) take effect, the
others are only shown in the log. Ends on SIGTERM with the running requests, like a vLLM without a shutdown
timeout.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

from perfbook.errors import PerfbookError
from perfbook.rehearsal import startlog
from perfbook.rehearsal.app import App
from perfbook.rehearsal.faults import Faults, unavailable
from perfbook.rehearsal.http import Exchange
from perfbook.rehearsal.launch import Launch, read_command_line
from perfbook.rehearsal.loop import Loop

NS_PER_S = 1_000_000_000
TRAFFIC_NS = 10 * NS_PER_S


class Loading:
    """Serves while the weights load: 503 to everything."""

    def handle(self, exchange: Exchange) -> None:
        """Not yet."""
        unavailable(exchange)

    def deadline_ns(self) -> int | None:
        """Nothing is pending."""
        return None

    def advance(self, now_ns: int) -> None:
        """Nothing to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until stopped; 2 when the input is wrong, 1 when the launch dies by its law."""
    try:
        launch = read_command_line(sys.argv[1:] if argv is None else argv, os.environ)
        loop = Loop(launch.host, launch.port)
        launch = replace(launch, port=loop.port)
    except PerfbookError as problem:
        sys.stderr.write(f"server.py: error: {problem}\n")
        return problem.exit_code
    except OSError as problem:
        sys.stderr.write(f"OSError: [Errno {problem.errno}] {problem.strerror}: port {launch.port}\n")
        return 1
    loop.wake_on_signals()
    stop = Stop()
    try:
        return _serve(launch, loop, stop)
    finally:
        loop.close()


class Stop:
    """Set by SIGTERM and SIGINT. A flag, looked at between turns: an exception could strike anywhere."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


def _serve(launch: Launch, loop: Loop, stop: Stop) -> int:
    faults = Faults(launch.law.faults)
    if faults.while_loading:
        loop.listen()
    error = startlog.start_error(launch)
    start_ns = time.monotonic_ns()
    for line in startlog.startup(launch):
        at_ns = start_ns + round(line.at * launch.load_s * NS_PER_S)
        while time.monotonic_ns() < at_ns and not stop.asked:
            loop.turn(Loading(), at_ns)
        if stop.asked:
            return 0
        if error is not None and line.at >= startlog.FAILS_AT:
            for last in startlog.failure(error):
                _log(last)
            return 1
        _log(line)
    app = App(launch, faults)
    if not faults.while_loading:
        loop.listen()
    for line in startlog.ready(os.getpid()):
        _log(line)
    report_ns = time.monotonic_ns() + TRAFFIC_NS
    while not stop.asked:
        loop.turn(app, report_ns)
        if time.monotonic_ns() >= report_ns:
            _report(app)
            report_ns += TRAFFIC_NS
    _log(startlog.Line(1.0, "[shutdown] API server: shutdown triggered", "APIServer", "launcher.py:254"))
    _log(startlog.Line(1.0, "INFO:     Application shutdown complete."))
    return 0


def _report(app: App) -> None:
    """vLLM's traffic line; silent while idle."""
    prompt_tok_s, output_tok_s = app.truth.rates_since_last(time.monotonic_ns())
    running, waiting = len(app.engine.running), len(app.engine.waiting)
    if prompt_tok_s or output_tok_s or running or waiting:
        usage, hits = app.engine.cache.usage, app.engine.cache.hit_rate
        _log(startlog.traffic(prompt_tok_s, output_tok_s, running, waiting, usage, hits))


def _log(line: startlog.Line) -> None:
    print(line.rendered(os.getpid()), flush=True)  # noqa: T201  (the server's log is its standard output)


if __name__ == "__main__":
    sys.exit(main())
