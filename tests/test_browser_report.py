"""The report as a reader meets it, in a real chromium with the network off."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import report_sample as sample
from perfbook import paths
from perfbook.errors import BadInput
from perfbook.report import html, index

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
AXE = "axe-core@4.14.1"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium, or name one in CHROMIUM"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A good run's report and the index of all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERFBOOK_OUTPUTS", str(tmp_path_factory.mktemp("outputs")))
        yield {"report": html.render(sample.good_run()), "index": index.write()}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Reader:
    """A page with everything that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def until(page: Any, condition: str) -> None:
    """Wait for a condition (Playwright's own waiting evaluates strings, which the page's policy forbids)."""
    deadline = time.monotonic() + 10
    while not page.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


DESK, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.mark.parametrize("name", ["report", "index"])
def test_it_opens_offline_asking_for_nothing_and_complaining_of_nothing(
    chromium: Any, pages: dict[str, Path], name: str
) -> None:
    with Reader(chromium, pages[name], viewport=DESK) as reader:
        asked = [url for url in reader.requests if not url.startswith("data:")]
        assert asked == [pages[name].as_uri()]
        assert reader.complaints == []
        broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
        assert reader.page.evaluate(broken) == 0


@pytest.mark.parametrize("name", ["report", "index"])
@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_the_page_is_never_wider_than_the_screen(
    chromium: Any, pages: dict[str, Path], name: str, viewport: dict[str, int]
) -> None:
    with Reader(chromium, pages[name], viewport=viewport) as reader:
        assert reader.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_foreign_scripts_do_not_run_even_when_they_are_in_the_page(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"]) as reader:
        inject = "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')"
        reader.page.evaluate(inject)
        reader.page.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
            " document.body.append(s); }"
        )
        assert reader.page.evaluate("window.ran") is None
        assert any("Content Security Policy" in said for said in reader.complaints)


def test_the_contents_work_by_keyboard_and_follow_the_reader(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK, reduced_motion="reduce") as reader:
        page = reader.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Contents"
        link = page.locator("nav.toc a", has_text="04 Where does it saturate")
        link.focus()
        page.keyboard.press("Enter")
        until(page, "location.hash === '#04_sweep'")
        current = "document.querySelector('nav.toc a[aria-current]')?.textContent.trim()"
        until(page, f"({current} ?? '').startsWith('04 Where does it saturate')")
        page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        until(page, f"{current} === 'Records'")
        page.evaluate("window.scrollTo(0, 0)")
        until(page, f"{current} === 'The answer'")


def test_code_is_folded_and_opens_all_at_once(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK) as reader:
        page = reader.page
        is_open = "[...document.querySelectorAll('details.source')].map(d => d.open)"
        assert set(page.evaluate(is_open)) == {False}
        page.get_by_role("button", name="Show code").click()
        assert set(page.evaluate(is_open)) == {True}
        page.get_by_role("button", name="Hide code").click()
        assert set(page.evaluate(is_open)) == {False}


def test_a_link_to_a_record_opens_it(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK) as reader:
        page = reader.page
        page.locator(".findings a", has_text="record").first.click()
        until(page, "document.querySelector(':target')?.closest('details').open === true")
        assert page.locator(":target").is_visible()


def test_tables_sort_by_value_and_copy_as_csv_with_exact_numbers(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK) as reader:
        page = reader.page
        table = page.locator("table", has_text="Median of each cell")
        header = table.get_by_role("columnheader", name="throughput (tok/s)")
        first = table.locator("tbody tr").first
        header.get_by_role("button").click()
        assert header.get_attribute("aria-sort") == "ascending"
        assert first.locator("th").inner_text() == "1"
        header.get_by_role("button").click()
        assert header.get_attribute("aria-sort") == "descending"
        assert first.locator("th").inner_text() == "128"
        page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
        page.locator(".table", has=table).get_by_role("button", name="Copy as CSV").click()
        until(page, "window.copied")
        lines = page.evaluate("window.copied").split("\n")
        assert lines[0] == (
            "concurrency,throughput (tok/s),TTFT p50 (ms),TTFT p99 (ms),TPOT p50 (ms),TPOT p99 (ms),failed,validity"
        )
        assert lines[1].startswith("128,1543.28430")
        assert lines[1].endswith(",0,valid")
        assert len(lines) == 10


