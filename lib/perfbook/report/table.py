"""Tables as notebooks show them and the report keeps them: captions, units in the headers, aligned numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from perfbook import units

_TONES = {
    **dict.fromkeys(("met", "valid", "right", "faster", "completed"), "good"),
    **dict.fromkeys(("suspect", "undecided", "cut off", "interrupted", "skipped", "too few launches"), "warning"),
    **dict.fromkeys(("missed", "invalid", "wrong", "slower", "failed"), "problem"),
}  # verdict words, coloured by the report wherever they stand alone
_SHORT = 32  # characters of a column that is not broken into lines
_LEFT = ' style="text-align:left"'  # JupyterLab aligns every cell to the right


class Note(str):
    """A sentence where a table or a figure would stand: a notebook shows it as prose, not as a quoted string."""

    def _repr_html_(self) -> str:
        return f'<p class="pb-note">{escape(self)}</p>'

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes
    ----------
    name : str
        What the numbers are.
    unit : str
        Suffix as in ``perfbook.units`` (``ms``, ``tok_s``), printed in the header once; empty for none.
    digits : int
        Significant digits of the column's smallest value; all values get as many decimals.
    sign : bool
        Whether to write a plus: for changes.
    """

    name: str
    unit: str = ""
    digits: int = 3
    sign: bool = False

    @property
    def header(self) -> str:
        """Name with its unit."""
        return f"{self.name} ({units.label(self.unit)})" if self.unit else self.name


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under named columns; what a notebook's cell ends with.

    Parameters
    ----------
    columns : sequence of str or Column
        Headers. The first column names its row.
    rows : sequence of sequences
        Cell values: numbers, text, bool (``yes``, ``no``) or None (``unknown``). Text is escaped.
    caption : str
        What the table shows, in a phrase.

    Raises
    ------
    ValueError
        A row is not as long as the header.
    """

    columns: Sequence[str | Column]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __post_init__(self) -> None:
        plain = [[value.item() if hasattr(value, "item") else value for value in row] for row in self.rows]
        object.__setattr__(self, "rows", plain)  # numpy's scalars as Python's
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {index} has {len(row)} values under {len(self.columns)} columns")

    def headers(self) -> list[str]:
        """Column headers, units included."""
        return [column.header for column in self._columns()]

    def texts(self) -> list[list[str]]:
        """Cell values as they are printed."""
        printed = [_column_texts(column, [row[i] for row in self.rows]) for i, column in enumerate(self._columns())]
        return [list(row) for row in zip(*printed, strict=True)] if self.rows else []

    def _columns(self) -> list[Column]:
        return [column if isinstance(column, Column) else Column(column) for column in self.columns]

    def _numeric(self) -> list[bool]:
        """Which columns hold numbers (and nothing else that is known)."""
        known = [[row[i] for row in self.rows if row[i] is not None] for i in range(len(self.columns))]
        return [bool(values) and all(_is_number(value) for value in values) for values in known]

    def _repr_html_(self) -> str:
        texts = self.texts()
        kinds = []
        for index, is_number in enumerate(self._numeric()):
            longest = max((len(row[index]) for row in texts), default=0)
            text = "text short" if longest <= _SHORT else "text"
            kinds.append(' class="num"' if is_number else f' class="{text}"{_LEFT}')
        parts = ['<table class="pb-table">']
        if self.caption:
            parts.append(f"<caption>{escape(self.caption)}</caption>")
        heads = "".join(
            f'<th scope="col"{kind}>{escape(head)}</th>' for head, kind in zip(self.headers(), kinds, strict=True)
        )
        parts.append(f"<thead><tr>{heads}</tr></thead><tbody>")
        for values, printed in zip(self.rows, texts, strict=True):
            cells = []
            for index, (value, text) in enumerate(zip(values, printed, strict=True)):
                raw = f' data-value="{value!r}"' if _is_number(value) and math.isfinite(value) else ""
                kind = (
                    kinds[index].replace('class="', f'class="verdict {_TONES[text]} ')
                    if text in _TONES
                    else kinds[index]
                )
                tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
                cells.append(f"<{tag}{scope}{kind}{raw}>{escape(text)}</{tag}>")
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</tbody></table>")
        return "".join(parts)

    def __repr__(self) -> str:
        headers, texts = self.headers(), self.texts()
        widths = [max(len(line[i]) for line in [headers, *texts]) for i in range(len(headers))]
        numeric = self._numeric()

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.rjust(width) if is_number else cell.ljust(width)
                for cell, width, is_number in zip(cells, widths, numeric, strict=True)
            ]
            return "  ".join(padded).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([*([self.caption] if self.caption else []), line(headers), rule, *map(line, texts)])

    def markdown(self) -> str:
        """The table in Markdown, for ``results.md``; the caption is left to the text around it."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

        marks = "|" + "|".join(" ---: " if is_number else " --- " for is_number in self._numeric()) + "|"
        return "\n".join([line(self.headers()), marks, *map(line, self.texts())])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _column_texts(column: Column, values: list[Any]) -> list[str]:
    """One column's texts: its numbers with as many decimals each, so that they compare by eye."""
    fractions = [abs(v) for v in values if isinstance(v, float) and math.isfinite(v) and v != 0]
    decimals = 0
    if fractions:
        # All digits of the smallest value, but no more than five of the largest one.
        room = _decimals(max(fractions), max(column.digits, 5))
        decimals = max(0, min(_decimals(min(fractions), column.digits), room))
    return [_text(value, decimals, sign=column.sign) for value in values]


def _decimals(value: float, digits: int) -> int:
    return digits - 1 - math.floor(math.log10(value))


def _text(value: Any, decimals: int, *, sign: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return units.UNKNOWN
    if isinstance(value, int):
        return f"{value:{'+' if sign and value else ''}{',' if abs(value) > 9999 else ''}}".replace("-", "−")
    if isinstance(value, float):
        text = f"{value:{'+' if sign else ''}{',' if abs(value) >= 9999.5 else ''}.{decimals}f}"
        is_zero = not any(digit in text for digit in "123456789")
        return text.lstrip("+-") if is_zero else text.replace("-", "−")
    return str(value)
