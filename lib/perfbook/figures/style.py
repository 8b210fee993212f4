"""The one style, and the object a notebook shows.

Colours are Okabe and Ito's (2008, "Color Universal Design"), told apart with every common colour blindness;
lines also differ in marker. Drawn without pyplot: no global state, and nothing leaks when a cell is run again.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

BLUE, ORANGE, GREEN, RED, SKY, PURPLE, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
)
INK, MUTED, GRID = "#1f2933", "#5f6b7a", "#e3e7ec"
MARKERS = ("o", "s", "^", "D", "v", "P")
DPI = 160

_RC: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True, repr=False)
class Figure:
    """A finished figure.

    Attributes
    ----------
    png_bytes : bytes
        The picture.
    alt : str
        What the picture shows, in a sentence, for who cannot see it.
    caption : str
        What is drawn: shown under the picture.
    width_px : int
        Width at which its text is as large as the text around it.
    """

    png_bytes: bytes
    alt: str
    caption: str
    width_px: int = 720

    def save(self, path: Path) -> Path:
        """Write the picture as a file of its own and return its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.png_bytes)
        return path

    def _repr_html_(self) -> str:
        source = base64.b64encode(self.png_bytes).decode("ascii")
        return (
            f'<figure class="pb-figure"><img alt="{escape(self.alt)}" width="{self.width_px}" '
            f'src="data:image/png;base64,{source}"><figcaption>{escape(self.caption)}</figcaption></figure>'
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"[figure: {self.alt}]"


@contextmanager
def canvas(width_in: float = 7.2, height_in: float = 4.0, **subplots: Any) -> Iterator[tuple[Canvas, Any]]:
    """A canvas and its axes (one, or numpy's array of them) in the one style."""
    with mpl.rc_context(_RC):
        figure = Canvas(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(**subplots)


def empty(axes: Axes) -> None:
    """Say that there is nothing to draw."""
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=MUTED)


def finish(figure: Canvas, alt: str, caption: str, *, rehearsed: bool) -> Figure:
    """Stamp a rehearsal as such, and turn the canvas into a :class:`Figure`."""
    if rehearsed:
        figure.text(
            0.5,
            0.5,
            "rehearsal",
            fontsize=52,
            color=MUTED,
            alpha=0.2,
            rotation=18,
            ha="center",
            va="center",
            zorder=9,
        )
        alt = f"Rehearsal, not measured on this hardware: {alt}"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return Figure(buffer.getvalue(), alt, caption, width_px=round(figure.get_figwidth() * 100))


def concurrency_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis that names the concurrencies measured, and no others."""
    shown = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("concurrency (streams)")
    if shown:
        axes.set_xlim(shown[0] / 1.25, shown[-1] * 1.25)


def mark(axes: Axes, x: float, text: str, color: str = MUTED, *, left: bool = False) -> None:
    """A vertical line with its meaning at its foot, to the right or to the left of it."""
    axes.axvline(x, color=color, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        text,
        (x, 0.03),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-4 if left else 4, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        color=color,
        fontsize=9,
    )


def limit(axes: Axes, y: float, text: str, color: str = RED) -> None:
    """A horizontal line with its meaning on it."""
    axes.axhline(y, color=color, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
    axes.annotate(
        text,
        (0.01, y),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        color=color,
        fontsize=9,
    )


def plain_numbers(*, sparse: bool = False) -> FuncFormatter:
    """Tick labels of a logarithmic axis as plain numbers; ``sparse`` names only the ticks at 2 and 5."""

    def text(value: float, _: int | None) -> str:
        if sparse and f"{value:e}"[0] not in "25":
            return ""
        return f"{value:,.10g}"

    return FuncFormatter(text)


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], gap_pt: float = 11.0) -> None:
    """Name lines at their right ends (y, text, colour), moved apart where they would overlap."""
    whole = axes.get_figure(root=True)
    if whole is None or not ends:
        return
    whole.draw_without_rendering()  # the layout decides where a value comes to lie
    lowest = -float("inf")
    for y, text, color in sorted(ends):
        height_pt = axes.transData.transform((1.0, y))[1] * 72 / whole.dpi
        placed = max(height_pt, lowest + gap_pt)
        lowest = placed
        axes.annotate(
            text,
            (1.0, y),
            xycoords=axes.get_yaxis_transform(),
            xytext=(2, placed - height_pt),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
            annotation_clip=False,
        )
