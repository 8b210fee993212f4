"""What a law says: the behaviour of one machine with one model, as data.

A law stands in the ``rehearsal:`` section of a parameter file. It names every number that the stand-in obeys,
so that a measurement taken against it has a truth to be held against. Curves are lists of ``[batch, value]``
pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from perfbook.errors import BadInput
from perfbook.params import Variant
from perfbook.yamlfile import read_yaml

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _as_pairs(value: object) -> object:
    """YAML and JSON write tuples as lists."""
    if isinstance(value, list | tuple):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


def _ascending(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if not pairs:
        raise ValueError("a curve needs at least one [batch, value] pair")
    if any(left[0] >= right[0] for left, right in pairwise(pairs)):
        raise ValueError("a curve's batches must ascend without repeats")
    return pairs


Curve = Annotated[tuple[tuple[Count, float], ...], BeforeValidator(_as_pairs), AfterValidator(_ascending)]


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(Section):
    """What is served, as far as the start-up log and the limits need it."""

    architecture: str = Field(default="LlamaForCausalLM", description="class name in the log")
    layers: Count = 61
    hidden_size: Count = 7168
    config: dict[str, Any] = Field(default={}, description="further values of its config.json, for the floor")
    dense_gb: NotNegative = Field(default=0.0, description="weights that every step reads, all ranks; 0: not known")
    expert_gb: NotNegative = Field(default=0.0, description="all routed experts")
    tensor_parallel: Count = 8
    max_model_len: Count = 131072
    dtype: str = "bfloat16"
    quantization: str | None = None
    attention_backend: str = "FLASH_ATTN"
    moe_backend_line: str | None = Field(default=None, description="the MoE layer's line in the log, verbatim")


class Load(Section):
    """Start-up. The log tells the nominal times; the process takes ``compressed_s`` of them."""

    seconds: NotNegative = Field(default=60.0, description="nominal time to load the weights")
    compressed_s: NotNegative = Field(default=1.0, description="time from start to ready that the stand-in takes")
    weights_gib_per_rank: Positive = 60.0
    shards: Count = 64
    kv_cache_gib: Positive = Field(default=12.0, description="cache memory per rank, in the log")
    compile_s: NotNegative = Field(default=40.0, description="nominal torch.compile time in the log")
    graph_capture_s: NotNegative = Field(default=20.0, description="nominal CUDA graph capture time in the log")


class Step(Section):
    """The step-time law; see :func:`perfbook.rehearsal.steptime.step_ms`."""

    decode_ms: Curve = Field(description="decode step over batch, every sequence at position 0")
    context_us_per_token: NotNegative = Field(
        default=0.0, description="growth of a decode step per token of mean position"
    )
    prefill_floor_ms: NotNegative = Field(default=10.0, description="least time of a step that holds prefill")
    prefill_tok_s: Positive = Field(default=20_000.0, description="prompt tokens per second beyond that")


class Limits(Section):
    """What the scheduler may do; ``--max-num-seqs`` and its like override these."""

    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    kv_cache_tokens: Count = 600_000


class WarmUp(Section):
    """Extra time of the first steps after the launch, as from lazy compilation."""

    prefill_extra_ms: NotNegative = Field(default=0.0, description="on the first step with prefill")
    decode_extra_ms: NotNegative = Field(default=0.0, description="in all, spread over the first decode steps")
    decode_steps: Count = Field(default=8, description="how many decode steps share it, linearly falling")


class Variation(Section):
    """Seeded randomness, all in per cent of the step time."""

    seed: int = 1
    noise_pct: NotNegative = Field(default=0.0, description="standard deviation from step to step")
    launch_pct: NotNegative = Field(default=0.0, description="standard deviation from launch to launch")
    drift_pct_per_min: Annotated[float, Field(ge=-5, le=5)] = Field(
        default=0.0, description="change per minute since ready"
    )


class Text(Section):
    """What the answers look like; the times do not depend on it."""

    reasoning_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0, description="thinking before the answer, closing tag included"
    )
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"
    filler_tokens: Count = Field(default=400, description="natural length of an answer to an unknown question")


class Communication(Section):
    """Tensor-parallel all-reduce: latency + bytes · 2(n-1)/n / busbw."""

    calls_per_step: Annotated[int, Field(ge=0)] = 122
    latency_us: NotNegative = 40.0
    busbw_gb_s: Positive = 20.0
    backends: tuple[str, ...] = Field(default=("PYNCCL",), strict=False, description="dispatch order, in the log")
    nccl_version: str = "2.28.9"
    custom_all_reduce_disabled: bool = Field(default=True, description="the PCIe warning stands in the log")


class Device(Section):
    """One accelerator, as the micro-benchmarks and the telemetry would find it."""

    name: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    memory_gib: Positive = 95.6
    memory_used_gib: Positive = 88.0
    read_gb_s: Positive = Field(default=1500.0, description="memory bandwidth, read only")
    copy_gb_s: Positive = Field(default=1350.0, description="memory bandwidth, bytes read plus bytes written")
    gemm_tflop_s: Positive = Field(default=380.0, description="dense bf16 GEMM at large shapes")
    launch_us: NotNegative = Field(default=2.5, description="least time of one kernel in a graph")
    clock_mhz: Positive = 2400.0
    idle_w: Positive = 35.0
    busy_w: Positive = 420.0


class AllReduceEffect(Section):
    """What a setting does to the all-reduce."""

    latency_factor: Positive = 1.0
    bandwidth_factor: Positive = 1.0
    outcome: Literal["taken", "ignored", "wrong sums", "hangs", "fails"] = "taken"


class Setting(Section):
    """A change of environment or arguments and its true effect; all of it must be set at the launch."""

    env: dict[str, str] = {}
    args: dict[str, Any] = Field({}, description="vLLM options without the leading dashes")
    step_pct: Curve | None = Field(
        default=None, description="change of the decode step over batch, beyond the all-reduce"
    )
    all_reduce: AllReduceEffect | None = None
    error: str | None = Field(default=None, description="the launch dies with this error")

    @model_validator(mode="after")
    def _some_change(self) -> Self:
        if not self.env and not self.args:
            raise ValueError("a setting needs env or args to be recognised by")
        return self


class Kernel(Section):
    """A kernel's part of a profiled step, mean over ranks."""

    name: str
    calls: Count
    share: Annotated[float, Field(gt=0, le=1)] = Field(description="of the profiled step's wall time")

    @property
    def all_reduce(self) -> bool:
        """Whether the ranks wait for one another in it."""
        return "allreduce" in self.name.lower() or "all_reduce" in self.name.lower()


