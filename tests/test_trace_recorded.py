"""Traces that were recorded from the embedded model, against numbers counted with nothing but ``json``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from perfbook.trace import analyse, render_text

FOLDER = Path(__file__).parent / "data" / "traces"


def test_one_rank_decodes_without_a_collective() -> None:
    report = analyse([FOLDER / "tp1"])
    (rank,) = report.ranks
    assert (rank.rank, rank.world_size, rank.device, rank.events, rank.gpu_events) == (0, 1, "cpu", 18_299, 0)
    decode, prefill = report.phases["decode"], report.phases["prefill"]
    assert (decode.steps, decode.requests, decode.tokens) == (3, 1, 1)
    assert (prefill.steps, prefill.tokens) == (1, 6)
    assert decode.collectives == () == report.phases["all"].collectives
    product = next(p for p in decode.kernels if p.name == "_C::onednn_mm")
    assert product.calls_per_step == 121
    inside_ms = 8.420495  # aten::item, once in each product
    assert product.ms_per_step == pytest.approx((15.296110 + 6.772499 + 7.188003 - inside_ms) / 3)
    attention = next(p for p in decode.kernels if p.name == "_C::cpu_attention_with_kv_cache")
    assert attention.calls_per_step == 30
    assert "_C::onednn_mm" in render_text(report)


def test_self_times_add_up_to_what_is_covered() -> None:
    (path,) = (FOLDER / "tp1").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    reach, covered = 0.0, 0.0
    for event in sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        covered += max(0.0, end - max(event["ts"], reach))
        reach = max(reach, end)
    whole = analyse([path]).phases["all"]
    assert whole.device_ms * whole.steps == pytest.approx(covered / 1e3, rel=1e-5)
    assert whole.busy_ms * whole.steps == pytest.approx(covered / 1e3, rel=1e-5)


def test_three_ranks_reduce_61_times_a_step_and_wait_for_each_other() -> None:
    report = analyse([FOLDER / "tp3"])
    assert [(r.rank, r.world_size, r.events) for r in report.ranks] == [(i, 3, 13_959) for i in range(3)]
    for path in sorted((FOLDER / "tp3").iterdir()):
        alone = analyse([path]).phases["decode"]
        assert next(p.calls_per_step for p in alone.categories if p.category == "all_reduce") == 61
        assert all(c.transfer_us is None and c.skew_us == {} for c in alone.collectives)
    decode = report.phases["decode"]
    assert decode.steps == 2
    reduce, gather = decode.collectives
    assert (reduce.category, reduce.message_bytes, reduce.calls_per_step) == ("all_reduce", 576 * 2, 61)
    assert (gather.category, gather.message_bytes, gather.calls_per_step) == ("all_gather", 49152 * 2, 1)
    assert reduce.duration_us == pytest.approx(3232.8587, rel=1e-6)
    assert reduce.transfer_us == pytest.approx(3.64673770)
    assert reduce.skew_us == pytest.approx({0: 3156.09486885, 1: 3369.93998361, 2: 3161.60097541})
    assert reduce.slowest_rank == 0
    assert report.phases["prefill"].collectives[0].message_bytes == 6 * 576 * 2
    total_ms = (231.837053 + 153.651423 + 236.645360 + 174.932220 + 224.636137 + 161.524084) / 2 / 3
    assert next(p.ms_per_step for p in decode.categories if p.category == "all_reduce") == pytest.approx(total_ms)
    assert not any("cannot be split" in w for w in report.warnings)
