"""The owner's commands for an attached server: real processes, a real server that they start and stop."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfbook.errors import BadInput, ServerFailed
from perfbook.params import Variant, make_variant
from perfbook.record.run import Run
from perfbook.server import commands
from perfbook.server.commands import run_command
from perfbook.server.ports import free_port, listeners

SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}' if "models" in self.path else sys.argv[2].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
START = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=-3, stderr=-3)"
IDLE, BUSY = "vllm:num_requests_running 0\n", "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path))
    monkeypatch.setenv(commands.ALLOWED, "1")
    chosen = free_port("127.0.0.1")
    yield chosen
    for one in listeners(chosen):
        os.kill(one.pid or 0, signal.SIGKILL)


def make(port: int, metrics: str = IDLE, **commands: list[str]) -> Variant:
    start = [sys.executable, "-c", START, SERVE, str(port), metrics]
    server: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "commands": {"start": start, **commands}}
    return make_variant({"variant": "v", "server": server}, "test")


def test_start_waits_until_the_model_is_served_and_shows_the_command(port: int):
    said: list[str] = []
    variant = make(port)
    run_command(variant, "start", Run.start(variant), say=said.append)
    assert said[0].startswith(f"running: {sys.executable} -c import subprocess")
    assert said[-1].startswith("ready after")


def test_stop_is_refused_while_others_use_the_server(port: int):
    variant = make(port, BUSY, stop=["true"])
    run = Run.start(variant)
    run_command(variant, "start", run)
    with pytest.raises(ServerFailed, match="works on 3 requests of others; not stopped"):
        run_command(variant, "stop", run)


def test_stop_of_an_idle_server_runs_the_command(port: int):
    kill = [sys.executable, "-c", "print('stopped')"]
    variant = make(port, IDLE, stop=kill)
    run = Run.start(variant)
    run_command(variant, "start", run)
    assert run_command(variant, "stop", run) == "stopped\n"


def test_nothing_runs_without_permission(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(commands.ALLOWED)
    touched = tmp_path / "touched"
    variant = make(port, read_log=["touch", str(touched)])
    with pytest.raises(BadInput, match="allow it with --allow-commands"):
        run_command(variant, "read_log", Run.start(variant))
    assert not touched.exists()


def test_words_are_no_shell_and_traces_has_its_place(port: int):
    variant = make(port, collect_traces=["echo", "{traces}", "; echo $HOME"])
    run = Run.start(variant)
    assert run_command(variant, "collect_traces", run) == f"{run.path}/traces ; echo $HOME\n"


def test_failures_are_one_line(port: int):
    variant = make(port, read_log=["sh", "-c", "echo no such unit >&2; exit 5"], stop=["/no/such/program"])
    run = Run.start(variant)
    with pytest.raises(ServerFailed, match=r"server\.commands\.read_log: sh ended with 5: no such unit"):
        run_command(variant, "read_log", run)
    with pytest.raises(BadInput, match=r"server\.commands\.collect_traces is missing"):
        run_command(variant, "collect_traces", run)
    with pytest.raises(ServerFailed, match="connection refused"):
        run_command(variant, "stop", run)
