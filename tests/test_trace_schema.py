"""What ``perfbook trace --json`` promises, key by key and type by type, on every kind of trace at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from perfbook import cli
from perfbook.rehearsal.kineto import Kernel, StepLaw, decode_annotation, prefill_annotation, write_profile
from perfbook.trace.kernels import CATEGORIES
from test_trace_nsys import export

RECORDED = Path(__file__).parent / "data" / "traces"
SHARED = Path(os.environ.get("PERFBOOK_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "traces"
COLLECTIVES = set(CATEGORIES[:5])


def number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def share(value: object) -> bool:
    return number(value) and value <= 1 + 1e-9  # type: ignore[operator]


def whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def has(value: dict[str, Any], **keys: Any) -> None:
    """Exactly these keys, each with a value that its predicate accepts."""
    assert set(value) == set(keys)
    for key, accepts in keys.items():
        assert accepts(value[key]), f"{key}: {value[key]!r}"


def holds_the_schema(found: dict[str, Any]) -> None:
    has(found, schema=lambda v: v == 1, ranks=bool, phases=lambda v: isinstance(v, dict))
    assert set(found["phases"]) <= {"decode", "prefill", "mixed", "all"}
    for rank in found["ranks"]:
        texts = isinstance(rank["warnings"], list) and all(isinstance(w, str) for w in rank["warnings"])
        has(rank, rank=whole, file=bool, events=whole, gpu_events=whole, warnings=lambda v, texts=texts: texts)
    numbers = {str(rank["rank"]) for rank in found["ranks"]}
    for name, phase in found["phases"].items():
        has(
            phase,
            steps=lambda v: whole(v) and v > 0,
            step_ms=lambda v: set(v) == {"mean", "p50", "p99"} and all(map(number, v.values())),
            busy_share=share,
            idle_share=share,
            idle_reliable=lambda v: isinstance(v, bool),
            categories=bool,
            unclassified_share=share,
            collectives=lambda v: isinstance(v, list),
        )
        assert phase["busy_share"] + phase["idle_share"] == pytest.approx(1)
        for part in phase["categories"]:
            known = {"category": CATEGORIES.__contains__, "ms_per_step": number, "calls_per_step": number}
            has(part, share=share, share_of_step=number, **known)
            if name != "all":  # where the steps have different names in their categories, so do their shares
                assert part["share_of_step"] == pytest.approx(part["ms_per_step"] / phase["step_ms"]["mean"])
        assert sum(part["share"] for part in phase["categories"]) == pytest.approx(1)
        for part in phase["collectives"]:
            has(
                part,
                category=COLLECTIVES.__contains__,
                message_bytes=lambda v: v is None or whole(v),
                calls_per_step=number,
                transfer_us=lambda v: v is None or number(v),
                skew_us=lambda v: set(v) <= numbers and all(map(number, v.values())),
            )
            assert bool(part["skew_us"]) == (part["transfer_us"] is not None)


def asked(capsys: pytest.CaptureFixture[str], *paths: Path) -> dict[str, Any]:
    assert cli.call(["trace", *map(str, paths), "--json", "-"]) == 0

    def never(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=never)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_drawn_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int) -> None:
    reduce = Kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 9_000, message_bytes=4096, wait_ns=(0, 70, 900))
    kernels = (Kernel("nvjet_tst_64x16", 40_000), reduce, Kernel("who_knows", 5))
    decode, prefill = StepLaw(decode_annotation(3), kernels), StepLaw(prefill_annotation(1, 9), kernels, graph=False)
    write_profile(tmp_path, [decode, decode, prefill, decode, decode], ranks=ranks)
    found = asked(capsys, tmp_path)
    holds_the_schema(found)
    assert set(found["phases"]) == {"decode", "prefill", "all"} and len(found["ranks"]) == ranks
    (replayed,) = found["phases"]["decode"]["collectives"]
    (eager,) = found["phases"]["prefill"]["collectives"]
    assert (replayed["message_bytes"], eager["message_bytes"]) == (None, 4096)
    assert (replayed["transfer_us"] is None) == (ranks == 1)


@pytest.mark.parametrize("folder", ["tp1", "tp3"])
def test_recorded_traces(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    holds_the_schema(asked(capsys, RECORDED / folder))


def test_an_export_of_nsight_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holds_the_schema(asked(capsys, export(tmp_path / "step.sqlite")))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no folder of real traces at {SHARED}")
def test_real_traces(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(SHARED.glob("*.json.gz"))
    for path in files:
        holds_the_schema(asked(capsys, path))
    holds_the_schema(asked(capsys, *[path for path in files if path.name.startswith("12")]))


def test_a_comparison_adds_one_key(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(RECORDED / "tp1")
    assert cli.call(["trace", folder, "--against", folder, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found.pop("diff")) == {"schema", "phases", "only_before", "only_after"}
    holds_the_schema(found)
