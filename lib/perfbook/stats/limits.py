"""What limits a sweep at its knee: requests that queue, or an engine step whose time saturates.

Both give the same plateau. 1536 tok/s at 128 and at 256 streams is a communication limit if the step takes
twice as long with twice the streams in it, and a scheduler limit (`max_num_seqs`, a full KV cache) if the
additional streams only wait. The two call for opposite actions, so this module tells them apart from what the
server and the client saw around the knee. Little's law links the two sides: streams being decoded =
throughput × TPOT.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.knee import STILL_RISING, Knee
from perfbook.stats.result import Result

KV_FULL = 0.95
"""KV cache use (fraction) from which the cache counts as full: a scheduler keeps a few blocks free."""
WAITING_SHARE = 0.05
"""Waiting requests per concurrency that count as a queue; fewer are arrivals between two steps."""
TTFT_STEP = 2.0
"""Growth of TTFT from one cell to the next, over the growth of concurrency, that counts as a step."""


class Limit(StrEnum):
    """What holds throughput down at the knee."""

    STEP_TIME = "step time"
    QUEUEING = "queueing"
    NOT_REACHED = "not reached"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CellLoad:
    """What one cell of a sweep showed (medians over its plateau and repeats); None where it was not measured.

    Attributes
    ----------
    concurrency : int
        Streams that the client kept open.
    throughput_tok_s : float
        Output tokens per second.
    tpot_ms, ttft_ms : float, optional
        Median decode time per token, median time to first token.
    running, waiting : float, optional
        The server's own gauges, as means over the cell.
    kv_usage : float, optional
        Highest use of the KV cache, as a fraction.
    preemptions : int, optional
        Requests that were preempted during the cell.
    """

    concurrency: int
    throughput_tok_s: float
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: int | None = None

    @property
    def in_decode(self) -> float | None:
        """Streams in decode by the client's side: throughput × TPOT (Little)."""
        return None if self.tpot_ms is None else self.throughput_tok_s * self.tpot_ms / 1e3

    @property
    def queues(self) -> bool | None:
        """Whether requests wait at the server; None where its gauge was not read."""
        if self.waiting is None:
            return None
        return self.waiting >= max(1.0, WAITING_SHARE * self.concurrency)


@dataclass(frozen=True)
class Limitation(Result):
    """The decision, what it rests on, and where queueing begins.

    Attributes
    ----------
    limit : Limit
        What limits at the knee.
    cause : str or None
        For queueing: ``max_num_seqs``, ``KV cache`` or None where neither showed.
    evidence : tuple of str
        The observations that decided, one sentence part each.
    queueing_from : int or None
        Smallest concurrency at which requests waited, also where the step time is the limit.
    still_scaling : bool or None
        Whether throughput was still rising steeply into the knee: then lifting a queueing limit pays; None
        where no smaller concurrency was measured.
    """

    limit: Limit
    cause: str | None
    evidence: tuple[str, ...]
    queueing_from: int | None
    still_scaling: bool | None

    @property
    def sentence(self) -> str:
        """The decision in words."""
        because = "; ".join(self.evidence)
        match self.limit:
            case Limit.NOT_REACHED:
                return f"No limit was reached: {because}."
            case Limit.UNKNOWN:
                return f"What limits throughput is unknown: {because}."
            case Limit.STEP_TIME:
                tail = f" Requests queue from {self.queueing_from} up." if self.queueing_from else ""
                return f"The step time saturates: {because}.{tail}"
        text = f"Requests queue ({self.cause or 'cause not visible'}): {because}."
        if self.still_scaling is not None:
            gain = "may well pay" if self.still_scaling else "can gain little, throughput was flattening before"
            text += f" Lifting that limit {gain}."
        return text


