"""Against the real vLLM: the same text as the openai client's, reconciled counts, and each disturbance named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from perfbook.server.endpoints import Endpoints
from perfbook.stream.ask import ask
from perfbook.stream.client import Deadlines, Endpoint
from perfbook.stream.load import Cell, measure
from perfbook.stream.tokenizers import ServerTokenizer
from perfbook.stream.workload import RequestShape, exact_prompts, fixed_prompts

pytest.importorskip("vllm", reason="the real server is not installed")

MODEL = (
    Path(os.environ.get("PERFBOOK_CACHE", Path(__file__).parents[1] / ".cache" / "models")) / "smollm2-135m-instruct"
)
pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]
PATIENT = Deadlines(first_byte_s=120, stall_s=60, total_s=300)


class Server:
    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.endpoint = Endpoint(f"http://127.0.0.1:{port}", "smol")
        self.metrics = Endpoints(f"http://127.0.0.1:{port}").metrics
        tmp = folder / "t"
        tmp.mkdir()
        self.log = folder / "server.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name",
             "smol", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048"],
            stdout=self.log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"TMPDIR": str(tmp), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
                              "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
        )  # fmt: skip

    def wait(self) -> None:
        until = time.monotonic() + 400
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if requests.get(self.endpoint.root + "/models", timeout=5).ok:
                    return
            except requests.RequestException:
                time.sleep(0.5)
        pytest.fail(f"the server did not start: {self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def cell(self, concurrency: int, count: int, tokens: int = 16, **more) -> Cell:
        tokenizer = ServerTokenizer.find(self.endpoint)
        assert tokenizer is not None
        prompts = more.pop("prompts", None) or exact_prompts(tokenizer, 48, count + 1, seed=time.monotonic_ns())
        shape = more.pop("shape", RequestShape(tokens, min_tokens=tokens, ignore_eos=True))
        return measure(
            self.endpoint, prompts, shape, concurrency=concurrency, requests=count, metrics=self.metrics,
            deadlines=PATIENT, **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (MODEL / "config.json").exists():
        pytest.skip("the embedded model has not been converted")
    server = Server(tmp_path_factory.mktemp("s"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def reasons(cell: Cell) -> str:
    return " | ".join(cell.summary["validity"]["reasons"])


def test_the_text_is_the_one_that_the_openai_client_sees(server: Server):
    openai = pytest.importorskip("openai")
    messages = [{"role": "user", "content": "Name three fruits, and write 你好 and an emoji."}]
    client = openai.OpenAI(base_url=server.endpoint.root, api_key="none")
    stream = client.chat.completions.create(
        model="smol", messages=messages, max_tokens=60, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, finish, counted = "", None, None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        counted = chunk.usage.completion_tokens if chunk.usage else counted
    for streamed in (True, False):
        answer = ask(server.endpoint, messages, RequestShape(60), stream=streamed)
        assert (answer.text, answer.finish_reason, answer.token_count) == (text, finish, counted)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_a_cell_reconciles_with_the_servers_counters(server: Server, concurrency: int):
    cell = server.cell(concurrency, max(4, 2 * concurrency))
    summary = cell.summary
    rows = {row["quantity"]: row for row in cell.reconciliation}
    assert summary["failed"] == 0
    assert (summary["clock"], summary["token_source"]) == ("kernel", "continuous_usage")
    assert rows["output tokens"]["difference"] == 0
    assert rows["prompt tokens"]["difference"] == 0
    assert rows["requests finished"]["difference"] == 0
    assert rows["TTFT mean"]["difference"] > 0, "the client cannot see a token before the server made it"
    assert rows["TTFT mean"]["difference"] < 0.5 * rows["TTFT mean"]["client"] + 50
    assert set(cell.requests["prompt_tokens_asked"].to_pylist()) == {48}
    template = {p - 48 for p in cell.requests["prompt_tokens"].to_pylist()}
    assert len(template) == 1, "the chat template adds the same to every prompt"
    assert "prompts repeat" not in reasons(cell)
    assert "shorter" not in reasons(cell)
    assert "somebody else" not in reasons(cell)


def test_repeated_prompts_are_named(server: Server):
    cell = server.cell(2, 6, prompts=fixed_prompts("word " * 300, 1))
    assert cell.summary["validity"]["verdict"] == "suspect"
    assert "prompts repeat" in reasons(cell)


def test_answers_that_fall_short_are_named(server: Server):
    shape = RequestShape(64, extra_body={"stop": [" ", "a", "e"]})
    cell = server.cell(2, 4, shape=shape)
    assert cell.summary["validity"]["verdict"] == "suspect"
    assert "4 of 4 answers are shorter than asked for" in reasons(cell)


def test_a_stranger_on_the_server_is_named(server: Server):
    over = threading.Event()

    def stranger() -> None:
        while not over.is_set():
            ask(server.endpoint, "Tell me a story.", RequestShape(12))

    other = threading.Thread(target=stranger)
    other.start()
    try:
        cell = server.cell(2, 8)
    finally:
        over.set()
        other.join()
    assert cell.summary["validity"]["verdict"] == "suspect"
    assert "somebody else" in reasons(cell) or "not from this cell" in reasons(cell)


def test_a_server_that_dies_half_way_makes_the_cell_invalid(server: Server):
    def kill() -> None:
        time.sleep(1.5)
        server.stop()

    killer = threading.Thread(target=kill)
    killer.start()
    cell = server.cell(2, 40, tokens=200, warmup=0, prompts=exact_prompts(None, 48, 40, seed=5))
    killer.join()
    assert cell.summary["validity"]["verdict"] == "invalid"
    assert set(cell.summary["errors"]) <= {"reset", "incomplete", "refused"}
    assert cell.summary["errors"]