def test_csv_quotes_what_a_server_wrote_and_makes_no_formula_of_it(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK) as reader:
        csv = "quoted('a \"b\", c') + '|' + quoted('=1+1') + '|' + quoted('-3.1') + '|' + quoted('@x')"
        assert reader.page.evaluate(csv) == '"a ""b"", c"|\'=1+1|-3.1|\'@x'


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)")])
def test_it_follows_the_system_and_lets_the_reader_choose(
    chromium: Any, pages: dict[str, Path], scheme: str, paper: str
) -> None:
    with Reader(chromium, pages["report"], viewport=DESK, color_scheme=scheme) as reader:
        page = reader.page
        background = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(background) == paper
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(background) != paper
        page.reload()
        assert page.evaluate(background) != paper
        page.get_by_role("button", name="Light or dark").click()
        assert page.evaluate(background) == paper


def test_print_is_light_unrolls_outputs_and_leaves_the_controls_out(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK, color_scheme="dark") as reader:
        page = reader.page
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(28, 37, 48)"
        for hidden in ("nav.toc", "button.copy", "details.source", ".appendix"):
            assert not page.locator(hidden).first.is_visible()
        log = page.locator("pre.stream", has_text="loading shard 62").first
        assert log.evaluate("pre => pre.scrollHeight <= pre.clientHeight + 1")
        assert page.pdf()[:5] == b"%PDF-"


def test_on_a_phone_the_contents_start_folded_and_figures_stay_legible(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=PHONE) as reader:
        page = reader.page
        assert page.evaluate("document.querySelector('nav.toc > details').open") is False
        page.locator("nav.toc summary").click()
        page.locator("nav.toc a", has_text="Findings").click()
        assert page.evaluate("document.querySelector('nav.toc > details').open") is False
        assert page.locator(".pb-figure img").first.evaluate("img => img.clientWidth") >= 500


def test_without_scripts_everything_is_still_there(chromium: Any, pages: dict[str, Path]) -> None:
    with Reader(chromium, pages["report"], viewport=DESK, java_script_enabled=False) as reader:
        assert reader.page.locator(".headlines", has_text="1536 tok/s").is_visible()
        assert reader.page.locator("table").first.is_visible()
        assert reader.page.locator("nav.toc a").first.is_visible()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """axe-core's script, kept in the checkout's cache."""
    try:
        cache = paths.repository() / ".cache" / "test"
    except BadInput:
        cache = tmp_path_factory.mktemp("axe")
    script = cache / "package" / "axe.min.js"
    npm = shutil.which("npm")
    if not script.is_file():
        if npm is None:
            pytest.skip("axe-core is fetched with npm, which is not here")
        cache.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            [npm, "pack", AXE, "--pack-destination", str(cache), "--silent"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if packed.returncode:
            pytest.skip(f"axe-core could not be fetched: {packed.stderr.strip()[-200:]}")
        shutil.unpack_archive(cache / packed.stdout.strip().splitlines()[-1], cache)
    return script.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report", "index"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_no_serious_accessibility_fault(
    chromium: Any, pages: dict[str, Path], axe: str, name: str, scheme: str, viewport: dict[str, int]
) -> None:
    with Reader(chromium, pages[name], viewport=viewport, color_scheme=scheme) as reader:
        page = reader.page
        page.evaluate(axe)
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        serious = [
            f"{fault['id']}: {node['html'][:120]}"
            for fault in found
            if fault["impact"] in ("serious", "critical", "moderate")
            for node in fault["nodes"]
        ]
        assert serious == []
