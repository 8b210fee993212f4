"""The campaign's four variants, rehearsed by one command and set side by side by notebook 90."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from perfbook import paths

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1500)]

VARIANTS = ("kimi-k2.5-int4", "kimi-k2.5-nvfp4", "minimax-m2.5-fp8", "glm-5-nvfp4")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All four measured with one stream, one after the other."""
    folder = tmp_path_factory.mktemp("four")
    there = os.environ | {"PERFBOOK_OUTPUTS": str(folder / "outputs"), "PERFBOOK_LOCK": str(folder / "lock")}
    files = [str(paths.params() / f"{name}.yaml") for name in VARIANTS]
    words = ["--rehearse", "--only", "01,03", "--set", "single_stream={output_tokens: [64, 256], repeats: 3}"]
    command = [sys.executable, "-m", "perfbook", "run", *files, *words]
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    return there


def compared(environment: dict[str, str]) -> dict[str, Any]:
    runs = [f"{name}/latest-rehearsal" for name in VARIANTS]
    command = [sys.executable, "-m", "perfbook", "compare", *runs, "--json", "-"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_each_variant_keeps_its_law_beside_the_others(environment: dict[str, str]) -> None:
    """Milliseconds per token of one stream, as the four laws say; a machine as busy as the tests' may add some."""
    tpot_ms = {"kimi-k2.5-nvfp4": 16.5, "minimax-m2.5-fp8": 9.0, "glm-5-nvfp4": 29.8}
    comparison = compared(environment)
    assert comparison["baseline"] == "kimi-k2.5-int4"
    rows = {row["side"]: row for row in comparison["metrics"] if row["metric"] == "tpot_ms"}
    assert list(rows) == list(tpot_ms)
    for side, row in rows.items():
        assert row["label"] == "too few launches"  # one launch of each decides nothing
        assert row["baseline"] == [pytest.approx(11.9, rel=0.1)]
        assert row["candidate"] == [pytest.approx(tpot_ms[side], rel=0.1)]
    assert any("rehears" in sentence for sentence in comparison["differences"])


def test_notebook_90_shows_all_four(environment: dict[str, str], tmp_path: Path) -> None:
    runs = json.dumps([f"{name}/latest-rehearsal" for name in VARIANTS])
    out = tmp_path / "out.ipynb"
    words = [str(paths.notebooks() / "90_compare_variants.ipynb"), str(out), "-y", f"runs: {runs}"]
    command = [sys.executable, "-m", "papermill", *words, "--no-progress-bar"]
    subprocess.run(command, env=environment, capture_output=True, timeout=300, check=True)
    shown = "\n".join(
        str(output.get("text") or output.get("data", {}).get("text/html", ""))
        for cell in nbformat.read(out, as_version=4).cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert all(name in shown for name in VARIANTS)
    assert "every run is a rehearsal: nothing was measured on this hardware" in shown
