"""Which notebooks there are, what each declares, and what it depends on.

A notebook says in its own metadata (``metadata.perfbook``) what must have completed before it (``requires``), whose
records it reads (``reads``) and whether the unattended sequence runs it (``unattended``, true unless said
otherwise). So a new notebook is a new file, nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from perfbook import paths
from perfbook.errors import BadInput

PARAMETERS_TAG = "parameters"


@dataclass(frozen=True)
class Notebook:
    """One notebook of the sequence.

    Attributes
    ----------
    declares : tuple of str
        Names assigned in the cell tagged ``parameters``.
    requires, reads : tuple of str
        Notebooks that must have completed; notebooks whose redoing makes this one stale.
    """

    path: Path
    title: str
    declares: tuple[str, ...]
    requires: tuple[str, ...]
    reads: tuple[str, ...]
    unattended: bool

    @property
    def name(self) -> str:
        """Such as ``04_sweep``."""
        return self.path.stem

    def fingerprint(self, parameters: Mapping[str, Any]) -> str:
        """Digest of all that decides what it would measure: its source, its parameters, the library's sources."""
        digest = hashlib.sha256(self.path.read_bytes())
        digest.update(json.dumps(parameters, sort_keys=True).encode())
        digest.update(_library_digest())
        return digest.hexdigest()


def read_notebook(path: Path) -> Notebook:
    """Read a notebook's title, parameters and dependencies; BadInput when it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = content["cells"]
        sources = ["".join(cell["source"]) for cell in cells]
        tags = [cell.get("metadata", {}).get("tags", []) for cell in cells]
        about = content["metadata"].get("perfbook", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a notebook ({error})") from None
    declared = [
        name for source, tag in zip(sources, tags, strict=True) if PARAMETERS_TAG in tag for name in _names(source)
    ]
    title = next((line.lstrip("# ") for line in "\n".join(sources).splitlines() if line.startswith("# ")), path.stem)
    return Notebook(
        path=path,
        title=title,
        declares=tuple(declared),
        requires=tuple(about.get("requires", ())),
        reads=tuple(about.get("reads", ())),
        unattended=bool(about.get("unattended", True)),
    )


def sequence() -> list[Notebook]:
    """All notebooks that an unattended run executes, in order."""
    return [
        notebook
        for path in sorted(paths.notebooks().glob("[0-9][0-9]_*.ipynb"))
        if (notebook := read_notebook(path)).unattended
    ]


def select(notebooks: Sequence[Notebook], only: Iterable[str]) -> list[Notebook]:
    """Those named by number or name (``04`` or ``04_sweep``); all when nothing is named."""
    wanted = [word.strip().removesuffix(".ipynb") for word in only if word.strip()]
    if not wanted:
        return list(notebooks)
    for word in wanted:
        if not any(_is(notebook, word) for notebook in notebooks):
            known = ", ".join(notebook.name for notebook in notebooks)
            raise BadInput(f"--only {word}: no such notebook; there are {known}")
    return [notebook for notebook in notebooks if any(_is(notebook, word) for word in wanted)]


def _is(notebook: Notebook, word: str) -> bool:
    return word in (notebook.name, notebook.name.split("_", 1)[0])


def _names(source: str) -> list[str]:
    return [
        target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


@cache
def _library_digest() -> bytes:
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.digest()
