"""Where things are, whatever directory a process was started in.

papermill runs notebooks in the launch directory, JupyterLab in the notebook's own: neither may decide.
"""

from __future__ import annotations

import os
from pathlib import Path

from perfbook.errors import BadInput

_MARKERS = ("pyproject.toml", "notebooks", "params")


def repository() -> Path:
    """The checkout: ``PERFBOOK_HOME`` when set, else the one this package is installed from, else one above here."""
    named = os.environ.get("PERFBOOK_HOME")
    candidates = [Path(named)] if named else [Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents]
    for candidate in candidates:
        if all((candidate / marker).exists() for marker in _MARKERS):
            return candidate.resolve()
    raise BadInput(
        f"no perfbook checkout at {candidates[0]}: set PERFBOOK_HOME to the folder that holds notebooks/ and params/"
    )


def notebooks() -> Path:
    """Folder of the numbered notebooks."""
    return repository() / "notebooks"


def params() -> Path:
    """Folder of the parameter files."""
    return repository() / "params"


def outputs() -> Path:
    """Folder of all runs: ``PERFBOOK_OUTPUTS`` when set, else ``outputs/`` of the checkout."""
    named = os.environ.get("PERFBOOK_OUTPUTS")
    return Path(named).resolve() if named else repository() / "outputs"
