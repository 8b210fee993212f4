"""Documentation that is written from the code stays what the code says."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import report_sample as sample
from perfbook import paths
from perfbook.cli import call
from perfbook.params import Variant
from perfbook.reference import render
from perfbook.stream.hostload import HostLoad
from perfbook.stream.tables import EVENTS, REQUESTS
from perfbook.stream.workers import Part, run_all
from perfbook.study.load import LoadRequest, run_load
from test_stream_load import count_to, fault, serving

DATA = (paths.repository() / "docs" / "data.md").read_text(encoding="utf-8")
RECORDED = paths.repository() / "tests" / "data"
DISTRIBUTIONS = ({"mean", "p50", "p90", "p95", "p99", "min", "max"}, {"mean", "p50", "p99"}, {"mean", "p99", "max"})
NAMED = {"errors": "<class>", "phases": "<phase>", "skew_us": "<rank>", "sides": "<side>"}


def test_parameter_reference_is_current() -> None:
    written = (paths.repository() / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert written == render(), "run: python -m perfbook.reference > docs/parameters.md"


def test_every_section_is_in_it() -> None:
    page = render()
    for name in Variant.model_fields:
        assert f"`{name}`" in page


def test_files_named_in_the_contributing_notes_exist() -> None:
    root = paths.repository()
    notes = (root / "CONTRIBUTING.md").read_text()
    for name in ("record/findings.toml", "server/log_rules.toml", "trace/kernels.toml", "server/retired.toml"):
        assert name in notes
        assert (root / "lib" / "perfbook" / name).is_file()


def documented(section: str) -> set[str]:
    """The keys in the first column of a section's table."""
    body = DATA.split(f"## `{section}`")[1].split("\n## ")[0]
    return {
        key
        for line in body.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    }


def keys(value: Any, at: str = "") -> Iterator[str]:
    """The keys of a JSON document as the page writes them."""
    if isinstance(value, dict) and set(value) not in DISTRIBUTIONS:
        name = NAMED.get(re.split(r"[.\]]", at)[-1])
        for key, inner in value.items():
            yield from keys(inner, f"{at}.{name or key}".lstrip("."))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from keys(inner, f"{at}[]")
    else:
        yield at + ("[]" if isinstance(value, list) else "")


def test_the_json_of_load_is_as_documented() -> None:
    def one_machine(*job: Any) -> Any:
        whole = run_all(*job)
        return replace(whole, parts=(Part("box", 2, whole, HostLoad(0.0, 0), 2, 0.1),))

    def without_tokenize(sock: Any, body: dict[str, Any]) -> None:
        count_to(sock, body) if "messages" in body else fault(sock, body, "http_503")

    with serving(without_tokenize) as endpoint:
        found = run_load(LoadRequest(endpoint.base_url, "m", [2], 4, 3), spread=one_machine).to_json()
    assert found["cells"][0]["errors"] == {}
    found["cells"][0]["errors"] = {"reset": 1}
    assert set(keys(found)) == documented("perfbook load") - {"null_run"}


def written(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert call([*words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_of_trace_is_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    traces = [str(RECORDED / "traces" / name) for name in ("tp3", "tp1")]
    found = written(["trace", traces[0], "--against", traces[1]], capsys)
    assert set(keys(found)) == documented("perfbook trace")


def test_the_json_of_log_is_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    found = written(["log", str(RECORDED / "logs" / "vllm_0.32_cpu_eager.log")], capsys)
    assert found["first_error"] is None
    error = {key for key in documented("perfbook log") if key.startswith("first_error.")}
    assert set(keys(found)) - {"first_error"} == documented("perfbook log") - error


def test_the_json_of_compare_is_as_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path))
    runs = [sample.start(), sample.start()]
    for run in runs:
        sample.measured(run)
        sample.finish(run)
    found = written(["compare", *(str(run.path) for run in runs)], capsys)
    assert set(keys(found)) == documented("perfbook compare")


@pytest.mark.parametrize(("name", "schema"), [("requests.parquet", REQUESTS), ("events.parquet", EVENTS)])
def test_the_tables_are_as_documented(name: str, schema: Any) -> None:
    assert set(schema.names) == documented(name)
