"""What somebody at the terminal sees while a campaign runs: standard error, one line per notebook."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perfbook.batch.execute import Outcome
from perfbook.batch.result import Result
from perfbook.progress import FILE_VARIABLE
from perfbook.record import jsonl
from perfbook.record.run import Run
from perfbook.units import duration

_MARKS = {"problem": "[red]✗[/]", "warning": "[yellow]![/]", "info": "[cyan]·[/]", "good": "[green]✓[/]"}


class Terminal:
    """Progress on standard error, the report's path on standard output."""

    def __init__(self) -> None:
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)  # one line stays one: paths can be copied
        self.started = time.monotonic()
        self.seen = 0
        self.notebooks: Sequence[str] = ()
        self.before_s: Mapping[str, float] = {}

    def start(self, run: Run, notebooks: Sequence[str], before_s: Mapping[str, float]) -> None:
        """A variant begins; ``before_s`` is how long its notebooks took in an earlier run, where there was one."""
        self.notebooks, self.before_s = notebooks, before_s
        self.seen = len(jsonl.read(run.path / "findings.jsonl"))
        self.err.print(f"[bold]{escape(run.name)}[/]  {len(notebooks)} notebooks → {escape(_short(run.path))}")

    def note(self, text: str) -> None:
        """Something that was done."""
        self.err.print(f"  {escape(text)}", style="dim")

    def problem(self, text: str) -> None:
        """Something that went wrong."""
        self.err.print(f"[red]✗[/] {escape(text)}")

    def kept(self, notebook: str) -> None:
        """A notebook that was complete and is unchanged."""
        self.err.print(f"[green]✓[/] {notebook:<24} [dim]kept from before (unchanged)[/]")

    def skipped(self, notebook: str, reason: str) -> None:
        """A notebook that cannot run."""
        self.err.print(f"[yellow]-[/] {notebook:<24} skipped: {escape(reason)}")

    def ended(self, notebook: str, outcome: Outcome) -> None:
        """A notebook's outcome."""
        if outcome.status == "completed":
            self.err.print(f"[green]✓[/] {notebook:<24} [dim]{duration(outcome.seconds)}[/]")
        else:
            self.err.print(f"[red]✗[/] {notebook:<24} {outcome.status}: {escape(outcome.reason)}")

    @contextmanager
    def running(self, run: Run, notebook: str) -> Iterator[None]:
        """While a notebook runs: elapsed time and what it says it is doing; findings as they come."""
        stop = threading.Event()
        began = time.monotonic()
        live_line = run.path / ".progress"
        os.environ[FILE_VARIABLE] = str(live_line)
        with self.err.status(notebook) as status:

            def follow() -> None:
                while not stop.wait(0.5):
                    self._findings(run)
                    doing = _read(live_line)
                    elapsed_s = time.monotonic() - began
                    stage = f"{notebook} ({self.notebooks.index(notebook) + 1}/{len(self.notebooks)})"
                    left = time_left(self.notebooks, self.before_s, notebook, elapsed_s)
                    line = f"{stage}  {duration(elapsed_s)}{left}  {escape(doing)}"
                    status.update(line[: max(40, self.err.width - 4)])

            thread = threading.Thread(target=follow, daemon=True)
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join()
                live_line.unlink(missing_ok=True)
        self._findings(run)

    def conclude(self, results: Sequence[Result]) -> None:
        """The table over all variants, and where each report lies."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("variant", "notebooks", "single stream", "best", "state"):
            table.add_column(column, justify="left" if column in ("variant", "state") else "right")
        for result in results:
            table.add_row(*_row(result))
        self.err.print(f"\n[dim]{duration(time.monotonic() - self.started)}[/]")
        self.err.print(table, soft_wrap=False)
        for result in results:
            if result.report is not None:
                sys.stdout.write(f"{result.report}\n")
        sys.stdout.flush()

    def _findings(self, run: Run) -> None:
        values = jsonl.read(run.path / "findings.jsonl")
        for value in values[self.seen :]:
            self.err.print(f"  {_MARKS.get(value['severity'], '·')} {escape(value['title'])}")
        self.seen = len(values)


def time_left(notebooks: Sequence[str], before_s: Mapping[str, float], current: str, elapsed_s: float) -> str:
    """``, about 4 min left``, by what an earlier run took; empty where one of the notebooks was not run before."""
    ahead = notebooks[list(notebooks).index(current) + 1 :]
    if not all(name in before_s for name in (current, *ahead)):
        return ""
    left_s = max(0.0, before_s[current] - elapsed_s) + sum(before_s[name] for name in ahead)
    return f", about {duration(round(left_s))} left"


def _row(result: Result) -> tuple[str, str, str, str, str]:
    numbers = _summary(result.run)
    complete = sum(outcome.status == "completed" for outcome in result.outcomes.values())
    single = (numbers.get("single_stream") or {}).get("decode_tok_s")
    best = (numbers.get("sweep") or {}).get("best_tok_s")
    return (
        escape(result.variant),
        f"{complete}/{len(result.outcomes)}",
        "-" if single is None else f"{single:.1f} tok/s",
        "-" if best is None else f"{best:.0f} tok/s",
        "[green]complete[/]" if result.complete else f"[red]{escape(result.error) or 'incomplete'}[/]",
    )


def _summary(run: Run | None) -> dict[str, Any]:
    try:
        value = json.loads((run.path / "summary.json").read_text(encoding="utf-8")) if run else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")[:200]
    except OSError:
        return ""


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
