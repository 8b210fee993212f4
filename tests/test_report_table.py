from __future__ import annotations

import numpy as np
import pytest

from perfbook.report.table import Column, Table


def test_a_column_has_its_unit_once_and_its_decimals_line_up() -> None:
    table = Table(["streams", Column("throughput", "tok_s")], [(1, 80.254), (256, 1543.31), (512, None)], "Sweep")
    assert table.headers() == ["streams", "throughput (tok/s)"]
    assert table.texts() == [["1", "80.3"], ["256", "1543.3"], ["512", "unknown"]]
    assert repr(table) == (
        "Sweep\n"
        "streams  throughput (tok/s)\n"
        "-------  ------------------\n"
        "      1                80.3\n"
        "    256              1543.3\n"
        "    512             unknown"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("column", "values", "texts"),
    [
        (Column("x"), [0.0123, 1.0], ["0.0123", "1.0000"]),
        (Column("x"), [1.0, 123456.0], ["1", "123,456"]),
        (Column("x", digits=2, sign=True), [0.614, -3.1], ["+0.61", "−3.10"]),
        (Column("x"), [float("nan"), 2.0], ["unknown", "2.00"]),
        (Column("x"), [10_000, -3], ["10,000", "−3"]),
        (Column("x", sign=True), [0, 4], ["0", "+4"]),
        (Column("x"), [True, False], ["yes", "no"]),
        (Column("x"), [0.0, 0.0], ["0", "0"]),
        (Column("x", sign=True), [-0.0001, 1.5, -123.456], ["0.00", "+1.50", "−123.46"]),
    ],
)
def test_numbers_are_printed_with_the_digits_that_the_column_needs(
    column: Column, values: list[object], texts: list[str]
) -> None:
    assert [row[0] for row in Table([column], [[value] for value in values]).texts()] == texts


def test_html_has_scopes_a_caption_and_exact_values_and_escapes_what_others_wrote() -> None:
    html = Table(["name", Column("time", "ms")], [("<b>&", np.float64(12.345))], "A < B")._repr_html_()
    assert "<caption>A &lt; B</caption>" in html
    assert '<th scope="col" class="num">time (ms)</th>' in html
    assert '<th scope="row" class="text short" style="text-align:left">&lt;b&gt;&amp;</th>' in html
    assert '<td class="num" data-value="12.345">12.3</td>' in html


def test_a_verdict_word_is_marked_for_colour_and_stays_text() -> None:
    html = Table(["target", "verdict"], [("ttft", "missed")])._repr_html_()
    assert '<td class="verdict problem text short" style="text-align:left">missed</td>' in html


def test_markdown_keeps_one_line_per_row() -> None:
    table = Table(["what", "n"], [("a|b\nc", 3)])
    assert table.markdown() == "| what | n |\n| --- | ---: |\n| a\\|b c | 3 |"


def test_a_ragged_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 1 values under 2 columns"):
        Table(["a", "b"], [(1, 2), (3,)])


def test_a_table_without_rows_shows_its_header() -> None:
    assert repr(Table(["a", "bb"], [])) == "a  bb\n-  --"
    assert "<tbody></tbody>" in Table(["a"], [])._repr_html_()
