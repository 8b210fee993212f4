"""Each fault of the stand-in, seen by a plain socket client."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from rehearsal_probe import Standin, connects, events, exchange, receive, request_bytes, standin, wait_until

LAW: dict[str, Any] = {
    "model": {"max_model_len": 1024, "tensor_parallel": 1},
    "step": {"decode_ms": [[1, 2.0]], "prefill_floor_ms": 2.0},
    "limits": {"kv_cache_tokens": 4096},
}


def faulty(*faults: dict[str, Any]) -> dict[str, Any]:
    return LAW | {"faults": list(faults)}


def ask(tokens: int) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}


def stream(server: Standin, tokens: int) -> list[Any]:
    status, _, parts = exchange(server.port, "POST", "/v1/completions", ask(tokens))
    assert status == 200
    return [value for _, value in events(parts)]


def test_die_takes_the_process_and_its_streams(tmp_path: Path) -> None:
    with standin(tmp_path, faulty({"kind": "die", "after_tokens": 5})) as server:
        with pytest.raises(ConnectionError):
            stream(server, 50)
        assert server.process.wait(10) == 1
        assert b"illegal memory access" in server.log.read_bytes()
        assert not connects(server.port)


def test_stall_keeps_health_but_makes_no_tokens(tmp_path: Path) -> None:
    with (
        standin(tmp_path, faulty({"kind": "stall", "after_tokens": 3})) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=0.3) as sock,
    ):
        sock.sendall(request_bytes("POST", "/v1/completions", ask(50)))
        wait_until(lambda: server.metric("vllm:generation_tokens_total") == 3)
        with pytest.raises(TimeoutError):
            receive(sock)
        assert server.call("GET", "/health")[0] == 200
        assert server.metric("vllm:num_requests_running") == 1
        assert server.metric("vllm:iteration_tokens_total_count") == 3
        assert server.metric("vllm:generation_tokens_total") == 3


def test_a_stall_with_an_end_goes_on_after_it(tmp_path: Path) -> None:
    with standin(tmp_path, faulty({"kind": "stall", "after_tokens": 3, "seconds": 0.3})) as server:
        assert len(stream(server, 10)) == 11
        late_ns = [lateness for *_, lateness in server.json("GET", "/rehearsal")["steps"]]
        assert late_ns.index(max(late_ns)) == 3
        assert late_ns[3] > 250e6


def test_an_error_object_inside_a_stream_hits_every_second_request(tmp_path: Path) -> None:
    with standin(tmp_path, faulty({"kind": "stream_error", "after_tokens": 4, "every": 2})) as server:
        assert len(stream(server, 10)) == 11
        values = stream(server, 10)
        assert ["error" in value for value in values] == [False] * 4 + [True, False]
        assert values[4]["error"]["code"] == 500
        assert values[5] == "[DONE]"
        assert len(stream(server, 10)) == 11
        plain = ask(10) | {"stream": False}
        assert server.call("POST", "/v1/completions", plain)[0] == 500
        assert server.metric("vllm:request_success_total", finished_reason="length") == 2
        assert server.metric("vllm:request_success_total", finished_reason="error") == 2
        assert server.metric("vllm:num_requests_running") == 0


def test_reset_breaks_the_connection_in_mid_stream(tmp_path: Path) -> None:
    with standin(tmp_path, faulty({"kind": "reset", "after_tokens": 2})) as server:
        with pytest.raises(ConnectionResetError):
            stream(server, 10)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_html_instead_of_an_answer(tmp_path: Path) -> None:
    with standin(tmp_path, faulty({"kind": "html"})) as server:
        status, head, parts = exchange(server.port, "POST", "/v1/completions", ask(1))
        assert status == 502
        assert b"content-type: text/html" in head
        assert b"502 Bad Gateway" in parts[0][1]


def test_503_while_loading(tmp_path: Path) -> None:
    with standin(tmp_path, faulty({"kind": "loading_503"}), "--load-s", "1.5") as server:
        assert server.call("GET", "/health")[0] == 503
        assert server.call("GET", "/v1/models")[0] == 503
        wait_until(lambda: server.call("GET", "/health")[0] == 200)
        assert len(stream(server, 3)) == 4
