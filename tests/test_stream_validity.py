"""Verdicts, reconciliation and the export, from literal evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from perfbook.stream import export, hostload, validity
from perfbook.stream.cell import Cell, Costs, summarise, with_reasons
from perfbook.stream.client import Endpoint
from perfbook.stream.reconcile import reconcile, settled
from perfbook.stream.tables import EVENTS, REQUESTS

GOOD = validity.Evidence(
    requests=8, ok=8, lag_p99_ms=0.5, busy_share=0.1, waiting_share=0.1, tokens=800, server_tokens=800.0,
    server_requests=8.0, prompt_tokens=400, template_tokens=80, prefix_hits=64.0, preemptions=0.0, foreign_cores=0.1,
    cores=2,
)  # fmt: skip


def test_a_clean_cell_is_valid():
    assert validity.judge(GOOD) == validity.Validity("valid")


@pytest.mark.parametrize(
    ("change", "verdict", "word"),
    [
        ({"ok": 7, "errors": {"reset": 1}}, "invalid", "reset 1"),
        ({"requests": 100, "ok": 99, "errors": {"stall": 1}, "server_requests": 99.0}, "suspect", "stall 1"),
        ({"ok": 0, "errors": {"refused": 8}}, "invalid", "refused 8"),
        ({"server_restarted": True}, "invalid", "restarted"),
        ({"clock_step_ms": 12.0}, "suspect", "clock was set"),
        ({"merged_share": 0.2}, "suspect", "20% of the token events"),
        ({"lag_p99_ms": 80.0}, "suspect", "80.0 ms late"),
        ({"waiting_share": 0.9, "clock": "user"}, "suspect", "starved: it waited 90%"),
        ({"other_threads": 0.9}, "suspect", "other threads"),
        ({"busy_share": 0.95}, "suspect", "more processes"),
        ({"foreign_cores": 0.9}, "suspect", "0.9 cores"),
        ({"throttled": 3}, "suspect", "throttled 3"),
        ({"server_tokens": 1000.0}, "suspect", "somebody else used the server"),
        ({"server_tokens": 700.0}, "suspect", "counts fewer"),
        ({"server_requests": 9.0}, "suspect", "not from this cell"),
        ({"others_waiting": 2.0}, "suspect", "before or after"),
        ({"preemptions": 1.0}, "suspect", "preempted"),
        ({"prefix_hits": 300.0}, "suspect", "prompts repeat"),
        ({"outputs_short": 4}, "suspect", "shorter than asked"),
        ({"prompts_short": 8}, "suspect", "counted shorter"),
    ],
)
def test_each_disturbance_is_named(change: dict, verdict: str, word: str):
    found = validity.judge(replace(GOOD, **change))
    assert found.verdict == verdict
    assert any(word in reason for reason in found.reasons), found.reasons
    assert len(found.reasons) == 1


def test_a_client_that_only_shares_its_cores_is_not_suspect():
    assert validity.judge(replace(GOOD, waiting_share=0.9, lag_p99_ms=9.0)).verdict == "valid"
    assert validity.judge(replace(GOOD, lag_p99_ms=80.0, gap_p50_ms=400.0)).verdict == "valid"
    starved = validity.judge(replace(GOOD, waiting_share=0.9, foreign_cores=1.0))
    assert starved.reasons == (
        "the client was starved: it waited 90% of the time in which it wanted a CPU",
        "other processes on this machine kept 1.0 cores busy",
    )


def test_a_cell_in_which_nothing_arrived_says_nothing_of_its_client():
    nothing = replace(GOOD, ok=0, errors={"refused": 8}, tokens=0, server_tokens=0.0, server_requests=0.0)
    starved = replace(nothing, waiting_share=0.9, foreign_cores=1.0, lag_p99_ms=80.0, busy_share=0.95)
    assert validity.judge(starved) == validity.Validity("invalid", ("8 of 8 requests failed (refused 8)",))


def table(schema: pa.Schema, rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in rows], schema)


MS = 1_000_000
ROWS = [
    {"cell": "c", "request": 0, "ok": True, "status": 200, "start_ns": 0, "end_ns": 40 * MS, "ttft_ms": 10.0,
     "ttfa_ms": 10.0, "tpot_ms": 15.0, "e2e_ms": 40.0, "output_tokens": 3, "output_tokens_asked": 3,
     "prompt_tokens": 12, "prompt_tokens_asked": 10, "token_source": "usage", "text": "abc", "clock": "kernel"},
    {"cell": "c", "request": 1, "ok": False, "error": "stall", "detail": "no byte", "status": 200, "start_ns": 0,
     "end_ns": 90 * MS, "ttft_ms": 12.0, "output_tokens": 1, "text": "a", "token_source": "events", "clock": "kernel"},
    {"cell": "c", "request": 2, "ok": True, "status": 200, "start_ns": 40 * MS, "end_ns": 100 * MS, "ttft_ms": 20.0,
     "ttfa_ms": 20.0, "e2e_ms": 60.0, "output_tokens": 1, "output_tokens_asked": 3, "prompt_tokens": 12,
     "token_source": "usage", "text": "z", "clock": "kernel"},
]  # fmt: skip
TOKENS = [(0, 0, 10, 1), (0, 1, 25, 1), (0, 2, 40, 1), (1, 0, 12, 1), (2, 0, 60, 1)]
COSTS = Costs(9 * MS, 4 * MS, 0, 100 * MS, 1 * MS, np.array([0.1, 0.2]), 0.0, 4000, 0, 0)


def example() -> Cell:
    requests = table(REQUESTS, ROWS)
    events = table(
        EVENTS,
        [
            {"cell": "c", "request": r, "index": i, "arrival_ns": at * MS, "earliest_ns": at * MS, "tokens": n,
             "text": "x", "merged": False}
            for r, i, at, n in TOKENS
        ],
    )  # fmt: skip
    return Cell("c", summarise(requests, events, 2, COSTS), requests, events, REQUESTS.empty_table())


def test_a_summary_counts_successes_only_and_clips_to_the_plateau():
    summary = example().summary
    assert (summary["requests"], summary["ok"], summary["failed"], summary["errors"]) == (3, 2, 1, {"stall": 1})
    assert (summary["output_tokens"], summary["prompt_tokens"]) == (4, 24)
    assert summary["duration_s"] == 0.1
    assert summary["output_tok_s"] == pytest.approx(40.0)
    assert summary["plateau_s"] == pytest.approx(0.09), "until the second stream has nothing left to send"
    assert summary["output_tok_s_plateau"] == pytest.approx(4 / 0.09)
    assert summary["request_s"] == pytest.approx(20.0)
    assert summary["gap_ms"]["mean"] == 15.0
    assert summary["ttft_ms"]["mean"] == 15.0
    assert summary["window"] == "burst"
    assert summary["client_cpu_us_per_token"] == pytest.approx(9000 / 5)
    assert (summary["token_source"], summary["clock"]) == ("usage", "kernel")


def test_reconciliation_rows():
    before = {"generation_tokens_total": 100.0, "time_to_first_token_seconds_sum": 1.0,
              "time_to_first_token_seconds_count": 10.0, "num_preemptions_total": 0.0}  # fmt: skip
    after = {"generation_tokens_total": 105.0, "time_to_first_token_seconds_sum": 1.024,
             "time_to_first_token_seconds_count": 12.0, "num_preemptions_total": 1.0}  # fmt: skip
    rows = {row["quantity"]: row for row in reconcile(example().requests, before, after)}
    assert rows["output tokens"]["difference"] == 0.0
    assert rows["TTFT mean"]["client"] == 15.0
    assert rows["TTFT mean"]["server"] == pytest.approx(12.0)
    assert rows["TTFT mean"]["difference"] == pytest.approx(3.0)
    assert rows["preemptions"]["server"] == 1.0
    assert "prompt tokens" not in rows, "the server did not say"
    assert reconcile(example().requests, None, after) == []


def test_counters_are_read_until_they_hold_the_cell():
    readings = iter([{"generation_tokens_total": n} for n in (100.0, 104.0, 104.0, 105.0, 105.0)])
    assert settled(lambda: next(readings), {"generation_tokens_total": 100.0}, 5) == {"generation_tokens_total": 105.0}
    assert settled(None) is None
    assert settled(lambda: None) is None
    assert settled(lambda: {"other": 1.0}) == {"other": 1.0}

    def dead() -> dict[str, float]:
        raise ConnectionRefusedError

    assert settled(dead) is None


def test_reasons_from_elsewhere_keep_the_worse_verdict():
    cell = with_reasons(example(), "suspect", ["the GPU was throttled"])
    assert cell.summary["validity"] == {"verdict": "suspect", "reasons": ["the GPU was throttled"]}
    worse = with_reasons(with_reasons(cell, "invalid", ["x"]), "valid", [])
    assert worse.summary["validity"] == {"verdict": "invalid", "reasons": ["the GPU was throttled", "x"]}


def test_the_export_reads_like_a_result_of_vllm_bench():
    result = export.vllm_bench_result(example(), Endpoint("http://h:1", "m"))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 1, 4)
    assert result["ttfts"] == pytest.approx([0.010, 0.012, 0.020])
    assert result["itls"] == [[pytest.approx(0.015)] * 2, [], []]
    assert result["output_lens"] == [3, 0, 1]
    assert result["errors"] == ["", "stall: no byte", ""]
    assert result["mean_ttft_ms"] == 15.0
    assert result["median_tpot_ms"] == 15.0
    assert result["max_concurrent_requests"] == 1
    assert (result["backend"], result["request_rate"]) == ("openai-chat", "inf")


def test_a_busy_stranger_is_seen_and_our_own_work_is_not():
    import subprocess
    import sys
    import time

    def burn(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    port = 9
    with hostload.Watch("203.0.113.1", port) as own:
        burn(0.6)
    spin = "import time\nend=time.monotonic()+0.7\nwhile time.monotonic()<end: pass"
    stranger = subprocess.Popen([sys.executable, "-c", spin])
    with hostload.Watch("203.0.113.1", port) as foreign:
        time.sleep(0.5)
        time.sleep(0.1)
    stranger.wait()
    assert own.seen.foreign_cores is not None
    assert foreign.seen.foreign_cores is not None
    assert foreign.seen.foreign_cores > 0.2
    with hostload.Watch("127.0.0.1", 1) as nobody:
        pass
    assert nobody.seen.foreign_cores is None, "the server would run here and is not visible"
