"""What stands in the report, for good runs and for wrecks. What it looks like: test_browser_report.py."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nbformat import v4

import report_sample as sample
from perfbook.record.run import Run
from perfbook.report import html, index, results


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path / "outputs"))
    return tmp_path / "outputs"


class Page(HTMLParser):
    """Ids, links, headings, everything that would be fetched, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.inner_links: list[str] = []
        self.fetched: list[str] = []
        self.headings: list[int] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a" and values.get("href", "").startswith("#"):
            self.inner_links.append(values["href"][1:])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        fetching = ("src", "srcset", "poster", "data", "action", "background")
        self.fetched += [values[key] for key in fetching if key in values]
        if tag == "link":
            self.fetched.append(values.get("href", ""))
        self.handlers += [key for key in values if key.startswith("on")]

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def rendered(run: Run) -> tuple[str, Page]:
    path = html.render(run)
    assert path == run.path / "report.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert [name for name, times in Counter(page.ids).items() if times > 1] == []
    assert [link for link in page.inner_links if link not in page.ids] == []
    assert [(a, b) for a, b in zip(page.headings, page.headings[1:], strict=False) if b > a + 1] == []
    assert page.headings.count(1) == 1
    assert [source[:40] for source in page.fetched if not source.startswith("data:image/png;base64,")] == []
    assert page.handlers == []
    outside = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
    assert re.findall(r"url\(|@import|<iframe|<object|<embed|<base\b", outside) == []
    assert sample.SECRET not in text
    assert str(Path.home()) + "/" not in outside
    assert str(run.path) not in outside
    return text, page


def test_the_answer_stands_on_top_with_links_to_where_it_was_measured() -> None:
    _, page = rendered(sample.good_run())
    before_findings = page.text.partition("Findings #")[0]
    for said in (
        "MiniMax-M2.5-FP8 on vLLM 0.16.0rc2 · 8 × RTX PRO 6000 Blackwell (96 GiB)",
        "Started 2026-11-30 09:12 UTC, took 52 min 41 s",
        "Single stream 81.9 tok/s 95 % interval 81.2–82.6, n = 5 12.2 ms per token from 03_single_stream",
        "First token 28.1 ms 95 % interval 27.4–30.2, n = 10 from 03_single_stream",
        "Plateau 1536 tok/s knee at 128 streams [64, 128] limit: queueing 1 of 18 cells suspect or invalid",
        "Above the floor 1.42 × floor: 8.60 ms per token from 07_ceiling",
        "one stream AllReduce is 51.5 % of a decode step: 122 calls, 11.2 ms.",
        "single-stream TTFT missed 25 ms 28.1 ms",
        "NCCL_ALGO=Tree 1 slower −3.10 +1.4 10",
    ):
        assert said in before_findings
    assert "Rehearsal" not in before_findings
    assert "No end is recorded" not in before_findings


def test_notebooks_are_sections_with_folded_code_and_hidden_injected_parameters() -> None:
    text, page = rendered(sample.good_run())
    assert [name for name in page.ids if name in sample.NAMES] == sample.NAMES
    assert "04 Where does it saturate, and what stops it?" in page.text
    assert "injected" not in text
    assert text.count('<details class="source">') == len(re.findall(r"<summary>Code", text)) > 8
    assert '<details class="source" open' not in text
    assert len(page.fetched) == 6  # the figures
    assert len(re.findall(r'<img alt="[^"]{40,}" src="[^"]+" width="720"', text)) == 6
    assert "Throughput stops rising at 128 streams" in page.text


def test_what_a_server_wrote_is_text_and_never_markup() -> None:
    text, _ = rendered(sample.good_run())
    assert text.count("<script") == 1
    assert "Paris. &lt;script&gt;alert(" in text


def test_each_finding_links_to_its_cell_and_its_records() -> None:
    text, page = rendered(sample.good_run())
    assert "Problem Target missed: time to first token 28.1 ms against 25 ms" in page.text
    assert re.search(r'<a href="#03_single_stream-[\w-]+">03_single_stream, cell</a> · <a href="#record-r\d+">', text)
    cited = re.findall(r'id="(record-r\d+)"', text)
    assert len(cited) == 2
    severities = re.findall(r'<li class="(\w+)"><span class="badge">', text)
    assert severities == ["problem", "warning", "info", "good"]


