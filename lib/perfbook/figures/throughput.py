"""Throughput figures of the concurrency sweep."""

from __future__ import annotations

from perfbook import units
from perfbook.figures import style
from perfbook.figures.cells import (
    Cells,
    by_concurrency,
    doubts,
    medians,
    per_user_tok_s,
    range_text,
    throughput_tok_s,
    valid,
)
from perfbook.figures.style import Figure

_DOUBTFUL = "Hollow: suspect or invalid."


def throughput_over_concurrency(
    cells: Cells,
    knee: int | None = None,
    best: float | None = None,
    slo: int | None = None,
    *,
    rehearsed: bool = False,
) -> Figure:
    """Total output tokens per second over the number of streams.

    Parameters
    ----------
    cells : sequence of mappings
        Cells of the sweep; several of one concurrency are its repeats: each is a point, the line joins medians,
        and the bar spans them. ``output_tok_s_interval`` ([low, high]), where a cell has it, is drawn as its bar.
    knee : int, optional
        Concurrency of the knee.
    best : float, optional
        Best throughput (tok/s).
    slo : int, optional
        Largest concurrency that meets the service-level objective.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    values = [throughput_tok_s(cell) for cell in cells]
    points = by_concurrency(cells, values)
    x, y = medians(points)
    with style.canvas() as (figure, axes):
        style.concurrency_axis(axes, x)
        axes.set_ylabel("output throughput (tok/s)")
        if x:
            top = max(max(repeats) for repeats in points.values())
            axes.set_ylim(0, top * 1.15)
            ideal = [y[0] / x[0] * streams for streams in x]
            axes.plot(x, ideal, color=style.MUTED, linewidth=1, linestyle=":", zorder=1)
            inside = [i for i, rate in enumerate(ideal) if rate <= top]
            if len(inside) > 1:
                axes.annotate(
                    "if one stream's rate held",
                    (x[inside[-1]], ideal[inside[-1]]),
                    xytext=(-6, 3),
                    textcoords="offset points",
                    ha="right",
                    color=style.MUTED,
                    fontsize=9,
                )
            axes.plot(x, y, color=style.BLUE, zorder=3)
            axes.vlines(
                x,
                [min(r) for r in points.values()],
                [max(r) for r in points.values()],
                color=style.BLUE,
                linewidth=1.2,
            )
        for cell, value in zip(cells, values, strict=True):
            if value is None:
                continue
            fill = style.BLUE if valid(cell) else "white"
            axes.plot(
                cell["concurrency"],
                value,
                "o",
                color=style.BLUE,
                markerfacecolor=fill,
                markersize=5.5,
                zorder=4,
            )
            if cell.get("output_tok_s_interval"):
                axes.vlines(cell["concurrency"], *cell["output_tok_s_interval"], color=style.BLUE, linewidth=1.2)
        if not x:
            style.empty(axes)
        if best is not None:
            style.limit(axes, best, f"best {units.quantity(best, 'tok_s')}", style.GREEN)
        if knee is not None:
            style.mark(axes, knee, f"knee: {knee}", style.RED)
        if slo is not None:
            style.mark(axes, slo, f"SLO met up to {slo}", style.PURPLE, left=slo > min(x, default=slo))
    said = [f"Throughput over concurrency: {range_text(points, 'tok_s')}"]
    if best is not None:
        said.append(f"best {units.quantity(best, 'tok_s')}")
    said.append(f"knee at {knee} streams" if knee is not None else "no knee in range")
    if slo is not None:
        said.append(f"SLO met up to {slo} streams")
    doubtful = f" {_DOUBTFUL}" if not all(map(valid, cells)) else ""
    caption = f"Total output throughput by number of streams. Points: measurements; line: medians.{doubtful}"
    return style.finish(figure, "; ".join(said) + ".", caption, rehearsed=rehearsed)


def throughput_latency(cells: Cells, *, rehearsed: bool = False) -> Figure:
    """What all users get together over what each one gets: the trade that concurrency makes.

    Parameters
    ----------
    cells : sequence of mappings
        Cells of the sweep, repeats included (medians are drawn, with the concurrency beside each).
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    total = by_concurrency(cells, [throughput_tok_s(cell) for cell in cells])
    user = by_concurrency(cells, [per_user_tok_s(cell) for cell in cells])
    both = [streams for streams in total if streams in user]
    x = medians({streams: user[streams] for streams in both})[1]
    y = medians({streams: total[streams] for streams in both})[1]
    # A concurrency is on the frontier when no other one gives both more in total and more to each user.
    frontier = [
        i
        for i in range(len(both))
        if not any(x[j] >= x[i] and y[j] >= y[i] and (x[j], y[j]) != (x[i], y[i]) for j in range(len(both)))
    ]
    with style.canvas() as (figure, axes):
        axes.set_xlabel("rate of each user once tokens flow (tok/s)")
        axes.set_ylabel("output throughput of all users (tok/s)")
        axes.plot(x, y, color=style.GRID, linewidth=1.5, zorder=2)
        axes.plot([x[i] for i in frontier], [y[i] for i in frontier], color=style.BLUE, zorder=3)
        for i, streams in enumerate(both):
            fill = style.BLUE if i in frontier else "white"
            axes.plot(x[i], y[i], "o", color=style.BLUE, markerfacecolor=fill, zorder=4)
            axes.annotate(f"{streams}", (x[i], y[i]), xytext=(7, 2), textcoords="offset points", fontsize=9)
        if both:
            axes.set_xlim(0, max(x) * 1.12)
            axes.set_ylim(0, max(y) * 1.12)
        else:
            style.empty(axes)
    if both:
        ends = [
            f"{units.quantity(x[i], 'tok_s')} each and {units.quantity(y[i], 'tok_s')} together at {both[i]}"
            for i in ((0, -1) if len(both) > 1 else (0,))
        ]
        alt = f"Per-user rate against total throughput: {', '.join(ends)} streams."
    else:
        alt = "Per-user rate against total throughput: not measured."
    caption = (
        "Each point is one concurrency (number beside it). Filled: no other concurrency gives more both to each "
        "user and in total." + doubts(cells)
    )
    return style.finish(figure, alt, caption, rehearsed=rehearsed)
