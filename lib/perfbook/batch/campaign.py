"""A campaign: each parameter file in turn through the notebooks, then its report.

Whatever happens to a notebook, what was measured stays, the server is stopped, and the report is written. Later
notebooks go on where they do not depend on the one that failed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from perfbook import paths
from perfbook.batch.execute import Outcome, execute
from perfbook.batch.interrupts import Interrupts, interruptible, undisturbed
from perfbook.batch.result import Result
from perfbook.batch.sequence import Notebook, select, sequence
from perfbook.batch.terminal import Terminal
from perfbook.errors import BadInput, PerfbookError
from perfbook.hardware import hardware_of
from perfbook.params import Variant, load_variant
from perfbook.record import summary
from perfbook.record.lock import host_lock
from perfbook.record.run import Run, now_utc
from perfbook.rehearsal.law import law_of
from perfbook.report import html, index, results
from perfbook.server import process
from perfbook.server.commands import allowed

INTERRUPTED = 130  # what a shell reports for a process ended by Ctrl-C


@dataclass(frozen=True)
class Options:
    """What the command line says beside the parameter files.

    ``only`` names notebooks by number or name; ``resume`` goes on with the latest run of the variant; ``force``
    measures although the answers are wrong; ``keep_server`` leaves it running at the end; ``rehearse`` lets a stand-in
    serve that obeys the file's law.
    """

    only: Sequence[str] = ()
    overrides: Sequence[str] = ()
    resume: bool = False
    keep_server: bool = False
    force: bool = False
    allow_commands: bool = False
    rehearse: bool = False


def run_campaign(files: Sequence[Path], options: Options, terminal: Terminal | None = None) -> int:
    """Run every variant; returns the exit code: 0 complete, 1 something failed, 130 interrupted.

    Raises
    ------
    BadInput
        A parameter file or ``--only`` cannot be used; nothing was started.
    """
    terminal = terminal or Terminal()
    variants = prepare(files, options)
    notebooks = select(sequence(), options.only)
    done: list[Result] = []
    interrupted = False
    with (
        interruptible() as interrupts,
        allowed(options.allow_commands),
        host_lock(f"perfbook run {', '.join(v.variant for v in variants)}"),
    ):
        for left in process.stop_everything(_abandoned()):
            terminal.note(f"stopped a server that an earlier run had left: {left}")
        for variant in variants:
            result = Result(variant.variant)
            done.append(result)
            try:
                interrupted = _run_variant(variant, notebooks, options, terminal, result, interrupts)
            except PerfbookError as error:
                result.error = str(error)
                terminal.problem(result.error)
            except OSError as error:  # a full disk, most likely: its server is stopped, the next variant may fit
                where = error.filename or (result.run.path if result.run else paths.outputs())
                what = (error.strerror or str(error)).lower()
                result.error = f"{where}: {what}; mend that, then go on with --resume"
                terminal.problem(result.error)
            if interrupted:
                break
    terminal.conclude(done)
    if interrupted:
        return INTERRUPTED
    return 0 if all(result.complete for result in done) and len(done) == len(variants) else 1


def prepare(files: Sequence[Path], options: Options) -> list[Variant]:
    """The variants, each fit to be run.

    Raises
    ------
    BadInput
        A parameter file or ``--only`` cannot be used, or asks for what is not allowed.
    """
    variants = [load_variant(path, options.overrides) for path in files]
    select(sequence(), options.only)
    for variant in variants:
        if options.rehearse:
            law_of(variant)
        if variant.on_end and not options.allow_commands:
            raise BadInput(f"{variant.variant}: on_end would run {variant.on_end}: allow it with --allow-commands")
    return variants


def _run_variant(
    variant: Variant,
    notebooks: Sequence[Notebook],
    options: Options,
    terminal: Terminal,
    result: Result,
    interrupts: Interrupts,
) -> bool:
    """One variant; returns whether it was interrupted."""
    found = Run.latest(variant.variant, rehearsed=options.rehearse) if options.resume else None
    run = found or Run.start(variant, rehearsed=options.rehearse)
    result.run = run
    known = hardware_of(run).provenance(variant)
    elsewhere = _measured_elsewhere(run, known)
    if elsewhere:
        terminal.note(f"measured on {elsewhere}, going on on {known.get('host')}: what depends on the host is redone")
        run.write_header({"notebooks": []})
    run.write_header({"provenance": known, "finished": None, "batch": _me(options.keep_server)}, variant)
    terminal.start(run, [notebook.name for notebook in notebooks], _took_before(run))
    interrupted = False
    try:
        _run_notebooks(run, variant, notebooks, options, terminal, result)
    except KeyboardInterrupt:
        interrupts.acknowledge()
        interrupted = True
        result.error = "interrupted"
        terminal.note("interrupted: stopping the server, writing the report")
    finally:
        with undisturbed():
            if interrupted:
                _say_what_was_cut_off(run, notebooks, terminal, result)
            if not options.keep_server and variant.server.base_url is None:
                terminal.note(str(process.stop(run)).splitlines()[0])
            run.write_header({"finished": now_utc()})
            result.report = finish(run)
    if variant.on_end:
        _run_on_end(variant.on_end, run, terminal)
    return interrupted


def _say_what_was_cut_off(run: Run, notebooks: Sequence[Notebook], terminal: Terminal, result: Result) -> None:
    """The notebook that ran is interrupted; those still to come are skipped, unless an earlier start did them."""
    before = {entry["notebook"]: entry for entry in run.header.get("notebooks", [])}
    for notebook in notebooks:
        if notebook.name in result.outcomes:
            continue
        entry = before.get(notebook.name)
        if entry is None:
            outcome = Outcome("skipped", "the run was interrupted before it")
        elif entry["status"] == "interrupted":
            outcome = Outcome("interrupted", "stopped from outside (Ctrl-C or a signal) while it was being executed")
            terminal.ended(notebook.name, outcome)
        else:
            outcome = Outcome(entry["status"], entry["reason"], entry["seconds"])
        result.outcomes[notebook.name] = outcome
        if entry is None or entry["status"] == "interrupted":
            _log(run, notebook, outcome, "")


def _measured_elsewhere(run: Run, known: Mapping[str, Any]) -> str:
    """The other host that a resumed run was measured on; empty where it is this one, or a rehearsal's law."""
    before = (run.header.get("provenance") or {}).get("host")
    return str(before) if before and not run.rehearsed and before != known.get("host") else ""


