"""What would fail, found before any weights are loaded.

Three levels of the engine's arguments (names, values, the engine's own configuration) are asked of the
installed vLLM in a process of its own; the rest is looked up here: variables, port, model files, memory,
devices, key, disk. What cannot be known on this machine is listed as skipped.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from perfbook import paths
from perfbook.errors import BadInput, PerfbookError
from perfbook.params import Server, Variant
from perfbook.record import devices
from perfbook.record.devices import Gpu
from perfbook.server import catalog, ports
from perfbook.server.checkpoint import check_checkpoint, read_checkpoint
from perfbook.server.endpoints import Endpoints
from perfbook.server.flags import check_flags, groups
from perfbook.server.launch import build_command, local_model, own_environment
from perfbook.server.problems import Problem
from perfbook.server.variables import check_conf_files, check_variables
from perfbook.stream.workload import read_prompts

__all__ = ["Problem", "check", "render_text", "require"]

_ROOM_BYTES = 2 * 10**9
_NCCL_FILES = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
    found += [*_prompts(variant), *_commands(variant)]
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


def render_text(problems: Sequence[Problem]) -> str:
    """The list for a terminal of 80 columns."""
    if not problems:
        return "nothing found: the launch should work\n"
    lines = []
    for problem in problems:
        lines += textwrap.wrap(f"{problem.level:<8} {problem.what}", 80, subsequent_indent=" " * 9)
        for label, text in (("where", problem.where), ("why", problem.why), ("do", problem.do)):
            lines += textwrap.wrap(f"{'':<9}{label + ':':<7}{text}", 80, subsequent_indent=" " * 16)
    counts = {level: sum(one.level == level for one in problems) for level in ("error", "warning", "skipped")}
    lines.append(f"{counts['error']} errors, {counts['warning']} warnings, {counts['skipped']} not checked")
    return "\n".join(lines) + "\n"


def _owned(variant: Variant, args: dict[str, Any], environment: dict[str, str]) -> Iterator[Problem]:
    server = variant.server
    dashed = {key.lstrip("-").replace("_", "-"): value for key, value in args.items()}
    if misplaced := _misplaced(variant, args):
        yield misplaced
        return
    assert server.model is not None
    gpus = _visible(environment)
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
            else list(check_checkpoint(read, dashed, gpus, psutil.virtual_memory().available))
        )
        model_errors = sum(one.level == "error" for one in files)
        yield from files
    elif model is not None and not isinstance(model, Path) and not _downloaded(model):
        yield Problem(
            "skipped", f"{model} is not on this disk", "server.model",
            "what its own files ask for is not known yet", "download it first, or let the launch do so",
        )  # fmt: skip
    yield from _engine(variant, args, environment, model, model_errors)
    yield from check_conf_files(_conf_files())
    yield from _port(server)
    yield from _devices(gpus, dashed)
    yield from _pointed_out(server, dashed, environment)
    yield from _disk()


def _rehearsed(variant: Variant, args: dict[str, Any], environment: dict[str, str]) -> Iterator[Problem]:
    """What a stand-in's launch can fail at, and what only the machine itself will tell."""
    if misplaced := _misplaced(variant, args):
        yield misplaced
        return
    yield from _engine(variant, args, environment, None, 0)
    yield from _disk()
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


def _engine(
    variant: Variant, args: dict[str, Any], environment: dict[str, str], model: Path | str | None, model_errors: int
) -> Iterator[Problem]:
    """The three levels of the engine's arguments, and the variables."""
    remote_code = bool(args.get("trust-remote-code") or args.get("trust_remote_code"))
    here = isinstance(model, Path) or (model is not None and _downloaded(model))
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
    named, colon, reason = message.removeprefix("argument ").partition(": ")
    flag = named.split("/")[0].lstrip("-")
    where = f"server.args.{flag}" if message.startswith("argument ") and colon else "server.args"
    return Problem("error", "vLLM refuses a value", where, reason if colon else message, "correct the value")


def _attached(server: Server) -> Iterator[Problem]:
    assert server.base_url is not None
    key = os.environ.get(server.api_key_env) if server.api_key_env else None
    yield from _key(server)
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
    if server.log_file is None:
        yield Problem("skipped", "what its log says", "server.log_file", "no log is named", "name a copy of it")
    elif not server.log_file.is_file():
        yield Problem("error", f"no file {server.log_file}", "server.log_file", "it cannot be read", "correct the path")
    yield Problem(
        "skipped", "arguments, environment, devices and memory of the server", "server.base_url",
        "they belong to a server that perfbook does not own", "ask its owner",
    )  # fmt: skip


