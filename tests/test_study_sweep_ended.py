"""04: a server that dies ends the sweep, and the sweep says what it died of."""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from perfbook.desk import Desk
from perfbook.errors import ServerFailed
from perfbook.params import make_variant
from perfbook.record.run import Run
from perfbook.stream.cell import Cell
from perfbook.study.sweep.measure import measure

DEAD = "the server is dead: its process 17 ended"
NO_ROWS = pa.table({})


class Dying(Desk):
    """A desk whose server is dead from a cell on."""

    lives_for = 0

    def measure(self, prompts: Any, shape: Any, **values: Any) -> Cell:
        if self.lives_for == 0:
            raise ServerFailed(DEAD)
        self.lives_for -= 1
        summary = {"duration_s": 1.0, "output_tok_s_plateau": 50.0, "validity": {"verdict": "valid", "reasons": []}}
        return Cell("1", summary, NO_ROWS, NO_ROWS, NO_ROWS)

    def prompts(self, tokens: int, count: int, seed: int) -> list[Any]:
        return []

    def record_cell(self, kind: str, cell: Cell, values: Mapping[str, Any], *, key: str) -> str:
        return self.record(kind, cell.summary, key=key)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dying:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setenv("PERFBOOK_LOCK", str(tmp_path / "lock"))
    sweep = {"concurrency": [1, 8], "repeats": 1, "time_budget_s": 60}
    variant = make_variant({"variant": "small", "server": {"model": str(tmp_path)}, "sweep": sweep}, "test")
    return Dying("04_sweep", variant, Run.start(variant))


def test_without_any_cell_the_cause_is_raised_and_recorded(desk: Dying) -> None:
    with pytest.raises(ServerFailed, match=DEAD):
        measure(desk, lambda text: None)
    said = desk.run.record("sweep_skipped")
    assert said is not None
    assert said["ended"] == DEAD
    assert [cell["why"] for cell in said["cells"]] == ["the server failed", "the server failed"]


def test_with_a_cell_the_sweep_ends_there_and_keeps_it(desk: Dying) -> None:
    desk.lives_for = 1
    measure(desk, lambda text: None)
    said = desk.run.record("sweep_skipped")
    assert said is not None
    assert said["ended"] == DEAD
    assert [cell["concurrency"] for cell in said["cells"]] == [8]
    assert len(desk.run.records("sweep_cell")) == 1


def test_no_cell_begins_once_the_budget_is_spent_not_even_in_the_first_block(
    desk: Dying, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.lives_for = 2
    clock = itertools.count(0, 50)  # each look at it is 50 s later: at the start, before the first cell, …
    room = sys.modules["perfbook.study.sweep.measure"]  # its package names the function of the same name
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    measure(desk, lambda text: None)
    said = desk.run.record("sweep_skipped")
    assert said is not None
    assert said["ended"] is None
    assert [record["key"] for record in desk.run.records("sweep_cell")] == ["1/0"]
    assert said["cells"] == [{"concurrency": 8, "repeat": 0, "why": "the time budget was spent"}]
