"""What a parameter file says: one YAML file per model variant, validated before anything starts.

A file has up to eleven top-level keys, each a section below. The same sections travel to the notebooks as
papermill parameters, so whatever comes in, from a file, from ``--set`` or from a notebook's parameters cell,
passes through :class:`Variant`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from perfbook.errors import BadInput
from perfbook.masking import is_secret
from perfbook.yamlfile import Document, nearest, read_yaml

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


def _text_of_scalar(value: object) -> object:
    """YAML reads ``KEY: 1`` as a number; an environment holds text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _name_of_variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("no variable can have this name")
    return name


EnvName = Annotated[str, AfterValidator(_name_of_variable)]
EnvText = Annotated[str, BeforeValidator(_text_of_scalar)]


def _check_address(text: str) -> None:
    """ValueError where a text cannot be a server's address."""
    if "@" in text:  # first of all: no message may show what stands before it
        raise ValueError("base_url carries credentials; put the key in a variable and name it in api_key_env")
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError as error:  # brackets that do not close, a port out of range
        raise ValueError(f"base_url {text!r} is not a http:// or https:// address: {error}") from None
    if not usable or re.search(r"[\s\x00-\x1f]", text) or url.query or url.fragment:
        raise ValueError(f"base_url {text!r} is not a http:// or https:// address such as http://gpu-box:8000/v1")


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are refused, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Commands(Section):
    """Argument lists that control a server which somebody else owns; run only with ``--allow-commands``.

    In JupyterLab, which has no such option: with ``PERFBOOK_ALLOW_COMMANDS=1`` in its environment.
    """

    stop: list[str] | None = Field(None, description="frees the devices")
    start: list[str] | None = Field(None, description="brings the server back")
    collect_traces: list[str] | None = Field(None, description="copies profiler traces into the run's folder")
    read_log: list[str] | None = Field(None, description="prints the server's start-up log")


class Server(Section):
    """The vLLM server: one that perfbook starts (``model``), or one to attach to (``base_url``)."""

    model: str | None = Field(
        None, description="a local folder, a hub name, or embedded:smollm2-135m-instruct", min_length=1
    )
    served_name: str | None = Field(None, description="the model name in requests; default: from the model")
    args: dict[str, JsonValue] = Field({}, description="vLLM's own options, without the leading dashes")
    env: dict[EnvName, EnvText] = Field({}, description="environment variables of the server")
    host: str = Field("127.0.0.1", description="address to bind; other machines can reach anything but loopback")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="0 takes a free one")
    base_url: str | None = Field(None, description="attach to this server instead of starting one")
    api_key_env: str | None = Field(
        None, description="name of the environment variable that holds the API key", pattern=r"^[A-Za-z_]\w*$"
    )
    verify_tls: bool = Field(True, description="check the certificate of an https base_url")
    log_file: Path | None = Field(None, description="log of an attached server, for the diagnosis", strict=False)
    ready_timeout_s: Positive = Field(600.0, description="deadline for loading")
    stop_grace_s: Positive = Field(30.0, description="from the polite signal to the hard one")
    commands: Commands = Field(Commands(), description="how an attached server is stopped and started")

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        # Parameters are recorded with the run and stand in executed notebooks; the server inherits the environment.
        for name in (*self.env, *self.args):
            if is_secret(name):
                raise ValueError(
                    f"{name} looks like a secret; export it before you start (the server inherits it), "
                    "and leave it out of the file"
                )
        return self

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.model is None) == (self.base_url is None):
            raise ValueError("give either model (perfbook starts the server) or base_url (attach to one)")
        if self.base_url is not None:
            _check_address(self.base_url)
            if self.args or self.env:
                raise ValueError("args and env belong to a server that perfbook starts; base_url attaches to one")
        return self

    @property
    def name(self) -> str:
        """The model's name in requests; empty when attached and not given (then the server says)."""
        if self.served_name or self.model is None:
            return self.served_name or ""
        return self.model.rstrip("/").removeprefix("embedded:").rsplit("/", 1)[-1]


