"""Run a command on a leash: when whoever holds the other end of standard input dies, the command is interrupted.

``python -m perfbook.cluster.leash SECONDS COMMAND…``. Ray ends a worker, and with it the worker's children, without a
word when its driver or its node dies. A campaign must then still stop its server: so the command is no child of the
worker, and it gets the SIGINT that Ctrl-C would send, with ``SECONDS`` to clean up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(arguments: list[str]) -> int:
    """Detach, run, and interrupt on end of file; the last line on standard output is ``exit CODE``."""
    patience_s, command = float(arguments[0]), arguments[1:]
    if os.fork():
        return 0  # the caller's child ends here; what follows belongs to init
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it, and so would all that it starts
    running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)

    def hold() -> None:
        while os.read(0, 4096):
            pass
        running.send_signal(signal.SIGINT)
        try:
            running.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)

    threading.Thread(target=hold, daemon=True).start()
    code = running.wait()
    with contextlib.suppress(OSError):  # nobody may read any more: then that is why it ended
        os.write(1, f"exit {code}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
