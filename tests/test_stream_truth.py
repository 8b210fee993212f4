"""Against the ground-truth server: no arrival before its token was sent, every bound holds, on every path."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import requests

from perfbook.rehearsal.replay_text import Script, sent_ns, stamped
from perfbook.stream import calibrate, response
from perfbook.stream.client import Endpoint
from perfbook.stream.load import measure
from perfbook.stream.workload import RequestShape, exact_prompts, fixed_prompts


def test_a_script_is_a_response_whose_tokens_say_when_they_were_sent():
    for chat in (True, False):
        script = Script(chat, 3, 7, usage=True, continuous=True)
        raw = script.head
        for index in range(3):
            before, after = script.around(index)
            raw += before + stamped(10**15 + index) + after
        raw += script.tail
        parsed = response.parse(raw, [len(raw)])
        assert parsed.error is None
        assert sent_ns("".join(parsed.answer)) == [10**15, 10**15 + 1, 10**15 + 2]
        assert (parsed.completion_tokens, parsed.prompt_tokens, parsed.finish_reason) == (3, 7, "length")


@pytest.mark.parametrize("relay", [False, True])
def test_arrivals_are_bounded_by_the_truth(relay: bool):
    floor = calibrate.null_run(8, tick_ms=4, tokens=30, waves=2, relay=relay)
    assert floor.tokens == 8 * 2 * 30
    assert floor.outside_interval == 0
    assert floor.clock == "kernel"
    assert floor.relayed is relay
    assert floor.arrival_error_ms["mean"] > -calibrate.SEND_SLACK_MS
    assert json.loads(json.dumps(floor.as_dict(), allow_nan=False))["concurrency"] == 8


def test_an_effect_within_the_noise_is_refused():
    errors = {"mean": 0.1, "p99": 0.5, "max": 1.0}
    floor = calibrate.NoiseFloor(8, 10.0, 800.0, 100, errors, errors, errors, 0.0, 0, 0.1, "kernel", False)
    assert floor.refuses(0.6, "ttft") is None
    assert "within the client's own noise of 0.500 ms" in str(floor.refuses(-0.4, "gap"))


def test_two_processes_share_a_cell():
    with calibrate.replay(4, 4) as (port, _):
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "replay")
        cell = measure(endpoint, fixed_prompts("a b", 1), RequestShape(10), concurrency=5, requests=11, processes=2)
        truth = requests.get(f"http://127.0.0.1:{port}/replay/truth", timeout=5).json()
    assert truth["requests"] == 12, "eleven and the warm-up"
    assert cell.requests["request"].to_pylist() == list(range(11))
    assert cell.summary["ok"] == 11
    assert cell.summary["output_tokens"] == 110
    events = cell.events
    assert events["index"].to_pylist() == list(range(10)) * 11
    sent = np.array([sent_ns(t)[0] for t in events["text"].to_pylist()])
    assert (events["arrival_ns"].to_numpy() >= sent - 5000).all(), "one clock"
    starts = cell.requests["start_ns"].to_numpy()[:5]
    assert starts.max() - starts.min() < 200_000_000, "one start"


def test_user_space_times_are_later_but_not_wrong():
    floor = calibrate.null_run(2, tick_ms=4, tokens=10, kernel_times=False)
    assert floor.clock == "user"
    assert floor.outside_interval == 0
    assert floor.arrival_error_ms["mean"] > 0


def test_open_loop_over_processes_keeps_the_schedule():
    with calibrate.replay(2, 2) as (port, _):
        endpoint = Endpoint(f"http://127.0.0.1:{port}", "replay")
        cell = measure(
            endpoint,
            fixed_prompts("a", 1),
            RequestShape(3),
            concurrency=4,
            requests=8,
            rate_per_s=400.0,
            seed=3,
            processes=2,
        )
    due = np.array(cell.requests["scheduled_ns"].to_pylist())
    assert cell.summary["ok"] == 8
    assert (cell.requests["start_ns"].to_numpy() >= due).all()
    assert abs(due[7] - due[0]) < 1_000_000_000


def test_a_client_beside_busy_loops_on_its_own_core_is_suspect():
    """Each loop takes its turns of the only core that the client may use; a few threads' time, ended by id."""
    cpu = min(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    allowed = os.sched_getaffinity(0)
    try:
        for loop in loops:
            os.sched_setaffinity(loop.pid, {cpu})
        os.sched_setaffinity(0, {cpu})
        with calibrate.replay(10, 5) as (port, _):
            endpoint = Endpoint(f"http://127.0.0.1:{port}", "replay")
            prompts = exact_prompts(None, 16, 32, seed=1)
            cell = measure(endpoint, prompts, RequestShape(100), concurrency=32, requests=32, warmup=0)
    finally:
        os.sched_setaffinity(0, allowed)
        for loop in loops:
            loop.kill()
            loop.wait()
    assert cell.summary["ok"] == 32
    assert cell.summary["validity"]["verdict"] == "suspect"
    reasons = " ".join(cell.summary["validity"]["reasons"])
    assert "starved" in reasons or "other processes on this machine kept" in reasons, reasons