def _took_before(run: Run) -> dict[str, float]:
    """Seconds of each notebook in the variant's latest run in which it completed, of the same kind as this one."""
    took: dict[str, float] = {}
    for other in Run.every():  # oldest first
        if other.path.parent == run.path.parent and other.path != run.path and other.rehearsed == run.rehearsed:
            entries = other.header.get("notebooks") or []
            took |= {one["notebook"]: one["seconds"] for one in entries if one.get("status") == "completed"}
    return took


def finish(run: Run) -> Path:
    """Write everything that is computed from the records: summary, results.md, report, index of all runs."""
    summary.write(run)
    results.write(run)
    report = html.render(run)
    index.write()
    return report


def _run_notebooks(
    run: Run,
    variant: Variant,
    notebooks: Sequence[Notebook],
    options: Options,
    terminal: Terminal,
    result: Result,
) -> None:
    values: dict[str, Any] = variant.sections() | {"run": str(run.path)}
    before = {entry["notebook"]: entry for entry in run.header.get("notebooks", [])} if options.resume else {}
    redone: set[str] = set()
    for notebook in notebooks:
        parameters = {key: values[key] for key in notebook.declares if key in values}
        fingerprint = notebook.fingerprint({k: v for k, v in parameters.items() if k != "run"})
        entry = before.get(notebook.name, {})
        stale = bool(redone.intersection(notebook.requires + notebook.reads))
        if entry.get("status") == "completed" and entry.get("fingerprint") == fingerprint and not stale:
            outcome = Outcome("completed", "", entry.get("seconds", 0.0))
            terminal.kept(notebook.name)
        elif reason := _blocked(run, notebook, result, force=options.force):
            outcome = Outcome("skipped", reason)
            terminal.skipped(notebook.name, reason)
        else:
            redone.add(notebook.name)
            _log(
                run,
                notebook,
                Outcome("interrupted", "the run ended while this notebook was being executed"),
                "",
            )
            with terminal.running(run, notebook.name):
                outcome = _executed(run, notebook, parameters)
            terminal.ended(notebook.name, outcome)
        result.outcomes[notebook.name] = outcome
        _log(run, notebook, outcome, fingerprint)
        summary.write(run)
        results.write(run)


def _executed(run: Run, notebook: Notebook, parameters: dict[str, Any]) -> Outcome:
    return execute(notebook, run.path / "notebooks" / notebook.path.name, parameters)


def _blocked(run: Run, notebook: Notebook, result: Result, *, force: bool) -> str:
    """Why a notebook cannot run, empty when it can. Notebooks that were not selected block nothing."""
    for name in notebook.requires:
        outcome = result.outcomes.get(name)
        if outcome is not None and outcome.status != "completed" and not force:
            return f"{name} {outcome.status}"
    if "02_verify" in notebook.requires and summary.answers(run) == "wrong" and not force:
        return "the answers are wrong (02_verify); --force measures all the same, and marks it"
    return ""


def _log(run: Run, notebook: Notebook, outcome: Outcome, fingerprint: str) -> None:
    """Keep the notebook's state in ``run.json``, in the order of the sequence."""
    entries = {entry["notebook"]: entry for entry in run.header.get("notebooks", [])}
    entries[notebook.name] = {
        "notebook": notebook.name,
        "title": notebook.title,
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": round(outcome.seconds, 1),
        "ended": now_utc(),
        "fingerprint": fingerprint,
    }
    run.write_header({"notebooks": [entries[name] for name in sorted(entries)]})


def _me(keep_server: bool) -> dict[str, Any]:
    """Marks a run as driven by this process, so that a later one can tell an abandoned server from one in use."""
    return {"pid": os.getpid(), "create_time": psutil.Process().create_time(), "keep_server": keep_server}


def _abandoned() -> list[Run]:
    """Runs whose batch is gone and was to stop its server but could not (killed)."""
    return [run for run in Run.every() if _is_abandoned(run.header.get("batch"))]


def _is_abandoned(batch: dict[str, Any] | None) -> bool:
    if not batch or batch.get("keep_server"):
        return False
    try:
        return bool(psutil.Process(batch["pid"]).create_time() != batch["create_time"])
    except psutil.NoSuchProcess:
        return True


def _run_on_end(command: list[str], run: Run, terminal: Terminal) -> None:
    """The owner's own command, an argument list; its failure is told, and is not the run's."""
    terminal.note(f"on_end: {command}")
    try:
        code = subprocess.run(command, cwd=run.path, check=False, timeout=600).returncode
        terminal.note(f"on_end exited with {code}")
    except (OSError, subprocess.TimeoutExpired) as error:
        terminal.problem(f"on_end failed: {error}")
