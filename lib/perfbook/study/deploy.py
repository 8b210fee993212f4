"""01: is the server up, and what did the engine really decide?

The start-up log is the only witness of what a launch became: compiled or eager, with CUDA graphs or without, which
all-reduce, how much KV cache. It is read here once, before anything is measured, and what it does not say stays
unknown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfbook.desk import Desk, Verdict
from perfbook.report.table import Note, Table
from perfbook.server import log, preflight
from perfbook.server.log import EngineFacts
from perfbook.server.process import ServerHandle
from perfbook.stream.load import Cell
from perfbook.study import owner
from perfbook.study.prompts import numbered
from perfbook.units import count, quantity


def check(desk: Desk) -> Table | Note:
    """What would fail, before it does; an error stops the notebook before any weights are loaded."""
    problems = preflight.require(desk.variant, rehearsed=desk.run.rehearsed)
    rows = [(p.level, p.what, p.where, p.why, p.do) for p in problems]
    if not rows:
        return Note("Nothing found: the launch should work.")
    return Table(
        ["level", "what", "where", "why", "do"], rows, caption=f"Preflight: {count(len(rows), 'remark')}, no error"
    )


def server_table(handle: ServerHandle) -> Table:
    """Which server everything below was measured on."""
    rows = [
        ("address", handle.base_url),
        ("model", handle.model),
        ("owner", "perfbook, which started it" if handle.owned else "somebody else; perfbook never stops it"),
        ("process", "unknown" if handle.pid is None else str(handle.pid)),
        ("ready after", quantity(handle.ready_s, "s")),
        ("log", handle.log_path.name if handle.log_path else "unknown"),
    ]
    return Table(["what", "value"], rows, caption="The server")


def read_log(desk: Desk, handle: ServerHandle) -> EngineFacts:
    """What the start-up log says, recorded; for an attached server without a log everything is unknown.

    The log of an attached server is a file that the parameters name, else what its owner's command prints.
    """
    path = handle.log_path or owner.read_log(desk)
    facts = log.read_log(path) if isinstance(path, Path) else log.parse_log("")
    where = {"log": path.name, "no_log": None} if isinstance(path, Path) else {"log": None, "no_log": path}
    record = desk.record("engine", {**facts.to_json(), "owned": handle.owned, **where})
    for found in facts.findings:
        desk.find(
            "log_finding",
            subject=found.rule,
            severity=found.severity,
            title=found.title,
            next_step=found.advice,
            evidence=f"{found.meaning} (log line {', '.join(str(e.line) for e in found.evidence)})",
            records=[record],
        )
    return facts


def engine_table(desk: Desk, facts: EngineFacts) -> Table:
    """The facts that decide performance, each with the log line it rests on."""
    said = facts.to_json()
    read = desk.need("engine", "01_deploy")
    rows: list[tuple[str, Any, str]] = [
        ("log", read["log"] or "not read", read["no_log"] or f"{said['logged_lines']} lines of the engine's own"),
        ("vLLM", said["vllm_version"], said["engine"] or ""),
        ("model", said["model"], ""),
        ("tensor parallel", said["tensor_parallel_size"], ""),
        ("torch.compile", _mode(said["compile"]), _lines(said["compile"])),
        ("CUDA graphs", _mode(said["cuda_graphs"]), _lines(said["cuda_graphs"])),
        ("attention", said["attention_backend"], ""),
        ("all-reduce", ", ".join(said["all_reduce_backends"] or []) or None, said["nccl_version"] or ""),
        ("KV cache", quantity(said["kv_cache_tokens"], "tokens"), _concurrency(said["max_concurrency"])),
        (
            "weights loaded in",
            quantity(said["weights_s"], "s"),
            "as the law says; the rehearsal did not wait for it" if desk.run.rehearsed else "",
        ),
        ("engine ready in", quantity(said["init_s"], "s"), "profiling, KV cache and warm-up"),
    ]
    return Table(
        ["what", "value", "evidence"],
        [(what, "unknown" if value is None else str(value), evidence) for what, value, evidence in rows],
        caption="What the engine decided, from its start-up log",
    )


def first_request(desk: Desk) -> Cell:
    """The first request of this launch: warm-up, compilation and graph capture are in it, so it is measured apart."""
    tokens = min(desk.variant.single_stream.output_tokens)
    workload = desk.variant.workload
    shape = desk.shape(tokens)
    with desk.measuring():
        cell = desk.measure(numbered(workload.prompt, 1, workload.seed), shape, key="first", concurrency=1, requests=1)
    row = cell.requests.to_pylist()[0]
    desk.record_cell(
        "first_request",
        cell,
        {
            "blended_tok_s": row["blended_tok_s"],
            "first_ttft_ms": row["ttft_ms"],
            "output_tokens_asked": tokens,
        },
        key="first",
    )
    return cell


def conclude(desk: Desk, handle: ServerHandle, facts: EngineFacts, first: Cell) -> Verdict:
    """Up or not, owned or not, and the two modes that matter most."""
    said = facts.to_json()
    row = first.requests.to_pylist()[0]
    how = "started by perfbook" if handle.owned else "attached, owned by somebody else"
    request = (
        f"the first request took {quantity(row['ttft_ms'], 'ms')} to its first token and ran at"
        f" {quantity(row['blended_tok_s'], 'tok_s')} (warm-up included)"
        if row["ok"]
        else f"the first request failed ({row['error']})"
    )
    return desk.conclude(
        f"{handle.model} is up ({how}); torch.compile is {_mode(said['compile'])}, CUDA graphs are"
        f" {_mode(said['cuda_graphs'])}; {request}."
    )


def _mode(fact: dict[str, Any]) -> str:
    active = {True: "on", False: "off", None: "unknown"}[fact["active"] if isinstance(fact["active"], bool) else None]
    return f"{active} ({fact['mode']})" if fact["mode"] and active != "unknown" else active


def _lines(fact: dict[str, Any]) -> str:
    evidence = fact["evidence"]
    return (
        "; ".join(f"line {item['line']}: {item['text'][:90]}" for item in evidence[:2]) if evidence else "no evidence"
    )


def _concurrency(value: float | None) -> str:
    return "" if value is None else f"room for {value:.1f} requests of full length"
