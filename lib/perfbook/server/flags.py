"""Engine arguments against the options that the installed vLLM has (pure)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from perfbook.server.catalog import Answer, Option, known_flags
from perfbook.server.launch import option_words
from perfbook.server.problems import Problem
from perfbook.yamlfile import nearest

_WHERE = "server.args"


@cache
def retired() -> dict[str, dict[str, Any]]:
    """The curated table: ``flags``, ``settings`` (option → key) and ``variables`` → fate, replacement, source."""
    text = files("perfbook.server").joinpath("retired.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def groups(args: Mapping[str, Any]) -> list[list[str]]:
    """The words of each option, one group per key."""
    return [words for key, value in args.items() if (words := option_words({key: value}))]


def check_flags(args: Mapping[str, Any], answer: Answer) -> list[Problem]:
    """Problems of the options' names and shapes, before any value is looked at.

    Retired and renamed options with their fate, unknown ones with the nearest valid one, abbreviations, the
    same setting given twice, switches with values, ``false`` where there is no ``--no-`` form.
    """
    problems: list[Problem] = []
    first_key: dict[str, str] = {}
    for key, value in args.items():
        words = option_words({key: value})
        if not words:
            continue
        flag = words[0].split(".")[0]
        option = answer.option(flag)
        if option is None and flag != "-O":
            problems.append(_unknown(key, flag, value, answer))
            continue
        if option is not None:
            problems += _shape(key, value, option, answer)
            if option.dest in first_key and "." not in key:
                problems.append(_twice(first_key[option.dest], key, args))
            first_key.setdefault(option.dest, key)
        problems += _retired_settings(key, value)
    return problems


def _unknown(key: str, flag: str, value: Any, answer: Answer) -> Problem:
    where = f"{_WHERE}.{key}"
    name = flag.removeprefix("--no-").lstrip("-")
    version = f"vLLM {answer.version}"
    fate = retired()["flags"].get(name)
    if fate is not None:
        since = f" (gone in {fate['gone']})" if "gone" in fate else ""
        return Problem("error", f"--{name} was retired", where, f"{fate['fate']}{since}", f"use: {fate['instead']}")
    positive = answer.option(f"--{name}")
    if value is False and positive is not None:
        return Problem(
            "error",
            f"--{name} has no --no- form",
            where,
            "false cannot be said on the command line",
            "leave the key out" if positive.is_switch else "give it a value",
        )
    longer = sorted({one for one in known_flags(answer) if one.startswith(name) and not one.startswith("no-")})
    if len(longer) == 1:
        return Problem(
            "error", f"--{name} is an abbreviation", where, "a later version may give it another meaning",
            f"write {longer[0]}",
        )  # fmt: skip
    close = nearest(name, known_flags(answer))
    swallowed = "" if isinstance(value, bool) else "; its value would be taken for the model's name"
    return Problem(
        "error",
        f"--{name} does not exist in {version}",
        where,
        f"the launch would end with exit 2{swallowed}",
        f"did you mean {close}?" if close else "remove it",
    )


def _shape(key: str, value: Any, option: Option, answer: Answer) -> Iterator[Problem]:
    where = f"{_WHERE}.{key}"
    if option.is_switch and not isinstance(value, bool):
        yield Problem(
            "error", f"{option.flags[0]} takes no value", where,
            f"{value!r} would be taken for the model's name", "set it to true, or leave it out",
        )  # fmt: skip
    fate = retired()["flags"].get(option.flags[0].lstrip("-"), {})
    if option.deprecated or fate:
        when = f"in {fate['gone']}" if "gone" in fate else "later"
        yield Problem(
            "warning", f"{option.flags[0]} is deprecated", where,
            f"still there in vLLM {answer.version}, {fate.get('fate', 'on its way out')} {when}",
            f"use: {fate['instead']}" if fate else "see vLLM's release notes",
        )  # fmt: skip


def _twice(one: str, other: str, args: Mapping[str, Any]) -> Problem:
    same = args[one] == args[other]
    return Problem(
        "warning" if same else "error",
        f"{one} and {other} are the same option",
        f"{_WHERE}.{other}",
        "both say the same" if same else "the last one would win without a word",
        "keep one of them",
    )


def _retired_settings(key: str, value: Any) -> Iterator[Problem]:
    """Settings inside of JSON options, whether given as a mapping, as JSON text or with a dot."""
    head, _, rest = key.replace("_", "-").partition(".")
    table = retired()["settings"].get(head)
    if table is None:
        return
    inner: Any = {rest: value} if rest else value
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except ValueError:
            return
    for name in inner if isinstance(inner, Mapping) else ():
        if name in table:
            fate = table[name]
            yield Problem(
                "error", f"{head} {name!r} was retired", f"{_WHERE}.{key}", fate["fate"], f"use: {fate['instead']}"
            )
