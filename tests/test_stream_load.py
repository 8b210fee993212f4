"""The client and a whole cell against a scripted server on a socket: times, faults, keep-alive, fallbacks."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest

from perfbook.errors import BadInput
from perfbook.stream.ask import ask
from perfbook.stream.client import Deadlines, Endpoint
from perfbook.stream.load import measure
from perfbook.stream.workload import Prompt, RequestShape, fixed_prompts

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
QUICK = Deadlines(connect_s=2, first_byte_s=2, stall_s=2, total_s=10)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str, count: int | None = None, finish: str | None = None) -> bytes:
    body: dict[str, object] = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    if count is not None:
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": count}
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
Script = Callable[[socket.socket, dict], None]


def count_to(sock: socket.socket, body: dict) -> None:
    """The good server: max_tokens tokens, each its own segment, the first one after a role chunk."""
    n = body["max_tokens"]
    sock.sendall(HEAD + token("", 0))
    for i in range(1, n + 1):
        time.sleep(0.002)
        sock.sendall(token(f" {i}", i, "length" if i == n else None))
    sock.sendall(END)


@contextmanager
def serving(script: Script) -> Iterator[Endpoint]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    open_sockets: list[socket.socket] = []

    def talk(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock, sock.makefile("rb") as lines:
            try:
                while lines.readline():
                    size = 0
                    while (line := lines.readline()) not in (b"\r\n", b""):
                        if line.lower().startswith(b"content-length:"):
                            size = int(line.split(b":")[1])
                    script(sock, json.loads(lines.read(size)))
            except (OSError, ValueError):
                pass

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            open_sockets.append(sock)
            threading.Thread(target=talk, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for sock in open_sockets:
            sock.close()


def cell(endpoint: Endpoint, concurrency: int = 2, requests: int = 6, tokens: int = 5, **more):
    prompts = more.pop("prompts", fixed_prompts("hello", 1))
    more.setdefault("deadlines", QUICK)
    return measure(endpoint, prompts, RequestShape(tokens), concurrency=concurrency, requests=requests, **more)


def test_a_closed_loop_gives_every_token_its_time():
    lines: list[str] = []
    with serving(count_to) as endpoint:
        result = cell(endpoint, 2, 6, 5, progress=lines.append)
    summary = result.summary
    assert (summary["ok"], summary["failed"], summary["errors"]) == (6, 0, {})
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (30, 42)
    assert summary["token_source"] == "continuous_usage"
    assert summary["window"] == "steady"
    assert 0 < summary["plateau_s"] <= summary["duration_s"]
    assert summary["ttft_ms"]["min"] >= 2.0
    assert summary["tpot_ms"]["min"] >= 2.0
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    rows = result.requests.to_pylist()
    assert [r["text"] for r in rows] == [" 1 2 3 4 5"] * 6
    assert {r["finish_reason"] for r in rows} == {"length"}
    events = result.events.to_pylist()
    assert [e["index"] for e in events] == [0, 1, 2, 3, 4] * 6
    assert all(a["arrival_ns"] <= b["arrival_ns"] for a, b in pairwise(events) if b["index"])
    assert result.warmup.num_rows == 1
    one = rows[0]
    first = next(e for e in events if e["request"] == 0)
    assert one["ttft_ms"] == (first["arrival_ns"] - one["start_ns"]) / 1e6


def test_user_space_times_are_marked():
    with serving(count_to) as endpoint:
        summary = cell(endpoint, 1, 1, kernel_times=False).summary
    assert (summary["ok"], summary["clock"]) == (1, "user")
    assert summary["ttft_ms"]["min"] >= 2.0


def test_an_open_loop_counts_latency_from_the_schedule():
    with serving(count_to) as endpoint:
        result = cell(endpoint, 1, 4, 5, rate_per_s=1000.0, arrivals="constant")
    rows = result.requests.to_pylist()
    assert [b["scheduled_ns"] - a["scheduled_ns"] for a, b in pairwise(rows)] == [1_000_000] * 3
    assert all(r["start_ns"] >= r["scheduled_ns"] for r in rows)
    assert rows[3]["client_queue_ms"] > 20.0, "three answers of five 2 ms tokens come first on the only stream"
    assert rows[3]["ttft_ms"] == pytest.approx(rows[3]["client_queue_ms"] + 2.0, abs=30.0)
    assert rows[3]["ttft_ms"] > rows[3]["client_queue_ms"]


def test_time_and_precision_stop_a_cell_early():
    with serving(count_to) as endpoint:
        assert 1 <= cell(endpoint, 1, 10_000, 5, seconds=0.1).summary["requests"] < 1000
        assert cell(endpoint, 1, 10_000, 5, precision=0.9).summary["requests"] == 10


def test_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = cell(Endpoint(f"http://127.0.0.1:{port}", "m"))
    assert result.summary["errors"] == {"refused": 6}
    assert not result.measured
    assert result.summary["validity"]["verdict"] == "invalid"
    assert result.summary["ttft_ms"]["mean"] is None


def fault(sock: socket.socket, body: dict, kind: str) -> None:
    if kind == "reset":
        sock.sendall(HEAD + token("a", 1))
        time.sleep(0.02)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raise OSError
    if kind == "incomplete":
        sock.sendall(HEAD + token("a", 1))
        raise OSError
    if kind == "stall":
        sock.sendall(HEAD + token("a", 1))
        time.sleep(0.45)
    elif kind == "first_byte_timeout":
        time.sleep(0.45)
    elif kind == "http_503":
        sock.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 7\r\n\r\nloading")
    elif kind == "stream_error":
        sock.sendall(HEAD + token("a", 1) + chunk(b'data: {"error": {"message": "boom"}}\n\n') + END)
    elif kind == "bad_http":
        sock.sendall(b"\x00\x01\x02garbage\r\n\r\n")
    elif kind == "bad_event":
        sock.sendall(HEAD + chunk(b"data: {nonsense\n\n") + END)
    elif kind == "oversized":
        sock.sendall(HEAD)
        for _ in range(100):
            sock.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
    elif kind == "not_streamed":
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    "kind",
    ["reset", "incomplete", "stall", "first_byte_timeout", "http_503", "stream_error", "bad_http", "bad_event",
     "oversized", "not_streamed"],
)  # fmt: skip
def test_a_fault_is_named_and_leaves_the_other_stream_alone(kind: str):
    def script(sock: socket.socket, body: dict) -> None:
        if body["messages"][0]["content"] == "bad":
            fault(sock, body, kind)
        else:
            count_to(sock, body)

    prompts = [Prompt(text="good"), Prompt(text="bad"), Prompt(text="good"), Prompt(text="good")]
    deadlines = Deadlines(connect_s=2, first_byte_s=0.25, stall_s=0.25, total_s=5)
    with serving(script) as endpoint:
        result = cell(endpoint, 2, 4, prompts=prompts, warmup=0, deadlines=deadlines)
    rows = result.requests.to_pylist()
    assert [r["error"] for r in rows] == [None, kind, None, None]
    assert [r["text"] for r in rows if r["ok"]] == [" 1 2 3 4 5"] * 3
    assert all(r["ttft_ms"] < 200 for r in rows if r["ok"])
    assert result.summary["errors"] == {kind: 1}
    assert result.summary["validity"]["verdict"] == "invalid"
    assert result.summary["validity"]["reasons"][0] == f"1 of 4 requests failed ({kind} 1)"
    assert result.summary["output_tokens"] == 15


def test_a_server_that_refuses_continuous_usage_is_measured_without_and_it_is_noted():
    def script(sock: socket.socket, body: dict) -> None:
        if "continuous_usage_stats" in body.get("stream_options", {}):
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\nunknown field")
        else:
            sock.sendall(HEAD + token("a") + token("b") + END)

    with serving(script) as endpoint:
        result = cell(endpoint, 1, 2)
        answer = ask(endpoint, "hello", RequestShape(2))
    assert result.summary["ok"] == 2
    assert result.summary["token_source"] == "events"
    assert "continuous_usage_stats" in result.details["notes"][0]
    assert (answer.text, answer.token_count, answer.error) == ("ab", 2, None)


def test_a_connection_that_the_server_closes_is_opened_again():
    def script(sock: socket.socket, body: dict) -> None:
        data = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n'
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + data)
        raise OSError

    with serving(script) as endpoint:
        assert cell(endpoint, 2, 6).summary["ok"] == 6


def test_bytes_beyond_the_limit_go_to_a_file_and_come_back():
    from perfbook.stream import client, tables
    from perfbook.stream.client import Schedule

    with serving(count_to) as endpoint:
        body = RequestShape(150).body(endpoint, Prompt(text="x"))
        recording = client.record(endpoint, [endpoint.request(body)] * 4, Schedule(2), spool_bytes=1000)
    assert recording.spool.spilled_bytes > 20_000
    made = tables.tabulate(recording, [tables.Asked(None, None)] * 4, "c")
    assert made.requests["output_tokens"].to_pylist() == [150] * 4
    assert made.requests["ok"].to_pylist() == [True] * 4


def test_ask_plainly():
    def script(sock: socket.socket, body: dict) -> None:
        assert "stream" not in body
        reply = {"choices": [{"message": {"content": "Paris", "reasoning": "hm"}, "finish_reason": "stop"}],
                 "usage": {"prompt_tokens": 3, "completion_tokens": 2}}  # fmt: skip
        data = json.dumps(reply).encode()
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))

    with serving(script) as endpoint:
        answer = ask(endpoint, [{"role": "user", "content": "?"}], RequestShape(5), stream=False)
    assert (answer.text, answer.reasoning, answer.finish_reason, answer.token_count) == ("Paris", "hm", "stop", 2)
    assert answer.ok


def test_ask_reports_what_failed():
    with serving(lambda sock, body: fault(sock, body, "http_503")) as endpoint:
        for stream in (True, False):
            answer = ask(endpoint, "hello", RequestShape(5), stream=stream)
            assert (answer.error, answer.detail, answer.ok) == ("http_503", "loading", False)


def test_the_key_is_sent_but_never_shown():
    endpoint = Endpoint("http://h:1/v1", "m", api_key="s3cret")
    assert "s3cret" not in repr(endpoint)
    assert b"Authorization: Bearer s3cret\r\n" in endpoint.request(b"{}")
    assert endpoint.url == "http://h:1/v1/chat/completions"
    assert Endpoint("http://h:1/", "m", kind="completions").url == "http://h:1/v1/completions"


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:99999999", "http://u:p@h"])
def test_bad_addresses_are_refused(url: str):
    with pytest.raises(BadInput):
        Endpoint(url, "m")


def test_impossible_loads_are_refused():
    endpoint = Endpoint("http://127.0.0.1:1", "m")
    for bad in ({"concurrency": 0}, {"requests": 0}, {"rate_per_s": 0.0}, {"warmup": -1}):
        with pytest.raises(BadInput):
            measure(endpoint, fixed_prompts("x", 1), RequestShape(1), **{"concurrency": 1, "requests": 1, **bad})


def test_the_command_measures_a_sweep_of_a_strict_server_and_writes_its_tables(tmp_path):
    import pyarrow.parquet as pq

    from perfbook.study.load import LoadRequest, run_load

    def script(sock: socket.socket, body: dict) -> None:
        if "messages" not in body or {"ignore_eos", "min_tokens"} & set(body):
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\nunknown field")
        else:
            count_to(sock, body)

    with serving(script) as endpoint:
        request = LoadRequest(
            endpoint.base_url, "m", [1, 2], 4, 3, prompt_tokens=9, out=tmp_path / "out", deadlines=QUICK
        )
        report = run_load(request)
    assert report.measured
    assert [c["ok"] for c in report.to_json()["cells"]] == [4, 4]
    assert report.to_json()["schema"] == 1
    assert report.noise is not None
    assert report.noise.concurrency == 2
    assert report.to_json()["null_run"]["outside_interval"] == 0
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    assert pq.read_table(tmp_path / "out" / "requests.parquet")["cell"].to_pylist() == ["c1"] * 4 + ["c2"] * 4
    assert pq.read_table(tmp_path / "out" / "events.parquet").num_rows == 24
    exported = json.loads((tmp_path / "out" / "vllm-bench-c2.json").read_text())
    assert (exported["completed"], exported["max_concurrency"]) == (4, 2)
    text = report.render_text()
    assert "approximate" in text
    assert "the client's own error at 2 streams (null run" in text
    assert max(map(len, text.splitlines()[:4])) <= 80
    assert "refused stream_options.continuous_usage_stats, ignore_eos and min_tokens" in text


def test_the_command_says_when_nothing_was_measured():
    from perfbook.study.load import LoadRequest, run_load

    with serving(lambda sock, body: fault(sock, body, "http_503")) as endpoint:
        report = run_load(LoadRequest(endpoint.base_url, "m", [2], 3, 3, deadlines=QUICK))
    assert not report.measured
    assert report.noise is None
    assert "http_503 3" in report.render_text()
    assert "starved" not in report.render_text()  # nothing came: the client had nothing to be late for
