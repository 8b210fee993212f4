from __future__ import annotations

import base64
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

import report_sample as sample
from perfbook import figures
from perfbook.figures import Figure, style
from perfbook.figures import cells as sweep_cells

PHASE = {
    "label": "decode, 1 stream",
    "step_ms": {"mean": 20.0},
    "categories": [{"category": "gemm", "ms_per_step": 5.0}, {"category": "all_reduce", "ms_per_step": 10.0}],
}
STEP = {
    "label": "decode",
    "duration_ms": 10.0,
    "events": [
        {"start_ms": 0.0, "duration_ms": 4.0, "category": "gemm", "stream": 7},
        {"start_ms": 2.0, "duration_ms": 3.0, "category": "all_reduce", "stream": 20},
        {"start_ms": 8.0, "duration_ms": 1.0, "category": "a_new_one", "stream": 7},
    ],
}
RATES = [
    {"output_tokens": 512, "decode_tok_s": 82.5, "blended_tok_s": 81.5, "decode_tok_s_interval": [82.0, 83.0]},
    {"output_tokens": 2048, "decode_tok_s": None, "blended_tok_s": 76.2},
]

FLOORS = [
    {"streams": 1, "parts": [{"name": "weights", "ms": 7.0}, {"name": "all-reduce", "ms": 1.0}], "tpot_ms": 12.0},
    {"streams": 64, "parts": [{"name": "weights", "ms": 9.0}, {"name": "all-reduce", "ms": 1.0}], "tpot_ms": None},
]
PARTS = [
    {"name": "weights", "intensity_flop_per_byte": 2.0},
    {"name": "experts", "intensity_flop_per_byte": 500.0},
    {"name": "all-reduce", "intensity_flop_per_byte": None},
]


@cache
def every_figure(**options: Any) -> dict[str, Figure]:
    return {
        "position": figures.tpot_over_position(
            np.arange(4), [12.0, 12.0, 12.0, 13.0], {"intercept_ms": 12.0, "slope_us_per_token": 250.0}, **options
        ),
        "rates": figures.rates_by_length(RATES, **options),
        "throughput": figures.throughput_over_concurrency(sample.cells(), knee=128, best=1536.4, slo=64, **options),
        "pareto": figures.throughput_latency(sample.cells(), **options),
        "latency": figures.latency_over_concurrency(sample.cells(), slo_ttft_ms=500, slo_tpot_ms=50, **options),
        "breakdown": figures.step_breakdown([PHASE], **options),
        "timeline": figures.timeline(STEP, **options),
        "floor": figures.floor_over_concurrency(FLOORS, **options),
        "roofline": figures.roofline(1.6e12, 2.4e14, PARTS, **options),
    }


def test_alt_texts_state_what_the_data_show() -> None:
    assert {name: figure.alt for name, figure in every_figure().items()} == {
        "position": "Time per token over position: median 12.0 ms over 4 tokens, from 12.0 ms at position 0 to 12.8 ms"
        " at 3 (+250 µs/token).",
        "rates": "Rate of one stream by length: decode 82.5 tok/s over 512 tokens; blended 81.5 tok/s over 512,"
        " 76.2 tok/s over 2048 tokens.",
        "throughput": "Throughput over concurrency: 79.3 tok/s at 1 to 1541 tok/s at 256; best 1536 tok/s; knee at 128"
        " streams; SLO met up to 64 streams.",
        "pareto": "Per-user rate against total throughput: 79.3 tok/s each and 79.3 tok/s together at 1, 12.0 tok/s"
        " each and 1541 tok/s together at 256 streams.",
        "latency": "Time to first token p50 29.1 ms at 1 to 2316 ms at 256; time to first token p99 50.5 ms at 1 to"
        " 4017 ms at 256; time per token p50 12.4 ms at 1 to 81.4 ms at 256; time per token p99 15.1 ms at 1 to 99.7 ms"
        " at 256.",
        "breakdown": "Where a step's time goes. decode, 1 stream: 20.0 ms per step, all reduce 50.0 %, gemm 25.0 %,"
        " idle 25.0 %.",
        "timeline": "Timeline of one step (decode): 3 kernels on 2 streams in 10.0 ms, busy 60.0 % of it.",
        "floor": "Time per token over its floor: at concurrency 1: 12.0 ms measured over a floor of 8.00 ms (1.50 ×).",
        "roofline": "Roofline: ridge at 150 FLOP per byte; weights bound by memory, 1 by compute.",
    }


