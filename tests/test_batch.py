"""The batch with small notebooks of its own: what fails is said, what was measured stays, dependents are skipped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perfbook.batch.campaign import Options, run_campaign
from perfbook.batch.execute import one_line, unfinished
from perfbook.batch.terminal import time_left
from perfbook.errors import BadInput
from perfbook.record.run import Run

VARIANT = "variant: demo\nserver:\n  base_url: http://127.0.0.1:9\n"
RECORD = (
    "from perfbook.record.run import Run\nr = Run.open(run)\nr.begin('{0}')\n"
    "r.append('{0}', 'seen', {{'workload': workload}})"
)


def write_notebook(folder: Path, name: str, *cells: str, **about: Any) -> None:
    sources = ["workload = None  # ours\nrun = None  # ours", *cells]
    book = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            "language_info": {"name": "python"},
            "perfbook": about,
        },
        "cells": [
            {"cell_type": "markdown", "id": "title", "metadata": {}, "source": f"# {name}?"},
            *(
                {
                    "cell_type": "code",
                    "id": f"c{i}",
                    "metadata": {"tags": ["parameters"]} if i == 0 else {},
                    "source": source,
                    "outputs": [],
                    "execution_count": None,
                }
                for i, source in enumerate(sources)
            ),
        ],
    }
    (folder / f"{name}.ipynb").write_text(json.dumps(book))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with notebooks of the test's own."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "params").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "params" / "demo.yaml").write_text(VARIANT)
    monkeypatch.setenv("PERFBOOK_HOME", str(tmp_path))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    monkeypatch.delenv("PERFBOOK_OUTPUTS", raising=False)
    return tmp_path


def run(home: Path, **options: Any) -> tuple[int, dict[str, tuple[str, str]]]:
    code = run_campaign([home / "params" / "demo.yaml"], Options(**options))
    entries = Run.open("demo").header["notebooks"]
    return code, {entry["notebook"]: (entry["status"], entry["reason"]) for entry in entries}


def test_all_complete(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_notebook(home / "notebooks", "01_a", RECORD.format("01_a"))
    code, states = run(home, overrides=["workload.seed=7"])
    assert (code, states) == (0, {"01_a": ("completed", "")})
    last = Run.open("demo")
    assert last.record("seen")["workload"]["seed"] == 7
    assert last.header["finished"] is not None
    assert capsys.readouterr().out == f"{last.path / 'report.html'}\n"
    for name in ("report.html", "results.md", "summary.json"):
        assert (last.path / name).stat().st_size > 0
    assert (home / "outputs" / "index.html").exists()


def test_failures_are_told_and_do_not_stop_what_does_not_depend_on_them(home: Path) -> None:
    books = home / "notebooks"
    write_notebook(books, "01_raises", "1 / 0")
    write_notebook(books, "02_needs", "x = 1", requires=["01_raises"])
    write_notebook(books, "03_dies", "import os\nos._exit(3)", "x = 1")
    write_notebook(books, "04_leaves", "import sys\nsys.exit(0)", "x = 1")
    write_notebook(books, "05_fine", "x = 1", reads=["01_raises"])
    code, states = run(home)
    assert code == 1
    assert states["01_raises"] == ("failed", "ZeroDivisionError: division by zero")
    assert states["02_needs"] == ("skipped", "01_raises failed")
    assert states["03_dies"] == ("failed", "the notebook's kernel died (out of memory, or killed from outside)")
    assert states["04_leaves"][0] == "failed"
    assert states["05_fine"] == ("completed", "")
    page = (Run.open("demo").path / "report.html").read_text()
    assert "ZeroDivisionError" in page
    assert "01_raises failed" in page


def test_resume_keeps_what_is_unchanged_and_redoes_what_depends_on_a_change(home: Path) -> None:
    books = home / "notebooks"
    for name, reads in (("01_a", []), ("02_b", []), ("03_c", ["02_b"])):
        write_notebook(books, name, RECORD.format(name), reads=reads)
    assert run(home)[0] == 0
    first = Run.open("demo")
    assert len(first.history()) == 6
    assert run(home, resume=True)[0] == 0
    assert Run.open("demo") == first
    assert len(first.history()) == 6
    write_notebook(books, "02_b", RECORD.format("02_b"), "changed = True", reads=[])
    assert run(home, resume=True)[0] == 0
    assert [r["notebook"] for r in first.history()[6:]] == ["02_b", "02_b", "03_c", "03_c"]


def test_wrong_answers_stop_the_measuring_unless_forced(home: Path) -> None:
    books = home / "notebooks"
    wrong = (
        "from perfbook.record.run import Run\nRun.open(run).append('02_verify', 'verdict_on_answers', {'ok': False})"
    )
    write_notebook(books, "02_verify", wrong)
    write_notebook(books, "03_b", RECORD.format("03_b"), requires=["02_verify"])
    code, states = run(home)
    assert code == 1
    assert states["03_b"] == (
        "skipped",
        "the answers are wrong (02_verify); --force measures all the same, and marks it",
    )
    code, states = run(home, force=True)
    assert (code, states["03_b"][0]) == (0, "completed")
    assert json.loads((Run.open("demo").path / "summary.json").read_text())["answers"] == "wrong"


def test_bad_input_starts_nothing(home: Path) -> None:
    write_notebook(home / "notebooks", "01_a", "x = 1")
    with pytest.raises(BadInput, match="--only 07"):
        run(home, only=["07"])
    with pytest.raises(BadInput, match="allow it with --allow-commands"):
        run(home, overrides=["on_end=[touch, x]"])
    assert not (home / "outputs").exists()


def test_on_end_runs_as_an_argument_list(home: Path) -> None:
    write_notebook(home / "notebooks", "01_a", "x = 1")
    code, _ = run(home, overrides=["on_end=[touch, 'a b; c']"], allow_commands=True)
    assert code == 0
    assert (Run.open("demo").path / "a b; c").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_keep_their_records_and_say_so(home: Path, number: signal.Signals) -> None:
    write_notebook(home / "notebooks", "01_a", RECORD.format("01_a"), "import time\ntime.sleep(300)")
    write_notebook(home / "notebooks", "02_b", "x = 1")
    command = [sys.executable, "-m", "perfbook", "run", str(home / "params" / "demo.yaml")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ.copy())
    try:
        deadline = time.monotonic() + 120
        while not any('"seen"' in file.read_text() for file in home.glob("outputs/demo/2*/records.jsonl")):
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.1)
        child.send_signal(number)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130, err
    last = Run.open("demo")
    assert out.decode() == f"{last.path / 'report.html'}\n"
    assert last.record("seen") is not None
    assert [(entry["status"], entry["reason"]) for entry in last.header["notebooks"]] == [
        ("interrupted", "stopped from outside (Ctrl-C or a signal) while it was being executed"),
        ("skipped", "the run was interrupted before it"),
    ]
    assert b" 0/2 " in err
    assert "interrupted" in (last.path / "report.html").read_text()
    assert err.decode().split()[-1] == "interrupted"  # the state in the closing table
    assert b"Traceback" not in err
    assert b"Kernel died" not in err


def test_what_cannot_be_written_is_told_with_its_place_and_the_next_variant_runs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = "import pathlib\nif '/demo/' in run: pathlib.Path(run, 'results.md', 'x').mkdir(parents=True)"
    write_notebook(home / "notebooks", "01_a", blocked)
    (home / "params" / "next.yaml").write_text(VARIANT.replace("demo", "next"))
    assert run_campaign([home / "params" / "demo.yaml", home / "params" / "next.yaml"], Options()) == 1
    out, err = capsys.readouterr()
    assert out == f"{Run.open('next').path / 'report.html'}\n"
    first = Run.open("demo").path
    assert f"✗ {first / 'results.md'}: is a directory; mend that, then go on with --resume\n" in err


def test_an_executed_notebook_with_unrun_cells_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.ipynb"
    cell = {
        "cell_type": "code",
        "source": "x",
        "execution_count": 1,
        "metadata": {"papermill": {"status": "completed"}},
    }
    path.write_text(json.dumps({"metadata": {}, "cells": [cell, {**cell, "execution_count": None}]}))
    assert unfinished(path) == "cell 2 did not run to its end (the kernel ended early)"
    path.write_text(json.dumps({"metadata": {}, "cells": [cell]}))
    assert unfinished(path) == ""
    assert unfinished(tmp_path / "none.ipynb") == "the executed notebook was not written"


def test_errors_become_one_line() -> None:
    assert one_line("\x1b[0;31mValueError\x1b[0m: a\n  b") == "ValueError: a b"


def test_the_time_left_is_what_an_earlier_run_took() -> None:
    names, before_s = ["01_deploy", "03_single_stream", "04_sweep"], {"01_deploy": 30.0, "03_single_stream": 60.0}
    assert time_left(names, before_s, "01_deploy", 10.0) == ""  # nobody knows how long the sweep takes
    known = before_s | {"04_sweep": 120.0}
    assert time_left(names, known, "01_deploy", 10.0) == ", about 3 min 20 s left"
    assert time_left(names, known, "04_sweep", 500.0) == ", about 0 s left"  # late, but not below nothing
