"""Perfbook: a workbook for investigating the performance of vLLM servers.

The notebooks under ``notebooks/`` are the way in; this package is the library behind them. Data flows
one way: parameters → server and workload → timed streams → cells → findings → report.
"""

__version__ = "0.1.0"
