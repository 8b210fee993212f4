"""Nsight Systems exports, as SQLite databases made here from the documented schema."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from perfbook.errors import BadInput
from perfbook.trace import analyse
from perfbook.trace.nsys import is_sqlite, read_nsys

STRINGS = {
    1: "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>",
    2: "nvjet_tst_64x16_64x16_4x1_v_bz_TNT",
    3: "cudaGraphLaunch_v10000",
    4: "cudaStreamSynchronize_v3020",
    5: "execute_context_0(0)_generation_8(8)",
    6: "execute_context_2(300)_generation_0(0)",
}
KERNEL_COLUMNS = '"start", "end", deviceId, streamId, correlationId, demangledName, shortName'
STEP_NS, KERNEL_NS, GAP_NS = 1_000_000, 100_001, 1_000
PIDS = (70, 71)


def export(path: Path, *, pids: tuple[int, ...] = PIDS, old: bool = False, graph_node: bool = True) -> Path:
    """Six steps of three kernels per process: GEMM, all-reduce, GEMM; on process 71 the all-reduce is 500 ns longer."""
    db = sqlite3.connect(path)
    pid_column = "" if old else ", globalPid INTEGER"
    db.executescript(
        f"""
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ("start" INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, demangledName INTEGER, shortName INTEGER{pid_column});
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ("start" INTEGER, "end" INTEGER, deviceId INTEGER, streamId INTEGER,
            correlationId INTEGER, bytes INTEGER, copyKind INTEGER{pid_column});
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ("start" INTEGER, "end" INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        CREATE TABLE NVTX_EVENTS ("start" INTEGER, "end" INTEGER, eventType INTEGER, text TEXT, textId INTEGER,
            globalTid INTEGER);
        """
    )
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
    for device, pid in enumerate(pids):
        process = pid * 0x1000000
        own = [] if old else [process]
        for step in range(6):
            at = 10_000_000 + step * STEP_NS
            name = (None, 6) if step == 3 else ("execute_context_0(0)_generation_8(8)", None)
            db.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)", (at - 5_000, at - 1_000, *name, process + 9)
            )
            db.execute("INSERT INTO NVTX_EVENTS VALUES (?, NULL, 34, 'mark', NULL, ?)", (at, process + 9))
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 3)",
                (at - 3_000, at - 2_000, process + 9, step),
            )
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 4)", (at, at + 9, process + 9, 1000 + step)
            )
            for i, kernel in enumerate((2, 1, 2)):
                begin = at + i * (KERNEL_NS + GAP_NS)
                end = begin + KERNEL_NS + (500 if kernel == 1 and pid == 71 else 0)
                row = (begin, end, device, 7, step, kernel, kernel, *own)
                db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * len(row))})", row)
            copy = (at + 500_000, at + 500_400, device, 7, step, 64, 2, *own)
            db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES ({','.join('?' * len(copy))})", copy)
    db.commit()
    db.close()
    return path


def test_two_processes_are_two_ranks_and_split(tmp_path: Path) -> None:
    path = export(tmp_path / "r.sqlite")
    assert is_sqlite(path)
    report = analyse([path])
    assert [(r.rank, r.gpu_events, r.how) for r in report.ranks] == [(0, 24, "annotations"), (1, 24, "annotations")]
    decode, prefill = report.phases["decode"], report.phases["prefill"]
    assert (decode.steps, prefill.steps, decode.requests, prefill.tokens) == (4, 1, 8, 300)
    assert decode.step_mean_ms == pytest.approx(1.0)
    ms = {p.category: p.ms_per_step for p in decode.categories}
    assert ms == pytest.approx({"gemm": 0.200002, "all_reduce": 0.100251, "memcpy": 0.0004})
    (all_reduce,) = decode.collectives
    assert (all_reduce.calls_per_step, all_reduce.message_bytes) == (1, None)
    assert all_reduce.transfer_us == pytest.approx(100.001)
    assert all_reduce.skew_us == pytest.approx({0: 0, 1: 0.5})
    assert all_reduce.slowest_rank == 0
    assert decode.idle.device_ms + decode.idle.host_ms == pytest.approx(1.0 - decode.busy_ms)


def test_an_older_export_without_process_numbers_is_one_rank(tmp_path: Path) -> None:
    path = export(tmp_path / "old.sqlite", pids=(70,), old=True)
    (trace,) = read_nsys(path)
    assert (len(trace.gpu), len(trace.launches), len(trace.annotations)) == (24, 6, 6)
    assert analyse([path]).phases["decode"].steps == 4


def test_whole_graph_records_are_said(tmp_path: Path) -> None:
    path = export(tmp_path / "g.sqlite", pids=(70,))
    db = sqlite3.connect(path)
    db.execute(
        'CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ("start" INTEGER, "end" INTEGER, deviceId INTEGER, '
        "streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER)"
    )
    db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2, 0, 7, 1, ?, 5)", (70 * 0x1000000,))
    db.commit()
    db.close()
    (trace,) = read_nsys(path)
    assert "--cuda-graph-trace=node" in trace.warnings[0]


def changed(path: Path, *statements: str) -> Path:
    db = sqlite3.connect(export(path, pids=(70,)))
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    return path


KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"


@pytest.mark.parametrize("value", ["NULL", "start - 5", "'soon'"])
def test_a_time_that_cannot_be_costs_its_event_and_is_said(tmp_path: Path, value: str) -> None:
    path = changed(tmp_path / "r.sqlite", f'UPDATE {KERNELS} SET "end" = {value} WHERE rowid = 4')
    report = analyse([path])
    assert report.ranks[0].gpu_events == 23
    assert "1 events have no usable start or duration and are left out" in report.ranks[0].warnings
    gemm = next(p for p in report.phases["decode"].categories if p.category == "gemm")
    assert gemm.calls_per_step == pytest.approx(7 / 4)


def test_work_of_no_known_process_is_a_rank(tmp_path: Path) -> None:
    path = changed(
        tmp_path / "r.sqlite", *[f"UPDATE {t} SET globalPid = NULL" for t in (KERNELS, KERNELS[:-6] + "MEMCPY")]
    )
    assert [r.gpu_events for r in analyse([path]).ranks] == [24]


def test_without_ranges_the_steps_are_found_by_repetition(tmp_path: Path) -> None:
    report = analyse([changed(tmp_path / "r.sqlite", "DROP TABLE NVTX_EVENTS")])
    assert (report.ranks[0].how, report.phases["all"].steps) == ("repeats", 6)
    assert report.phases["all"].step_mean_ms == pytest.approx(1.0)


def test_an_export_in_which_nothing_ran(tmp_path: Path) -> None:
    tables = (KERNELS, KERNELS[:-6] + "MEMCPY")
    with pytest.raises(BadInput, match="nothing ran"):
        analyse([changed(tmp_path / "r.sqlite", *[f"DELETE FROM {table}" for table in tables])])


def test_what_is_no_export_is_said(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (a)")
    db.commit()
    with pytest.raises(BadInput, match="not an Nsight Systems export"):
        read_nsys(path)
    db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    db.commit()
    db.close()
    with pytest.raises(BadInput, match="no CUDA work"):
        analyse([path])
    path.write_bytes(b"SQLite format 3\0" + b"\1" * 200)
    with pytest.raises(BadInput, match="cannot be read"):
        read_nsys(path)
