"""A cell in the result format of ``vllm bench serve --save-result --save-detailed``, for tools that read
that.

The names are vLLM's; the numbers are perfbook's. Two differ in what they mean: ``itls`` are gaps between
token events (as vLLM's are), but no role or finish chunk is among them; and TPOT excludes all tokens of the
first event, not one."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pyarrow.compute as pc

from perfbook.stream import timing
from perfbook.stream.cell import Cell
from perfbook.stream.endpoint import Endpoint

_BACKENDS = {"chat": "openai-chat", "completions": "openai"}


def vllm_bench_result(cell: Cell, endpoint: Endpoint, *, rate_per_s: float | None = None) -> dict[str, Any]:
    """One cell as one result file's content; plain values, None where nothing was measured."""
    summary = cell.summary
    rows = cell.requests.to_pylist()
    good = [row for row in rows if row["ok"]]
    request = cell.events["request"].to_numpy()
    merged = cell.events["merged"].to_numpy(zero_copy_only=False).astype(bool)
    found = timing.gaps(request, cell.events["arrival_ns"].to_numpy(), cell.events["tokens"].to_numpy(), merged)
    gap_s = found.gap_ms / 1e3
    itls = [gap_s[(request == row["request"]) & np.isfinite(gap_s)].tolist() if row["ok"] else [] for row in rows]
    queue_s = [(row["client_queue_ms"] or 0.0) / 1e3 for row in rows]
    duration, prompt, output = summary["duration_s"], summary["prompt_tokens"] or 0, summary["output_tokens"]
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": _BACKENDS[endpoint.kind],
        "backend": _BACKENDS[endpoint.kind],
        "label": cell.name,
        "model_id": endpoint.model,
        "tokenizer_id": endpoint.model,
        "num_prompts": summary["requests"],
        "request_rate": "inf" if rate_per_s is None else rate_per_s,
        "burstiness": 1.0,
        "max_concurrency": summary["concurrency"],
        "duration": duration,
        "completed": summary["ok"],
        "failed": summary["failed"],
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": summary["request_s"],
        "request_goodput": None,
        "output_throughput": summary["output_tok_s"],
        "total_token_throughput": (prompt + output) / duration if duration else None,
        "input_lens": [row["prompt_tokens"] or row["prompt_tokens_asked"] or 0 for row in rows],
        "output_lens": [row["output_tokens"] if row["ok"] else 0 for row in rows],
        "ttfts": [_seconds(row["ttft_ms"], queue) for row, queue in zip(rows, queue_s, strict=True)],
        "itls": itls,
        "latencies": [_seconds(row["e2e_ms"], queue) for row, queue in zip(rows, queue_s, strict=True)],
        "start_times": [(row["start_ns"] or 0) / 1e9 for row in rows],
        "queue_times": queue_s,
        "generated_texts": [row["text"] for row in rows],
        "errors": ["" if row["ok"] else f"{row['error']}: {row['detail'] or ''}" for row in rows],
        "max_output_tokens_per_s": _busiest_second(cell),
        "max_concurrent_requests": _most_at_once(good),
    }
    for name, values in (
        ("ttft", np.array([row["ttft_ms"] for row in good if row["ttft_ms"] is not None], float)),
        ("tpot", np.array([row["tpot_ms"] for row in good if row["tpot_ms"] is not None], float)),
        ("itl", found.gap_ms[found.clean]),
        ("e2el", np.array([row["e2e_ms"] for row in good if row["e2e_ms"] is not None], float)),
    ):
        spread = timing.distribution(values)
        result[f"mean_{name}_ms"] = spread["mean"]
        result[f"median_{name}_ms"] = spread["p50"]
        result[f"std_{name}_ms"] = float(values.std()) if len(values) else None
        for percent in ("p50", "p90", "p95", "p99"):
            result[f"{percent}_{name}_ms"] = spread[percent]
    return result


def _seconds(value_ms: float | None, queue_s: float) -> float:
    """vLLM counts from the moment a request is sent, and writes 0 for a request without a first token."""
    return 0.0 if value_ms is None else value_ms / 1e3 - queue_s


def _busiest_second(cell: Cell) -> float:
    if not cell.events.num_rows:
        return 0.0
    arrival = cell.events["arrival_ns"].to_numpy()
    begin = pc.min(cell.requests["start_ns"]).as_py() or int(arrival.min())
    second = (arrival - begin) // 1_000_000_000
    return float(np.bincount(np.maximum(second, 0), cell.events["tokens"].to_numpy()).max())


def _most_at_once(rows: list[dict[str, Any]]) -> int:
    """Most requests outstanding at any moment."""
    changes = sorted([(row["start_ns"], 1) for row in rows] + [(row["end_ns"], -1) for row in rows])
    return int(max(np.cumsum([step for _, step in changes]), default=0))
