"""Conventions of the notebooks, held by a test so that they stay."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from perfbook import paths
from perfbook.batch.sequence import read_notebook, select, sequence
from perfbook.errors import BadInput
from perfbook.params import Variant

NOTEBOOKS = sorted(paths.notebooks().glob("*.ipynb"))


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def code(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in content(path)["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_the_sequence_is_numbered() -> None:
    assert [n.name for n in sequence()][:4] == ["01_deploy", "02_verify", "03_single_stream", "04_sweep"]
    assert sequence()[-1].name == "08_findings"


def test_committed_without_outputs(notebook: Path) -> None:
    for cell in content(notebook)["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert "papermill" not in cell["metadata"]
    assert "papermill" not in content(notebook)["metadata"]


def test_format_kernel_and_ids(notebook: Path) -> None:
    book = content(notebook)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert book["metadata"]["language_info"]["name"] == "python"
    ids = [cell["id"] for cell in book["cells"]]
    assert len(ids) == len(set(ids))


def test_cells_are_short_and_define_nothing(notebook: Path) -> None:
    for source in code(notebook):
        assert len(source.splitlines()) <= 15
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Lambda)
        assert not any(isinstance(node, kinds) for node in ast.walk(ast.parse(source)))


def test_title_asks_and_the_end_states_limits(notebook: Path) -> None:
    cells = content(notebook)["cells"]
    assert re.match(r"# \d\d · .+\?\n", "".join(cells[0]["source"]))
    assert "".join(cells[-1]["source"]).startswith("**Limits.**")


def test_parameters_cell(notebook: Path) -> None:
    """One per line with a help text, and nothing that papermill's inspection would misread."""
    cells = [c for c in content(notebook)["cells"] if "parameters" in c["metadata"].get("tags", [])]
    assert len(cells) == 1
    for line in "".join(cells[0]["source"]).splitlines():
        assert re.fullmatch(r"[a-z_]+ = [^=#]+  # [^#]+", line), line
    declared = read_notebook(notebook).declares
    assert set(declared) <= {*Variant.model_fields, "run", "runs"}


def test_every_key_of_a_parameter_file_is_declared_somewhere() -> None:
    declared = {name for path in NOTEBOOKS for name in read_notebook(path).declares}
    written = set()
    for path in paths.params().glob("*.yaml"):
        written |= {line.split(":")[0] for line in path.read_text().splitlines() if re.match(r"[a-z_]+:", line)}
    assert written <= declared


def test_dependencies_exist() -> None:
    names = {path.stem for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        book = read_notebook(path)
        assert set(book.requires) | set(book.reads) <= names
        assert all(other < book.name for other in book.requires + book.reads)


def test_every_notebook_is_in_the_readme() -> None:
    readme = (paths.repository() / "README.md").read_text()
    for path in NOTEBOOKS:
        assert f"`{path.stem}`" in readme


def test_only_selects_by_number_or_name() -> None:
    books = sequence()
    assert [b.name for b in select(books, ["04", "03_single_stream"])] == ["03_single_stream", "04_sweep"]
    assert select(books, [""]) == books
    with pytest.raises(BadInput, match="--only 55: no such notebook; there are 01_deploy"):
        select(books, ["55"])


def test_not_a_notebook(tmp_path: Path) -> None:
    path = tmp_path / "x.ipynb"
    path.write_text("{}")
    with pytest.raises(BadInput, match="not a notebook"):
        read_notebook(path)
