from __future__ import annotations

from pathlib import Path

import pytest

import report_sample as sample
from perfbook.report import index, results


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    return tmp_path / "outputs"


def test_results_are_readable_on_their_own() -> None:
    text = results.write(sample.good_run()).read_text(encoding="utf-8")
    assert text.startswith(
        "# minimax-m2.5-fp8\n\nMiniMax-M2.5-FP8 on vLLM 0.16.0rc2, 8 × RTX PRO 6000 Blackwell (96 GiB)."
    )
    for line in (
        "| Single stream | 81.9 tok/s | 95 % interval 81.2–82.6, n = 5; 12.2 ms per token | 03_single_stream |",
        "- **plateau**: Above 128 streams requests queue: max_num_seqs is 128 and 128 wait.",
        "| single-stream TTFT | missed | 25 ms | 28.1 ms |",
        "| 2 | 2 | 150.3 | 30.8 | 53.4 | 13.0 | 16.0 | 0 | suspect |",
        "### Problem: Target missed: time to first token",
        "Next: Raise max-num-seqs above 128 and sweep again.",
    ):
        assert line in text.splitlines()
    assert sample.SECRET not in text


def test_results_of_a_run_that_goes_on_say_what_is_finished_and_when() -> None:
    run = sample.start()
    run.begin("01_deploy")
    run.append("01_deploy", "verdict", {"sentence": "The server is up <b>"})
    run.begin("03_single_stream")
    run.append("03_single_stream", "single_stream_cell", {"output_tokens_asked": 64}, key="64/0")
    lines = results.write(run).read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("> **Warning.** No end is recorded") for line in lines)
    deploy = next(line for line in lines if line.startswith("| 01_deploy | completed | 20"))
    assert deploy.endswith("UTC | unknown | The server is up &lt;b> |")
    assert any(line.startswith("| 03_single_stream | unfinished | 20") for line in lines)
    assert "| Plateau | not measured | 04_sweep not run |  |" in lines


def test_the_index_lists_every_run_newest_first_with_its_numbers(outputs: Path) -> None:
    first = sample.good_run()
    (first.path / "report.html").write_text("x")
    newer = sample.start(rehearsed=True, variant="kimi-k2.5-int4")
    newer_path = newer.path.rename(newer.path.with_name("99991231T000000Z"))
    path = index.write()
    assert path == outputs / "index.html"
    text = path.read_text(encoding="utf-8")
    rows = text.partition("<tbody>")[2].split("</tr>")
    assert "kimi-k2.5-int4" in rows[0]
    assert "rehearsal" in rows[0]
    assert "unfinished" in rows[0]
    assert "No end is recorded: the run was interrupted or still goes on" in rows[0]
    assert "No end is recorded" not in rows[1]
    assert "href=" not in rows[0]
    assert f'href="minimax-m2.5-fp8/{first.path.name}/report.html"' in rows[1]
    assert '<td class="num" data-value="81.9">81.9</td>' in rows[1]
    assert '<td class="num" data-value="1536.4">1536</td>' in rows[1]
    assert ">complete<" in rows[1]
    assert "2 of 3" in rows[1]
    assert "2 runs of 2 variants" in text
    assert newer_path.is_dir()


def test_an_index_without_runs_says_how_to_make_one() -> None:
    assert "No run yet." in index.write().read_text(encoding="utf-8")


def test_a_broken_run_does_not_break_the_index() -> None:
    run = sample.good_run()
    (run.path / "summary.json").write_text("nonsense")
    (run.path / "run.json").write_text("{")
    assert "minimax-m2.5-fp8" in index.write().read_text(encoding="utf-8")