class Workload(Section):
    """What the requests ask."""

    endpoint: Literal["chat", "completions"] = Field("chat", description="which of the two OpenAI endpoints")
    prompt: str = Field("Count from 1 to 50.", description="the prompt of the single-stream measurement", min_length=1)
    dataset: Path | None = Field(None, description="prompts of the sweep from a JSONL file", strict=False)
    ignore_eos: bool = Field(True, description="generate exactly the length asked for")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.0, description="0 is greedy")
    seed: int = Field(1, description="of the generated prompts")
    extra_body: dict[str, JsonValue] = Field({}, description="further fields of every request body")
    workers: Count = Field(1, description="clients that share the streams of a cell, one core each")
    workers_on: str | None = Field(
        None,
        pattern=r"^ray(:(//)?[^/\s]+:\d+)?$",
        description="a Ray cluster (ray, ray://HOST:PORT) over whose nodes they go; else they are processes here",
    )


class Targets(Section):
    """What the deployment should reach; a target left out is not judged."""

    single_stream_tok_s: Positive | None = Field(None, description="decode rate of one stream, at least")
    ttft_ms: Positive | None = Field(None, description="time to first token of one stream, at most")
    tpot_ms: Positive | None = Field(None, description="time per output token of one stream, at most")
    best_tok_s: Positive | None = Field(None, description="best throughput of the sweep, at least")


class Question(Section):
    """A question with a known answer."""

    ask: str = Field(description="the question", min_length=1)
    expect: list[str] = Field(description="the answer holds one of these (case ignored)", min_length=1)


class Verify(Section):
    """02: is the server really working?"""

    questions: list[Question] = Field(
        [Question(ask="What is the capital of France? Answer in one sentence.", expect=["Paris"])],
        description="questions with known answers",
        min_length=1,
    )
    max_tokens: Count = Field(256, description="room for an answer, reasoning included")
    greedy_tokens: Count = Field(64, description="length of the greedy answer that is repeated and compared")


class SingleStream(Section):
    """03: one request at a time."""

    output_tokens: list[Count] = Field([128, 512], description="lengths to generate", min_length=1)
    repeats: Count = Field(5, description="requests per length")


class Slo(Section):
    """What a user accepts; requests within all of it are goodput."""

    ttft_ms: Positive | None = Field(None, description="time to first token, at most")
    tpot_ms: Positive | None = Field(None, description="time per output token, at most")


class Sweep(Section):
    """04: throughput and latency over concurrency."""

    concurrency: list[Count] = Field([1, 2, 4, 8, 16, 32, 64, 128, 256], description="cells, ascending", min_length=1)
    prompt_tokens: Count = Field(128, description="length of each (distinct) prompt")
    output_tokens: Count = Field(256, description="length of each answer")
    requests_per_stream: Count = Field(4, description="waves per cell; the first and last do not count as plateau")
    repeats: Count = Field(3, description="measurements of each cell, in shuffled blocks")
    slo: Slo = Field(Slo(), description="limits that make a request count as goodput")
    precision_pct: Positive | None = Field(
        None, description="repeat a cell no more once its mean throughput is known to this, either way (95 %)"
    )
    time_budget_s: Positive | None = Field(None, description="no cell begins once this is spent")

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if list(self.concurrency) != sorted(set(self.concurrency)):
            raise ValueError("concurrency must ascend without repeats")
        return self


class Profile(Section):
    """06: profiler traces."""

    concurrency: list[Count] | None = Field(
        None, description="one trace at each; default: at 1 and at the knee that 04 found", min_length=1
    )
    iterations: Count = Field(20, description="engine steps in the trace")
    output_tokens: Count = Field(64, description="length of the answers while tracing")


class Setting(Section):
    """One setting to try: what it changes at the launch, on top of the server's own options and environment."""

    env: dict[EnvName, EnvText] = Field({}, description="environment variables")
    args: dict[str, JsonValue] = Field({}, description="vLLM's options; null takes one away")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.env and not self.args:
            raise ValueError("a setting needs env or args")
        return self


class Tuning(Section):
    """05: settings that need a relaunch, screened and predicted first."""

    settings: dict[str, Setting] = Field({}, description="name → what it changes")
    concurrency: list[Count] = Field(
        [1], description="judged at each: a setting can win at 1 and lose at 100", min_length=1
    )
    launches: Count = Field(
        6, description="of each setting and of the baseline; with fewer a verdict is rarely reached"
    )
    confirm: Literal["predicted", "all", "none"] = Field(
        "predicted", description="relaunch what is predicted to matter, everything, or nothing"
    )
    minimum_effect_pct: Positive = Field(2.0, description="the smallest change of TPOT worth a reload")
    requests_per_stream: Count = Field(3, description="measured requests per stream and launch")
    screen_rounds: Count = Field(2, description="all-reduce benchmarks of each setting")
    screen_timeout_s: Positive = Field(120.0, description="a setting that hangs is ended after this")
    time_budget_s: Positive | None = Field(None, description="plan no more relaunches than fit into this")


