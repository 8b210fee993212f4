"""Figures in one style: plain data in, a PNG with alt text out; nothing here knows of runs or servers.

Alt texts state what the data show, computed from them, so that the report can be read without seeing.
"""

from perfbook.figures.ceiling import floor_over_concurrency, roofline
from perfbook.figures.latency import latency_over_concurrency, rates_by_length, tpot_over_position
from perfbook.figures.steps import step_breakdown, timeline
from perfbook.figures.style import Figure
from perfbook.figures.throughput import throughput_latency, throughput_over_concurrency

__all__ = [
    "Figure",
    "floor_over_concurrency",
    "latency_over_concurrency",
    "rates_by_length",
    "roofline",
    "step_breakdown",
    "throughput_latency",
    "throughput_over_concurrency",
    "timeline",
    "tpot_over_position",
]
