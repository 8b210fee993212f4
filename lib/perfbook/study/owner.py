"""What the owner of an attached server lets perfbook do (``server.commands``), at the places where it is of use.

Each function says why a command did not run instead of running it; only ``--allow-commands`` makes one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from perfbook.desk import Desk
from perfbook.errors import ServerFailed
from perfbook.masking import MASKED
from perfbook.params import Server, Variant
from perfbook.progress import Progress
from perfbook.server import commands, ports
from perfbook.server.handle import api_key
from perfbook.stream.hostload import is_this_host

Say = Callable[[str], None]
LOG = "server-attached.log"


def why_not_freed(desk: Desk) -> str:
    """Why the devices of an attached server cannot be freed for a measurement; empty when they can, or it is ours."""
    server = desk.variant.server
    if server.base_url is None:
        return ""
    theirs = "the server was not started here: its devices are its owner's"
    if not is_this_host(urlsplit(server.base_url).hostname or ""):
        return f"{theirs}, and on another host"
    missing = [why for name in ("stop", "start") if (why := commands.refusal(desk.variant, name, desk.run))]
    return f"{theirs}; {missing[0]}" if missing else ""


@contextmanager
def devices_freed(desk: Desk, say: Say) -> Iterator[str]:
    """An attached server stopped for the block, and started again after it whatever happened; yields why it was not."""
    reason = why_not_freed(desk)
    if desk.variant.server.base_url is None or reason:
        yield reason
        return
    try:
        _run(desk, "stop", say)
    except ServerFailed as error:  # it works for others, or its owner's command failed
        yield str(error)
        return
    try:
        holders = ports.listeners(urlsplit(desk.variant.server.base_url).port or 0)
        yield f"its port is still held by {holders[0]}: the server is on another host, or goes on" if holders else ""
    finally:
        _run(desk, "start", say)


def described(desk: Desk) -> Variant:
    """The variant, for what is computed from the model: an attached server's as its log describes it."""
    engine = desk.run.record("engine")
    if desk.variant.server.base_url is None or engine is None or not engine.get("model"):
        return desk.variant
    args = {"tensor-parallel-size": engine["tensor_parallel_size"], "dtype": engine["dtype"]}
    server = Server(model=engine["model"], args={key: value for key, value in args.items() if value is not None})
    return desk.variant.model_copy(update={"server": server})


def why_no_traces(desk: Desk) -> str:
    """Why the traces of an attached server are not fetched; empty when they are, or lie here anyway."""
    if desk.variant.server.base_url is None:
        return ""
    return commands.refusal(desk.variant, "collect_traces", desk.run)


def collect_traces(desk: Desk) -> None:
    """Have the owner's command copy an attached server's trace files into ``traces/``, where it is allowed to.

    Raises
    ------
    ServerFailed
        The command failed.
    """
    if desk.variant.server.base_url is not None and not why_no_traces(desk):
        with Progress("the owner's command") as progress:
            _run(desk, "collect_traces", progress)


def read_log(desk: Desk) -> Path | str:
    """The log of an attached server as its owner's command prints it, kept in the run; or why there is none."""
    if reason := commands.refusal(desk.variant, "read_log", desk.run):
        return reason
    try:
        with Progress("the owner's command") as progress:
            text = _run(desk, "read_log", progress)
    except ServerFailed as error:
        return str(error)
    key = api_key(desk.variant)
    path = desk.run.path / LOG
    path.write_text(text.replace(key, MASKED) if key else text, encoding="utf-8")
    return path


def _run(desk: Desk, name: commands.Name, say: Say) -> str:
    """Run it, and keep that it ran."""
    said = commands.run_command(desk.variant, name, desk.run, say=say)
    desk.record("owner_command", {"command": getattr(desk.variant.server.commands, name)}, key=name)
    return said
