"""The ``perfbook`` command. Thin: every verb is one library call.

Exit codes: 0 done; 1 something failed; 2 the input was wrong; 130 interrupted. Tables and JSON go to standard output,
progress and warnings to standard error. An error is one line; ``--debug`` shows where it came from.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import TyperException

from perfbook.errors import BadInput, MeasurementFailed, PerfbookError
from perfbook.masking import read_secret

app = typer.Typer(
    name="perfbook",
    help="Investigate the performance of vLLM servers: notebooks, timers, traces, reports.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a parameter; VALUE is YAML.")
]


def _writable(file: str | None) -> str | None:
    """Refuse a file that cannot be written before anything is measured, not after."""
    if file is not None and file != "-":
        path, folder = Path(file), Path(file).parent
        if not folder.is_dir():
            raise BadInput(f"--json {file}: there is no folder {folder}; make it, or write elsewhere")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise BadInput(f"--json {file}: cannot be written; choose another file")
    return file


Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write JSON to FILE; - is standard output.", callback=_writable),
]


@app.command()
def run(
    params: Annotated[list[Path], typer.Argument(metavar="PARAMS...", help="Parameter files, one per variant.")],
    only: Annotated[str, typer.Option(metavar="03,04", help="Only these notebooks.")] = "",
    overrides: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the latest run; keep what is unchanged.")
    ] = False,
    keep_server: Annotated[bool, typer.Option("--keep-server", help="Leave the server running at the end.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure although answers are wrong.")] = False,
    allow_commands: Annotated[
        bool, typer.Option("--allow-commands", help="Allow on_end and server.commands of the parameter file.")
    ] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="A stand-in serves, by the file's law; measures no hardware.")
    ] = False,
    on: Annotated[
        str | None, typer.Option("--on", metavar="ray[://ADDRESS]", help="A Ray cluster: a node per variant.")
    ] = None,
) -> int:
    """Run the notebooks for each variant and write the report."""
    from perfbook.batch.campaign import Options, run_campaign

    options = Options(only.split(","), overrides or (), resume, keep_server, force, allow_commands, rehearse)
    if on is not None:
        from perfbook.cluster.campaign import run_on

        return run_on(on, params, options)
    return run_campaign(params, options)


@app.command()
def check(
    params: Annotated[Path, typer.Argument(metavar="PARAMS", help="A parameter file.")], overrides: Set = None
) -> int:
    """Say what would fail, before weights are loaded: flags, environment, port, disk, devices, model."""
    from perfbook.params import load_variant
    from perfbook.server import preflight

    problems = preflight.check(load_variant(params, overrides or ()))
    _print(preflight.render_text(problems))
    return 2 if any(problem.level == "error" for problem in problems) else 0


@app.command()
def load(
    base_url: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server.")],
    model: Annotated[str, typer.Option(help="Model name in requests.")],
    concurrency: Annotated[str, typer.Option(metavar="1,64,256", help="Requests in flight, one cell each.")],
    requests: Annotated[int, typer.Option(min=1, help="Measured requests per cell.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per request.")],
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each cell, not counted.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 128,
    endpoint: Annotated[Literal["chat", "completions"], typer.Option(help="Which endpoint.")] = "chat",
    api_key_env: Annotated[str | None, typer.Option(metavar="NAME", help="Variable that holds the API key.")] = None,
    connect_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a connection stands.")] = 10.0,
    first_byte_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds from request to first byte.")] = 600.0,
    stall_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds between two reads.")] = 120.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a whole request.")] = 3600.0,
    on: Annotated[
        str | None, typer.Option("--on", metavar="ray[://ADDRESS]", help="A Ray cluster: the workers on its nodes.")
    ] = None,
    json_file: Json = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the two tables.")] = None,
) -> int:
    """Measure any OpenAI-compatible server without a notebook."""
    from perfbook.stream.endpoint import Deadlines
    from perfbook.study.load import LoadRequest, run_load

    request = LoadRequest(
        base_url=base_url,
        model=model,
        concurrency=_integers("--concurrency", concurrency),
        requests=requests,
        max_tokens=max_tokens,
        rate_per_s=rate,
        warmup=warmup,
        workers=workers,
        prompt_tokens=prompt_tokens,
        api_key=read_secret(api_key_env, "--api-key-env") if api_key_env else None,
        out=out,
        deadlines=Deadlines(connect_timeout, first_byte_timeout, stall_timeout, timeout),
        kind=endpoint,
    )
    if on is not None:
        from perfbook.nodes.load import hands_on

        report = run_load(request, progress=_say, spread=hands_on(on, workers))
    else:
        report = run_load(request, progress=_say)
    _deliver(report.to_json(), report.render_text(), json_file)
    return 0 if report.measured else 1


@app.command()
def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Trace files or folders, all ranks of one profile."),
    ],
    against: Annotated[list[Path] | None, typer.Option(help="An earlier profile to compare with.")] = None,
    json_file: Json = None,
) -> int:
    """Break down where the time of each engine step goes."""
    from perfbook import trace as traces
    from perfbook.trace.compare import render_diff

    report = traces.analyse(paths)
    if against:
        change = traces.diff(traces.analyse(against), report)
        _deliver(report.to_json() | {"diff": change.to_json()}, render_diff(change), json_file)
    else:
        _deliver(report.to_json(), traces.render_text(report), json_file)
    if not report.phases:
        named = ", ".join(map(str, paths))
        raise MeasurementFailed(f"{named}: no work is recorded in it; profile again while requests are running")
    return 0


@app.command()
def log(file: Annotated[Path, typer.Argument(help="A vLLM log.")], json_file: Json = None) -> int:
    """Say what a vLLM log says: versions, modes, memory, first error, findings."""
    from perfbook.server import log as logs

    facts = logs.read_log(file)
    if not facts.recognised:
        raise BadInput(f"{file}: no vLLM log: none of its lines is its logger's; name the file that the server writes")
    _deliver(facts.to_json(), logs.render_text(facts), json_file)
    return 0


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or variants (their latest run).")
    ],
    json_file: Json = None,
) -> int:
    """Set runs or variants side by side, with verdicts; the first is the baseline."""
    from perfbook.study import compare as comparing

    comparison = comparing.compare_runs(runs)
    _deliver(comparison.to_json(), comparing.render_text(comparison), json_file)
    return 0


@app.command()
def stop(
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's folder; default: every run.")] = None,
) -> int:
    """Stop servers that perfbook started and that still run."""
    from perfbook.record.run import Run
    from perfbook.server import process

    reports = process.stop_everything([Run.open(name)] if name else Run.every())
    for report in reports:
        _print(str(report))
    if not reports:
        _print("no server of ours is running")
    return 0 if all(report.clean for report in reports) else 1


@app.command()
def report(name: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")]) -> int:
    """Render a run's report again from its records."""
    from perfbook.batch.campaign import finish
    from perfbook.record.run import Run

    _print(str(finish(Run.open(name))))
    return 0