def test_findings_of_a_kind_share_their_next_step() -> None:
    run = sample.start()
    run.begin("05_nccl_tuning")
    kind = {"notebook": "05_nccl_tuning", "attempt": "r00001", "severity": "info", "next_step": "Relaunch all."}
    found = [
        {**kind, "id": "setting_not_tried:a/1", "title": "a at 1 stream: too small", "verdict": "too small"},
        {**kind, "id": "setting_not_tried:a/8", "title": "a at 8 streams: too small", "verdict": "too small"},
        {**kind, "id": "another", "title": "Something else", "verdict": "seen once"},
    ]
    (run.path / "findings.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    text, page = rendered(run)
    assert text.count('<span class="badge">Info</span>') == 2
    assert page.text.count("Next: Relaunch all.") == 2
    assert "a at 1 stream: too small" in page.text and "a at 8 streams: too small" in page.text
    assert "Verdict: too small" not in page.text
    assert "Verdict: seen once" in page.text


def test_the_policy_allows_this_script_and_nothing_else() -> None:
    text, _ = rendered(sample.good_run())
    assert "default-src 'none'; img-src data:" in text
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", text)


def test_a_rehearsal_says_so_before_any_number() -> None:
    run = sample.start(rehearsed=True)
    sample.measured(run)
    sample.finish(run)
    _, page = rendered(run)
    before, _, after = page.text.partition("Single stream")
    assert "Rehearsal: a stand-in server answered" in before
    assert "stand-in for 8 × RTX PRO 6000 Blackwell" in before
    assert after.startswith(", rehearsed 81.9 tok/s")
    assert "target verdict asked for rehearsed" in after
    assert results.write(run).read_text(encoding="utf-8").startswith("# minimax-m2.5-fp8 (rehearsal)\n")


def test_a_failing_notebook_is_named_with_its_reason_and_the_rest_stays() -> None:
    run = sample.start()
    sample.measured(run)
    made = sample.notebooks()
    made["04_sweep"].cells.append(
        sample.code("sweep.measure(desk)", sample.failed("MeasurementFailed", "all 4 requests were refused"))
    )
    for name, notebook in made.items():
        sample.write(run, name, notebook)
    sample.finish(run, nb04={"status": "failed", "reason": "MeasurementFailed: all 4 requests were refused"})
    text, page = rendered(run)
    reason = "MeasurementFailed: all 4 requests were refused"
    assert f"The run ended with 6 of 7 notebooks completed: 04_sweep failed ({reason})." in page.text
    assert "Failed. MeasurementFailed: all 4 requests were refused To the cell" in page.text
    assert re.search(r'<a href="#04_sweep-[\w-]+">To the cell</a>', text)
    assert "04 Where does it saturate, and what stops it? failed" in page.text
    assert "What limits, and what to try next?" in page.text


def test_a_dead_server_leaves_a_report_that_says_which_numbers_are_missing() -> None:
    run = sample.start()
    run.begin("01_deploy")
    reason = "ServerFailed: the server died after 12 s: ValueError: KV cache needs 9.4 GiB, 4.1 GiB are free"
    dead = sample.notebook("Is the server up?", sample.code("desk.server()", sample.failed(*reason.split(": ", 1))))
    sample.write(run, "01_deploy", dead)
    skipped = {"status": "skipped", "reason": "needs 01_deploy, which failed", "seconds": 0}
    others = {f"nb{name[:2]}": skipped for name in sample.NAMES[1:]}
    sample.finish(run, nb01={"status": "failed", "reason": reason}, **others)
    _, page = rendered(run)
    assert f"Failed. {reason}" in page.text
    assert "Single stream not measured 03_single_stream skipped" in page.text
    assert "Skipped. Needs 01_deploy, which failed" in page.text
    assert f"The run ended with 0 of 7 notebooks completed: 01_deploy failed ({reason}); 6 skipped." in page.text


def test_an_interrupted_run_says_where_it_stopped() -> None:
    run = sample.start()
    sample.measured(run)
    made = sample.notebooks()
    sample.write(run, "03_single_stream", made["03_single_stream"])
    half = made["04_sweep"]
    half.cells.append(sample.code("sweep.conclude(desk, result)", count=None))
    sample.write(run, "04_sweep", half)
    _, page = rendered(run)
    assert "No end is recorded: the run was interrupted or still goes on (" in page.text
    assert "Unfinished. Stopped, or still running, before code cell 6 of 6." in page.text


def test_a_notebook_stamped_completed_whose_cells_never_ran_is_not_believed() -> None:
    run = sample.start()
    sample.measured(run)
    dead = sample.notebook("T", sample.code("os._exit(1)", count=None))
    sample.write(run, "04_sweep", dead)
    sample.finish(run)
    _, page = rendered(run)
    assert "Failed. It ended early, before code cell 2 of 2." in page.text


def test_notebooks_run_by_hand_have_their_verdict_without_an_executed_copy() -> None:
    run = sample.start()
    sample.measured(run)
    _, page = rendered(run)
    assert "03_single_stream · completed" in page.text
    assert "One stream decodes at 81.9 tok/s" in page.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", "{", "run.json could not be read"),
        ("run.json", "[]", "run.json could not be read"),
        ("run.json", '{"parameters": 3, "provenance": [], "notebooks": {}, "finished": 5}', "started an unknown time"),
        ("records.jsonl", '{"id": "r1"', "Torn lines in records.jsonl were left out (1)"),
        ("records.jsonl", '{"kind": "sweep", "best_tok_s": "fast"}\n{"kind": 3}', "not measured"),
        ("summary.json", "nonsense", "summary.json could not be read"),
        ("summary.json", '{"single_stream": {"decode_tok_s": null}, "targets": [1], "bottleneck": []}', "not measured"),
        ("findings.jsonl", '{"severity": "problem", "attempt": ""}', "findings.jsonl could not be read"),
        ("notebooks/04_sweep.ipynb", "{}", "04_sweep"),
        ("notebooks/04_sweep.ipynb", "not json", "its executed copy cannot be read"),
    ],
)
def test_whatever_is_broken_is_said_and_never_raises(name: str, content: str, said: str) -> None:
    run = sample.start()
    (run.path / name).write_text(content, encoding="utf-8")
    _, page = rendered(run)
    assert said in page.text


