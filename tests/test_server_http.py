"""Metrics and endpoints: vLLM's real /metrics text, a real HTTP server that answers like one that misbehaves."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook import http
from perfbook.errors import ServerFailed
from perfbook.server.endpoints import Endpoints
from perfbook.server.liveness import Watch
from perfbook.server.metrics import delta, parse_metrics
from perfbook.stream.ask import ask
from perfbook.stream.client import Endpoint
from perfbook.stream.tokenizers import ServerTokenizer
from perfbook.stream.workload import RequestShape

RECORDED = (Path(__file__).parent / "data" / "vllm_0.32_metrics.txt").read_text(encoding="utf-8")
KEY = "sesame-open-8731"


def test_recorded_metrics():
    values = parse_metrics(RECORDED)
    assert values["generation_tokens_total"] == 512
    assert values["prompt_tokens_total"] == 36
    assert (values["iteration_tokens_total_count"], values["iteration_tokens_total_sum"]) == (129, 548)
    assert values["request_success_total"] == 4  # summed over finish reasons
    assert values["inter_token_latency_seconds_count"] == 508
    assert values["time_to_first_token_seconds_sum"] == 0.8834984302520752
    assert (values["num_requests_running"], values["kv_cache_usage_perc"]) == (0, 0)
    assert values["process_start_time_seconds"] == 1.79607973794e9
    assert not any("bucket" in name or "created" in name or name.startswith(("python_", "http_")) for name in values)


def test_old_names_engines_and_fractions():
    text = """
vllm:gpu_cache_usage_perc{engine="0"} 0.25
vllm:gpu_cache_usage_perc{engine="1"} 0.75
vllm:time_per_output_token_seconds_sum{engine="0"} 2.0
vllm:time_per_output_token_seconds_sum{engine="1"} 3.0
vllm:gpu_prefix_cache_hits_total{engine="0"} 7
vllm:request_time_per_output_token_seconds_sum 9.0
"""
    assert parse_metrics(text) == {
        "kv_cache_usage_perc": 0.75,
        "inter_token_latency_seconds_sum": 5.0,
        "prefix_cache_hits_total": 7.0,
        "request_time_per_output_token_seconds_sum": 9.0,
    }


def test_new_name_wins_where_both_are_there():
    text = "vllm:gpu_cache_usage_perc 0.9\nvllm:kv_cache_usage_perc 0.5\n"
    assert parse_metrics(text) == {"kv_cache_usage_perc": 0.5}


def test_delta():
    before = {
        "generation_tokens_total": 10.0,
        "x_seconds_sum": 1.0,
        "x_seconds_count": 2.0,
        "num_requests_running": 3.0,
    }
    after = {"generation_tokens_total": 25.0, "x_seconds_sum": 4.0, "x_seconds_count": 4.0, "num_requests_running": 0.0}
    grown = delta(before, after)
    assert grown.values == {"generation_tokens_total": 15.0, "x_seconds_sum": 3.0, "x_seconds_count": 2.0}
    assert (grown.mean("x_seconds"), grown.mean("y_seconds")) == (1.5, None)
    assert (grown.resets, grown.restarted) == ((), False)


def test_delta_notices_resets_and_restarts():
    reset = delta({"a_total": 10.0, "b_total": 1.0}, {"a_total": 3.0, "b_total": 1.0})
    assert (reset.values, reset.resets) == ({"b_total": 0.0}, ("a_total",))
    gone = delta({"a_total": 10.0}, {})
    assert (gone.values, gone.resets) == ({}, ("a_total",))
    other = delta(
        {"a_total": 1.0, "process_start_time_seconds": 5.0}, {"a_total": 9.0, "process_start_time_seconds": 6.0}
    )
    assert (other.values, other.resets, other.restarted) == ({}, ("a_total",), True)


counters = st.dictionaries(st.sampled_from(["a_total", "b_sum", "c_count", "gauge"]), st.floats(0, 1e12))


@given(counters, counters)
def test_delta_is_never_negative_and_accounts_for_every_counter(before: dict[str, float], after: dict[str, float]):
    grown = delta(before, after)
    assert all(value >= 0 for value in grown.values.values())
    names = {name for name in before.keys() | after.keys() if name != "gauge"}
    assert set(grown.values) | set(grown.resets) == names
    assert not set(grown.values) & set(grown.resets)


class Misbehaving(ThreadingHTTPServer):
    """Answers what ``answers`` says: path → (status, headers, body); remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[tuple[str, str, str | None, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: object, status: int = 200, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers[path] = (status, headers, raw)


class Handler(BaseHTTPRequestHandler):
    server: Misbehaving

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization"), body))
        status, headers, answer = self.server.answers.get(self.path, (404, {}, b"no such route"))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Misbehaving]:
    running = Misbehaving()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_endpoints_read_what_a_server_says(server: Misbehaving):
    server.answer("/health", b"")
    server.answer("/version", {"version": "0.32.0"})
    server.answer("/v1/models", {"data": [{"id": "m", "max_model_len": 2048}, {"id": "lora"}]})
    server.answer("/tokenize", {"count": 2, "tokens": [9825, 429]})
    server.answer("/openapi.json", {"paths": {"/start_profile": {}}})
    server.answer("/metrics", b"vllm:num_requests_running 1\n")
    endpoints = Endpoints(server.url + "/v1/")
    assert (endpoints.base_url, endpoints.health(), endpoints.version()) == (server.url, True, "0.32.0")
    assert (endpoints.models(), endpoints.context_tokens("m"), endpoints.context_tokens("lora")) == (
        ["m", "lora"],
        2048,
        None,
    )
    assert endpoints.tokenize("m", "Count from") == [9825, 429]
    assert endpoints.can_profile()
    assert endpoints.metrics() == {"num_requests_running": 1.0}


def test_what_a_server_lacks(server: Misbehaving):
    endpoints = Endpoints(server.url)
    assert (endpoints.health(), endpoints.version(), endpoints.can_profile()) == (False, None, False)
    assert (endpoints.tokenize("m", "x"), endpoints.reset_prefix_cache()) == (None, None)
    with pytest.raises(ServerFailed, match="no profiler; it is armed when the server starts"):
        endpoints.start_profile()
    with pytest.raises(ServerFailed, match=r"/metrics: 404 no such route"):
        endpoints.metrics()


def test_profile_is_noted_while_it_runs(server: Misbehaving, tmp_path: Path):
    note = tmp_path / ".profiling"
    endpoints = Endpoints(server.url, profiling_note=note)
    server.answer("/start_profile", b"")
    server.answer("/stop_profile", b"")
    endpoints.start_profile(iterations=5, prefix="c1")
    assert json.loads(server.asked[-1][3]) == {"max_iterations": 5, "profile_prefix": "c1"}
    assert note.exists()
    endpoints.stop_profile()
    assert not note.exists()
    server.answer("/start_profile", b"busy", status=409)
    with pytest.raises(ServerFailed, match="a profile is already being taken"):
        endpoints.start_profile()
    assert not note.exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"{}", "no list of models"),
        (b'{"data": 3}', "no list"),
    ],
)
def test_other_servers_are_told_apart(server: Misbehaving, body: bytes, said: str):
    server.answer("/v1/models", body)
    with pytest.raises(ServerFailed, match=said):
        Endpoints(server.url).models()


