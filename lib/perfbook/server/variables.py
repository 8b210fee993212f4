"""Environment variables of the server against what vLLM and NCCL read (pure, files named by the caller)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfbook.server.catalog import Answer
from perfbook.server.flags import retired
from perfbook.server.problems import Problem
from perfbook.yamlfile import nearest

#: Collectives that have only these algorithms; tensor parallelism and sampling use them.
_NEEDS_ONE_OF = {"ring", "pat", "nvls", "collnetdirect"}
_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)[kKmMgG]?")


@cache
def nccl_variables() -> dict[str, dict[str, Any]]:
    """NCCL's variables: kind and values."""
    text = files("perfbook.server").joinpath("nccl.toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = tomllib.loads(text)["variables"]
    return table


def check_variables(values: Mapping[str, str], answer: Answer, where: str) -> list[Problem]:
    """Problems of ``VLLM_*`` and ``NCCL_*`` variables: unknown, retired, refused, or ignored without a word."""
    problems: list[Problem] = []
    for name, value in values.items():
        place = f"{where}.{name}"
        if name.startswith("VLLM_") and not answer.failed:
            problems += _vllm(name, answer, place)
        elif name.startswith("NCCL_"):
            problems += _nccl(name, value, place)
    return problems


def check_conf_files(paths: Mapping[Path, str]) -> list[Problem]:
    """What NCCL's own configuration files set; ``paths`` maps each file to its text."""
    problems = []
    for path, text in paths.items():
        lines = [line.strip() for line in text.splitlines()]
        values = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        if values:
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            problems.append(
                Problem("warning", f"NCCL reads {path}", str(path), f"it sets {shown}", "know it, or move it away")
            )
            problems += [one for key, value in values.items() for one in _nccl(key.strip(), value.strip(), str(path))]
    return problems


def _vllm(name: str, answer: Answer, where: str) -> Iterator[Problem]:
    refused = (answer.refused_variables or {}).get(name)
    if refused is not None:
        yield Problem("error", f"{name} has a value that vLLM refuses", where, refused, "correct the value")
    if name in answer.variables:
        return
    fate = retired()["variables"].get(name)
    if fate is not None:
        since = f" (gone in {fate['gone']})" if "gone" in fate else ""
        yield Problem(
            "error",
            f"{name} was retired",
            where,
            f"{fate['fate']}{since}; it would have no effect",
            f"use: {fate['instead']}",
        )
        return
    close = nearest(name, answer.variables)
    yield Problem(
        "warning", f"{name} is unknown to vLLM {answer.version}", where, "it would have no effect",
        f"did you mean {close}?" if close else "remove it",
    )  # fmt: skip


def _nccl(name: str, value: str, where: str) -> Iterator[Problem]:
    known = nccl_variables()
    entry = known.get(name)
    if entry is None:
        close = nearest(name, known)
        yield Problem(
            "warning", f"{name} is not a variable that NCCL documents", where, "it may have no effect",
            f"did you mean {close}?" if close else "check its spelling",
        )  # fmt: skip
        return
    if entry["kind"] == "integer" and not _INTEGER.fullmatch(value.strip()):
        yield Problem(
            "error", f"{name}={value} is not a number", where, "NCCL would read it as 0 without a word", "give a number"
        )
    elif entry["kind"] == "choice" and value.upper() not in {one.upper() for one in entry["values"]}:
        close = nearest(value, entry["values"])
        yield Problem(
            "error", f"{name}={value} is not a value of it", where, "NCCL would ignore it without a word",
            f"did you mean {close}?" if close else f"one of {', '.join(entry['values'])}",
        )  # fmt: skip
    elif entry["kind"] == "list":
        yield from _listed(name, value, entry["values"], where)


def _listed(name: str, value: str, valid: list[str], where: str) -> Iterator[Problem]:
    """``Ring,Tree``, ``^Tree`` and, per collective, ``ring,tree;allreduce:tree``."""
    folded = {one.lower() for one in valid}
    for part in value.split(";"):
        _, colon, listed = part.rpartition(":")
        names = [word.strip().lstrip("^").lower() for word in listed.split(",") if word.strip()]
        for word in names:
            if word not in folded:
                close = nearest(word, valid)
                yield Problem(
                    "error", f"{name}={value}: {word!r} is not a value of it", where,
                    "NCCL refuses it when the communicators are made",
                    f"did you mean {close}?" if close else f"any of {', '.join(valid)}",
                )  # fmt: skip
        excluded = listed.strip().startswith("^")
        left = folded - set(names) if excluded else set(names)
        if name == "NCCL_ALGO" and not colon and names and not left & _NEEDS_ONE_OF:
            yield Problem(
                "error", f"NCCL_ALGO={value} leaves AllGather and ReduceScatter without an algorithm", where,
                "they have no tree algorithm; since NCCL 2.24 that is an error",
                f"name the collective: NCCL_ALGO='allreduce:{listed.strip()}'",
            )  # fmt: skip
        if name == "NCCL_PROTO" and "ll128" in left and not excluded:
            yield Problem(
                "warning", f"NCCL_PROTO={value} forces LL128", where,
                "it needs a path that keeps 128-byte stores whole, which PCIe does not promise; data may be corrupted",
                "check the result of every collective before believing its speed",
            )  # fmt: skip