def main() -> None:
    """Entry point of the ``perfbook`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without µ or → still shows the table
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    sys.exit(call([word for word in arguments if word != "--debug"], debug=debug))


def call(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command line and return its exit code; errors become one line on standard error."""
    try:
        if odd := next((word for word in arguments if _torn(word)), None):
            raise BadInput(f"the argument {odd!r} is not text in this terminal's encoding; write it in UTF-8")
        code = app(list(arguments), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing more to say
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        _say(message)
        return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, PerfbookError):
        return " ".join(str(error).split()), error.exit_code
    if isinstance(error, TyperException):  # the words of the command line do not fit
        said = getattr(error, "format_message", error.__str__)()
        return " ".join(said.split()), 2
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror.lower()}", 1
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1


def _say(text: str) -> None:
    sys.stderr.write(f"perfbook: {text}\n")


def _print(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


def _deliver(values: dict[str, Any], text: str, json_file: str | None) -> None:
    """The table for people, or JSON for programs; with ``--json FILE`` both."""
    if json_file != "-":
        _print(text)
    if json_file is not None:
        encoded = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        if json_file == "-":
            _print(encoded)
        else:
            Path(json_file).write_text(encoded + "\n", encoding="utf-8")


def _integers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(f"{option} {text!r}: write whole numbers with commas, such as 1,64,256") from None
    if min(numbers) < 1:
        raise BadInput(f"{option} {text!r}: each must be at least 1")
    return numbers


def _torn(word: str) -> bool:
    """Whether an argument holds bytes that are no text."""
    return any("\udc80" <= one <= "\udcff" for one in word)
