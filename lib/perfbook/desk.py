"""The analyst's desk: what a notebook opens first and then works with.

A notebook passes the sections it declares; the desk finds the run they belong to (or starts one), the server that
serves it, and appends what is measured. Interactive and unattended notebooks are the same: only where the parameters
come from differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from perfbook import paths
from perfbook.errors import BadInput, OutOfOrder, ServerFailed
from perfbook.figures import Figure
from perfbook.hardware import Hardware, hardware_of
from perfbook.nodes.load import hands_on
from perfbook.params import Variant, load_variant, make_variant
from perfbook.progress import Progress
from perfbook.record import findings, summary, tables
from perfbook.record.lock import host_lock
from perfbook.record.run import Run
from perfbook.rehearsal.law import law_of
from perfbook.report import results
from perfbook.server import process
from perfbook.server.launch import local_model
from perfbook.server.liveness import Watch, watched
from perfbook.server.process import ServerHandle
from perfbook.server.telemetry import energy_per_token_j
from perfbook.stream.ask import Answer, ask
from perfbook.stream.cell import Cell, with_reasons
from perfbook.stream.client import Endpoint
from perfbook.stream.load import Spread
from perfbook.stream.load import measure as measure_cell
from perfbook.stream.promptfile import read_prompts
from perfbook.stream.tokenizers import LocalTokenizer, ServerTokenizer, Tokenizer
from perfbook.stream.workers import run_all
from perfbook.stream.workload import Prompt, RequestShape, exact_prompts


@dataclass(frozen=True)
class Verdict:
    """One sentence that a notebook ends with."""

    sentence: str

    def _repr_html_(self) -> str:
        return f'<p class="pb-verdict">{escape(self.sentence)}</p>'

    def __repr__(self) -> str:
        return self.sentence


@dataclass
class Desk:
    """One notebook's view of one run.

    Attributes
    ----------
    notebook : str
        Name of the notebook, such as ``04_sweep``.
    variant : Variant
        The parameters in force.
    run : Run
        Where everything is recorded.
    """

    notebook: str
    variant: Variant
    run: Run
    _handle: ServerHandle | None = field(default=None, repr=False)
    _tokenizer: Tokenizer | None = field(default=None, repr=False)

    @cached_property
    def hardware(self) -> Hardware:
        """Where numbers come from that no server gives: this machine, or the law of a rehearsal."""
        return hardware_of(self.run)

    def server(self) -> ServerHandle:
        """The server of this run: attached, found running, or started (and then recorded).

        Raises
        ------
        ServerFailed
            It cannot be reached, died while loading, or died since this notebook first used it: two launches are never
            mixed in one measurement. The message has the log's first error.
        """
        if self._handle is None or not self._handle.alive():
            self._handle = self._find_or_start(seen=self._handle is not None)
            self._tokenizer = None  # the server that counted tokens may have gone, and its address with it
        return self._handle

    def _find_or_start(self, *, seen: bool) -> ServerHandle:
        if self.variant.server.base_url is not None:
            return process.attach(self.variant)
        found = process.find(self.run)
        if found is not None:
            return found
        end = process.died(self.run)
        if end is not None and seen:
            raise ServerFailed(f"{end}; run the notebook again to go on with a new launch")
        if end is not None:
            self.find("server_died", evidence=end)
        with Progress("server") as progress:
            return process.start(self.variant, self.run, progress=progress)

    def shape(self, tokens: int, *, exact: bool = True) -> RequestShape:
        """What a request asks for: ``tokens`` at most, or exactly so many where the workload ignores the end of text.

        ``exact`` False lets the model end its answer: for questions, not for rates. Those are asked greedily.
        """
        workload = self.variant.workload
        fixed = exact and workload.ignore_eos
        return RequestShape(
            output_tokens=tokens,
            min_tokens=tokens if fixed else None,
            ignore_eos=fixed,
            temperature=workload.temperature if exact else 0.0,
            extra_body=workload.extra_body,
        )

    def prompts(self, tokens: int, count: int, seed: int) -> list[Prompt]:
        """Prompts of a cell: the workload's data set in an order of its own, else distinct ones of a token length.

        Lengths are exact by the served model's tokenizer, from its folder or through ``/tokenize``, else approximate.
        """
        if self.variant.workload.dataset is not None:
            known = read_prompts(self.variant.workload.dataset)
            return (
                random.Random(seed).choices(known, k=count)
                if count > len(known)
                else random.Random(seed).sample(known, count)
            )
        return exact_prompts(self._find_tokenizer(), tokens, count, seed)

    def _find_tokenizer(self) -> Tokenizer | None:
        """The model's own, from its folder; else the server's. A stand-in counts its own tokens, not the model's."""
        named = None if self.run.rehearsed else self.variant.server.model
        model = local_model(named) if named else None
        if isinstance(model, Path):
            self._tokenizer = self._tokenizer or LocalTokenizer(model)
        else:
            endpoint = self.endpoint()  # asked every time: a relaunched server may have another address
            self._tokenizer = self._tokenizer or ServerTokenizer.find(endpoint)
        return self._tokenizer

    def endpoint(self) -> Endpoint:
        """Where the requests go."""
        handle = self.server()
        return Endpoint(
            base_url=handle.base_url,
            model=handle.model,
            api_key=handle.api_key,
            kind=self.variant.workload.endpoint,
        )

    def counters(self) -> dict[str, float] | None:
        """The server's counters (``/metrics``); None when it does not give them. Never starts a server."""
        handle = self._handle or self.server()
        try:
            return handle.endpoints.metrics()
        except ServerFailed:
            return None

    @cached_property
    def _spread(self) -> Spread:
        """How the clients of a cell are run: here, or over a cluster that stays connected while the kernel lives."""
        workload = self.variant.workload
        if workload.workers_on is None or workload.workers == 1:
            return run_all
        return hands_on(workload.workers_on, workload.workers)

    def ask(self, question: str, shape: RequestShape, *, stream: bool = False) -> Answer:
        """Ask this run's server one question; a request that failed is an answer with its error.

        Raises
        ------
        ServerFailed
            The engine hung or died meanwhile; no notebook uses that launch again.
        """
        endpoint = self.endpoint()
        with self._watching() as watch:
            answer = watched(watch, lambda: ask(endpoint, question, shape, stream=stream))
            reason = None if answer.ok else watch.autopsy()
            if reason is not None:
                raise ServerFailed(reason)
        return answer

    def measure(
        self,
        prompts: Sequence[Prompt],
        shape: RequestShape,
        *,
        key: str,
        concurrency: int,
        requests: int,
        warmup: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> Cell:
        """Measure one cell on this run's server, with its counters before and after and the devices beside it.

        A device that throttled makes the cell suspect. What the devices did stands in ``Cell.details["telemetry"]``.
        Nothing is recorded yet: :meth:`record_cell` does that.

        Raises
        ------
        ServerFailed
            The engine hung or died meanwhile. What the cell saw until then is recorded as a ``failed_cell``, and no
            notebook uses that launch again.
        """
        server = self.server()
        with self._watching() as watch:
            with self.hardware.telemetry(server) as telemetry:
                cell = measure_cell(
                    self.endpoint(),
                    prompts,
                    shape,
                    concurrency=concurrency,
                    requests=requests,
                    warmup=warmup,
                    metrics=self.counters,
                    progress=progress,
                    watch=watch,
                    cell=f"{self.notebook}/{key}",
                    processes=self.variant.workload.workers,
                    spread=self._spread,
                )
            reason = cell.details["ended"] or (watch.autopsy() if cell.summary["failed"] else None)
            if reason is not None:
                self.record_cell("failed_cell", cell, {"reason": reason}, key=key)
                raise ServerFailed(reason)
        tokens = sum(pc.sum(rows["output_tokens"]).as_py() or 0 for rows in (cell.warmup, cell.requests))
        per_token_j = energy_per_token_j(telemetry.summary, tokens)
        cell.details["telemetry"] = {**telemetry.summary, "energy_per_token_j": per_token_j}
        doubts = telemetry.summary["suspect"]
        return with_reasons(cell, "suspect", doubts) if doubts else cell

    @contextmanager
    def _watching(self) -> Iterator[Watch]:
        """A watch over this run's server. Once it has found it hung or dead, no notebook uses that launch again."""
        server = self.server()
        watch = Watch(server.endpoints, server)
        try:
            yield watch
        except ServerFailed as error:
            if watch.failed:
                process.condemn(self.run, str(error))
            raise

    def record(self, kind: str, values: Mapping[str, Any], *, key: str = "") -> str:
        """Append a record (marked when the server's answers were found wrong or are unchecked); returns its id."""
        return self.run.append(self.notebook, kind, {"answers": summary.answers(self.run), **values}, key=key)

    def record_cell(self, kind: str, cell: Cell, values: Mapping[str, Any], *, key: str) -> str:
        """Append a measured cell: its rows to the tables, its summary to the records; returns the record's id."""
        tables.append_cell(self.run.path / "requests.parquet", cell.requests)
        tables.append_cell(self.run.path / "events.parquet", cell.events)
        return self.record(kind, {**values, **cell.summary, "details": cell.details}, key=key)

    def find(self, rule: str, **values: Any) -> None:
        """Record a finding by its rule (``record/findings.toml``); ``values`` fill its sentences."""
        findings.record(self.run, findings.make(rule, self.notebook, **values))

    def need(self, kind: str, notebook: str) -> dict[str, Any]:
        """The latest record of a kind; without one, the error names the notebook to run first."""
        return self.run.need(kind, notebook)

    def figure(self, name: str, figure: Figure) -> Figure:
        """Keep a figure under ``figures/`` too, and return it for the notebook to show."""
        figure.save(self.run.path / "figures" / f"{name}.png")
        return figure

    def measuring(self) -> Any:
        """Context manager that keeps other perfbook measurements on this host away."""
        return host_lock(f"{self.run.name} {self.notebook}")

    def conclude(self, sentence: str) -> Verdict:
        """The notebook's last word, computed from its data: recorded and shown; summary and results rewritten."""
        self.record("verdict", {"sentence": sentence})
        summary.write(self.run)
        results.write(self.run)
        return Verdict(sentence)

    def _repr_html_(self) -> str:
        header = self.run.header
        provenance = header.get("provenance", {})
        parts = [
            f"variant <b>{escape(self.variant.variant)}</b>",
            f"run <code>{escape(self.run.path.name)}</code>",
            escape(str(provenance.get("hardware", "hardware unknown"))),
            f"answers {summary.answers(self.run)}",
        ]
        if self.run.rehearsed:
            parts.insert(0, "<b>REHEARSAL: no number here was measured on this hardware</b>")
        return '<p class="pb-provenance">' + " · ".join(parts) + "</p>"

    def __repr__(self) -> str:
        return f"{self.notebook} · {self.run.name} · answers {summary.answers(self.run)}"


def open_desk(notebook: str, variant: str, run: str | None = None, **sections: Any) -> Desk:
    """Open the desk for a notebook.

    Parameters
    ----------
    notebook : str
        The notebook's own name.
    variant : str
        Name of the variant; ``params/<variant>.yaml`` gives every section that is not passed here.
    run : str, optional
        Folder of an existing run, of a rehearsal too. None: the latest measured run of the variant; ``01_deploy``
        starts a new one unless the latest one's server is still up; other notebooks start one where there is none.
    **sections
        Top-level keys of a parameter file (``server={…}``, ``sweep={…}``); None means "as the file says".

    Raises
    ------
    BadInput
        An unknown variant, key or value, or a run of another variant.
    """
    given = {key: value for key, value in sections.items() if value is not None}
    opened = Run.open(run) if run else Run.latest(variant)
    if opened is not None and not run and notebook.startswith("01") and process.find(opened) is None:
        opened = None  # the deploy notebook begins a run, unless there is a server to go on with
    if opened is not None and opened.path.parent.name != variant:
        raise BadInput(f"run {opened.name} belongs to another variant than {variant!r}")
    checked = _merge(variant, given, opened, named=run is not None)
    if opened is None:
        opened = Run.start(checked)
        opened.write_header({"provenance": hardware_of(opened).provenance(checked)})
    else:
        if opened.rehearsed:
            law_of(checked)  # a section passed here must not attach a rehearsal to a real server
        opened.write_header({}, checked)
    opened.begin(notebook)
    return Desk(notebook, checked, opened)


def read_desk(notebook: str, variant: str, run: str | None = None, **sections: Any) -> Desk:
    """Open the desk of a notebook that only computes from records; there must be some."""
    if not run and Run.latest(variant) is None:
        raise OutOfOrder(f"nothing is recorded for {variant!r} yet: run 01_deploy and what follows it first")
    return open_desk(notebook, variant, run, **sections)


def _merge(variant: str, given: dict[str, Any], run: Run | None, *, named: bool) -> Variant:
    """Sections given here, over the run's.

    In a run that was not named, sections other than ``server`` come from the variant's file again, so that an analyst
    can edit it between notebooks; the server stays the one that runs.
    """
    recorded = run.header["parameters"] if run is not None else {}
    if named:
        base = recorded
    else:
        path = paths.params() / f"{Path(variant).name}.yaml"
        if path.is_file():
            base = load_variant(path).sections() | {key: recorded[key] for key in ("server",) if key in recorded}
        elif recorded:
            base = recorded
        elif "server" in given:
            base = {}
        else:
            known = ", ".join(sorted(found.stem for found in paths.params().glob("*.yaml")))
            raise BadInput(f"no parameter file {path.name} in params/, and no server section given; known: {known}")
    return make_variant({**base, "variant": variant, **given}, f"parameters of {variant}")