class Regime(Section):
    """Where a profiled step goes at one batch size; the nearest (in log batch) applies."""

    batch: Count
    kernels: tuple[Kernel, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _within_the_step(self) -> Self:
        total = sum(kernel.share for kernel in self.kernels)
        if total > 1 + 1e-9:
            raise ValueError(f"kernel shares sum to {total:.4f}, more than the step")
        if not self.kernels or len({kernel.name for kernel in self.kernels}) < len(self.kernels):
            raise ValueError("a regime needs kernels, each under its own name")
        return self


ONE_KERNEL = Regime(batch=1, kernels=(Kernel(name="nvjet_tst_64x16_64x16_4x1_v_bz_TNT", calls=100, share=0.9),))


class Profile(Section):
    """What the torch profiler would record; a law that does not say gets one kind of kernel."""

    overhead_ms: NotNegative = Field(default=0.0, description="added to every step while a profile is active")
    regimes: tuple[Regime, ...] = Field(default=(ONE_KERNEL,), strict=False, min_length=1)
    skew_us: tuple[NotNegative, ...] = Field(
        default=(), strict=False, description="arrival skew per rank at each all-reduce"
    )


class Fault(Section):
    """Something that goes wrong; see :mod:`perfbook.rehearsal.faults`."""

    kind: Literal["die", "stall", "loading_503", "stream_error", "reset", "html"]
    after_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0, description="die, stall: of all answers; else of the one hit"
    )
    every: Count = Field(
        default=1, description="stream_error, reset, html: hit each request whose number divides by this"
    )
    seconds: Positive | None = Field(default=None, description="stall: for how long; left out: for good")


class Law(Section):
    """Everything the stand-in obeys."""

    vllm_version: str = "0.32.0"
    model: Model = Model()
    load: Load = Load()
    step: Step
    limits: Limits = Limits()
    warmup: WarmUp = WarmUp()
    variation: Variation = Variation()
    text: Text = Text()
    communication: Communication = Communication()
    device: Device = Device()
    settings: tuple[Setting, ...] = Field(default=(), strict=False)
    profile: Profile = Profile()
    faults: tuple[Fault, ...] = Field(default=(), strict=False)


def make_law(values: Mapping[str, Any], origin: str) -> Law:
    """Validate a law that was already read, such as a parameter file's ``rehearsal:`` section.

    Raises
    ------
    BadInput
        One line: where, which key, what is wrong with it.
    """
    try:
        return Law.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "law"
        reason = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"{origin}: {key}: {reason[:1].lower()}{reason[1:]}") from None


def law_of(variant: Variant) -> Law:
    """The law in a variant's ``rehearsal:`` section.

    Raises
    ------
    BadInput
        There is none, it is not valid, or the variant attaches to a server, for which nothing can stand in.
    """
    if variant.server.model is None:
        raise BadInput(f"{variant.variant}: server.base_url attaches to a server; to rehearse, name a server.model")
    if not variant.rehearsal:
        raise BadInput(f"{variant.variant}: nothing to rehearse with: the file has no rehearsal: section (a law)")
    return make_law(variant.rehearsal, f"{variant.variant}: rehearsal")


def load_law(path: Path) -> Law:
    """Read a law file: a law, or a parameter file with a ``rehearsal:`` section."""
    values = read_yaml(path).values
    section = values.get("rehearsal", values)
    if not isinstance(section, dict):
        raise BadInput(f"{path}: rehearsal: holds no law")
    return make_law(section, str(path))