def test_without_data_each_figure_says_so() -> None:
    empty = [
        figures.tpot_over_position([], []),
        figures.rates_by_length([]),
        figures.throughput_over_concurrency([]),
        figures.throughput_latency([]),
        figures.latency_over_concurrency([]),
        figures.step_breakdown([]),
        figures.floor_over_concurrency([]),
    ]
    assert all("not measured" in figure.alt for figure in empty)


def test_a_stall_is_counted_and_does_not_set_the_scale() -> None:
    figure = figures.tpot_over_position(np.arange(1000), [12.0] * 999 + [900.0])
    assert figure.alt == "Time per token over position: median 12.0 ms over 1000 tokens; 1 above the scale."


def test_a_rehearsal_is_stamped_in_the_picture_and_in_the_alt_text() -> None:
    plain, stamped = every_figure(), every_figure(rehearsed=True)
    for name in plain:
        assert stamped[name].alt == f"Rehearsal, not measured on this hardware: {plain[name].alt}"
        assert stamped[name].png_bytes != plain[name].png_bytes


def test_the_same_data_give_the_same_bytes() -> None:
    first, second = every_figure()["breakdown"], figures.step_breakdown([PHASE])
    assert first.png_bytes == second.png_bytes


def test_pictures_are_sharp_and_small() -> None:
    for name, figure in every_figure().items():
        height, width = imread(io.BytesIO(figure.png_bytes)).shape[:2]
        assert width == 1152, name  # 7.2 inches, shown 720 pixels wide
        assert height > 250, name
        assert len(figure.png_bytes) < 200_000, name


def test_html_carries_the_picture_alt_and_caption_escaped() -> None:
    figure = Figure(b"\x89PNG", 'a < b "quoted"', "c & d")
    html = figure._repr_html_()
    source = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert source is not None
    assert base64.b64decode(source.group(1)) == b"\x89PNG"
    assert 'alt="a &lt; b &quot;quoted&quot;"' in html
    assert "<figcaption>c &amp; d</figcaption>" in html
    assert set(figure._repr_mimebundle_()) == {"text/html", "text/plain"}
    assert repr(figure) == '[figure: a < b "quoted"]'


def test_a_figure_can_be_kept_as_a_file(tmp_path: Path) -> None:
    path = Figure(b"\x89PNG", "a", "b").save(tmp_path / "figures" / "x.png")
    assert path.read_bytes() == b"\x89PNG"


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figures.step_breakdown([PHASE])
    assert dict(mpl.rcParams) == before


def test_the_plateau_is_preferred_and_the_whole_cell_is_what_is_left() -> None:
    assert sweep_cells.throughput_tok_s({"output_tok_s": 9.0, "output_tok_s_plateau": 10.0}) == 10.0
    assert sweep_cells.throughput_tok_s({"output_tok_s": 9.0, "output_tok_s_plateau": None}) == 9.0
    assert sweep_cells.throughput_tok_s({"output_tok_s": float("nan")}) is None
    assert sweep_cells.per_user_tok_s({"tpot_ms": {"mean": 12.5}}) == 80.0
    assert sweep_cells.per_user_tok_s({"tpot_ms": None}) is None


def test_repeats_are_grouped_by_concurrency() -> None:
    made = [{"concurrency": 2}, {"concurrency": 1}, {"concurrency": 2}, {"concurrency": 4}]
    points = sweep_cells.by_concurrency(made, [3.0, 1.0, 5.0, None])
    assert points == {1: [1.0], 2: [3.0, 5.0]}
    assert sweep_cells.medians(points) == ([1, 2], [1.0, 4.0])


@pytest.mark.parametrize("paint", [style.BLUE, style.RED, style.GREEN, style.PURPLE, style.MUTED, style.INK])
def test_text_and_lines_stand_out_from_white(paint: str) -> None:
    red, green, blue = (int(paint[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert 1.05 / (luminance + 0.05) >= 3.0  # WCAG 2.2, 1.4.11: graphical objects


def test_what_host_operators_leave_of_a_step_is_not_called_idle() -> None:
    with_device, host_only = figures.step_breakdown([PHASE]), figures.step_breakdown([PHASE], device=False)
    assert "idle: no kernel ran" in with_device.caption
    assert "idle" not in host_only.caption + host_only.alt
    assert "not traced" in host_only.caption
