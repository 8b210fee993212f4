"""What would fail, found before any weights are loaded.

Three levels of the engine's arguments (names, values, the engine's own configuration) are asked of the
installed vLLM in a process of its own; the rest is looked up here: variables, port, model files, memory,
devices, key, disk. What cannot be known on this machine is listed as skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from perfbook.errors import BadInput, PerfbookError
from perfbook.params import Server, Variant
from perfbook.record.devices import cpu_flags
from perfbook.server.checkpoint import check_checkpoint, read_checkpoint
from perfbook.server.endpoints import Endpoints
from perfbook.server.engine import check_engine, downloaded
from perfbook.server.launch import build_command, local_model, own_environment
from perfbook.server.problems import Problem, render_text
from perfbook.server.surroundings import (
    check_address,
    check_devices,
    check_disk,
    check_key,
    check_prompts,
    nccl_files,
    point_out,
    show_commands,
    visible_gpus,
)
from perfbook.server.variables import check_conf_files

__all__ = ["Problem", "check", "render_text", "require"]


def check(
    variant: Variant,
    *,
    rehearsed: bool = False,
    extra_args: Mapping[str, Any] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Everything that would fail or mislead, errors first.

    Parameters
    ----------
    variant : Variant
        What would be started or attached to.
    rehearsed : bool
        A stand-in will be started in its place: what needs the model's files or the devices is skipped.
    extra_args, extra_env : mapping, optional
        A setting to try on top, as in :func:`perfbook.server.process.start`.
    """
    server = variant.server
    args, environment = {**server.args, **(extra_args or {})}, own_environment(variant, extra_env)
    if server.base_url is not None:
        found = list(_attached(server))
    elif rehearsed:
        found = list(_rehearsed(variant, args, environment))
    else:
        found = list(_owned(variant, args, environment))
    found += [*check_prompts(variant), *show_commands(variant)]
    order = {"error": 0, "warning": 1, "skipped": 2}
    return sorted(found, key=lambda problem: order[problem.level])


def require(
    variant: Variant,
    *,
    rehearsed: bool = False,
    extra_args: Mapping[str, Any] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Like :func:`check`, and refuses to go on with an error.

    Raises
    ------
    BadInput
        The first error in one line, and how many more there are.
    """
    problems = check(variant, rehearsed=rehearsed, extra_args=extra_args, extra_env=extra_env)
    errors = [problem for problem in problems if problem.level == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more: perfbook check lists them)" if len(errors) > 1 else ""
        raise BadInput(f"{errors[0]}{more}")
    return problems


def _owned(variant: Variant, args: dict[str, Any], environment: dict[str, str]) -> Iterator[Problem]:
    server = variant.server
    dashed = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    if misplaced := _misplaced(variant, args):
        yield misplaced
        return
    assert server.model is not None
    gpus = visible_gpus(environment)
    try:
        model = local_model(server.model)
    except PerfbookError as error:
        yield Problem("error", "the model is not there", "server.model", str(error), "correct the path")
        model = None
    model_errors = 0
    if isinstance(model, Path) and model.is_dir():
        read = read_checkpoint(model)
        files = (
            [read]
            if isinstance(read, Problem)
            else list(check_checkpoint(read, dashed, gpus, psutil.virtual_memory().available, cpu_flags()))
        )
        model_errors = sum(one.level == "error" for one in files)
        yield from files
    elif model is not None and not isinstance(model, Path) and not downloaded(model):
        yield Problem(
            "skipped", f"{model} is not on this disk", "server.model",
            "what its own files ask for is not known yet", "download it first, or let the launch do so",
        )  # fmt: skip
    yield from check_engine(variant, args, environment, model, model_errors)
    yield from check_conf_files(nccl_files())
    yield from check_address(server)
    yield from check_devices(gpus, dashed)
    yield from point_out(server, dashed, environment)
    yield from check_disk()


def _rehearsed(variant: Variant, args: dict[str, Any], environment: dict[str, str]) -> Iterator[Problem]:
    """What a stand-in's launch can fail at, and what only the machine itself will tell."""
    if misplaced := _misplaced(variant, args):
        yield misplaced
        return
    yield from check_engine(variant, args, environment, None, 0)
    yield from check_disk()
    for what, where in (
        ("the model's files", "server.model"),
        ("GPUs, memory and who holds them", "devices"),
        (f"port {variant.server.port} of {variant.server.host}", "server.port"),
    ):
        yield Problem("skipped", what, where, "not needed to rehearse", "perfbook check, on the machine itself")


def _misplaced(variant: Variant, args: dict[str, Any]) -> Problem | None:
    try:
        build_command(variant, port=1, model="-", traces=Path("/"), extra_args=args)
    except BadInput as error:
        return Problem("error", "an option has its own key", "server.args", str(error), "move it there")
    return None


def _attached(server: Server) -> Iterator[Problem]:
    assert server.base_url is not None
    key = os.environ.get(server.api_key_env) if server.api_key_env else None
    yield from check_key(server)
    endpoints = Endpoints(server.base_url, key, server.verify_tls)
    try:
        served = endpoints.models()
    except PerfbookError as error:
        yield Problem(
            "error", "the server cannot be used", "server.base_url", str(error), "start it, or correct the address"
        )
    else:
        if server.name and server.name not in served:
            yield Problem(
                "error", f"{server.name!r} is not served there", "server.served_name",
                f"it serves {', '.join(served) or 'nothing'}", "name one of these",
            )  # fmt: skip
        if not endpoints.can_profile():
            yield Problem(
                "warning", "its profiler is not armed", "server.base_url",
                "06 can look from outside only", "start it with vLLM's --profiler-config",
            )  # fmt: skip
    if not server.verify_tls:
        yield Problem(
            "warning", "the certificate is not checked", "server.verify_tls",
            "anybody on the way could answer and see the key", "set it to true where you can",
        )  # fmt: skip
    if server.log_file is None and not server.commands.read_log:
        yield Problem("skipped", "what its log says", "server.log_file", "no log is named", "name a copy of it")
    elif server.log_file is not None and not server.log_file.is_file():
        yield Problem("error", f"no file {server.log_file}", "server.log_file", "it cannot be read", "correct the path")
    yield Problem(
        "skipped", "arguments, environment, devices and memory of the server", "server.base_url",
        "they belong to a server that perfbook does not own", "ask its owner",
    )  # fmt: skip
