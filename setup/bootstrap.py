"""Set up ``.venv`` and the embedded model: what ``make report`` and ``make test`` do first.

Standard library only, since it runs before anything is installed. Each stage that succeeds is stamped with a
hash of what it was made from, and skipped while that holds: a second run costs a moment. An environment that
was interrupted half-way, moved, or made for another engine or Python is made anew.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import ENGINES, ROOT, CannotSetUpError, check_disk, check_machine, check_python, explain

SETUP = ROOT / "setup"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "perfbook-setup.json"
CACHE = ROOT / ".cache"
LOG = CACHE / "setup.log"

# Settings that would send packages, or an import, past the new environment.
MISLEADING = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT")


@dataclass(frozen=True)
class Stage:
    """One step.

    ``key`` is what it is stamped with; ``installs``: broken off, it leaves an environment not to be trusted;
    ``there``: whether what it made outside the environment still exists.
    """

    name: str
    title: str
    key: str
    run: Callable[[], None]
    installs: bool = True
    there: Callable[[], bool] = lambda: True


class Progress:
    """One line per stage with the time it took; in a terminal the time counts while it runs."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.number = 0
        self.live = sys.stdout.isatty()
        self.line = ""
        self.began = 0.0

    def start(self, title: str) -> None:
        """Begin the next line."""
        self.number += 1
        self.line = f"[{self.number}/{self.total}] {title} … "
        self.began = time.monotonic()
        print(self.line, end="", flush=True)

    def tick(self) -> None:
        """Show the time so far, where somebody watches."""
        if self.live:
            print(f"\r{self.line}{time.monotonic() - self.began:.0f} s", end="", flush=True)

    def end(self) -> None:
        """Close the line."""
        start = "\r" + self.line if self.live else ""
        print(f"{start}{time.monotonic() - self.began:.0f} s", flush=True)


