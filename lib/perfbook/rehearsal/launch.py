"""One launch of the stand-in: its own options, vLLM's options, the environment, and the law they add up to."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfbook.errors import BadInput
from perfbook.rehearsal.law import Law, Setting, load_law
from perfbook.rehearsal.steptime import active_settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Launch:
    """Everything fixed at the start of the process; ``law`` has the limits that vLLM's options set."""

    law: Law
    active: tuple[Setting, ...]
    host: str
    port: int
    model: str
    served_name: str
    number: int
    load_s: float
    profile_dir: Path | None
    profile_iterations: int
    dev_mode: bool
    args: Mapping[str, Any]

    @property
    def eager(self) -> bool:
        """Whether compilation and graphs are off."""
        return self.args.get("enforce-eager") is True


def read_command_line(argv: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Parse the command line; what is not the stand-in's own is read as vLLM's.

    Raises
    ------
    BadInput
        The law is not one, an option cannot be read, or the host is not loopback.
    """
    parser = argparse.ArgumentParser(
        prog="python -m perfbook.rehearsal.server", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--law", type=Path, required=True, help="law file, or a parameter file with a rehearsal: section"
    )
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", default=None, help="model name in requests")
    parser.add_argument("--model", default=None, help="shown in the log; never read")
    parser.add_argument("--profile-dir", type=Path, default=None, help="arms the profiler, like --profiler-config")
    parser.add_argument("--launch", type=int, default=None, help="seeds this launch's variation; default: the time")
    parser.add_argument("--load-s", type=float, default=None, help="seconds until ready; default: the law's")
    own, rest = parser.parse_known_args(argv)
    if own.host not in LOOPBACK:
        raise BadInput(f"--host {own.host}: the stand-in serves loopback only; use 127.0.0.1")
    positional, args = vllm_options(rest)
    law = _with_limits(load_law(own.law), args)
    profiler = _profiler(args)
    model = own.model or positional or f"/models/{own.law.stem}"
    return Launch(
        law=law,
        active=active_settings(law, env, args),
        host=own.host,
        port=own.port,
        model=model,
        served_name=own.served_model_name or model,
        number=own.launch if own.launch is not None else time.time_ns(),
        load_s=own.load_s if own.load_s is not None else law.load.compressed_s,
        profile_dir=own.profile_dir or profiler[0],
        profile_iterations=profiler[1],
        dev_mode=env.get("VLLM_SERVER_DEV_MODE") == "1",
        args=args,
    )


def vllm_options(words: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The positional model and ``{"max-num-seqs": 128, "enforce-eager": True}`` from ``--key value`` words.

    Underscores become dashes; numbers and JSON objects are decoded; an option without a value is True.
    """
    positional: str | None = None
    options: dict[str, Any] = {}
    key: str | None = None
    for word in words:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            name, equals, value = word.lstrip("-").partition("=")
            key = name.replace("_", "-")
            options[key] = _value(value) if equals else True
            key = None if equals else key
        elif key is not None:
            options[key] = _value(word)
            key = None
        elif positional is None:
            positional = word
    return positional, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _with_limits(law: Law, args: Mapping[str, Any]) -> Law:
    """The law with the limits that options of the same name set."""
    limits = {
        field: _whole(args[option], option)
        for field, option in (
            ("max_num_seqs", "max-num-seqs"),
            ("max_num_batched_tokens", "max-num-batched-tokens"),
        )
        if option in args
    }
    model = {
        field: _whole(args[option], option)
        for field, option in (("max_model_len", "max-model-len"), ("tensor_parallel", "tensor-parallel-size"))
        if option in args
    }
    return law.model_copy(
        update={"limits": law.limits.model_copy(update=limits), "model": law.model.model_copy(update=model)}
    )


def _whole(value: Any, option: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"--{option} {value}: give a whole number above 0")
    return value


def _profiler(args: Mapping[str, Any]) -> tuple[Path | None, int]:
    """Folder and iteration limit (0: none) of ``--profiler-config``, written as JSON or with dotted keys."""
    config = dict(args["profiler-config"]) if isinstance(args.get("profiler-config"), dict) else {}
    prefix = "profiler-config."
    config |= {key[len(prefix) :].replace("-", "_"): value for key, value in args.items() if key.startswith(prefix)}
    if config.get("profiler") != "torch" or not config.get("torch_profiler_dir"):
        return None, 0
    return Path(str(config["torch_profiler_dir"])), int(config.get("max_iterations", 0))
