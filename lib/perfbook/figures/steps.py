"""Figures of profiled engine steps: where a step's time goes, and what runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfbook import units
from perfbook.figures import style
from perfbook.figures.style import Figure

IDLE = "idle"
# One colour per group of categories, the same in every figure; communication stands out.
_COLORS: Mapping[str, str] = {
    "all_reduce": style.RED,
    "all_gather": "#e8823a",
    "reduce_scatter": "#f0a468",
    "all_to_all": "#f5c19a",
    "send_recv": "#f9dcc6",
    "gemm": style.BLUE,
    "moe": "#3d94c9",
    "attention": style.GREEN,
    "kv_cache": "#5cc0a0",
    "norm": style.PURPLE,
    "activation": "#dba6c4",
    "rope": "#eccbdd",
    "quantize": style.ORANGE,
    "cast_copy": "#f0bf4d",
    "elementwise": style.YELLOW,
    "reduction": "#c9b800",
    "sampling": style.SKY,
    "embedding": "#a5d5f1",
    "memcpy": "#8c97a5",
    "memset": "#a9b2bd",
    "other": "#c4cad2",
    IDLE: "#eef1f4",
}
_LETTERS_PER_PCT = 0.68  # of the labels' size, in a bar as wide as the figure
_LIGHT = frozenset(
    {"send_recv", "all_to_all", "rope", "activation", "elementwise", "embedding", "other", "memset", IDLE}
)


def step_breakdown(phases: Sequence[Mapping[str, Any]], *, device: bool = True, rehearsed: bool = False) -> Figure:
    """One stacked bar per phase: the share of a step that each category of kernel takes.

    Parameters
    ----------
    phases : sequence of mappings
        Each with ``label`` (``decode, 1 stream``), ``categories`` (mappings with ``category`` and
        ``ms_per_step``) and, where known, ``step_ms``: a number or a mapping with ``mean``. What the
        categories leave of the step is idle.
    device : bool
        Whether a device's kernels were traced. Without them (host operators only) the rest is not traced: nobody knows
        whether it was idle.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    rest, meaning = ("idle", "no kernel ran") if device else ("not traced", "outside of the traced operators")

    def name_of(category: str) -> str:
        return rest if category == IDLE else category.replace("_", " ")

    said = []
    with style.canvas(height_in=1.3 + 0.75 * max(len(phases), 1)) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("share of the step (%)")
        names = [f"{phase['label']}\n{units.quantity(_step_ms(phase), 'ms')}" for phase in phases]
        axes.set_yticks(range(len(phases)), names)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        shown: dict[str, Any] = {}
        for row, phase in enumerate(phases):
            left_pct, step_ms = 0.0, _step_ms(phase)
            for category, ms in _parts(phase):
                share_pct = 100 * ms / step_ms
                bars = axes.barh(
                    row,
                    share_pct,
                    left=left_pct,
                    height=0.62,
                    color=_color(category),
                    edgecolor="white",
                    linewidth=0.8,
                )
                shown.setdefault(category, bars)
                name = name_of(category)
                share = units.percent(share_pct, 2)
                for text in (f"{name}\n{share}", share):
                    if share_pct * _LETTERS_PER_PCT > max(map(len, text.split("\n"))) * 1.15 + 1:
                        ink = style.INK if category in _LIGHT else "white"
                        axes.text(
                            left_pct + share_pct / 2,
                            row,
                            text,
                            ha="center",
                            va="center",
                            fontsize=8.5,
                            color=ink,
                        )
                        break
                left_pct += share_pct
            top = sorted((part for part in _parts(phase)), key=lambda part: -part[1])[:3]
            shares = ", ".join(f"{name_of(name)} {units.percent(100 * ms / step_ms)}" for name, ms in top)
            said.append(f"{phase['label']}: {units.quantity(step_ms, 'ms')} per step, {shares}")
        axes.set_xlim(0, 100)
        if not phases:
            style.empty(axes)
        if shown:
            figure.legend(
                [bars[0] for bars in shown.values()],
                [name_of(name) for name in shown],
                loc="outside lower center",
                ncols=6,
                frameon=False,
                fontsize=8.5,
                handlelength=1,
            )
    alt = ("Where a step's time goes. " + "; ".join(said) + ".") if said else "Where a step's time goes: not measured."
    return style.finish(
        figure,
        alt,
        f"Share of a step by category of kernel; {rest}: {meaning}. The step's time stands under its name.",
        rehearsed=rehearsed,
    )