class Setup:
    """The stages for one engine, run by one process at a time."""

    def __init__(self, engine: str, tests: bool) -> None:
        self.engine = engine
        self.tests = tests
        self.lock = -1
        self.progress = Progress(0)

    def run(self) -> None:
        """Do what is missing, and nothing when nothing is."""
        CACHE.mkdir(exist_ok=True)
        with alone(CACHE / "setup.lock") as self.lock:
            stamps = self.usable_stamps()
            done = stamps["done"]
            todo = [stage for stage in self.stages() if done.get(stage.name) != stage.key or not stage.there()]
            if not todo:
                return
            check_machine(self.engine)
            check_disk(self.engine, fresh="packages" not in done)
            LOG.write_text("")
            self.progress = Progress(len(todo))
            began = time.monotonic()
            for stage in todo:
                self.do(stage, stamps)
            print(f"Set up for the {self.engine} engine in {time.monotonic() - began:.0f} s.", flush=True)

    def usable_stamps(self) -> dict[str, Any]:
        """What earlier runs finished; an environment that cannot be built upon is removed."""
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        made_for = {"engine": self.engine, "folder": str(ROOT), "python": python}
        empty: dict[str, Any] = {"made_for": made_for, "interrupted_in": None, "done": {}}
        if not VENV.exists():
            return empty
        try:
            found = {**empty, **json.loads(STAMPS.read_text())}
        except (OSError, ValueError, TypeError):
            found = {**empty, "interrupted_in": "its first step"}
        if found["interrupted_in"]:
            why = f"an earlier set-up was interrupted in {found['interrupted_in']}"
        elif found["made_for"] != made_for:
            was = {key: found["made_for"].get(key) for key in made_for}
            why = ", ".join(
                f"{key} was {was[key]}, now {made_for[key]}" for key in made_for if was[key] != made_for[key]
            )
        elif not os.access(PYTHON, os.X_OK):
            why = "its Python is gone"
        else:
            return found
        print(f"Making .venv anew: {why}.", flush=True)
        shutil.rmtree(VENV)
        return empty

    def stages(self) -> list[Stage]:
        """In the order in which they build on each other."""
        python = f"environment with Python {platform.python_version()}"
        stages = [Stage("environment", python, "1", self.make_environment)]
        if self.engine == "cpu":
            stages.append(self.lock_stage("torch", "torch-cpu.lock", "PyTorch for the CPU"))
        stages.append(self.lock_stage("packages", f"{self.engine}.lock", "vLLM, JupyterLab and the rest"))
        if self.tests:
            stages.append(self.lock_stage("tests", "test.lock", "test tools"))
            stages.append(self.lock_stage("ray", "ray.lock", "Ray, for the tests of the cluster"))
        project = digest(ROOT / "pyproject.toml")
        stages.append(Stage("perfbook", "perfbook itself", project, self.install_perfbook))
        model = model_folder()
        there = (model / "model.safetensors").is_file
        stages.append(Stage("model", "embedded model", str(model), self.make_model, False, there))
        return stages

    def lock_stage(self, name: str, lock: str, title: str) -> Stage:
        """Install a lock file; its content is the stamp."""
        path = SETUP / lock
        number = sum("==" in line for line in path.read_text().splitlines())
        label = f"{title} ({number} packages)" if number > 1 else title
        return Stage(name, label, digest(path), lambda: self.install("-r", path))

    def do(self, stage: Stage, stamps: dict[str, Any]) -> None:
        """Run a stage between two stamps: the first says that it began, the second that it succeeded."""
        self.progress.start(stage.title)
        if stage.installs and VENV.exists():
            write_stamps({**stamps, "interrupted_in": stage.title})
        try:
            stage.run()
        except CannotSetUpError:
            print(flush=True)
            if VENV.exists() and "Installing collected packages" not in LOG.read_text(errors="replace"):
                write_stamps(stamps)  # pip gave up before it touched the environment
            raise
        stamps["done"][stage.name] = stage.key
        write_stamps(stamps)
        self.progress.end()

    def make_environment(self) -> None:
        """Create .venv with the Python that runs this."""
        try:
            venv.create(VENV, with_pip=True, symlinks=True)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(VENV, ignore_errors=True)
            raise CannotSetUpError(f"{sys.executable} cannot create .venv: {error}") from None

    def install(self, *what: str | Path) -> None:
        """Install exactly what is named: the locks are complete, pip has nothing to resolve."""
        quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
        self.call("-m", "pip", "install", *quiet, "--no-deps", *what)

    def install_perfbook(self) -> None:
        """Editable, and built with the locked setuptools, so that nothing more is fetched."""
        self.install("--no-build-isolation", "-e", ROOT)

    def make_model(self) -> None:
        """Convert the embedded model, unless the cache has it."""
        self.call("-m", "perfbook.server.embedded")

    def call(self, *arguments: str | Path) -> None:
        """Run the environment's Python with its output in the log.

        The child holds the lock too: when only this process is killed, the next set-up waits until pip is
        done before it clears up after it.
        """
        env = {name: value for name, value in os.environ.items() if name not in MISLEADING}
        with LOG.open("w") as log:
            child = subprocess.Popen(
                [PYTHON, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=ROOT,
                pass_fds=(self.lock,),
            )
            while child.poll() is None:
                try:
                    child.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    self.progress.tick()
        if child.returncode:
            raise CannotSetUpError(explain(LOG))


@contextmanager
def alone(path: Path) -> Iterator[int]:
    """Hold the set-up lock and give its descriptor; the kernel releases it when the last holder ends."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up of this checkout is at work; waiting for it.", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def model_folder() -> Path:
    """Where perfbook.server.embedded keeps the model, without importing it."""
    named = os.environ.get("PERFBOOK_CACHE")
    return (Path(named).absolute() if named else CACHE / "models") / "smollm2-135m-instruct"


def digest(path: Path) -> str:
    """Short hash of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def write_stamps(stamps: dict[str, Any]) -> None:
    """Replace the stamps in one step."""
    partial = STAMPS.with_suffix(".partial")
    partial.write_text(json.dumps(stamps, indent=1))
    partial.replace(STAMPS)


def main() -> int:
    """Parse, run, and turn every expected failure into its one message."""
    parser = argparse.ArgumentParser(description="Set up .venv and the embedded model.")
    parser.add_argument("--engine", default="cpu", help="cpu: vLLM's CPU build; cuda: for NVIDIA GPUs")
    parser.add_argument("--tests", action="store_true", help="the tools of `make test` as well")
    arguments = parser.parse_args()
    try:
        if arguments.engine not in ENGINES:
            raise CannotSetUpError(f"ENGINE={arguments.engine}: there are ENGINE=cpu and ENGINE=cuda")
        check_python()
        Setup(arguments.engine, arguments.tests).run()
    except (CannotSetUpError, OSError) as problem:
        print(f"setup: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run the same command again, it clears up by itself", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
