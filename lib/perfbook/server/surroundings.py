"""What surrounds a launch: address, devices, disk, key, libraries, prompts, commands."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfbook import paths
from perfbook.errors import BadInput
from perfbook.params import Server, Variant
from perfbook.record import devices
from perfbook.record.devices import Gpu
from perfbook.server import catalog, ports
from perfbook.server.problems import Problem
from perfbook.stream.promptfile import read_prompts

_ROOM_BYTES = 2 * 10**9
_NCCL_FILES = (Path("/etc/nccl.conf"), Path("~/.nccl.conf"))


def check_address(server: Server) -> Iterator[Problem]:
    """Whether the server could listen where it is told to, and who else could reach it there."""
    try:
        ports.address(server.host)
    except OSError as error:
        yield Problem(
            "error", f"{server.host!r} is no address", "server.host", f"{error.strerror or error}",
            "127.0.0.1 for this machine only, 0.0.0.0 for all its networks; IPv6 without brackets",
        )  # fmt: skip
        return
    if not ports.is_free(server.host, 0):
        yield Problem(
            "error", f"{server.host} cannot be bound", "server.host", "it is not an address of this machine",
            "name one of its own, or attach to the server there with server.base_url",
        )  # fmt: skip
    elif server.port and not ports.is_free(server.host, server.port):
        holders = ports.listeners(server.port)
        yield Problem(
            "error", f"port {server.port} is taken", "server.port",
            f"by {holders[0]}" if holders else f"{server.host} does not let it be bound (a port below 1024?)",
            "stop that one, or set server.port to 0 for any free port",
        )  # fmt: skip
    if not ports.is_loopback(server.host) and not server.api_key_env:
        yield Problem(
            "warning", f"{server.host or 'every network'} can be reached from other machines", "server.host",
            "anybody there can use the model and the profiler", "bind 127.0.0.1, or set server.api_key_env",
        )  # fmt: skip


def check_devices(gpus: Sequence[Gpu], args: Mapping[str, Any]) -> Iterator[Problem]:
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


def point_out(server: Server, args: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Problem]:
    """Allowed, but nobody should find out late."""
    yield from check_key(server)
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


def check_key(server: Server) -> Iterator[Problem]:
    """Whether the key is where the parameters say."""
    if server.api_key_env and not os.environ.get(server.api_key_env):
        yield Problem(
            "error", f"the variable {server.api_key_env} is not set", "server.api_key_env",
            "the key is read from it", f"export {server.api_key_env} before you start",
        )  # fmt: skip


def check_prompts(variant: Variant) -> Iterator[Problem]:
    """The data set, which is first read after the load."""
    if variant.workload.dataset is None:
        return
    try:
        read_prompts(variant.workload.dataset, limit=1)
    except BadInput as error:
        yield Problem("error", "no prompts", "workload.dataset", str(error), "correct the path or the file")


def show_commands(variant: Variant) -> Iterator[Problem]:
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


def check_disk() -> Iterator[Problem]:
    """Room for results."""
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


def visible_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that the server would see."""
    named = environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    found = devices.gpus()
    if named is None:
        return found
    wanted = [word.strip() for word in named.split(",")]
    return [gpu for gpu in found if str(gpu.index) in wanted] if all(map(str.isdigit, wanted)) else found


def nccl_files() -> dict[Path, str]:
    """Text of the configuration files that NCCL reads by itself."""
    texts = {}
    for path in _NCCL_FILES:
        try:
            texts[path.expanduser()] = path.expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):
            continue
    return texts
