"""Data flows one way: a room uses what stands before it in this list, never what stands after it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import perfbook

ORDER = [
    "errors", "units", "http", "masking", "yamlfile", "paths", "params", "progress", "stats", "record", "stream",
    "nodes", "server", "trace", "micro", "ceiling", "rehearsal", "hardware", "figures", "report", "desk", "study",
    "batch", "reference", "cluster", "cli", "__main__",
]  # fmt: skip
ROOT = Path(perfbook.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "perfbook":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("perfbook."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("perfbook."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_backwards(path: Path) -> None:
    place = ORDER.index(room(path))
    for name in imported_rooms(path):
        assert name == "__version__" or ORDER.index(name) <= place, f"{room(path)} uses {name}"