def what_limits(cells: Iterable[CellLoad], knee: Knee, *, max_num_seqs: int | None = None) -> Limitation:
    """Decide what limits throughput at the knee, by comparing the knee's cell with the next one.

    From one to the other concurrency grows by a factor and throughput hardly. Either the streams in decode
    did not grow with it (they wait: queueing), or they did and TPOT grew with them (the step saturates).
    "Grow with it" means by more than the square root of the factor. Where the server's gauges are missing the
    streams in decode come from the client's side (throughput × TPOT), and the evidence says so. If neither
    holds, the answer is ``unknown``: the time is lost outside decode (prefill, the API server, the client).

    Parameters
    ----------
    cells : iterable of CellLoad
        One per concurrency.
    knee : Knee
        As :func:`perfbook.stats.find_knee` found it on the same cells.
    max_num_seqs : int, optional
        The scheduler's limit, to name the cause.

    Raises
    ------
    BadInput
        When a concurrency appears twice, or the knee's own or the one above it is not among the cells.
    """
    ordered = sorted(cells, key=lambda cell: cell.concurrency)
    by_c = {cell.concurrency: cell for cell in ordered}
    if len(by_c) < len(ordered):
        raise BadInput("what limits: a concurrency appears twice; give one cell for all its repeats")
    queueing_from = next((c for c, cell in by_c.items() if cell.queues), None)
    if knee.cells == 1:
        return Limitation(Limit.UNKNOWN, None, ("only one concurrency was measured",), queueing_from, None)
    if knee.concurrency is None:
        rising = f"throughput still rises at {max(by_c, default=knee.best_concurrency)}"
        return Limitation(Limit.NOT_REACHED, None, (rising,), queueing_from, True)
    order = list(by_c)
    if knee.concurrency not in order[:-1]:
        raise BadInput(f"what limits: needs the cell of the knee ({knee.concurrency}) and the one above it")
    at = order.index(knee.concurrency)
    here, there = by_c[order[at]], by_c[order[at + 1]]
    still_scaling = None
    if at:
        before = by_c[order[at - 1]]
        still_scaling = _growth(before, here, here.throughput_tok_s, before.throughput_tok_s) > STILL_RISING

    source, decoding, then_decoding = "running requests", here.running, there.running
    if decoding is None or then_decoding is None:
        source, decoding, then_decoding = "streams in decode (throughput × TPOT)", here.in_decode, there.in_decode
    if decoding is None or then_decoding is None:
        return Limitation(
            Limit.UNKNOWN,
            None,
            ("neither the server's running requests nor TPOT were measured",),
            queueing_from,
            still_scaling,
        )
    span = f"from concurrency {here.concurrency} to {there.concurrency}"
    evidence = [f"{span} {source} go from {units.number(decoding)} to {units.number(then_decoding)}"]
    joined = _growth(here, there, then_decoding, decoding) > STILL_RISING
    if here.tpot_ms is not None and there.tpot_ms is not None:
        evidence.append(f"TPOT from {units.quantity(here.tpot_ms, 'ms')} to {units.quantity(there.tpot_ms, 'ms')}")
    if not joined:
        evidence += _queue_evidence(here, there)
        # A server that says nothing waits, while streams are missing from decode, contradicts queueing.
        limit = Limit.UNKNOWN if there.queues is False else Limit.QUEUEING
        cause = _cause(there, then_decoding, max_num_seqs) if limit is Limit.QUEUEING else None
        return Limitation(limit, cause, tuple(evidence), queueing_from, still_scaling)
    slower = (
        here.tpot_ms is not None
        and there.tpot_ms is not None
        and _growth(here, there, there.tpot_ms, here.tpot_ms) > STILL_RISING
    )
    if not slower:
        missing = here.tpot_ms is None or there.tpot_ms is None
        evidence.append("TPOT was not measured" if missing else "so the time is lost outside decode")
    return Limitation(Limit.STEP_TIME if slower else Limit.UNKNOWN, None, tuple(evidence), queueing_from, still_scaling)


def _growth(here: CellLoad, there: CellLoad, after: float, before: float) -> float:
    """Growth of a quantity per growth of concurrency, both as logarithms: 1 in proportion, 0 not at all."""
    if after <= 0 or before <= 0:
        return 0.0
    return math.log(after / before) / math.log(there.concurrency / here.concurrency)


def _queue_evidence(here: CellLoad, there: CellLoad) -> list[str]:
    found = []
    if there.waiting is not None:
        found.append(f"{units.number(there.waiting)} wait")
    if there.preemptions:
        found.append(f"{there.preemptions} preemptions")
    if there.kv_usage is not None:
        found.append(f"KV cache use {units.percent(100 * there.kv_usage)}")
    if here.ttft_ms and there.ttft_ms:
        times = there.ttft_ms / here.ttft_ms
        if times >= TTFT_STEP * there.concurrency / here.concurrency:
            found.append(f"TTFT steps up {units.number(times)} times")
    return found


def _cause(cell: CellLoad, decoding: float, max_num_seqs: int | None) -> str | None:
    if cell.preemptions or (cell.kv_usage is not None and cell.kv_usage >= KV_FULL):
        return "KV cache"
    if max_num_seqs is not None and decoding >= 0.95 * max_num_seqs:
        return "max_num_seqs"
    return None
