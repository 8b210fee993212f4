"""The stand-in as a process, held against its law by a plain socket client; vLLM's endpoints one by one."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rehearsal_probe import Standin, events, exchange, free_port, receive, request_bytes, standin, wait_until

LAW: dict[str, Any] = {
    "model": {"max_model_len": 4096, "tensor_parallel": 2, "hidden_size": 64, "layers": 2},
    "step": {
        "decode_ms": [[1, 8.0], [4, 11.0], [16, 23.0]],
        "context_us_per_token": 20.0,
        "prefill_floor_ms": 15.0,
        "prefill_tok_s": 4000.0,
    },
    "limits": {"max_num_seqs": 16, "kv_cache_tokens": 16384},
    "text": {"reasoning_tokens": 5, "filler_tokens": 30},
}
MS = 1_000_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    with standin(tmp_path_factory.mktemp("standin"), LAW, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def streamed(text: str, **fields: Any) -> dict[str, Any]:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return chat(text, stream=True, stream_options=usage, **fields)


def token_times(served: Standin, body: dict[str, Any]) -> tuple[int, list[int]]:
    """Send time, and the arrival of each chunk that carries new tokens."""
    sent_ns = time.monotonic_ns()
    status, _, parts = exchange(served.port, "POST", "/v1/chat/completions", body)
    assert status == 200
    arrivals, seen = [], 0
    for arrival_ns, value in events(parts):
        if value != "[DONE]" and value["choices"] and value["usage"]["completion_tokens"] > seen:
            seen = value["usage"]["completion_tokens"]
            arrivals.append(arrival_ns)
    return sent_ns, arrivals


def test_one_stream_obeys_the_law_by_a_foreign_clock(served: Standin) -> None:
    tokens = 60
    sent_ns, arrivals = token_times(served, streamed("Count from 1 to 50.", max_tokens=tokens, ignore_eos=True))
    truth = served.json("GET", "/rehearsal")["steps"][-tokens:]
    # what the engine planned is the law to the nanosecond: a 28-token prompt, then one position more per step
    assert truth[0][2:4] == [0, 28]
    times = [end_ns - start_ns for start_ns, end_ns, *_ in truth]
    assert times[0] == pytest.approx((15.0 + 28 / 4.0) * MS, abs=1)
    assert times[1:] == [pytest.approx(8.0 * MS + 20_000 * (28 + k), abs=1) for k in range(1, tokens)]
    # and what the client saw is what the engine planned: never early, and on the whole not late. The closing tag of
    # the thinking, token 5, makes no event.
    ends = [end_ns for _, end_ns, *_ in truth]
    seen = ends[:4] + ends[5:]
    assert len(arrivals) == len(seen)
    late = sorted(arrival - end for arrival, end in zip(arrivals, seen, strict=True))
    assert late[0] >= 0
    assert late[len(late) // 2] < 100 * MS
    assert arrivals[0] - sent_ns >= (15.0 + 28 / 4.0) * MS


def test_four_streams_share_steps_of_the_batchs_time(served: Standin) -> None:
    body = streamed("Tell me about caches.", max_tokens=60, ignore_eos=True)
    sockets = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(4)]
    for sock in sockets:
        sock.sendall(request_bytes("POST", "/v1/chat/completions", body))
    for sock in sockets:
        with sock:
            usage = events(receive(sock)[2])[-2][1]["usage"]
        assert usage["completion_tokens"] == 60
    full = [step for step in served.json("GET", "/rehearsal")["steps"] if step[2] == 4 and not step[3]]
    assert len(full) >= 20
    for start_ns, end_ns, *_ in full:
        positions_ms = (end_ns - start_ns) / MS - 11.0
        assert 0.5 < positions_ms < 1.9  # 20 us times a mean position between 25 and 95


def test_usage_text_and_ending_of_a_stream(served: Standin) -> None:
    status, head, parts = exchange(
        served.port, "POST", "/v1/chat/completions", streamed("What is the capital of France? Answer in one sentence.")
    )
    assert status == 200
    assert b"content-type: text/event-stream" in head
    values = [value for _, value in events(parts)]
    assert values[-1] == "[DONE]"
    assert values[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert values[0]["usage"]["completion_tokens"] == 0
    deltas = [value["choices"][0]["delta"] for value in values[1:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == "The capital of France is Paris."
    assert len([delta for delta in deltas if "reasoning" in delta]) == 4
    counts = [value["usage"]["completion_tokens"] for value in values[1:-2]]
    assert counts[:6] == [1, 2, 3, 4, 6, 7]  # the closing tag has no event of its own
    assert values[-3]["choices"][0]["finish_reason"] == "stop"
    assert values[-2]["choices"] == []
    # 5 of thinking, 9 of answer, the end-of-sequence token
    assert values[-2]["usage"] == {"prompt_tokens": 38, "total_tokens": 53, "completion_tokens": 15}


def test_a_short_limit_truncates_inside_the_thinking(served: Standin) -> None:
    answer = served.json("POST", "/v1/chat/completions", chat("What is the capital of France?", max_tokens=3))
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"]
    assert answer["usage"]["completion_tokens"] == 3


def test_equal_questions_have_equal_answers_and_min_tokens_holds(served: Standin) -> None:
    first, second = (served.json("POST", "/v1/chat/completions", chat("Why?")) for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["usage"]["completion_tokens"] == 5 + 30 + 1
    longer = served.json("POST", "/v1/chat/completions", chat("Why?", min_tokens=50))
    assert longer["usage"]["completion_tokens"] == 51


def test_completions_take_text_or_ids_and_stream_without_a_role(served: Standin) -> None:
    plain = served.json("POST", "/v1/completions", {"model": "m", "prompt": "What is 17 + 25?", "max_tokens": 100})
    assert plain["choices"][0]["text"] == "17 + 25 is 42."
    assert plain["object"] == "text_completion"
    assert "reasoning" not in plain["choices"][0]
    body = {"model": "m", "prompt": [5000, 5001, 5002], "max_tokens": 4, "ignore_eos": True, "stream": True}
    _, _, parts = exchange(served.port, "POST", "/v1/completions", body)
    values = [value for _, value in events(parts)]
    assert [value["choices"][0]["finish_reason"] for value in values[:-1]] == [None, None, None, "length"]
    assert values[-1] == "[DONE]"
    assert all("usage" not in value for value in values[:-1])
    assert served.json("POST", "/v1/completions", {"prompt": "x"})["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", chat("x") | {"model": "other"}, 404, "The model `other` does not exist."),
        ("/v1/chat/completions", {"model": "m"}, 400, "messages must be a list"),
        ("/v1/chat/completions", chat("x", max_tokens=0), 400, "max_tokens must be a whole number of at least 1"),
        ("/v1/chat/completions", chat("x", max_tokens=5000), 400, "is too large: 5000"),
        ("/v1/chat/completions", chat("x", n=2), 400, "one choice"),
        ("/v1/chat/completions", chat("x", stream_options={"include_usage": True}), 400, "Stream options"),
        ("/v1/chat/completions", chat("a " * 4100), 400, "maximum context length is 4096 tokens"),
        ("/v1/completions", {"prompt": []}, 400, "prompt must be one text"),
        ("/v1/completions", [1], 400, "JSON object"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, "the body is not JSON"),
        ("/detokenize", {"tokens": "x"}, 400, "list of token ids"),
    ],
)
def test_what_vllm_refuses_is_refused(served: Standin, path: str, body: Any, status: int, says: str) -> None:
    got, answer = served.call("POST", path, body)
    error = json.loads(answer)["error"]
    assert (got, error["code"]) == (status, status)
    assert says in error["message"]


def test_unknown_paths_and_methods(served: Standin) -> None:
    assert served.call("GET", "/nothing") == (404, b'{"detail":"Not Found"}')
    assert served.call("GET", "/v1/completions") == (405, b'{"detail":"Method Not Allowed"}')


def test_small_endpoints(served: Standin) -> None:
    assert served.call("GET", "/health") == (200, b"")
    assert served.json("GET", "/version") == {"version": "0.32.0+rehearsal"}
    model = served.json("GET", "/v1/models")["data"][0]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == ("m", 4096, "perfbook-rehearsal")


def test_tokenize_counts_what_a_request_then_counts(served: Standin) -> None:
    text = "Count from 1 to 50."
    plain = served.json("POST", "/tokenize", {"model": "m", "prompt": text, "return_token_strs": True})
    assert plain["token_strs"] == ["Count", " from", " 1", " to", " 50", "."]
    assert (plain["count"], plain["max_model_len"]) == (6, 4096)
    assert served.json("POST", "/detokenize", {"tokens": plain["tokens"]}) == {"prompt": text}
    messages = served.json("POST", "/tokenize", chat(text))
    answer = served.json("POST", "/v1/chat/completions", chat(text, max_tokens=1))
    assert messages["count"] == answer["usage"]["prompt_tokens"] == 28


def test_metrics_agree_with_what_was_streamed(served: Standin) -> None:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:iteration_tokens_total_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_decode_time_seconds_count",
    )
    before = {name: served.metric(name) for name in names}
    finished = served.metric("vllm:request_success_total", finished_reason="length")
    body = chat("A question of its own, with more than sixteen tokens in it.", max_tokens=10, ignore_eos=True)
    prompt = sum(served.json("POST", "/v1/chat/completions", body)["usage"]["prompt_tokens"] for _ in range(2))
    grown = {name: served.metric(name) - before[name] for name in names}
    hits = (prompt // 2 - 1) // 16 * 16
    assert grown == {
        "vllm:prompt_tokens_total": prompt,
        "vllm:generation_tokens_total": 20,
        "vllm:prefix_cache_queries_total": prompt,
        "vllm:prefix_cache_hits_total": hits,
        "vllm:iteration_tokens_total_count": 20,
        "vllm:iteration_tokens_total_sum": prompt - hits + 20,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 18,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
    }
    assert served.metric("vllm:request_success_total", finished_reason="length") - finished == 2
    assert served.metric("vllm:num_requests_running", model_name="m") == 0
    assert served.metric("vllm:kv_cache_usage_perc") == 0


def test_queueing_shows_in_the_gauges_and_the_cache_is_reset_only_when_idle(served: Standin) -> None:
    sockets = []
    for _ in range(20):
        sock = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        sock.sendall(request_bytes("POST", "/v1/chat/completions", chat("x", max_tokens=30, ignore_eos=True)))
        sockets.append(sock)
    wait_until(lambda: served.metric("vllm:num_requests_running") == 16)
    assert served.metric("vllm:num_requests_waiting") == 4
    assert served.metric("vllm:kv_cache_usage_perc") > 0
    assert served.json("POST", "/reset_prefix_cache") == {"success": False}
    assert [receive(sock)[0] for sock in sockets] == [200] * 20
    assert served.json("POST", "/reset_prefix_cache") == {"success": True}
    for sock in sockets:
        sock.close()


def test_a_client_that_leaves_frees_its_place(served: Standin) -> None:
    aborted = served.metric("vllm:request_success_total", finished_reason="abort")
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(request_bytes("POST", "/v1/chat/completions", streamed("x", max_tokens=3000, ignore_eos=True)))
        wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
    wait_until(lambda: served.metric("vllm:num_requests_running") == 0)
    assert served.metric("vllm:request_success_total", finished_reason="abort") - aborted == 1


def test_keep_alive_and_requests_split_anywhere(served: Standin) -> None:
    whole = request_bytes("POST", "/v1/chat/completions", chat("What is 2 * 3?"))
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        for cut in (1, 20, len(whole) - 3):
            sock.sendall(whole[:cut])
            time.sleep(0.01)
            sock.sendall(whole[cut:])
            status, _, parts = receive(sock)
            assert (status, b"2 * 3 is 6." in parts[0][1]) == (200, True)
        sock.sendall(b"garbage\r\n\r\n")
        assert receive(sock)[0] == 400


def test_connection_close_is_obeyed(served: Standin) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as sock:
        sock.sendall(request_bytes("GET", "/v1/models").replace(b"keep-alive", b"close"))
        answer = b""
        while data := sock.recv(65536):
            answer += data
        assert answer.startswith(b"HTTP/1.1 200 OK")


def test_the_openai_client_reads_its_answers(served: Standin) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none")
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    whole = client.chat.completions.create(model="m", messages=question)
    chunks = client.chat.completions.create(
        model="m", messages=question, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content == "The capital of Japan is Tokyo."
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_without_profiler_and_dev_mode_their_routes_are_missing(tmp_path: Path) -> None:
    with standin(tmp_path, LAW) as plain:
        for path in ("/start_profile", "/stop_profile", "/reset_prefix_cache"):
            assert plain.call("POST", path) == (404, b'{"detail":"Not Found"}')


def test_it_refuses_connections_while_loading_and_ends_on_sigterm(tmp_path: Path) -> None:
    with standin(tmp_path, LAW, "--load-s", "0.4", wait=False) as loading:
        with pytest.raises(ConnectionRefusedError):
            loading.call("GET", "/health")
        wait_until(lambda: b"Application startup complete." in loading.log.read_bytes())
        assert loading.call("GET", "/health")[0] == 200
        loading.process.send_signal(signal.SIGTERM)
        assert loading.process.wait(10) == 0
        with pytest.raises(ConnectionRefusedError):
            loading.call("GET", "/health")


def test_vllms_options_and_the_environment_change_the_law(tmp_path: Path) -> None:
    law = LAW | {"settings": [{"env": {"NCCL_PROTO": "LL"}, "args": {"enforce-eager": True}, "step_pct": [[1, 100.0]]}]}
    options = ("--max-num-seqs", "1", "--max_model_len=512", "--enforce-eager")
    with standin(tmp_path, law, *options, env={"NCCL_PROTO": "LL"}) as slow:
        assert slow.json("GET", "/v1/models")["data"][0]["max_model_len"] == 512
        slow.json("POST", "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        start_ns, end_ns, *_ = slow.json("GET", "/rehearsal")["steps"][1]
        assert end_ns - start_ns == pytest.approx(2 * (8.0 * MS + 2 * 20_000), abs=1)


@pytest.mark.parametrize(
    ("options", "law", "code", "says"),
    [
        (("--host", "0.0.0.0"), LAW, 2, "--host 0.0.0.0: the stand-in serves loopback only"),
        (("--max-num-seqs", "none"), LAW, 2, "--max-num-seqs none: give a whole number above 0"),
        ((), {"step": {}}, 2, "law.yaml: step.decode_ms: field required"),
        (("--max-model-len", "262144"), LAW, 1, "max seq len (262144)"),
        (
            ("--kv-cache-dtype", "fp8"),
            LAW | {"settings": [{"args": {"kv-cache-dtype": "fp8"}, "error": "ValueError: no FP8 cache here"}]},
            1,
            "ValueError: no FP8 cache here",
        ),
    ],
)
def test_a_launch_that_cannot_live_says_why(
    tmp_path: Path, options: tuple[str, ...], law: dict[str, Any], code: int, says: str
) -> None:
    with standin(tmp_path, law, *options, wait=False) as dead:
        assert dead.process.wait(30) == code
        assert says in dead.log.read_text()


def test_a_taken_port_is_said(tmp_path: Path, served: Standin) -> None:
    with standin(tmp_path, LAW, "--port", str(served.port), wait=False) as second:
        assert second.process.wait(30) == 1
        assert f"Address already in use: port {served.port}" in second.log.read_text()
    assert free_port() != served.port