class Ceiling(Section):
    """07: what is known better than it can be measured or read; a value left out is measured, or unknown."""

    bandwidth_gb_s: Positive | None = Field(None, description="memory bandwidth of one device, reading")
    gemm_tflop_s: Positive | None = Field(None, description="matrix-product rate of one device")
    all_reduce_us: Positive | None = Field(None, description="latency of one all-reduce at the decode size")
    all_reduces: Count | None = Field(None, description="all-reduces in a step")
    weight_gb: Positive | None = Field(None, description="dense weights that a step reads, all ranks together")
    kv_bytes_per_token: Positive | None = Field(None, description="KV cache of one token, all layers")
    draft_tokens: Count = Field(3, description="of the speculative decoding considered")
    acceptance: Annotated[float, Field(ge=0, lt=1)] = Field(0.7, description="chance that a draft token is right")


class Variant(Section):
    """One model variant: everything a run needs to know."""

    variant: str = Field(
        description="name; also the folder under outputs/", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
    )
    server: Server
    workload: Workload = Workload()
    targets: Targets = Targets()
    verify: Verify = Verify()
    single_stream: SingleStream = SingleStream()
    sweep: Sweep = Sweep()
    tuning: Tuning = Tuning()
    profile: Profile = Profile()
    ceiling: Ceiling = Ceiling()
    rehearsal: dict[str, JsonValue] = Field({}, description="the law of the stand-in that `--rehearse` starts")
    on_end: list[str] | None = Field(None, description="command to run when the run ends; only with --allow-commands")

    def sections(self) -> dict[str, Any]:
        """Plain values per top-level key, as papermill takes them and as ``run.json`` keeps them."""
        return self.model_dump(mode="json")


def load_variant(path: Path, overrides: Sequence[str] = ()) -> Variant:
    """Read and validate a parameter file.

    Parameters
    ----------
    path : Path
        YAML file.
    overrides : sequence of str
        ``dotted.key=YAML value``, as given to ``--set``; validated like the file.

    Raises
    ------
    BadInput
        One line that names file, line, key and what to write instead.
    """
    document = read_yaml(path)
    for override in overrides:
        document.set(override)
    return _validated(document)


def make_variant(values: Mapping[str, Any], origin: str) -> Variant:
    """Validate values that did not come from a file, such as a notebook's parameters."""
    return _validated(Document(dict(values), origin, {}))


def _validated(document: Document) -> Variant:
    try:
        return Variant.model_validate(document.values)
    except ValidationError as error:
        raise BadInput(_explain(error, document)) from None


def _explain(error: ValidationError, document: Document) -> str:
    """The first problem in one line; how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    path = tuple(part for part in first["loc"] if part != "[key]")
    dotted = ".".join(str(part) for part in path)
    where = document.where(path)
    value = first["input"]
    if first["type"] == "extra_forbidden":
        valid = _keys_at(path[:-1])
        said = f"unknown key {dotted!r}"
        close = nearest(str(path[-1]), valid)
        said += f"; did you mean {close!r}?" if close else f"; valid here: {', '.join(valid)}"
    elif first["type"] == "missing":
        said = f"{dotted!r} is missing"
    else:
        reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        if first["type"] in ("dict_type", "model_type"):
            reason = "should be keys with values; leave it out for the defaults"
        elif first["type"] == "string_pattern_mismatch":
            reason = "should be a plain name: letters and digits, no blanks or slashes"
        shown = "" if isinstance(value, Mapping) else f" = {str(value)[:60]!r}"
        # A message that begins with a name (HF_TOKEN …) keeps it as it is written.
        said = f"{dotted}{shown}: {reason[0].lower() + reason[1:] if reason[1:2].islower() else reason}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {said}{more}"


def _keys_at(path: tuple[int | str, ...]) -> list[str]:
    """Valid keys of the section that ``path`` leads to."""
    model: type[BaseModel] = Variant
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # an index into a list of sections
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
    return sorted(model.model_fields)
