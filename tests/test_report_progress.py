from __future__ import annotations

import io
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import v4

from perfbook.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_live_line_and_keeps_the_last() -> None:
    terminal = Terminal()
    with Progress("loading", stream=terminal) as progress:
        progress.update("shard 1\nof 2")
        progress("shard 2 of 2")
    lines = terminal.getvalue().split("\r\x1b[2K")
    assert lines[1] == "loading"
    assert lines[2].startswith("loading · ")
    assert lines[2].endswith(" · shard 1 of 2")
    assert lines[-1].startswith("loading: done in ")
    assert "shard" not in lines[-1]  # what was last under way is no news once all is done
    assert terminal.getvalue().count("\n") == 1


def test_an_error_is_told_from_success() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="no"), Progress("loading", stream=terminal):
        raise ValueError("no")
    assert "loading: stopped after " in terminal.getvalue()


def test_a_file_or_pipe_gets_nothing() -> None:
    stream = io.StringIO()
    with Progress("loading", stream=stream) as progress:
        progress("half")
    assert stream.getvalue() == ""


def test_a_saved_notebook_keeps_one_plain_line() -> None:
    source = (
        "from perfbook.progress import Progress\n"
        "with Progress('sweep') as progress:\n"
        "    for streams in (1, 2, 4):\n"
        "        progress(f'{streams} streams')\n"
    )
    notebook = v4.new_notebook(cells=[v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs: list[Any] = nbformat.from_dict(notebook.cells[0].outputs)
    assert len(outputs) == 1
    assert list(outputs[0].data) == ["text/plain"]
    assert outputs[0].data["text/plain"].startswith("sweep: done in ")
    assert "streams" not in outputs[0].data["text/plain"]
