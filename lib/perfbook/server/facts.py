"""What a log can say about an engine: the types."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from perfbook.server.rootcause import RootError


@dataclass(frozen=True)
class Evidence:
    """A line of the log that something was read from."""

    line: int
    text: str


@dataclass(frozen=True)
class Switch:
    """Something that is on, off, or not known.

    Attributes
    ----------
    mode : str or None
        The mode last stated, such as ``FULL_AND_PIECEWISE``.
    active : bool or None
        True when a line reports it done, False when it is stated off, None when neither.
    evidence : tuple of Evidence
        The lines that this was read from, in order.
    """

    mode: str | None = None
    active: bool | None = None
    evidence: tuple[Evidence, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values; an unknown state is the word ``unknown``."""
        return {
            "mode": self.mode,
            "active": "unknown" if self.active is None else self.active,
            "evidence": [{"line": one.line, "text": one.text} for one in self.evidence],
        }


@dataclass(frozen=True)
class Finding:
    """Something in the log that matters for speed or health."""

    rule: str
    severity: str
    title: str
    meaning: str
    advice: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Throughput:
    """One of the engine's periodic lines; rates in tokens per second, shares in percent."""

    line: int
    time: str
    engine: str
    prompt_tok_s: float
    generation_tok_s: float
    running: int
    waiting: int
    kv_usage_pct: float | None
    prefix_hit_pct: float | None


@dataclass(frozen=True)
class EngineFacts:
    """What a log says; None where it does not. Times in seconds, memory in GiB as vLLM prints it.

    With several engines or ranks, times are the slowest one's, and the cache is that of the first engine.
    With several launches in one log, everything is about the last. ``logged_lines`` counts those that vLLM's logger
    wrote, of the throughput lines the last hundred thousand are kept.
    """

    vllm_version: str | None = None
    engine: str | None = None
    model: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    device: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    compile: Switch = Switch()
    cuda_graphs: Switch = Switch()
    attention_backend: str | None = None
    moe_backend: str | None = None
    all_reduce_backends: tuple[str, ...] = ()
    nccl_version: str | None = None
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    kv_cache_gib: float | None = None
    max_concurrency: float | None = None
    weights_s: float | None = None
    weights_gib: float | None = None
    compile_s: float | None = None
    graph_capture_s: float | None = None
    init_s: float | None = None
    ready_line: int | None = None
    launches: int = 0
    logged_lines: int = 0
    throughput: tuple[Throughput, ...] = ()
    first_error: RootError | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def recognised(self) -> bool:
        """Whether the text is a vLLM log at all, or at least tells why a program ended."""
        return self.logged_lines > 0 or self.ready_line is not None or self.first_error is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        value["compile"] = self.compile.to_json()
        value["cuda_graphs"] = self.cuda_graphs.to_json()
        value["all_reduce_backends"] = list(self.all_reduce_backends)
        value["throughput"] = [asdict(row) for row in self.throughput]
        error = self.first_error
        value["first_error"] = None if error is None else {**vars(error), "context": list(error.context)}
        value["findings"] = [{**vars(one), "evidence": [vars(line) for line in one.evidence]} for one in self.findings]
        return value
