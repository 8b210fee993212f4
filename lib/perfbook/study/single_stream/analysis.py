"""From requests and token events to rates, fit, warm-up and attribution (pure, but for :func:`load`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from perfbook import stats
from perfbook.desk import Desk
from perfbook.errors import MeasurementFailed
from perfbook.record import tables
from perfbook.stats import Estimate
from perfbook.study.single_stream.measure import NOTEBOOK

VISIBLY_SLOWER = 0.05
"""Share by which the first request must fall behind the slowest later one to be called warm-up."""


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
    first_tok_s, steady_tok_s, slowest_tok_s : float or None
        Blended rate of the launch's first request; the median and the slowest of later ones of the same length.
    cells : tuple of mappings
        The records of the requests, one each, with their validity.
    """

    lengths: tuple[Length, ...]
    ttft: Estimate
    fit: stats.PositionFit | None
    attribution: stats.Attribution | None
    drift: stats.Drift
    warm_up: stats.WarmUp
    first_tok_s: float | None
    steady_tok_s: float | None
    slowest_tok_s: float | None = None
    cells: tuple[Mapping[str, Any], ...] = ()
    launch: str = "one launch: intervals say how requests vary within it, not how launches do"

    @property
    def longest(self) -> Length:
        """The length that the headline decode rate comes from."""
        return self.lengths[-1]

    @property
    def first_is_warm_up(self) -> bool:
        """Whether the launch's first request was slower than every later one of its length, and visibly so."""
        if self.first_tok_s is None or self.slowest_tok_s is None:
            return False
        return self.first_tok_s < (1 - VISIBLY_SLOWER) * self.slowest_tok_s

    @property
    def decode(self) -> Estimate:
        """Decode rate in tokens per second: the reciprocal of TPOT, ends swapped."""
        tpot = self.longest.tpot
        value, low, high = rate_of(tpot.value), rate_of(tpot.high), rate_of(tpot.low)
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
    later = good[good.asked == at_first.tokens].blended_tok_s.dropna() if at_first else good.blended_tok_s[:0]
    return SingleStream(
        lengths=lengths,
        ttft=_median(good.ttft_ms, "ms"),
        fit=fit,
        attribution=_attribute(good, fit),
        drift=stats.find_drift(relative),
        warm_up=stats.find_warm_up(relative),
        first_tok_s=first["blended_tok_s"] if first else None,
        steady_tok_s=at_first.blended.value if at_first else None,
        slowest_tok_s=float(later.min()) if len(later) else None,
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
    return replace(analyse(requests.sort_values("order"), events, first), cells=tuple(cells.values()))


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


def _median(values: pd.Series[float], unit: str) -> Estimate:
    known = values.dropna()
    return stats.median_interval(known, unit) if len(known) else Estimate(None, unit=unit, n=0)


def rate_of(tpot_ms: float | None) -> float | None:
    """Tokens per second at a time per token; None where that is not known."""
    return 1000 / tpot_ms if tpot_ms else None


def _relative(good: pd.DataFrame) -> list[float]:
    """TPOT over the median of its own length, in the order measured: lengths differ, drift should not."""
    known = good.dropna(subset=["tpot_ms"])
    relative = known.tpot_ms / known.groupby("asked").tpot_ms.transform("median")
    return [float(value) for value in relative] or [1.0]


def _fit(events: pd.DataFrame, good: pd.DataFrame, tokens: int) -> stats.PositionFit | None:
    found = gaps(events, list(good[good.asked == tokens].cell))
    return stats.fit_position(found.ms, [list(map(int, one)) for one in found.tokens]) if found.ms else None


def _attribute(good: pd.DataFrame, fit: stats.PositionFit | None) -> stats.Attribution | None:
    """Of the two longest lengths, of which nobody says that they are mostly prefill.

    From means, not medians: the parts have to add up to the whole time.
    """
    means = good.groupby("asked")[["e2e_ms", "ttft_ms"]].mean() / 1e3
    if fit is None or len(means) < 2 or means.isna().to_numpy().any():
        return None
    short, long = (
        stats.Generation(int(tokens), float(means.e2e_ms[tokens]), float(means.ttft_ms[tokens]))
        for tokens in means.index[-2:]
    )
    return stats.attribute_gap(short, long, slope=fit.slope, start_ms=fit.start.value)
