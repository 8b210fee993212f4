"""Provenance holds what a reader needs and no secret; telemetry tells own load from that of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook.masking import MASKED, is_secret, mask
from perfbook.params import make_variant
from perfbook.record.provenance import collect
from perfbook.server.telemetry import THROTTLING, Sampler, energy_per_token_j
from perfbook.study.sweep.view import energy_in_words


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "token", "X-Api-Key", "Authorization",
     "apikey", "DB_PASSWD", "hfToken", "password", "HF_HUB_TOKEN", "credentials"],
)  # fmt: skip
def test_secret_names(name: str):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "max_num_batched_tokens", "output_tokens", "prompt_tokens", "min_tokens", "api_key_env", "tokenizer",
     "keyboard", "kv_transfer", "key_cache", "output_tok_s", "max-num-batched-tokens", "monkey", "author"],
)  # fmt: skip
def test_harmless_names(name: str):
    assert not is_secret(name)


def test_mask_at_any_depth_leaves_the_original():
    values = {
        "a": {"HF_TOKEN": "x", "n": 1},
        "list": [{"password": "y"}, 2],
        "api_key": "",
        "max_tokens": 5,
    }
    assert mask(values) == {
        "a": {"HF_TOKEN": MASKED, "n": 1}, "list": [{"password": MASKED}, 2], "api_key": "", "max_tokens": 5,
    }  # fmt: skip
    assert values["a"] == {"HF_TOKEN": "x", "n": 1}


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_mask_never_shows_what_stands_under_a_secret_name(inner: object):
    shown = json.dumps(mask({"outer": {"MY_SECRET": ["sesame", inner]}, "rows": [{"api_key": "sesame"}]}))
    assert "sesame" not in shown


def test_collect_is_plain_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("UNRELATED", "sesame")
    server = {"model": "m", "env": {"VLLM_CPU_KVCACHE_SPACE": 1}}
    found = collect(make_variant({"variant": "v", "server": server}, "test"))
    text = json.dumps(found, allow_nan=False)
    assert "sesame" not in text
    assert found["environment"]["HF_TOKEN"] == MASKED
    assert found["environment"]["VLLM_LOGGING_LEVEL"] == "INFO"
    assert found["server_environment"] == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert found["cpu"]["usable_threads"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > 0
    assert found["versions"]["perfbook"]
    assert found["server_is_here"]
    assert len(found["hardware"]) > 5


def test_collect_for_an_attached_server_says_whose_machine_it_is():
    attached = make_variant({"variant": "v", "server": {"base_url": "http://127.0.0.1:1"}}, "test")
    assert collect(attached)["server_is_here"] is False


def test_own_load_is_told_from_that_of_others():
    """A busy child counts as ours. (Others may be busy, too: nothing is said about them here.)"""
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint()\ninput()"
    with Sampler(every_s=0.05) as sampler:
        child = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        sampler_saw = sampler
    child.communicate(b"\n", timeout=60)
    cpu = sampler_saw.summary["cpu"]
    assert cpu["own_cores"] * sampler_saw.summary["duration_s"] >= 0.2  # the kernel counts in ticks
    json.dumps(sampler_saw.summary, allow_nan=False)


def test_energy_stands_beside_the_throughput_where_it_is_known():
    def cell(streams: int, joules: float | None) -> dict[str, Any]:
        return {"concurrency": streams, "details": {"telemetry": {"energy_per_token_j": joules}}}

    known = [cell(128, 0.21), cell(1, 1.9), cell(1, 2.1), cell(64, None)]
    assert energy_in_words(known) == "; energy of the GPUs per token: 2.0 J at 1, 0.21 J at 128"
    assert energy_in_words([cell(1, None), {"concurrency": 2}]) == ""


def test_energy_per_token():
    assert energy_per_token_j({"energy_j": 50.0}, 100) == 0.5
    assert energy_per_token_j({"energy_j": None}, 100) is None
    assert energy_per_token_j({"energy_j": 50.0}, 0) is None
    assert len(set(THROTTLING.values())) == len(THROTTLING)
