"""Tables, figures and the verdict of a single stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfbook import figures
from perfbook.desk import Desk, Verdict
from perfbook.figures import Figure
from perfbook.record import tables
from perfbook.report.table import Column, Note, Table
from perfbook.stats import Estimate, Part
from perfbook.study import doubts
from perfbook.study.single_stream.analysis import SingleStream, gaps, rate_of
from perfbook.study.single_stream.measure import NOTEBOOK
from perfbook.units import number, quantity


def length_table(result: SingleStream) -> Table:
    """Every length with its rates; the blended rate contains the prefill, the decode rate does not."""
    rows = [
        (
            x.tokens,
            x.requests,
            x.failed,
            str(x.ttft),
            str(x.tpot),
            _rate(x.tpot),
            x.blended.value,
            _validity([cell for cell in result.cells if cell["output_tokens_asked"] == x.tokens]),
        )
        for x in result.lengths
    ]
    return Table(
        [
            Column("output length", "tokens"), "requests", "failed", "TTFT, median", "TPOT, median",
            Column("decode rate", "tok_s"), Column("blended rate, median", "tok_s"), "validity",
        ],
        rows,
        caption=f"One stream; {result.launch}; {doubts.clock(result.cells)}",
    )  # fmt: skip


def rates_figure(desk: Desk, result: SingleStream) -> Figure:
    """Decode and blended rate at each length."""
    rows = [
        {
            "output_tokens": x.tokens,
            "decode_tok_s": _rate(x.tpot),
            "decode_tok_s_interval": _ends(Estimate(None, rate_of(x.tpot.high), rate_of(x.tpot.low))),
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


def position_figure(desk: Desk, result: SingleStream) -> Figure | Note:
    """Decode time of every token of the longest length over its position, with the fit."""
    if result.fit is None:
        return Note("Too few tokens for a fit over position.")
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


def attribution_table(result: SingleStream) -> Table | Note:
    """The gap between the blended rates of the two longest lengths, by cause."""
    if result.attribution is None:
        return Note("One length only: there is no gap to attribute.")
    parts = [(p.cause, p.seconds, _ends_s(p), p.tok_s) for p in result.attribution.parts]
    total = ("sum: the whole gap", result.attribution.gap_s, "", result.attribution.gap_tok_s)
    short, long = (length.tokens for length in result.lengths[-2:])
    return Table(
        ["cause", Column("time", "s", sign=True), "95 % interval (s)", Column("rate", "tok_s", sign=True)],
        [*parts, total],
        caption=f"From {result.attribution.ratio:g} × {short} tokens to {long} tokens, on means over the requests",
    )


def _ends_s(part: Part) -> str:
    """``+0.81 to +0.93``; empty where only the value is known."""
    if part.low_s is None or part.high_s is None:
        return ""
    return f"{number(part.low_s, sign=True)} to {number(part.high_s, sign=True)}"


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
            "not_valid": len(doubts.not_valid(result.cells)),
        },
    )
    doubt = doubts.sentence(result.cells, "requests")
    if doubt:
        desk.find(
            "cells_not_valid",
            subject="single stream",
            count=len(doubts.not_valid(result.cells)),
            cells=f"{len(result.cells)} single-stream requests",
            where=desk.notebook,
            evidence=doubts.reasons(result.cells),
            records=[record],
        )
    if result.first_tok_s is not None and result.steady_tok_s is not None:
        desk.record("warmup", {"first_request_tok_s": result.first_tok_s, "steady_tok_s": result.steady_tok_s})
    if result.first_is_warm_up:
        desk.find(
            "warm_up",
            first=quantity(result.first_tok_s, "tok_s"),
            steady=quantity(result.steady_tok_s, "tok_s"),
            evidence="first request of this launch against the median of later ones of its length, the slowest of "
            f"which ran at {quantity(result.slowest_tok_s, 'tok_s')}.{doubt}",
            records=[record],
        )
    if slope is not None and slope.low is not None and slope.low > 0:
        desk.find(
            "context_slope",
            slope=quantity(slope.value, "us"),
            longest=longest.tokens,
            shortest=result.lengths[0].tokens,
            evidence=f"TPOT over position: {slope}.{doubt}",
            records=[record],
        )
    if result.drift.detected or result.warm_up.over is False:
        unsteady = result.drift.sentence if result.drift.detected else result.warm_up.sentence
        evidence = f"TPOT over the median of its length, {result.drift.n} requests in order: {unsteady}"
        desk.find("not_steady", evidence=evidence, records=[record])
    return desk.conclude(
        f"One stream decodes at {decode} (TPOT {quantity(longest.tpot.value, 'ms')} over {longest.tokens} tokens), "
        f"after {quantity(result.ttft.value, 'ms')} to the first token; "
        f"{_slope_in_words(slope)}.{doubt}"
    )


def _slope_in_words(slope: Estimate | None) -> str:
    if slope is None:
        return "too few tokens for a fit over position"
    if slope.low is None or slope.high is None:
        return "whether a token's position matters is unknown: one request of that length has no interval"
    if slope.low <= 0 <= slope.high:
        return f"no effect of the token's position detected ({slope})"
    return f"each token of position adds {slope}"


def _validity(cells: list[Mapping[str, Any]]) -> str:
    """``valid``, or how many of the requests are not."""
    doubtful = len(doubts.not_valid(cells))
    return f"{doubtful} of {len(cells)} suspect or invalid" if doubtful else "valid" if cells else "unknown"


def _rate(tpot: Estimate) -> float | None:
    return rate_of(tpot.value)


def _ends(estimate: Estimate) -> list[float] | None:
    return None if estimate.low is None or estimate.high is None else [estimate.low, estimate.high]
