"""JupyterLab as an analyst uses it: notebooks run from the menu against a real vLLM, interrupted, and run again."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perfbook import paths
from perfbook.record.run import Run

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
BINARIES = Path(sys.executable).parent
TOKEN = "a-token-for-this-test"
VARIANT = "smollm2-135m-cpu"
PANEL = ".jp-NotebookPanel:not(.lm-mod-hidden)"
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium, or name one in CHROMIUM"),
    pytest.mark.skipif(not (BINARIES / "jupyter-lab").exists(), reason="no jupyter lab beside this Python"),
]


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab."""

    port: int

    def api(self, path: str) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{path}?token={TOKEN}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def kernel_is_idle(self, name: str) -> bool:
        """Whether the notebook's kernel has a browser connected and nothing to do."""
        kernels = [session["kernel"] for session in self.api("sessions") if session["path"] == name]
        return bool(kernels) and kernels[0]["execution_state"] == "idle" and kernels[0]["connections"] >= 1


def until(condition: Callable[[], bool], what: str, seconds: float, pause: Callable[[], None]) -> None:
    """Wait for a condition; it may raise while things start."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        pause()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Copies of the notebooks to work in; servers started from them are stopped at the end."""
    home = tmp_path_factory.mktemp("lab")
    plan = {"repeats": 2, "output_tokens": [16, 48]}
    _copy("02_verify", home / "02_verify.ipynb", {})
    _copy("03_single_stream", home / "03_single_stream.ipynb", {"single_stream": plan})
    _copy("03_single_stream", home / "03_long.ipynb", {"single_stream": plan | {"repeats": 500}})
    yield home
    environment = os.environ | {"PERFBOOK_OUTPUTS": str(home / "outputs")}
    subprocess.run([BINARIES / "perfbook", "stop"], env=environment, check=True, timeout=120)


def _copy(name: str, target: Path, parameters: dict[str, Any]) -> None:
    """A notebook with other values in its parameters cell, as an analyst would type them."""
    notebook = json.loads((paths.notebooks() / f"{name}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            cell["source"] = "".join(cell["source"]) + "".join(
                f"\n{key} = {value!r}" for key, value in parameters.items()
            )
    target.write_text(json.dumps(notebook), encoding="utf-8")


@pytest.fixture(scope="module")
def lab(home: Path) -> Iterator[Lab]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    private = {
        name: str(home / ".jupyter" / name.lower())
        for name in (
            "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
            "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR",
        )
    }  # fmt: skip
    quiet = Path(private["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab/apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    command = [
        BINARIES / "jupyter-lab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={home}",
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.news_url=None", "--LabApp.extension_manager=readonly", "--ServerApp.terminals_enabled=False",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    environment = os.environ | private | {"PERFBOOK_OUTPUTS": str(home / "outputs"), "JUPYTER_PREFER_ENV_PATH": "1"}
    with (home / "lab.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            lab = Lab(port)
            until(lambda: "version" in lab.api(""), "JupyterLab is up", 90, lambda: time.sleep(0.3))
            yield lab
        finally:
            process.terminate()
            process.wait(timeout=30)


class Notebook:
    """One notebook open in the browser."""

    def __init__(self, page: Any, lab: Lab, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name
        page.goto(f"http://127.0.0.1:{lab.port}/lab/tree/{name}?reset&token={TOKEN}")
        page.wait_for_selector(f"{PANEL} .jp-Notebook", timeout=60_000)
        # Until the kernel is connected the indicator says idle too, and Run All would be lost.
        self.wait(lambda: lab.kernel_is_idle(name), "the kernel is connected", 90)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        until(condition, f"{self.name}: {what}", seconds, lambda: self.page.wait_for_timeout(200))

    def run_all(self) -> None:
        """Run → Run All Cells, by mouse."""
        self.page.click("#jp-MainMenu .lm-MenuBar-item:has-text('Run')")
        self.page.click(".lm-Menu-item[data-command='runmenu:run-all']")

    def prompts(self) -> list[str]:
        texts: list[str] = self.page.locator(f"{PANEL} .jp-CodeCell .jp-InputPrompt").all_text_contents()
        return [text.strip() for text in texts]

    def outputs(self) -> str:
        return " ".join(self.page.locator(f"{PANEL} .jp-OutputArea-output").all_text_contents())

    def finished(self) -> bool:
        """Every cell that was started has ended."""
        return "[*]:" not in self.prompts() and self.lab.kernel_is_idle(self.name)

    def errors(self) -> str:
        kind = "application/vnd.jupyter.stderr"
        return " ".join(self.page.locator(f"{PANEL} [data-mime-type='{kind}']").all_text_contents())


@pytest.fixture
def page(lab: Lab) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser.new_page(viewport={"width": 1400, "height": 1000})
        browser.close()


def test_notebooks_run_from_the_menu_and_an_interrupt_leaves_the_server_usable(page: Any, lab: Lab, home: Path) -> None:
    verify = Notebook(page, lab, "02_verify.ipynb")
    verify.run_all()
    verify.wait(lambda: "Working: 2 of 2 known answers right" in verify.outputs(), "the verdict", 400)
    verify.wait(verify.finished, "it ended", 30)
    assert verify.errors() == ""

    long = Notebook(page, lab, "03_long.ipynb")
    long.run_all()
    long.wait(lambda: "repeat 2 of 500" in long.outputs(), "live progress", 120)
    page.click(f"{PANEL} [data-jp-item-name='interrupt'] jp-button")
    long.wait(lambda: "KeyboardInterrupt" in long.errors(), "the interrupt arrived", 60)
    long.wait(long.finished, "the kernel lives", 30)

    single = Notebook(page, lab, "03_single_stream.ipynb")
    single.run_all()
    single.wait(lambda: "One stream decodes at " in single.outputs(), "the verdict", 200)
    single.wait(single.finished, "it ended", 30)
    assert single.errors() == ""
    assert all(prompt.strip("[]: ").isdigit() for prompt in single.prompts())
    figures = page.locator(f"{PANEL} figure.pb-figure img[alt^='Time per token over position']")
    assert figures.count() == 1
    single.run_all()  # again, in the same kernel
    single.wait(lambda: max(int(p.strip("[]: ") or 0) for p in single.prompts() if "*" not in p) > 10, "re-run", 120)
    single.wait(single.finished, "it ended again", 60)
    assert single.errors() == ""

    runs = list((home / "outputs" / VARIANT).glob("2*"))
    assert len(runs) == 1  # all of it is one run, on one launch of the server
    assert len(list(runs[0].glob("server-*.log"))) == 1
    cells = Run(runs[0]).records("single_stream_cell")
    assert sorted(record["key"] for record in cells) == ["16/0", "16/1", "48/0", "48/1"]
