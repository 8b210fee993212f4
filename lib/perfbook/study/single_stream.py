"""03: how fast is one request, and why do two lengths disagree?

A blended rate (tokens over total time) mixes prefill and decode, so two of them at different lengths are not
comparable. Here every token is timed: time to first token is told from decode time, decode time is fitted against the
position of the token, and the gap between the blended rates of two lengths is attributed to its causes, with signs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from perfbook import figures, stats
from perfbook.desk import Desk, Verdict
from perfbook.errors import MeasurementFailed
from perfbook.figures import Figure
from perfbook.record import tables
from perfbook.report.table import Column, Table
from perfbook.stats import Estimate
from perfbook.stream.load import measure as measure_cell
from perfbook.stream.workload import RequestShape
from perfbook.study.prompts import numbered
from perfbook.units import number, quantity

NOTEBOOK = "03_single_stream"


def measure(desk: Desk, progress: Callable[[str], None]) -> None:
    """Measure every length once per repeat, the lengths in shuffled order within each repeat; one record each."""
    plan, workload = desk.variant.single_stream, desk.variant.workload
    endpoint = desk.endpoint()
    shuffle = random.Random(workload.seed)
    prompts = numbered(workload.prompt, plan.repeats * len(plan.output_tokens), workload.seed + 1)
    order = 0
    with desk.measuring():
        for repeat in range(plan.repeats):
            for tokens in shuffle.sample(plan.output_tokens, len(plan.output_tokens)):
                progress(f"repeat {repeat + 1} of {plan.repeats}, {tokens} tokens")
                shape = RequestShape(
                    output_tokens=tokens,
                    min_tokens=tokens if workload.ignore_eos else 0,
                    ignore_eos=workload.ignore_eos,
                    temperature=workload.temperature,
                    extra_body=workload.extra_body,
                )
                key = f"{tokens}/{repeat}"
                cell = measure_cell(
                    endpoint, [prompts[order]], shape, concurrency=1, requests=1, warmup=0,
                    metrics=desk.counters, cell=f"{NOTEBOOK}/{key}",
                )  # fmt: skip
                values = {"order": order, "repeat": repeat, "output_tokens_asked": tokens}
                desk.record_cell("single_stream_cell", cell, values, key=key)
                order += 1


@dataclass(frozen=True)
class Length:
    """What one output length showed; every estimate over the requests of this launch."""

    tokens: int
    requests: int
    failed: int
    ttft: Estimate
    tpot: Estimate
    blended: Estimate
    e2e: Estimate


@dataclass(frozen=True)
class SingleStream:
    """The analysis of one stream.

    Attributes
    ----------
    lengths : tuple of Length
        Ascending.
    ttft : Estimate
        Over all requests: the prompt is equally long in all.
    fit : PositionFit or None
        Decode time against position; None when nothing generated three tokens.
    attribution : Attribution or None
        Of the gap between the shortest and the longest length; None with one length.
    drift, warm_up : Drift, WarmUp
        Whether decode time, over its length's median, trends over the requests in the order measured; whether it is
        steady from the first of them.
    first_tok_s, steady_tok_s : float or None
        Blended rate of the launch's first request, and of later ones of the same length.
    """

    lengths: tuple[Length, ...]
    ttft: Estimate
    fit: stats.PositionFit | None
    attribution: stats.Attribution | None
    drift: stats.Drift
    warm_up: stats.WarmUp
    first_tok_s: float | None
    steady_tok_s: float | None
    launch: str = "one launch: intervals say how requests vary within it, not how launches do"

    @property
    def longest(self) -> Length:
        """The length that the headline decode rate comes from."""
        return self.lengths[-1]

    @property
    def decode(self) -> Estimate:
        """Decode rate in tokens per second: the reciprocal of TPOT, ends swapped."""
        tpot = self.longest.tpot
        value, low, high = _rate_of(tpot.value), _rate_of(tpot.high), _rate_of(tpot.low)
        return Estimate(value, low, high, "tok_s", tpot.n, tpot.confidence, tpot.method)


def analyse(requests: pd.DataFrame, events: pd.DataFrame, first: dict[str, Any] | None) -> SingleStream:
    """Analyse the requests of 03 (pure).

    Parameters
    ----------
    requests : DataFrame
        One row per request in the order measured: ``cell, ok, asked, ttft_ms, tpot_ms, e2e_ms, blended_tok_s``.
    events : DataFrame
        One row per token event: ``cell, arrival_ns, tokens``.
    first : dict or None
        ``first_request`` record: ``blended_tok_s, output_tokens_asked``.

    Raises
    ------
    MeasurementFailed
        No request succeeded.
    """
    good = requests[requests.ok]
    if good.empty:
        errors = ", ".join(sorted(set(requests.error.dropna()))) or "nothing was measured"
        raise MeasurementFailed(f"no single-stream request succeeded ({errors}): see 01_deploy for the server's log")
    lengths = tuple(
        Length(
            tokens=int(group.asked.iloc[0]),
            requests=len(group[group.ok]),
            failed=int((~group.ok).sum()),
            ttft=_median(group.ttft_ms, "ms"),
            tpot=_median(group.tpot_ms, "ms"),
            blended=_median(group.blended_tok_s, "tok_s"),
            e2e=_median(group.e2e_ms, "ms"),
        )
        for _, group in requests.groupby("asked", sort=True)
        if group.ok.any()
    )
    fit = _fit(events, good, lengths[-1].tokens)
    relative = _relative(good)
    at_first = next((x for x in lengths if first and x.tokens == first["output_tokens_asked"]), None)
    return SingleStream(
        lengths=lengths,
        ttft=_median(good.ttft_ms, "ms"),
        fit=fit,
        attribution=_attribute(good, fit),
        drift=stats.find_drift(relative),
        warm_up=stats.find_warm_up(relative),
        first_tok_s=first["blended_tok_s"] if first else None,
        steady_tok_s=at_first.blended.value if at_first else None,
    )


def load(desk: Desk) -> SingleStream:
    """Read what :func:`measure` recorded, and analyse it."""
    cells = {f"{NOTEBOOK}/{r['key']}": r for r in desk.run.records("single_stream_cell")}
    desk.need("single_stream_cell", NOTEBOOK)
    requests = tables.read(desk.run.path / "requests.parquet").to_pandas()
    requests = requests[requests.cell.isin(list(cells))].copy()
    requests["asked"] = [cells[cell]["output_tokens_asked"] for cell in requests.cell]
    requests["order"] = [cells[cell]["order"] for cell in requests.cell]
    events = tables.read(desk.run.path / "events.parquet").to_pandas()
    events = events[events.cell.isin(list(cells))]
    first = desk.run.record("first_request")
    return analyse(requests.sort_values("order"), events, first)


@dataclass(frozen=True)
class Gaps:
    """Times between consecutive token events (ms) and the tokens of each later event; one array per request."""

    ms: tuple[np.ndarray[Any, np.dtype[np.float64]], ...]
    tokens: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]

    @property
    def positions(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Position in the answer of each gap's last token."""
        return np.concatenate([np.cumsum(tokens) for tokens in self.tokens]).astype(float)

    @property
    def per_token_ms(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Gap over tokens (ITL)."""
        return np.concatenate([ms / tokens for ms, tokens in zip(self.ms, self.tokens, strict=True)])


def gaps(events: pd.DataFrame, cells: list[str]) -> Gaps:
    """Gaps of every request of the cells; an event that carries no token of its own belongs to the next gap."""
    ms, tokens = [], []
    counted = events[events.cell.isin(cells) & (events.tokens > 0)]
    for _, group in counted.sort_values(["cell", "request", "index"]).groupby(["cell", "request"], sort=False):
        if len(group) > 2:
            ms.append(np.diff(group.arrival_ns.to_numpy()) / 1e6)
            tokens.append(group.tokens.to_numpy()[1:].astype(np.int64))
    return Gaps(tuple(ms), tuple(tokens))


def length_table(result: SingleStream) -> Table:
    """Every length with its rates; the blended rate contains the prefill, the decode rate does not."""
    rows = [
        (
            x.tokens,
            x.requests,
            x.failed,
            str(x.ttft),
            str(x.tpot),
            number(_rate(x.tpot)),
            number(x.blended.value),
        )
        for x in result.lengths
    ]
    return Table(
        [
            Column("output length", "tokens"), "requests", "failed", "TTFT, median", "TPOT, median",
            Column("decode rate", "tok_s"), Column("blended rate", "tok_s"),
        ],
        rows,
        caption=f"One stream; {result.launch}",
    )  # fmt: skip


def rates_figure(desk: Desk, result: SingleStream) -> Figure:
    """Decode and blended rate at each length."""
    rows = [
        {
            "output_tokens": x.tokens,
            "decode_tok_s": _rate(x.tpot),
            "decode_tok_s_interval": _ends(Estimate(None, _rate_of(x.tpot.high), _rate_of(x.tpot.low))),
            "blended_tok_s": x.blended.value,
            "blended_tok_s_interval": _ends(x.blended),
        }
        for x in result.lengths
    ]
    return desk.figure("rates_by_length", figures.rates_by_length(rows, rehearsed=desk.run.rehearsed))


def steady_table(result: SingleStream) -> Table:
    """Warm-up and drift."""
    return Table(
        ["what", "value"],
        [
            ("first request of the launch, blended", quantity(result.first_tok_s, "tok_s")),
            ("later requests of that length, blended median", quantity(result.steady_tok_s, "tok_s")),
            ("steady from the first repeat", result.warm_up.sentence),
            ("drift over the repeats", result.drift.sentence),
        ],
        caption="Warm-up told from steady state",
    )


def position_figure(desk: Desk, result: SingleStream) -> Figure | str:
    """Decode time of every token of the longest length over its position, with the fit."""
    if result.fit is None:
        return "Too few tokens for a fit over position."
    events = tables.read(desk.run.path / "events.parquet").to_pandas()
    cells = [
        f"{NOTEBOOK}/{r['key']}"
        for r in desk.run.records("single_stream_cell")
        if r["output_tokens_asked"] == result.longest.tokens
    ]
    found = gaps(events, cells)
    fit = {
        "intercept_ms": result.fit.start.value or 0.0,
        "slope_us_per_token": result.fit.slope.value or 0.0,
    }
    drawn = figures.tpot_over_position(found.positions, found.per_token_ms, fit, rehearsed=desk.run.rehearsed)
    return desk.figure("tpot_over_position", drawn)


def attribution_table(result: SingleStream) -> Table | str:
    """The gap between the blended rates of the shortest and the longest length, by cause."""
    if result.attribution is None:
        return "One length only: there is no gap to attribute."
    parts = [(p.cause, p.seconds, p.tok_s) for p in result.attribution.parts]
    total = ("gap", result.attribution.gap_s, result.attribution.gap_tok_s)
    short, long = result.lengths[0].tokens, result.lengths[-1].tokens
    return Table(
        ["cause", Column("time", "s", sign=True), Column("rate", "tok_s", sign=True)],
        [*parts, total],
        caption=f"Why {long} tokens take {result.attribution.ratio:g} times {short} tokens plus the gap",
    )


def conclude(desk: Desk, result: SingleStream) -> Verdict:
    """Record the headline numbers and findings; the closing sentence."""
    longest, decode = result.longest, result.decode
    slope = result.fit.slope if result.fit else None
    record = desk.record(
        "single_stream",
        {
            "ttft_ms": result.ttft.value,
            "tpot_ms": longest.tpot.value,
            "decode_tok_s": decode.value,
            "tpot_slope_us_per_token": slope.value if slope else None,
            "blended_tok_s": {str(x.tokens): x.blended.value for x in result.lengths},
            "attribution": result.attribution.to_json() if result.attribution else None,
            "estimates": {
                "ttft": result.ttft.to_json(),
                "tpot": longest.tpot.to_json(),
                "decode": decode.to_json(),
                "tpot_slope": slope.to_json() if slope else None,
            },
            "drift": result.drift.to_json(),
            "warm_up": result.warm_up.to_json(),
            "requests": sum(x.requests for x in result.lengths),
            "failed": sum(x.failed for x in result.lengths),
        },
    )
    if result.first_tok_s is not None and result.steady_tok_s is not None:
        desk.record("warmup", {"first_request_tok_s": result.first_tok_s, "steady_tok_s": result.steady_tok_s})
        desk.find(
            "warm_up",
            first=quantity(result.first_tok_s, "tok_s"),
            steady=quantity(result.steady_tok_s, "tok_s"),
            evidence=f"first request of this launch against the median of {result.lengths[0].requests} later ones",
            records=[record],
        )
    if slope is not None and slope.low is not None and slope.low > 0:
        desk.find(
            "context_slope",
            slope=quantity(slope.value, "us_per_token"),
            longest=longest.tokens,
            shortest=result.lengths[0].tokens,
            evidence=f"TPOT over position: {slope}",
            records=[record],
        )
    if result.drift.detected or result.warm_up.over is False:
        unsteady = result.drift.sentence if result.drift.detected else result.warm_up.sentence
        desk.find("not_steady", drift=unsteady.rstrip("."), evidence=f"{result.drift.n} requests", records=[record])
    return desk.conclude(
        f"One stream decodes at {decode} (TPOT {quantity(longest.tpot.value, 'ms')} over {longest.tokens} tokens), "
        f"after {quantity(result.ttft.value, 'ms')} to the first token; "
        + (f"each token of position adds {slope}." if slope else "too few tokens for a fit over position.")
    )


def _median(values: pd.Series[float], unit: str) -> Estimate:
    known = values.dropna()
    return stats.median_interval(known, unit) if len(known) else Estimate(None, unit=unit, n=0)


def _rate(tpot: Estimate) -> float | None:
    return _rate_of(tpot.value)


def _rate_of(tpot_ms: float | None) -> float | None:
    return 1000 / tpot_ms if tpot_ms else None


def _ends(estimate: Estimate) -> list[float] | None:
    return None if estimate.low is None or estimate.high is None else [estimate.low, estimate.high]


def _relative(good: pd.DataFrame) -> list[float]:
    """TPOT over the median of its own length, in the order measured: lengths differ, drift should not."""
    known = good.dropna(subset=["tpot_ms"])
    relative = known.tpot_ms / known.groupby("asked").tpot_ms.transform("median")
    return [float(value) for value in relative] or [1.0]


def _fit(events: pd.DataFrame, good: pd.DataFrame, tokens: int) -> stats.PositionFit | None:
    found = gaps(events, list(good[good.asked == tokens].cell))
    return stats.fit_position(found.ms, [list(map(int, one)) for one in found.tokens]) if found.ms else None


def _attribute(good: pd.DataFrame, fit: stats.PositionFit | None) -> stats.Attribution | None:
    """From means, not medians: the parts have to add up to the whole time."""
    means = good.groupby("asked")[["e2e_ms", "ttft_ms"]].mean() / 1e3
    if fit is None or len(means) < 2 or means.isna().to_numpy().any():
        return None
    short, long = (
        stats.Generation(int(tokens), float(means.e2e_ms[tokens]), float(means.ttft_ms[tokens]))
        for tokens in (means.index[0], means.index[-1])
    )
    return stats.attribute_gap(short, long, slope=fit.slope, start_ms=fit.start.value)
