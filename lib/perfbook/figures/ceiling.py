"""Figures of the ceiling: measured step time over its floor, and the parts of a step on the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfbook import units
from perfbook.figures import style
from perfbook.figures.style import Figure

_PARTS = (style.BLUE, style.SKY, style.GREEN, style.RED, style.PURPLE)


def floor_over_concurrency(floors: Sequence[Mapping[str, Any]], *, rehearsed: bool = False) -> Figure:
    """Measured time per token over the floor that the machine sets, per concurrency.

    Parameters
    ----------
    floors : sequence of mappings
        Each with ``streams``, ``parts`` (mappings with ``name`` and ``ms``) and, where measured, ``tpot_ms``.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    names = list(dict.fromkeys(str(part["name"]) for floor in floors for part in floor["parts"]))
    said = []
    with style.canvas(height_in=3.8) as (figure, axes):
        axes.grid(visible=False, axis="x")
        axes.set_xticks(range(len(floors)), [f"{floor['streams']}" for floor in floors])
        axes.set_xlabel("concurrency (streams)")
        axes.set_ylabel("time per token (ms)")
        below = np.zeros(len(floors))
        for name, color in zip(names, _cycle(len(names)), strict=True):
            heights = np.array(
                [sum(float(part["ms"]) for part in floor["parts"] if part["name"] == name) for floor in floors]
            )
            axes.bar(range(len(floors)), heights, 0.55, bottom=below, color=color, label=f"floor: {name}", zorder=2)
            below = below + heights
        measured = [
            (index, float(floor["tpot_ms"])) for index, floor in enumerate(floors) if floor.get("tpot_ms") is not None
        ]
        if measured:
            x, y = [index for index, _ in measured], [ms for _, ms in measured]
            axes.plot(x, y, "D", color=style.INK, label="measured", zorder=4)
        for index, ms in measured:
            if below[index]:
                ratio = f"{units.number(ms / below[index])} ×"
                axes.annotate(
                    ratio, (index, ms), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9, zorder=5
                )
                floor_ms = units.quantity(float(below[index]), "ms")
                said.append(
                    f"at concurrency {floors[index]['streams']}: {units.quantity(ms, 'ms')} measured over a floor of "
                    f"{floor_ms} ({ratio})"
                )
        if floors:
            axes.margins(y=0.15)
            axes.set_ylim(bottom=0)
            figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        else:
            style.empty(axes)
    alt = f"Time per token over its floor: {', '.join(said) or 'not measured'}."
    caption = "Bars: the floor, by part of the step; diamonds: measured, with its multiple of the floor."
    return style.finish(figure, alt, caption, rehearsed=rehearsed)


def roofline(
    bandwidth_bytes_s: float, flop_s: float, parts: Sequence[Mapping[str, Any]], *, rehearsed: bool = False
) -> Figure:
    """The machine's roofline (Williams, Waterman & Patterson 2009) with the parts of a step on it.

    Parameters
    ----------
    bandwidth_bytes_s, flop_s : float
        Measured memory bandwidth and rate of matrix products, of one device.
    parts : sequence of mappings
        Each with ``name`` and ``intensity_flop_per_byte``; parts without an intensity are left out.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    ridge = flop_s / bandwidth_bytes_s
    known = [(str(p["name"]), float(p["intensity_flop_per_byte"])) for p in parts if p.get("intensity_flop_per_byte")]
    low = min([ridge / 100, *(intensity / 3 for _, intensity in known)])
    high = max([ridge * 10, *(intensity * 3 for _, intensity in known)])
    memory = [name for name, intensity in known if intensity < ridge]
    with style.canvas(height_in=3.8) as (figure, axes):
        x = np.geomspace(low, high, 200)
        axes.loglog(x, np.minimum(x * bandwidth_bytes_s, flop_s) / 1e12, color=style.INK)
        axes.set_xlabel("operations per byte moved (FLOP/B)")
        axes.set_ylabel("attainable rate (TFLOP/s)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(style.plain_numbers())
        axes.annotate(
            f"memory: {units.byte_rate(bandwidth_bytes_s)}",
            (low * 1.5, low * 1.5 * bandwidth_bytes_s / 1e12),
            xytext=(8, -4),
            textcoords="offset points",
            va="top",
            color=style.MUTED,
            fontsize=9,
        )
        axes.annotate(
            f"compute: {units.flop_rate(flop_s)}",
            (high, flop_s / 1e12),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            color=style.MUTED,
            fontsize=9,
        )
        style.mark(axes, ridge, f"ridge: {units.number(ridge)}")
        for (name, intensity), color in zip(known, _cycle(len(known)), strict=True):
            rate = min(intensity * bandwidth_bytes_s, flop_s) / 1e12
            axes.plot(intensity, rate, "o", color=color, markersize=7, zorder=4)
            axes.annotate(
                f"{name} ({units.number(intensity)})",
                (intensity, rate),
                xytext=(8, -3),
                textcoords="offset points",
                va="top",
                fontsize=9,
            )
        axes.margins(y=0.12)
    bound = f"{', '.join(memory)} bound by memory" if memory else "nothing bound by memory"
    alt = f"Roofline: ridge at {units.number(ridge)} FLOP per byte; {bound}, {len(known) - len(memory)} by compute."
    return style.finish(
        figure,
        alt,
        "Left of the ridge memory bandwidth limits a part, right of it computing does.",
        rehearsed=rehearsed,
    )


def _cycle(count: int) -> list[str]:
    return [_PARTS[index % len(_PARTS)] for index in range(count)]
