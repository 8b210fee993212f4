"""What 05 and 07 both need of machine and model: bandwidth and products as measured, bytes as the checkpoint says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil

from perfbook import micro
from perfbook.ceiling import ModelShape, model_shape
from perfbook.desk import Desk
from perfbook.errors import MeasurementFailed, PerfbookError, ServerFailed
from perfbook.hardware import Hardware, ThisMachine
from perfbook.params import Variant
from perfbook.report.table import Column, Note, Table
from perfbook.server import process
from perfbook.server.checkpoint import served_dtype
from perfbook.server.launch import own_environment
from perfbook.units import byte_size, count

BUSY_CORES = 0.3  # others' load from which on a CPU's bandwidth is not its own


@dataclass(frozen=True)
class Served:
    """The model as it is served.

    Attributes
    ----------
    shape : ModelShape
        What moves in a step; fields that are not known are None.
    config : mapping
        ``config.json``; empty where it is not on this disk.
    ranks : int
        Tensor-parallel ranks.
    dtype : str
        ``bfloat16``, ``float16`` or ``float32``: of activations, of weights that are not quantised, and of what the
        ranks sum.
    unknown : str
        Why the shape is not known; empty where it is.
    """

    shape: ModelShape
    config: Mapping[str, Any]
    ranks: int
    dtype: str
    unknown: str = ""

    def message_bytes(self, streams: int) -> int | None:
        """Bytes that one all-reduce of a decode step sums at so many streams; None where the model is not known."""
        return self.shape.message_bytes(streams, _float_bytes(self.dtype))


def served_model(variant: Variant, hardware: Hardware | None = None) -> Served:
    """Read ``config.json`` and the headers of the checkpoint; what the parameters state wins."""
    args = {key.lstrip("-").replace("_", "-"): value for key, value in variant.server.args.items()}
    asked = args.get("tensor-parallel-size", args.get("tp", 1))
    ranks = asked if isinstance(asked, int) and not isinstance(asked, bool) else 1
    config: dict[str, Any] = {}
    dtype, shape, unknown = "bfloat16", ModelShape(expert_bytes=None, expert_params=None), ""
    try:
        config, tensors = (hardware or ThisMachine()).checkpoint(variant)
        dtype = served_dtype(args, config)
        shape = model_shape(
            config,
            tensors,
            float_bytes=_float_bytes(dtype),
            kv_dtype_bytes=1 if str(args.get("kv-cache-dtype", "")).startswith("fp8") else _float_bytes(dtype),
        )
    except (PerfbookError, OSError, ValueError) as error:
        unknown = " ".join(str(error).split())
    given = variant.ceiling
    if given.weight_gb is not None:
        shape = replace(shape, dense_bytes=1e9 * given.weight_gb, expert_bytes=shape.expert_bytes or 0.0)
    if given.kv_bytes_per_token is not None:
        shape = replace(shape, kv_bytes_per_token=given.kv_bytes_per_token, kv_heads=shape.kv_heads or 1)
    return Served(shape, config, ranks, dtype, unknown)


def _float_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def refusal(desk: Desk, *, freed: bool = False) -> str:
    """Why nothing may be measured on the devices now; empty when it may. An idle server only takes memory.

    ``freed``: an attached server was stopped by its owner's command.
    """
    if desk.variant.server.base_url is not None and not freed:
        return "the server was not started here: its devices are its owner's"
    handle = process.find(desk.run)
    ours = set() if handle is None or handle.pid is None else {handle.pid}
    if handle is not None:
        try:
            running = handle.endpoints.metrics().get("num_requests_running", 0)
        except ServerFailed as error:
            return f"whether the server is idle cannot be told ({error})"
        if running:
            return f"the server is answering {running:g} requests: measure when it is idle"
    foreign = {pid for gpu in desk.hardware.gpus() for pid in gpu.holders}
    if not ours and foreign:
        return f"the GPUs are in use by process {', '.join(map(str, sorted(foreign)))}, which is not ours"
    return ""


def measure(desk: Desk, served: Served, *, freed: bool = False) -> micro.DeviceBench | str:
    """Bandwidth and products of the first device, recorded; a sentence where they cannot be measured."""
    if reason := refusal(desk, freed=freed):
        return f"Not measured: {reason}."
    tokens = sorted({*desk.variant.tuning.concurrency, 1})
    beside = process.find(desk.run) is not None
    busy = _busy_cores() if not desk.hardware.gpus() else 0.0
    try:
        with desk.measuring():
            bench = desk.hardware.measure_device(
                micro.gemm_shapes(served.config, served.ranks),
                tokens,
                weight_bytes=served.shape.dense_bytes and served.shape.dense_bytes / served.ranks,
                dtype=served.dtype,
                env=own_process_environment(desk.variant),
            )
    except MeasurementFailed as error:
        return f"Not measured: {error}."
    values = {**bench.to_json(), "server": "idle" if beside else "stopped", "busy_cores": busy}
    record = desk.record("micro_device", values)
    if busy > BUSY_CORES:
        evidence = f"{busy:.1f} cores were busy just before the benchmark, which needs them"
        desk.find("devices_busy", evidence=evidence, records=[record])
    return bench


def _busy_cores() -> float:
    """Cores that others keep busy, over half a second."""
    return psutil.cpu_percent(0.5) / 100 * (psutil.cpu_count() or 1)


def own_process_environment(variant: Variant, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a measuring process: ours, with what the server gets."""
    return {**os.environ, **own_environment(variant, extra)}


