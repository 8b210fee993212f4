"""Who watches the server can end a cell while no stream gets a byte; what had arrived stays."""

from __future__ import annotations

import re
import socket

import pytest

from perfbook.errors import ServerFailed
from perfbook.stream import load
from perfbook.stream.load import Deadlines, measure
from perfbook.stream.workload import RequestShape, fixed_prompts
from test_stream_load import END, HEAD, count_to, serving, token


class Hangs:
    """Answers the first requests, then says one token and nothing more."""

    def __init__(self, answers: int) -> None:
        self.left = answers

    def __call__(self, sock: socket.socket, body: dict[str, object]) -> None:
        self.left -= 1
        if self.left >= 0:
            count_to(sock, body)
        else:
            sock.sendall(HEAD + token("", 0) + token(" 1", 1))
            sock.recv(1)  # until the client gives up


class Patience:
    """Gives the server up once it was silent for so long; remembers what it was told."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.heard: list[float] = []

    def __call__(self, silent_s: float) -> str | None:
        self.heard.append(silent_s)
        return f"silent for more than {self.limit_s:g} s" if silent_s > self.limit_s else None


@pytest.mark.parametrize("processes", [1, 2])
def test_a_silent_cell_is_ended_and_keeps_what_arrived(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MUTE_S", 0.5)
    watch = Patience(0.8)
    told: list[str] = []
    with serving(Hangs(4)) as endpoint:
        cell = measure(
            endpoint, fixed_prompts("hello", 8), RequestShape(5), concurrency=2, requests=8, warmup=0, watch=watch,
            processes=processes, progress=told.append, deadlines=Deadlines(first_byte_s=60, stall_s=7),
        )  # fmt: skip
    assert cell.details["ended"] == "silent for more than 0.8 s"
    assert (cell.summary["ok"], cell.summary["errors"]) == (4, {"given_up": 2})
    assert cell.summary["validity"]["verdict"] == "invalid"
    assert cell.summary["validity"]["reasons"][-1] == "silent for more than 0.8 s"
    assert cell.summary["output_tokens"] == 20
    silent = re.compile(
        rf"c2: 4 of 8 requests after \d\.\d s, no byte from 127\.0\.0\.1:{endpoint.port} for \d s, "
        r"waiting up to 60 s for a first byte, 7 s for the next"
    )
    assert silent.fullmatch(told[-1])
    assert max(watch.heard) < 30  # seconds of silence, not nanoseconds or clock readings


def test_a_silent_warm_up_is_ended_before_the_cell() -> None:
    with serving(Hangs(0)) as endpoint, pytest.raises(ServerFailed, match="silent for more than"):
        measure(endpoint, fixed_prompts("hello", 2), RequestShape(5), concurrency=1, requests=1, watch=Patience(0.5))


def test_a_server_that_speaks_is_left_alone() -> None:
    def slow(sock: socket.socket, body: dict[str, object]) -> None:
        sock.sendall(HEAD + token("", 0))
        sock.settimeout(0.3)
        for i in range(1, 6):  # 1.5 s in all, but never silent for long
            try:
                sock.recv(1)
            except TimeoutError:
                sock.sendall(token(f" {i}", i, "length" if i == 5 else None))
        sock.sendall(END)

    watch = Patience(0.8)
    with serving(slow) as endpoint:
        cell = measure(
            endpoint, fixed_prompts("hello", 1), RequestShape(5), concurrency=1, requests=1, warmup=0, watch=watch
        )
    assert cell.details["ended"] is None
    assert cell.summary["ok"] == 1
    assert watch.heard
