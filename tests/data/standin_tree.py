"""A cheap stand-in for a vLLM server's process tree: API server → engine core → worker, with the real one's habits.

Takes vLLM's options. Children live in the same session, hold shared memory and a socket in TMPDIR, and do not watch
their parent. ``STANDIN`` names bad habits, separated by commas:
``dies``: an error in the log and exit 1; ``silent``: never listens; ``stubborn``: ignores SIGTERM, as do its children.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HABITS = set(os.environ.get("STANDIN", "").split(","))
PREFIX = "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1]"


def hold_resources(name: str) -> None:
    """Shared memory that outlives the process, and a socket in TMPDIR, as ZMQ has."""
    path = Path(f"/dev/shm/psm_standin_{os.getpid()}")
    path.write_bytes(b"\0" * 4096)
    with path.open("r+b") as file:
        globals()[name] = mmap.mmap(file.fileno(), 4096)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{os.environ['TMPDIR']}/{name}-{os.getpid()}")
    globals()[name + "_socket"] = listening


def sleep_forever() -> None:
    while True:
        time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--host", "--port", "--served-model-name", "--model"):
        parser.add_argument(option)
    options, _ = parser.parse_known_args()
    if "stubborn" in HABITS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "dies" in HABITS:
        print(f"{PREFIX} Traceback (most recent call last):\n{PREFIX} ValueError: no room for the cache", flush=True)
        sys.exit(1)
    settled, settling = os.pipe()
    engine = os.fork()
    if engine == 0:
        hold_resources("engine")
        if os.fork() == 0:
            hold_resources("worker")
            os.write(settling, b".")
        os.close(settling)
        sleep_forever()
    os.close(settling)
    os.read(settled, 1)  # vLLM's API server does not listen before its workers are there

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": options.served_model_name}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    def leave(number: int, frame: object) -> None:
        os.kill(engine, signal.SIGKILL)  # vLLM's API server kills its engine core; the workers are on their own
        os._exit(0)

    if "stubborn" not in HABITS:
        signal.signal(signal.SIGTERM, leave)
    if "silent" in HABITS:
        sleep_forever()
    try:
        server = ThreadingHTTPServer((options.host, int(options.port)), Handler)
    except OSError as error:
        print(f"{PREFIX} Traceback (most recent call last):\n{PREFIX} OSError: {error}", flush=True)
        os.kill(engine, signal.SIGKILL)
        os._exit(1)
    print("INFO:     Application startup complete.", flush=True)
    server.serve_forever()


main()
