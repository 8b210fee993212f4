"""The engine's arguments and variables, asked of the installed vLLM: names, values, its own configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfbook.params import Variant
from perfbook.server import catalog
from perfbook.server.flags import check_flags, groups
from perfbook.server.problems import Problem
from perfbook.server.variables import check_variables


def check_engine(
    variant: Variant, args: dict[str, Any], environment: dict[str, str], model: Path | str | None, model_errors: int
) -> Iterator[Problem]:
    """The three levels of the engine's arguments, and the variables."""
    remote_code = bool(args.get("trust-remote-code") or args.get("trust_remote_code"))
    here = isinstance(model, Path) or (model is not None and downloaded(model))
    configure = here and not remote_code and not model_errors
    whole = catalog.environment_for(environment)
    answer = catalog.ask(groups(args), str(model or variant.server.name), whole, configure=configure)
    if answer.failed:
        yield Problem(
            "skipped", "engine arguments and VLLM_ variables", "server.args", answer.failed,
            "install vLLM here, or check where it is",
        )  # fmt: skip
    else:
        yield from check_flags(args, answer)
        if answer.parse_error:
            yield _parse_problem(answer.parse_error)
        elif answer.config_error:
            yield Problem(
                "error", "vLLM refuses this configuration", "server.args", answer.config_error,
                "change what the message names",
            )  # fmt: skip
        elif remote_code and here:
            yield Problem(
                "skipped", "the engine's configuration", "server.args.trust-remote-code",
                "building it would run the checkpoint's code", "the launch itself will tell",
            )  # fmt: skip
    inherited = {
        key: value for key, value in os.environ.items()
        if key.startswith(("VLLM_", "NCCL_")) and key not in environment
    }  # fmt: skip
    yield from check_variables(environment, answer, "server.env")
    yield from check_variables(inherited, answer, "environment")


def _parse_problem(message: str) -> Problem:
    """argparse's ``argument --x: invalid …`` with the key in its place."""
    message = re.sub(r"1 validation error for \w+\s+([\w.]+)\s+(.*?) \[type=.*", r"\1: \2", message, flags=re.S)
    named, colon, reason = message.removeprefix("argument ").partition(": ")
    if not (message.startswith("argument ") and colon):
        return Problem("error", "vLLM refuses a value", "server.args", message, "correct the value")
    where = f"server.args.{named.split('/')[0].lstrip('-')}"
    return Problem("error", "vLLM refuses a value", where, reason, "correct the value")


def downloaded(model: str) -> bool:
    """Whether the hub's cache on this disk has the model's config.json."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False
