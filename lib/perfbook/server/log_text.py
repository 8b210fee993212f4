"""Facts about an engine as text of 80 columns."""

from __future__ import annotations

import textwrap

from perfbook.server.facts import EngineFacts, Switch, Throughput

_WIDTH = 80
_ROWS = 12
_UNKNOWN = "unknown"


def render_text(facts: EngineFacts) -> str:
    """Configuration, the two switches with their evidence, the cache, times, throughput, error, findings."""
    parallel = ", ".join(
        f"{name} {value}"
        for name, value in (
            ("TP", facts.tensor_parallel_size),
            ("PP", facts.pipeline_parallel_size),
            ("DP", facts.data_parallel_size),
        )
        if value is not None
    )
    rows = [
        ("vLLM", _joined(facts.vllm_version, f"{facts.engine} engine" if facts.engine else None)),
        ("model", facts.model),
        ("weights", _joined(facts.dtype, facts.quantization and f"quantised: {facts.quantization}")),
        ("parallel", parallel or None),
        ("context", facts.max_model_len and f"{facts.max_model_len:,} tokens"),
        ("attention", facts.attention_backend),
        ("MoE", facts.moe_backend) if facts.moe_backend else None,
        ("all-reduce", ", ".join(facts.all_reduce_backends) or None) if facts.all_reduce_backends else None,
        ("NCCL", facts.nccl_version) if facts.nccl_version else None,
        ("KV cache", _cache(facts)),
        ("times", _times(facts)),
    ]
    lines = [line for row in rows if row for line in _row(row[0], row[1] or _UNKNOWN)]
    lines += _switch("torch.compile", facts.compile) + _switch("CUDA graphs", facts.cuda_graphs)
    if facts.throughput:
        lines += ["", *_throughput(facts.throughput)]
    if facts.first_error:
        error = facts.first_error
        who = _joined(error.process or None, error.rank or None)
        lines += [
            "",
            *_wrapped(f"First error (line {error.line}{', ' + who if who else ''}): {error.message}", "  "),
        ]
    for finding in facts.findings:
        lines += ["", *_wrapped(f"[{finding.severity}] {finding.title}", "  ")]
        lines += _wrapped(f"  {finding.meaning}", "  ") + _wrapped(f"  Try: {finding.advice}", "  ")
        lines += [line for one in finding.evidence for line in _evidence(one.line, one.text)]
    return "\n".join(lines) + "\n"


def _row(label: str, value: str) -> list[str]:
    return textwrap.wrap(f"{label:<14}{value}", _WIDTH, subsequent_indent=" " * 14) or [label]


def _switch(label: str, switch: Switch) -> list[str]:
    state = {True: "active", False: "off", None: "unknown"}[switch.active]
    because = (
        ""
        if switch.active is not None
        else (" (configured, but no line reports it done)" if switch.mode else " (the log does not say)")
    )
    lines = _row(label, f"{state}{because}{', mode ' + switch.mode if switch.mode else ''}")
    return lines + [line for one in switch.evidence for line in _evidence(one.line, one.text)]


def _evidence(number: int, text: str) -> list[str]:
    short = textwrap.shorten(text, _WIDTH - 14, placeholder=" …") or text[: _WIDTH - 14]
    return [f"  {number:>8}  {short}"[:_WIDTH]]


def _cache(facts: EngineFacts) -> str | None:
    return _joined(
        f"{facts.kv_cache_tokens:,} tokens" if facts.kv_cache_tokens is not None else None,
        f"{facts.kv_cache_blocks:,} blocks" if facts.kv_cache_blocks is not None else None,
        f"{facts.max_concurrency:g} requests of full length" if facts.max_concurrency is not None else None,
    )


def _times(facts: EngineFacts) -> str | None:
    pairs = (
        ("weights", facts.weights_s),
        ("compile", facts.compile_s),
        ("graph capture", facts.graph_capture_s),
        ("engine", facts.init_s),
    )
    return _joined(*(f"{name} {value:g} s" for name, value in pairs if value is not None))


def _throughput(rows: tuple[Throughput, ...]) -> list[str]:
    lines = ["  line  time            prompt/s   gen./s  running  waiting  cache %  reused %"]
    for row in rows[-_ROWS:]:
        shares = f"{_number(row.kv_usage_pct):>8} {_number(row.prefix_hit_pct):>9}"
        lines.append(
            f"{row.line:>6}  {row.time:<14}  {row.prompt_tok_s:>8g} {row.generation_tok_s:>8g}"
            f" {row.running:>8} {row.waiting:>8} {shares}"
        )
    if len(rows) > _ROWS:
        lines.append(f"  (the last {_ROWS} of {len(rows)} lines)")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _joined(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, initial_indent="")
