"""A plain blocking-socket client and a launcher for the stand-in; on purpose nothing of perfbook's own client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

READY_S = 60


@dataclass(frozen=True)
class Standin:
    """A running stand-in."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body of a request without streaming."""
        status, _, parts = exchange(self.port, method, path, body)
        return status, b"".join(data for _, data in parts)

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a request that must succeed."""
        status, answer = self.call(method, path, body)
        assert status == 200, answer
        return json.loads(answer)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics by its full name and labels."""
        text = self.call("GET", "/metrics")[1].decode()
        for line in text.splitlines():
            wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
            if line.startswith((f"{name}{{", f"{name} ")) and wanted:
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"{name} {labels} is not in /metrics")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def standin(
    folder: Path, law: Mapping[str, Any], *options: str, env: Mapping[str, str] | None = None, wait: bool = True
) -> Iterator[Standin]:
    """Start a stand-in on a free port and stop it afterwards."""
    file = folder / "law.yaml"
    file.write_text(yaml.safe_dump(dict(law)))
    port = free_port()
    command = [sys.executable, "-m", "perfbook.rehearsal.server", "--law", str(file), "--port", str(port)]
    command += ["--served-model-name", "m", "--launch", "1", "--load-s", "0.05", *options]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
    try:
        if wait:
            wait_until(lambda: connects(port) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
        yield Standin(port, process, log)
    finally:
        process.terminate()
        process.wait(10)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def request_bytes(method: str, path: str, body: Any = None) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\nconnection: keep-alive\r\n\r\n"
    return head.encode() + payload


def exchange(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes, list[tuple[int, bytes]]]:
    """Status, head, and the body's pieces with the CLOCK_MONOTONIC ns at which each was there."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(request_bytes(method, path, body))
        return receive(sock)


def receive(sock: socket.socket) -> tuple[int, bytes, list[tuple[int, bytes]]]:
    """One answer from a connected socket, chunked or with a length."""
    buffer = b""
    while b"\r\n\r\n" not in buffer:
        data = sock.recv(65536)
        if not data:
            raise ConnectionError(f"closed after {len(buffer)} bytes")
        buffer += data
    head, _, rest = buffer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    parts: list[tuple[int, bytes]] = []
    now = time.monotonic_ns()
    if b"transfer-encoding: chunked" not in head:
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(rest) < length:
            rest += sock.recv(65536)
        return status, head, [(now, rest)]
    while True:
        line, mark, after = rest.partition(b"\r\n")
        size = int(line, 16) if mark else -1
        if mark and len(after) >= size + 2:
            if size == 0:
                return status, head, parts
            parts.append((now, after[:size]))
            rest = after[size + 2 :]
            continue
        data = sock.recv(65536)
        now = time.monotonic_ns()
        if not data:
            raise ConnectionError(f"closed inside a stream, after {len(parts)} chunks")
        rest += data


def events(parts: list[tuple[int, bytes]]) -> list[tuple[int, Any]]:
    """Arrival and value of each server-sent event; the end mark is the text ``[DONE]``."""
    found = []
    for arrival_ns, data in parts:
        for block in data.decode().split("\n\n"):
            if block:
                text = block.removeprefix("data: ")
                found.append((arrival_ns, text if text == "[DONE]" else json.loads(text)))
    return found