def test_key_is_sent_and_stays_out_of_messages_and_reprs(server: Misbehaving):
    endpoints = Endpoints(server.url, KEY)
    assert KEY not in repr(endpoints)
    server.answer("/v1/models", {"error": "denied"}, status=401)
    with pytest.raises(ServerFailed, match="401, the key is missing or wrong") as refused:
        endpoints.models()
    assert KEY not in str(refused.value)
    assert server.asked[-1][2] == f"Bearer {KEY}"
    with pytest.raises(ServerFailed) as bad:
        Endpoints(server.url, "line\nbreak").models()
    assert "break" not in str(bad.value)


def test_redirect_is_not_followed_so_that_the_key_goes_nowhere_else(server: Misbehaving):
    server.answer("/v1/models", b"", status=302, Location=f"{server.url}/elsewhere")
    with pytest.raises(ServerFailed, match="302"):
        Endpoints(server.url, KEY).models()
    assert [path for _, path, _, _ in server.asked] == ["/v1/models"]


def test_an_endless_answer_ends(server: Misbehaving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "MOST_BYTES", 2**20)
    server.answer("/v1/models", b" " * (2**20 + 1))
    with pytest.raises(ServerFailed) as error:
        Endpoints(server.url).models()
    assert str(error.value) == f"{server.url}/v1/models: the answer is longer than 1 MiB; is this a vLLM server?"
    server.answer("/tokenize", b" " * (2**20 + 1))
    assert ServerTokenizer.find(Endpoint(server.url, "m")) is None
    said = ask(Endpoint(server.url, "m"), "hello", RequestShape(1), stream=False)
    assert said.error == "http_404"
    server.answer("/v1/chat/completions", b" " * (2**20 + 1))
    said = ask(Endpoint(server.url, "m"), "hello", RequestShape(1), stream=False)
    assert (said.error, said.detail) == ("connection", "the answer is longer than 1 MiB")


def test_an_answer_nested_beyond_reason_is_no_json(server: Misbehaving):
    server.answer("/v1/models", b"[" * 100_000)
    with pytest.raises(ServerFailed) as error:
        Endpoints(server.url).models()
    assert str(error.value) == f"{server.url}/v1/models: the answer is not a JSON object"


def test_neither_tokens_nor_answers_are_taken_from_a_redirect(server: Misbehaving):
    for path in ("/tokenize", "/v1/chat/completions"):
        server.answer(path, b"", 307, Location=f"{server.url}/elsewhere")
    server.answer("/elsewhere", {"count": 2, "choices": [{"message": {"content": "no"}}]})
    assert ServerTokenizer.find(Endpoint(server.url, "m", KEY)) is None
    assert ask(Endpoint(server.url, "m", KEY), "hello", RequestShape(1), stream=False).error == "http_307"
    assert [path for _, path, _, _ in server.asked] == ["/tokenize", "/v1/chat/completions"]


