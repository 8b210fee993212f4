"""Latency figures: one stream's tokens over their position, rates over length, tails over concurrency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from perfbook import units
from perfbook.figures import style
from perfbook.figures.cells import Cells, by_concurrency, doubts, medians, range_text, statistic
from perfbook.figures.style import Figure

_BINS = 40


def tpot_over_position(
    positions: ArrayLike,
    tpot_ms: ArrayLike,
    fit: Mapping[str, float] | None = None,
    *,
    rehearsed: bool = False,
) -> Figure:
    """Time of each token over its position in the answer.

    Parameters
    ----------
    positions : array of shape (n,)
        Index of the token in its answer.
    tpot_ms : array of shape (n,)
        Time since the token before it (ms).
    fit : mapping, optional
        Straight line: ``intercept_ms`` at position 0, ``slope_us_per_token``.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    x, y = np.asarray(positions, dtype=float), np.asarray(tpot_ms, dtype=float)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    cut = 0
    with style.canvas() as (figure, axes):
        axes.set_xlabel("position in the answer (tokens)")
        axes.set_ylabel("time per token (ms)")
        if x.size:
            axes.plot(x, y, ".", color=style.SKY, markersize=3, alpha=0.5, zorder=2, rasterized=True)
            edges = np.linspace(x.min(), x.max() + 1, min(_BINS, x.size) + 1)
            which = np.digitize(x, edges)
            bins = [which == k for k in range(1, edges.size) if (which == k).any()]
            axes.plot(
                [float(x[k].mean()) for k in bins],
                [float(np.median(y[k])) for k in bins],
                color=style.BLUE,
                zorder=3,
            )
            # A few stalls must not flatten the rest; how many are off the scale is said.
            low, high = (float(q) for q in np.quantile(y, (0.005, 0.99)))
            room = max(high - low, 0.05 * high)
            bottom, top = max(0.0, min(low, float(y.min())) - room / 2), high + room
            cut = int((y > top).sum())
            axes.set_ylim(bottom, top)
            if cut:
                axes.annotate(
                    f"{cut} of {y.size} above, up to {units.quantity(float(y.max()), 'ms')}",
                    (0.99, 0.97),
                    xycoords="axes fraction",
                    ha="right",
                    va="top",
                    color=style.MUTED,
                    fontsize=9,
                )
        else:
            style.empty(axes)
        if fit is not None and x.size:
            ends = np.array([x.min(), x.max()])
            axes.plot(ends, _line_ms(fit, ends), color=style.RED, linestyle=(0, (5, 2)), zorder=4)
            axes.annotate(
                f"fit: {units.quantity(fit['intercept_ms'], 'ms')} at position 0, "
                f"{units.quantity(fit['slope_us_per_token'], 'us_per_token', sign=True)}",
                (0.01, 0.97),
                xycoords="axes fraction",
                va="top",
                color=style.RED,
                fontsize=9,
            )
    alt = "Time per token over position: not measured."
    if x.size:
        middle = units.quantity(float(np.median(y)), "ms")
        alt = f"Time per token over position: median {middle} over {x.size} tokens"
        if fit is not None:
            first, last = (units.quantity(ms, "ms") for ms in _line_ms(fit, np.array([x.min(), x.max()])))
            alt += f", from {first} at position {x.min():.0f} to {last} at {x.max():.0f}"
            alt += f" ({units.quantity(fit['slope_us_per_token'], 'us_per_token', sign=True)})"
        alt += f"; {cut} above the scale." if cut else "."
    caption = "Points: tokens; solid line: their running median" + (
        "; dashed: the straight line fitted by least squares, which a few slow tokens lift above the median."
        if fit
        else "."
    )
    return style.finish(figure, alt, caption, rehearsed=rehearsed)


