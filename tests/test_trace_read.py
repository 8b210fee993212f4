"""The reader: exact times, every way a file is written, and every way it is damaged."""

from __future__ import annotations

import gzip
import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfbook.errors import BadInput
from perfbook.rehearsal.kineto import Kernel, StepLaw, decode_annotation, trace_text
from perfbook.trace import inflate
from perfbook.trace.columns import Trace
from perfbook.trace.read import read_trace

STEPS = [
    StepLaw(decode_annotation(2), (Kernel("gemm_a", 1_234_567), Kernel("rms_norm_b", 8_001)) * 6, False, 7_000)
] * 4


@cache
def text(pretty: bool = False, metadata_last: bool = False) -> bytes:
    return "".join(trace_text(STEPS, 1, 4, 2, pretty, metadata_last)).encode()


def read(tmp_path: Path, data: bytes, name: str = "t.json") -> Trace:
    path = tmp_path / name
    path.write_bytes(data)
    return read_trace(path)


def total_ns(trace: Trace) -> int:
    return int(trace.gpu.dur_ns.sum(dtype=np.int64))


def event(**change: object) -> bytes:
    base = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2.25, "args": {"stream": 7}}
    return json.dumps(base | change).encode()


def trace_of(*events: bytes) -> bytes:
    return b'{"schemaVersion": 1, "traceEvents": [' + b",\n".join(events) + b"]}"


@pytest.mark.parametrize("pretty", [False, True])
@pytest.mark.parametrize("metadata_last", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_every_way_of_writing_reads_the_same(tmp_path: Path, pretty: bool, metadata_last: bool, packed: bool) -> None:
    data = text(pretty, metadata_last)
    trace = read(tmp_path, gzip.compress(data) if packed else data)
    assert (trace.rank, trace.world_size, trace.warnings) == (1, 4, ())
    assert trace.base_ns == 1_767_189_312_000_000_000
    assert len(trace.gpu) == 48
    assert total_ns(trace) == 24 * (1_234_567 + 8_001)
    assert (len(trace.launches), len(trace.annotations), len(trace.ops)) == (48, 4, 0)
    assert trace.events == 4 + 48 * 4


@pytest.mark.parametrize("chunk", [700, 1_000, 4_096])
def test_chunks_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(inflate, "CHUNK_BYTES", chunk)
    for data in (text(), text(True), text(False, True)):
        trace = read(tmp_path, data)
        assert (trace.events, total_ns(trace), trace.warnings) == (196, 24 * 1_242_568, ())
        assert trace.rank == 1


def test_times_are_nanoseconds_to_the_last_digit(tmp_path: Path) -> None:
    huge = event(ts=0).replace(b'"ts": 0', b'"ts": 1682725898236567.123')
    trace = read(tmp_path, trace_of(event(ts=6520618853487.683, dur=0.001), huge))
    assert trace.gpu.start_ns.tolist() == [6520618853487683, 1682725898236567123]
    assert trace.gpu.dur_ns.tolist() == [1, 2250]
    whole = read(tmp_path, trace_of(event(ts=1682725898236567, dur=68)))
    assert (whole.gpu.start_ns.tolist(), whole.gpu.dur_ns.tolist()) == ([1682725898236567000], [68000])


def test_capitalised_categories_bare_lists_and_other_phases(tmp_path: Path) -> None:
    bare = b"[" + event(cat="Kernel") + b"," + event(ph="i", cat="kernel") + b"," + event(cat="Memset", dur=1) + b"]"
    trace = read(tmp_path, bare)
    assert (trace.events, len(trace.gpu), total_ns(trace)) == (3, 2, 3250)


def test_python_frames_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(trace_of(event(cat="python_function"), event(cat="cpu_op")))
    assert len(read_trace(path).ops) == 1
    assert len(read_trace(path, with_python=True).ops) == 2


@pytest.mark.parametrize(
    ("damage", "says", "kept"),
    [
        ((b'"est": 1', b'"est": NaN'), "a number that is not finite at byte", 3),
        ((b'"est": 1', b'"est": -Infinity'), "a number that is not finite at byte", 3),
        ((b'"dur": 2.25', b'"dur": NaN'), "no usable start or duration", 2),
        ((b'"dur": 2.25', b'"dur": -2.25'), "no usable start or duration", 2),
        ((b'"dur": 2.25', b'"dur": "x"'), "no usable start or duration", 2),
        ((b'"dur": 2.25', b'"dur": 1e999'), "an event with impossible values at byte", 2),
        ((b'"dur": 2.25', b'"dur": ' + b"9" * 5000), "an event with impossible values at byte", 2),
        ((b'"name": "k"', b'"name": "k\x01"'), "a control character at byte", 3),
        ((b'"name": "k"', b'"name": "k\nl"'), "malformed text at byte", 3),
        ((b'"name": "k"', b'"name": "k\xff\xfe\x01"'), "bytes that are not UTF-8 at byte", 3),
        ((b'"est": 1', b'"est": ' + b"[" * 3000 + b"]" * 3000), "a broken event at byte", 2),
        ((b'"est": 1', b'"est": }{'), "a broken event at byte", 2),
    ],
)
def test_damage_costs_no_more_than_its_event(tmp_path: Path, damage: tuple[bytes, bytes], says: str, kept: int) -> None:
    bad = event(args={"stream": 7, "est": 1}).replace(*damage)
    trace = read(tmp_path, trace_of(event(), bad, event(ts=9)))
    assert len(trace.gpu) == kept
    assert total_ns(trace) == kept * 2250
    assert any(says in w for w in trace.warnings), trace.warnings
    if "at byte" in says:
        position = int(next(w for w in trace.warnings if says in w).split("at byte ")[1].split()[0])
        start = trace_of(event(), bad, event(ts=9)).index(bad)
        assert start <= position < start + len(bad)


def test_identifiers_beyond_64_bits_are_unknown(tmp_path: Path) -> None:
    trace = read(tmp_path, trace_of(event(args={"stream": 7, "correlation": 10**24}), event()))
    assert (len(trace.gpu), trace.gpu.correlation.tolist(), trace.warnings) == (2, [-1, -1], ())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1), st.booleans(), st.booleans())
