"""03: how fast is one request, and why do two lengths disagree?

A blended rate (tokens over total time) mixes prefill and decode, so two of them at different lengths are not
comparable. Here every token is timed: time to first token is told from decode time, decode time is fitted against the
position of the token, and the gap between the blended rates of two lengths is attributed to its causes, with signs.
"""

from perfbook.study.single_stream.analysis import SingleStream, analyse, load
from perfbook.study.single_stream.measure import measure
from perfbook.study.single_stream.view import (
    attribution_table,
    conclude,
    length_table,
    position_figure,
    rates_figure,
    steady_table,
)

__all__ = [
    "SingleStream",
    "analyse",
    "attribution_table",
    "conclude",
    "length_table",
    "load",
    "measure",
    "position_figure",
    "rates_figure",
    "steady_table",
]
