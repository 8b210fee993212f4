"""The README's commands do what it says: the quick ones are run, the long ones held against the help."""

import re
import shlex
from pathlib import Path

import pytest

import report_sample as sample
from perfbook import paths
from perfbook.cli import call

ROOT = paths.repository()
LINES = [
    re.split(r"\s+#", line)[0]
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    for line in block.splitlines()
]
COMMANDS = [line.removeprefix(".venv/bin/") for line in LINES if line.removeprefix(".venv/bin/").startswith("perfbook")]
QUICK = {
    "perfbook trace PATH…": ["trace", str(ROOT / "tests" / "data" / "traces" / "tp3")],
    "perfbook log FILE": ["log", str(ROOT / "tests" / "data" / "logs" / "vllm_0.32_cpu_eager.log")],
    "perfbook compare RUN RUN…": ["compare", "RUN", "RUN"],
    "perfbook stop [RUN]": ["stop"],
    "perfbook report RUN": ["report", "RUN"],
}
LONG = {"run", "check", "load"}  # minutes, a vLLM, a server


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path))
    made = [sample.start(), sample.start()]
    for run in made:
        sample.measured(run)
        sample.finish(run)
    return [str(run.path) for run in made]


@pytest.mark.parametrize("line", QUICK)
def test_the_quick_commands_run(line: str, runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert line in COMMANDS
    left = iter(runs)
    words = [next(left) if word == "RUN" else word for word in QUICK[line]]
    assert call(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip()


def test_every_command_is_run_here_or_is_a_long_one() -> None:
    assert {line.split()[1] for line in COMMANDS if line not in QUICK} == LONG


def test_every_option_in_the_readme_is_one_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    for verb in LONG:
        call([verb, "--help"])
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        for line in re.findall(rf"^(?:\.venv/bin/)?perfbook {verb} .*$", text, flags=re.M):
            named = set(re.findall(r"--[a-z-]+", line))
            assert named <= known, f"{line}: {sorted(named - known)}"


def test_every_file_in_a_command_exists_but_the_readers_own() -> None:
    named = {
        word for line in LINES for word in shlex.split(line, comments=True) if re.match(r"(params|notebooks)/", word)
    }
    assert named >= {"params/smollm2-135m-cpu.yaml", "notebooks/04_sweep.ipynb"}
    for word in named - {"params/my-model.yaml"}:
        assert (ROOT / word).is_file(), word