def recorded(desk: Desk) -> micro.DeviceBench | None:
    """What was measured in this run, by whichever notebook."""
    found = desk.run.record("micro_device")
    if found is None:
        return None
    return micro.read_bench({key: found[key] for key in ("device", "bandwidth", "gemms")})


def bandwidth_table(bench: micro.DeviceBench | str | None) -> Table | Note:
    """Memory bandwidth by kind of access."""
    if bench is None or isinstance(bench, str):
        return Note(bench or "The devices were not measured.")
    uses = {"read": "yes: a decode step reads", "copy": "no", "triad": "no"}
    return Table(
        ["access", "array", "median", Column("best", "gb_s"), "used for the floor"],
        [
            (one.kind, byte_size(one.buffer_bytes, binary=True), str(one.gb_s), one.best_gb_s, uses.get(one.kind, "no"))
            for one in bench.bandwidth
        ],
        caption=f"Memory bandwidth of {bench.device}; a floor takes the best repeat: nothing makes memory faster",
    )


def gemm_table(bench: micro.DeviceBench | str | None) -> Table | Note:
    """The products of a decode step, one by one."""
    if bench is None or isinstance(bench, str):
        return Note(bench or "The devices were not measured.")
    if not bench.gemms:
        return Note("The model's products are not measured: its layers are not of a kind whose shapes are known here.")
    rows = [
        (
            one.name,
            one.m,
            f"{one.k} × {one.n}",
            str(one.us),
            one.element_bytes * one.n * one.k / min(one.repeats_us) / 1e3,
            one.best_flop_s / 1e12,
            one.per_step,
        )
        for one in bench.gemms
    ]
    return Table(
        [
            "layer", "tokens", "weights", "time, median", Column("weights read", "gb_s"), Column("rate", "TFLOP/s"),
            "per step",
        ],
        rows,
        caption=f"Matrix products at the model's shapes ({bench.gemms[0].kernel}), weights not in a cache",
    )  # fmt: skip


def products_ms(bench: micro.DeviceBench | None, tokens: int) -> float | None:
    """All products of one step measured one by one, in ms; None where this count of tokens was not measured."""
    chosen = [one for one in bench.gemms if one.m == tokens] if bench else []
    return sum(one.per_step * min(one.repeats_us) for one in chosen) / 1e3 if chosen else None


def all_reduce_count(desk: Desk, served: Served) -> tuple[int | None, str]:
    """All-reduces in a decode step and where the number comes from: stated, traced, or from the layers."""
    if desk.variant.ceiling.all_reduces is not None:
        return desk.variant.ceiling.all_reduces, "stated in the parameters"
    for record in [*desk.run.records("profile"), *desk.run.records("step_trace")]:
        for part in record["categories"]:
            if part["category"] == "all_reduce" and part["calls_per_step"] >= 1:
                return round(part["calls_per_step"]), f"traced at {count(record['concurrency'], 'stream')}"
    return served.shape.all_reduces, "assumed from the layers: two each and one; a trace would tell"


def describe(served: Served) -> str:
    """``269 MB of weights read per step, 45.0 KiB of KV cache per token``."""
    shape = served.shape
    weights = byte_size(shape.dense_bytes)
    experts = f", {byte_size(shape.expert_bytes)} of experts" if shape.expert_bytes else ""
    ranks = f", over {served.ranks} ranks" if served.ranks > 1 else ""
    kv = byte_size(shape.kv_bytes_per_token, binary=True)
    return f"{weights} of weights read per step{experts}, {kv} of KV cache per token{ranks}"
