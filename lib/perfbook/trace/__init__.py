"""Profiler traces: where the time of a decode step goes, per category, phase, rank and collective.

A trace is read into columns (:mod:`.read` for torch.profiler JSON, :mod:`.nsys` for Nsight Systems), kernels are
named (:mod:`.kernels`), events are dealt to engine steps (:mod:`.steps`), and everything after that is arithmetic
(:mod:`.breakdown`, :mod:`.ranks`, :mod:`.compare`). :func:`analyse` goes all the way from paths to a report,
:func:`one_step` to the timeline of a step.
"""

from __future__ import annotations

from perfbook.trace.compare import beside_unprofiled, diff
from perfbook.trace.pipeline import analyse
from perfbook.trace.report import TraceReport, render_text
from perfbook.trace.timeline import StepTimeline, one_step

__all__ = ["StepTimeline", "TraceReport", "analyse", "beside_unprofiled", "diff", "one_step", "render_text"]
