"""Execute one notebook with papermill, and say honestly whether it ran.

papermill's own return is not enough: a kernel that dies leaves cells stamped completed that never ran, and
``sys.exit(0)`` in a cell ends a notebook early without an error.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from perfbook.batch.sequence import Notebook

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
Status = Literal["completed", "failed", "skipped", "interrupted"]


@dataclass(frozen=True)
class Outcome:
    """How a notebook ended: its status, the reason in one line when it is not ``completed``, and the seconds taken."""

    status: Status
    reason: str = ""
    seconds: float = 0.0


def execute(notebook: Notebook, output: Path, parameters: Mapping[str, Any]) -> Outcome:
    """Run a notebook into ``output`` with the parameters it declares.

    KeyboardInterrupt passes through; the output then holds what had finished.
    """
    # The environment's own kernel, even where the user's folder has another one of the same name.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    for logger in ("papermill", "asyncio"):  # what they say of a broken cell stands in the outcome, without tracebacks
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    started = time.monotonic()
    reason = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            papermill.execute_notebook(
                str(notebook.path),
                str(output),
                parameters=dict(parameters),
                kernel_name="python3",
                progress_bar=False,
                log_output=False,
                cwd=str(notebook.path.parent),
                # jupyter interrupts a kernel before it ends it; that would stand on the terminal as an ERROR
                extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
            )
    except PapermillExecutionError as error:
        reason = one_line(f"{error.ename}: {error.evalue}")
    except DeadKernelError:
        reason = "the notebook's kernel died (out of memory, or killed from outside)"
    except Exception as error:  # a broken notebook or a full disk ends this notebook, not the campaign
        reason = one_line(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - started
    reason = reason or unfinished(output)
    return Outcome("failed", reason, seconds) if reason else Outcome("completed", "", seconds)


def unfinished(executed: Path) -> str:
    """Why an executed notebook is not complete, in one line; empty when it is."""
    try:
        content = json.loads(executed.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "the executed notebook was not written"
    if content["metadata"].get("papermill", {}).get("exception"):
        return "a cell ended with an exception"
    for number, cell in enumerate(content["cells"], start=1):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        status = cell["metadata"].get("papermill", {}).get("status")
        if status != "completed" or cell.get("execution_count") is None:
            return f"cell {number} did not run to its end (the kernel ended early)"
    return ""


def one_line(text: str) -> str:
    """An error's text without colour codes and line breaks, at most 600 characters."""
    return " ".join(_ANSI.sub("", text).split())[:600]
