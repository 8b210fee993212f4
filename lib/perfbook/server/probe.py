"""Asks the installed vLLM about options, variables and a configuration; run as a script in a process of its
own.

Importing vLLM takes seconds, prints, and may fail, so it never happens in perfbook's own process. Reads a
question from standard input and writes the answer to the file named as argument, both JSON. No weights are
loaded.

Question: ``options``, a list of [option, word…] groups; ``model``; ``configure``, whether to build the
engine's configuration. Options that this vLLM does not have are left out of the parse: the asker reports them
by itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn


class _Refused(Exception):
    """argparse's message, instead of an exit."""


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _first(*names: str) -> Any:
    """The attribute of the first module that has it: vLLM moves these."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(names)} in this vLLM")


def _parser() -> Any:
    make = _first(
        "vllm.entrypoints.launchers.cli_args.make_arg_parser", "vllm.entrypoints.openai.cli_args.make_arg_parser"
    )
    flexible = _first("vllm.utils.argparse_utils.FlexibleArgumentParser", "vllm.utils.FlexibleArgumentParser")
    parser = make(flexible(prog="vllm"))
    parser.error = _refuse
    return parser


def _option(action: argparse.Action) -> dict[str, Any]:
    choices = list(action.choices) if action.choices is not None else None
    return {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "nargs": action.nargs,
        "choices": [str(choice) for choice in choices] if choices is not None else None,
        "deprecated": "Deprecated" in type(action).__name__,
    }


def _environment() -> tuple[list[str], dict[str, str]]:
    """Variables that this vLLM knows, and those set whose values it refuses."""
    envs = importlib.import_module("vllm.envs")
    known = sorted(envs.environment_variables)
    refused = {}
    for name in known:
        if name in os.environ:
            try:
                getattr(envs, name)
            except Exception as error:  # any failure of any reader is the answer
                refused[name] = str(error) or type(error).__name__
    return known, refused


def _message(error: BaseException) -> str:
    """The sentence in a pydantic report, else the exception's own."""
    lines = str(error).splitlines() or [type(error).__name__]
    if "validation error" in lines[0] and len(lines) > 1:
        wanted = next((line for line in lines[1:] if line.startswith("  ")), lines[1])
        where = "" if "rror, " in wanted else f"{lines[1].strip()}: "
        return (where + wanted.strip().partition(" [type=")[0]).removeprefix("Value error, ")
    return " ".join(lines)[:600]


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The installed vLLM's answer."""
    import vllm

    parser = _parser()
    table = parser._option_string_actions
    known, refused = _environment()
    found: dict[str, Any] = {
        "version": vllm.__version__,
        "options": [_option(action) for action in parser._actions if action.option_strings],
        "variables": known,
        "refused_variables": refused,
        "parse_error": None,
        "config_error": None,
        "configured": False,
    }
    words = ["--model", question["model"]]
    for group in question["options"]:
        if group[0].split(".")[0] in table or group[0] == "-O":
            words += group
    try:
        namespace = parser.parse_args(words)
    except _Refused as error:
        found["parse_error"] = str(error)
        return found
    except (SystemExit, Exception) as error:  # some option readers raise their own
        found["parse_error"] = _message(error)
        return found
    if question["configure"]:
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs

            AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
            found["configured"] = True
        except (SystemExit, Exception) as error:
            found["config_error"] = _message(error)
    return found


if __name__ == "__main__":
    try:
        result = answer(json.load(sys.stdin))
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {_message(error)}"}
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")