def test_cutting_a_file_anywhere_never_raises_and_never_adds(
    tmp_path: Path, where: float, pretty: bool, packed: bool
) -> None:
    whole = gzip.compress(text(pretty)) if packed else text(pretty)
    cut = max(3, int(where * (len(whole) - 1)))
    trace = read(tmp_path, whole[:cut])
    assert trace.warnings
    full = read(tmp_path, whole)
    assert trace.events <= full.events
    key = [(int(s), int(d)) for s, d in zip(trace.gpu.start_ns, trace.gpu.dur_ns, strict=True)]
    assert set(key) <= {(int(s), int(d)) for s, d in zip(full.gpu.start_ns, full.gpu.dur_ns, strict=True)}
    if not packed and where < 0.9:
        assert any(f"byte {cut}" in w for w in trace.warnings)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 400), st.booleans())
def test_garbage_in_the_middle_never_raises(tmp_path: Path, seed: int, length: int, packed: bool) -> None:
    rng = random.Random(seed)
    data = bytearray(gzip.compress(text()) if packed else text())
    start = rng.randrange(600 if not packed else 20, len(data))
    data[start : start + length] = rng.randbytes(length)
    trace = read(tmp_path, bytes(data))
    assert len(trace.gpu) <= 48


@pytest.mark.parametrize("data", [b"", b"hello", b'{"a": 1}', b"\x89PNG\r\n", b"null"])
def test_what_is_no_trace_is_said_in_one_line(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, data, "x.json")
    assert "x.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_trace(tmp_path / "none.json")