def rates_by_length(rows: Sequence[Mapping[str, Any]], *, rehearsed: bool = False) -> Figure:
    """Decode rate and blended rate of one stream at each length of answer.

    Parameters
    ----------
    rows : sequence of mappings
        Each with ``output_tokens``, ``decode_tok_s``, ``blended_tok_s`` and, where known,
        ``decode_tok_s_interval`` and ``blended_tok_s_interval`` ([low, high]).
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    series = (
        ("decode_tok_s", "decode (first token left out)", style.BLUE, -0.06),
        ("blended_tok_s", "blended (whole request)", style.RED, 0.06),
    )
    lengths = [str(row["output_tokens"]) for row in rows]
    said = []
    ends_of_lines: list[tuple[float, str, str]] = []
    with style.canvas(height_in=3.4) as (figure, axes):
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_xlim(-0.5, max(len(lengths), 1) - 0.5)
        axes.set_xlabel("length of the answer (tokens)")
        axes.set_ylabel("rate of one stream (tok/s)")
        for (key, name, color, shift), marker in zip(series, style.MARKERS, strict=False):
            measured = [(i + shift, row[key], row.get(f"{key}_interval")) for i, row in enumerate(rows) if row.get(key)]
            if not measured:
                continue
            axes.plot([m[0] for m in measured], [m[1] for m in measured], marker=marker, color=color, zorder=3)
            for x, _, ends in measured:
                if ends:
                    axes.vlines(x, *ends, color=color, linewidth=1.4, zorder=2)
            ends_of_lines.append((measured[-1][1], name.replace(" (", "\n("), color))
            values = ", ".join(
                f"{units.quantity(row[key], 'tok_s')} over {row['output_tokens']}" for row in rows if row.get(key)
            )
            said.append(f"{name.partition(' ')[0]} {values} tokens")
        axes.margins(y=0.25)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 0.0))  # a margin must not suggest a rate below zero
        style.label_ends(axes, ends_of_lines, gap_pt=24.0)
        if not ends_of_lines:
            style.empty(axes)
    alt = "Rate of one stream by length: " + ("; ".join(said) or "not measured") + "."
    return style.finish(figure, alt, "Rates of one stream; bars: intervals of the median.", rehearsed=rehearsed)


def latency_over_concurrency(
    cells: Cells,
    *,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    rehearsed: bool = False,
) -> Figure:
    """Time to first token and time per token, median to p99, over the number of streams.

    Parameters
    ----------
    cells : sequence of mappings
        Cells of the sweep, repeats included (medians over repeats are drawn).
    slo_ttft_ms, slo_tpot_ms : float, optional
        Limits to mark.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    panels = (
        ("ttft_ms", "time to first token (ms)", slo_ttft_ms),
        ("tpot_ms", "time per token (ms)", slo_tpot_ms),
    )
    lines = (("p50", style.BLUE, "-"), ("p90", style.ORANGE, "-"), ("p99", style.RED, "-"))
    said = []
    with style.canvas(width_in=7.2, height_in=3.6, ncols=2) as (figure, both):
        for axes, (key, label, slo) in zip(both, panels, strict=True):
            style.concurrency_axis(axes, [cell["concurrency"] for cell in cells])
            axes.tick_params(axis="x", labelsize=8)
            axes.set_title(label, fontsize=10)
            ends = []
            for (which, color, dash), marker in zip(lines, style.MARKERS, strict=False):
                points = by_concurrency(cells, [statistic(cell, key, which) for cell in cells])
                x, y = medians(points)
                if not x:
                    continue
                axes.plot(x, y, dash, marker=marker, markersize=4, color=color, zorder=3)
                ends.append((y[-1], which, color))
                if which in ("p50", "p99"):
                    said.append(f"{label.partition(' (')[0]} {which} {range_text(points, 'ms')}")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(style.plain_numbers())
            axes.yaxis.set_minor_formatter(style.plain_numbers(sparse=True))
            axes.tick_params(axis="y", which="minor", labelsize=8)
            style.label_ends(axes, ends)
            if not ends:
                style.empty(axes)
            if slo is not None:
                style.limit(axes, slo, f"SLO {units.quantity(slo, 'ms')}", style.PURPLE)
    alt = ("; ".join(said) or "Latency over concurrency: not measured") + "."
    caption = "Median and tail of the time to first token (left) and per token (right); logarithmic scales."
    caption += doubts(cells)
    return style.finish(figure, alt[:1].upper() + alt[1:], caption, rehearsed=rehearsed)


def _line_ms(fit: Mapping[str, float], x: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    return [float(fit["intercept_ms"] + fit["slope_us_per_token"] / 1000.0 * value) for value in x]