def _port(server: Server) -> Iterator[Problem]:
    if server.port == 0 or ports.is_free(server.host, server.port):
        return
    holders = ports.listeners(server.port)
    yield Problem(
        "error", f"port {server.port} is taken", "server.port",
        f"by {holders[0]}" if holders else f"{server.host} cannot be bound",
        "stop that one, or set server.port to 0 for any free port",
    )  # fmt: skip


def _devices(gpus: Sequence[Gpu], args: Mapping[str, Any]) -> Iterator[Problem]:
    """Who holds the GPUs, and whether what is left is enough."""
    share = args.get("gpu-memory-utilization", 0.9)
    for gpu in gpus:
        free = gpu.memory_bytes - gpu.used_bytes
        short = isinstance(share, int | float) and free < share * gpu.memory_bytes
        if gpu.holders or short:
            who = ", ".join(f"pid {pid}" for pid in gpu.holders) or "a process that the driver does not name"
            yield Problem(
                "error" if short else "warning", f"GPU {gpu.index} is in use", "devices",
                f"{who}; {free / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB are free",
                "stop that one, or lower gpu-memory-utilization",
            )  # fmt: skip
    named = catalog.installed()
    if not gpus and named is not None and named[0] == "vllm":
        yield Problem("skipped", "GPUs: none on this machine", "devices", "they are another host's", "check there")


def _pointed_out(server: Server, args: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Allowed, but nobody should find out late."""
    yield from _key(server)
    if args.get("trust-remote-code"):
        yield Problem(
            "warning", "the checkpoint's own Python code will run", "server.args.trust-remote-code",
            "with your rights, on this machine", "read that code first",
        )  # fmt: skip
    for library in environment.get("LD_PRELOAD", "").replace(":", " ").split():
        there = Path(library).is_file() or "/" not in library
        yield Problem(
            "warning",
            f"{library} is loaded into every process of the server" if there else f"{library} does not exist",
            "server.env.LD_PRELOAD",
            "it can change whatever it likes" if there else "the loader only prints a line and goes on without it",
            "know it" if there else "correct the path",
        )
    if server.host not in _LOOPBACK and not server.api_key_env:
        yield Problem(
            "warning", f"{server.host} can be reached from other machines", "server.host",
            "anybody there can use the model and the profiler", "bind 127.0.0.1, or set server.api_key_env",
        )  # fmt: skip


def _key(server: Server) -> Iterator[Problem]:
    if server.api_key_env and not os.environ.get(server.api_key_env):
        yield Problem(
            "error", f"the variable {server.api_key_env} is not set", "server.api_key_env",
            "the key is read from it", f"export {server.api_key_env} before you start",
        )  # fmt: skip


def _prompts(variant: Variant) -> Iterator[Problem]:
    """The data set, which is first read after the load."""
    if variant.workload.dataset is None:
        return
    try:
        read_prompts(variant.workload.dataset, limit=1)
    except BadInput as error:
        yield Problem("error", "no prompts", "workload.dataset", str(error), "correct the path or the file")


def _commands(variant: Variant) -> Iterator[Problem]:
    """Commands of a parameter file, shown before anybody allows them."""
    named = {f"server.commands.{name}": words for name, words in variant.server.commands if words}
    if variant.on_end:
        named["on_end"] = variant.on_end
    for where, words in named.items():
        found = shutil.which(words[0]) if words else None
        yield Problem(
            "warning", f"may run: {' '.join(words)}" if found else f"{words[0]!r} is not a program here", where,
            "only with --allow-commands", "read it before you allow it" if found else "correct it",
        )  # fmt: skip


def _disk() -> Iterator[Problem]:
    try:
        folder = paths.outputs()
    except BadInput:
        return
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < _ROOM_BYTES:
        yield Problem(
            "warning", f"only {free / 1e9:.1f} GB are free for results", str(folder),
            "one profile of many ranks can take gigabytes", "free some, or set PERFBOOK_OUTPUTS",
        )  # fmt: skip


def _visible(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that the server would see."""
    named = environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    found = devices.gpus()
    if named is None:
        return found
    wanted = [word.strip() for word in named.split(",")]
    return [gpu for gpu in found if str(gpu.index) in wanted] if all(map(str.isdigit, wanted)) else found


def _conf_files() -> dict[Path, str]:
    texts = {}
    for path in _NCCL_FILES:
        try:
            texts[path.expanduser()] = path.expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):
            continue
    return texts


def _downloaded(model: str) -> bool:
    """Whether the hub's cache on this disk has the model's config.json."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False