def test_proxies_of_the_environment_are_not_used(server: Misbehaving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.answer("/health", b"")
    assert Endpoints(server.url).health()


def test_broken_metrics(server: Misbehaving):
    server.answer("/metrics", b"vllm:x{ nonsense\n")
    with pytest.raises(ServerFailed, match="not in the exposition format"):
        Endpoints(server.url).metrics()


# --- liveness: what counts is engine steps ----------------------------------------------------------------------------


def gauge(server: Misbehaving, steps: int, running: int, waiting: int = 0) -> None:
    server.answer(
        "/metrics",
        f"vllm:iteration_tokens_total_count {steps}\nvllm:num_requests_running {running}\n"
        f"vllm:num_requests_waiting {waiting}\n".encode(),
    )


def test_progress_idle_waiting_hung(server: Misbehaving):
    watch = Watch(Endpoints(server.url), patience_s=0.0)
    patient = Watch(Endpoints(server.url), patience_s=1000.0)
    gauge(server, 10, 0)
    assert watch.look().state == "idle"
    gauge(server, 14, 2)
    assert (status := watch.look()).state == "progressing"
    assert status.steps == 4
    assert watch.look().state == "hung"
    assert "requests are out and no engine step for 0 s" in watch.look().reason
    patient.look()
    assert patient.look().state == "waiting"
    gauge(server, 15, 2)
    assert watch.look().state == "progressing"


def test_requests_that_only_the_caller_knows_of(server: Misbehaving):
    """A hung engine does not refresh its gauges: they may still say that nothing runs."""
    watch = Watch(Endpoints(server.url), patience_s=0.0)
    gauge(server, 10, 0)
    watch.look()
    assert watch.look(in_flight=0).state == "idle"
    assert watch.look(in_flight=3).state == "hung"


def test_queued_requests_with_nothing_running_are_not_idle(server: Misbehaving):
    watch = Watch(Endpoints(server.url), patience_s=0.0)
    gauge(server, 10, 0, waiting=4)
    watch.look()
    assert watch.look().state == "hung"


def test_a_filling_cache_is_progress(server: Misbehaving):
    """A long prefill in chunks gives no token and counts no step (vLLM 0.32), but its cache fills."""
    watch = Watch(Endpoints(server.url), patience_s=0.0)
    for usage in (0.1, 0.2, 0.3):
        server.answer("/metrics", f"vllm:iteration_tokens_total_count 7\nvllm:kv_cache_usage_perc {usage}\n".encode())
        last = watch.look(in_flight=1).state
    assert last == "progressing"
    assert watch.look(in_flight=1).state == "hung"


def test_several_missed_polls_before_dead(server: Misbehaving):
    there, gone = Endpoints(server.url), Endpoints("http://127.0.0.1:1")
    watch = Watch(there)
    gauge(server, 1, 1)
    watch.look()
    watch.endpoints = gone
    assert [watch.look().state for _ in range(3)] == ["waiting", "waiting", "dead"]
    assert watch.status is not None
    assert str(watch.status).startswith(
        "the server is dead: no answer to 3 polls in a row: http://127.0.0.1:1/metrics: c"
    )
    watch.endpoints = there
    gauge(server, 2, 1)
    assert watch.look().state == "progressing"


def test_a_server_without_counters_is_not_taken_for_dead(server: Misbehaving):
    """Other OpenAI-compatible servers have no /metrics: their silence is judged by the deadlines of the requests."""
    watch = Watch(Endpoints(server.url), patience_s=0.0)
    assert [watch.look(in_flight=1).state for _ in range(4)] == ["unknown"] * 4
    server.answer("/metrics", b"python_gc_objects 3\n")
    assert [watch.look(in_flight=1).state for _ in range(4)] == ["unknown"] * 4
    assert watch.autopsy() is None


def test_nobody_looks_while_a_stream_gets_bytes_and_silence_is_looked_at(server: Misbehaving):
    gauge(server, 10, 0)
    watch = Watch(Endpoints(server.url), patience_s=0.1, quiet_s=5.0, every_s=0.05)
    for _ in range(10):
        assert watch(4.9) is None
    assert server.asked == []
    deadline = time.monotonic() + 20
    while (reason := watch(5.0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert reason.startswith("the server is hung: requests are out and no engine step for ")
    assert 2 <= len(server.asked) < 20


def test_the_receiving_loop_never_waits_for_a_look():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        watch = Watch(Endpoints(f"http://127.0.0.1:{mute.getsockname()[1]}"), quiet_s=0.0)
        begun = time.monotonic()
        assert watch(1.0) is None
        assert time.monotonic() - begun < 1.0  # the look itself takes ten seconds here


def test_autopsy_of_a_server_that_is_gone_and_of_one_that_is_not(server: Misbehaving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("perfbook.server.liveness.time.sleep", lambda seconds: None)
    gauge(server, 10, 1)
    assert Watch(Endpoints(server.url)).autopsy() is None
    assert str(Watch(Endpoints("http://127.0.0.1:1")).autopsy()).startswith("the server is dead: no answer to 3 polls")