def test_an_empty_run_still_gives_a_report() -> None:
    _, page = rendered(sample.start())
    assert page.text.count("not measured") == 4
    assert "None recorded." in page.text


def test_markdown_pictures_from_elsewhere_are_not_fetched_and_headings_stay_in_order() -> None:
    run = sample.start()
    prose = v4.new_markdown_cell("#### Deep\n\n![a plot](https://e.test/p.png)\n\n## Deep\n\ntext")
    sample.write(run, "01_deploy", sample.notebook("T", prose))
    text, page = rendered(run)
    assert "[picture not embedded: a plot]" in page.text
    assert 'id="01_deploy--deep"' in text
    assert 'id="01_deploy--deep-2"' in text


def test_what_needs_a_script_or_a_widget_falls_back_to_its_text() -> None:
    run = sample.start()
    widget = v4.new_output(
        "display_data",
        data={
            "application/vnd.jupyter.widget-view+json": {},
            "application/javascript": "alert(1)",
            "text/plain": "50 %",
        },
    )
    sample.write(run, "01_deploy", sample.notebook("T", sample.code("x", widget)))
    text, page = rendered(run)
    assert "50 %" in page.text
    assert "alert(1)" not in text


def test_records_are_cut_in_the_page_where_they_are_huge() -> None:
    run = sample.start()
    run.begin("04_sweep")
    big = run.append("04_sweep", "sweep", {"notes": ["x" * 100] * 1000})
    finding = {
        "id": "a",
        "notebook": "04_sweep",
        "attempt": "r00001",
        "severity": "info",
        "title": "T",
        "records": [big, "r99999"],
    }
    (run.path / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    text, page = rendered(run)
    assert "more characters in records.jsonl" in page.text
    assert len(text) < 100_000
    assert "record r99999" in page.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9999) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
RECORD_KEYS = ("id", "notebook", "kind", "time", "sentence", "value", "low", "records", "severity", "title", "attempt")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.sampled_from(["parameters", "provenance", "notebooks", "started", "finished"]), JSON),
    summary=st.dictionaries(
        st.sampled_from(["single_stream", "sweep", "tuning", "ceiling", "targets", "bottleneck", "engine", "answers"]),
        JSON | st.dictionaries(st.sampled_from(["decode_tok_s", "knee", "cells", "estimates", "ratio"]), JSON),
    ),
    lines=st.lists(st.dictionaries(st.sampled_from(RECORD_KEYS), JSON), max_size=3),
)
def test_no_content_of_the_folder_stops_the_report(
    header: dict[str, object], summary: dict[str, object], lines: list[dict[str, object]]
) -> None:
    run = sample.start()
    (run.path / "run.json").write_text(json.dumps(header))
    (run.path / "summary.json").write_text(json.dumps(summary))
    for name in ("records.jsonl", "findings.jsonl"):
        (run.path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    rendered(run)
    results.write(run)
    index.write()
    shutil.rmtree(run.path)


def test_numbers_of_another_type_than_agreed_are_not_shown_as_numbers() -> None:
    run = sample.start()
    summary = {
        "sweep": {"best_tok_s": 3, "cells": 5, "knee_concurrency": "x", "knee": {"low": [1]}},
        "targets": [{"target": "a", "value": {}, "met": "no", "unit": [2], "name": None}],
        "tuning": [{"setting": {}, "concurrency": "q", "launches": []}],
        "bottleneck": {"a": None},
        "single_stream": {
            "decode_tok_s": 4,
            "estimates": {"decode": {"low_tok_s": 1, "high_tok_s": 2, "confidence": "x"}},
        },
        "ceiling": {"ratio": "high"},
    }
    finding = {"id": "a", "severity": "info", "attempt": "", "records": [[1], "r1"], "title": None}
    (run.path / "summary.json").write_text(json.dumps(summary))
    (run.path / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    _, page = rendered(run)
    assert "Single stream 4 tok/s" in page.text
    assert "Above the floor not measured" in page.text
    assert "Single stream | 4 tok/s" in results.write(run).read_text()
    assert index.write().is_file()


def test_a_notebook_name_cannot_leave_its_attribute() -> None:
    run = sample.start()
    run.write_header({"notebooks": [{"notebook": 'a" onload="alert(1)', "status": "failed"}]})
    sample.write(run, "x' onload='alert(2)", sample.notebook("T", v4.new_markdown_cell("## Part")))
    text, _ = rendered(run)
    assert "onload=" not in text


def test_a_record_shows_which_cell_it_is_of() -> None:
    """``key`` names a cell; only keys that open something are masked."""
    shown = html._record({"id": "r1", "key": "64/0", "api_key": sample.SECRET}, str)
    assert json.loads(shown["text"]) == {"id": "r1", "key": "64/0", "api_key": "***"}