def timeline(step: Mapping[str, Any], *, device: bool = True, rehearsed: bool = False) -> Figure:
    """One step as it ran: a row per stream, a bar per kernel; or a row per thread, a bar per stretch of an operator.

    Parameters
    ----------
    step : mapping
        ``label``, ``duration_ms`` and ``events``: mappings with ``start_ms`` (from the step's start),
        ``duration_ms``, ``category`` and ``stream``.
    device : bool
        Whether a device's kernels were traced, or operators on the host.
    rehearsed : bool
        Stamp the figure as a rehearsal.
    """
    events: Sequence[Mapping[str, Any]] = step["events"]
    streams = list(dict.fromkeys(str(event["stream"]) for event in events))
    categories = [name for name in _COLORS if any(event["category"] == name for event in events)]
    categories += sorted({str(event["category"]) for event in events} - set(categories))
    with style.canvas(height_in=1.5 + 0.5 * max(len(streams), 1)) as (figure, axes):
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time since the step began (ms)")
        axes.set_yticks(range(len(streams)), streams)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, step["duration_ms"])
        axes.set_ylim(len(streams) - 0.4, -0.6)
        handles: list[Any] = []
        for category in categories:
            handle = None
            for row, stream in enumerate(streams):
                spans = [
                    (event["start_ms"], event["duration_ms"])
                    for event in events
                    if event["category"] == category and str(event["stream"]) == stream
                ]
                if spans:
                    handle = axes.broken_barh(spans, (row - 0.36, 0.72), facecolors=_color(category), linewidth=0)
            handles.append(handle)
        if handles:
            names = [name.replace("_", " ") for name in categories]
            figure.legend(
                handles,
                names,
                loc="outside lower center",
                ncols=6,
                frameon=False,
                fontsize=8.5,
                handlelength=1,
            )
    busy_ms = _union_ms([(event["start_ms"], event["duration_ms"]) for event in events])
    busy = units.percent(100 * busy_ms / step["duration_ms"])
    what, rows, covered = ("kernel", "stream", "busy") if device else ("operator", "thread", "operators traced")
    bars = units.count(len(events), what) if device else f"{len(events)} stretches of operators"
    alt = (
        f"Timeline of one step ({step['label']}): {bars} on {units.count(len(streams), rows)} in "
        f"{units.quantity(step['duration_ms'], 'ms')}, {covered} {busy} of it."
    )
    white = "nothing ran" if device else "outside of the traced operators"
    return style.finish(figure, alt, f"One step as it ran: {step['label']}. White: {white}.", rehearsed=rehearsed)


def _step_ms(phase: Mapping[str, Any]) -> float:
    """Wall time of the step; the sum of its categories where that is all there is."""
    step = phase.get("step_ms")
    mean = step.get("mean") if isinstance(step, Mapping) else step
    return float(mean or sum(part["ms_per_step"] for part in phase["categories"]))


def _parts(phase: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(category, ms) in the order of the colours, so that bars compare; idle last."""
    order = list(_COLORS)
    parts = [(str(part["category"]), float(part["ms_per_step"])) for part in phase["categories"]]
    parts.sort(key=lambda part: order.index(part[0]) if part[0] in order else len(order))
    idle = _step_ms(phase) - sum(ms for _, ms in parts)
    return [*parts, (IDLE, idle)] if idle > 0.005 * _step_ms(phase) else parts


def _color(category: str) -> str:
    return _COLORS.get(category, _COLORS["other"])


def _union_ms(spans: Sequence[tuple[float, float]]) -> float:
    """Time covered by at least one span."""
    total, until = 0.0, -float("inf")
    for start, duration in sorted(spans):
        total += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
    return total
