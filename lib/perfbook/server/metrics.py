"""vLLM's ``/metrics``: one number per name, the same names whatever the version, and differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:"
#: Older names of the same quantity, without suffixes such as _total or _sum.
RENAMED = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
}
_COUNTING = ("_total", "_sum", "_count")
_FRACTIONS = ("_perc", "_rate")


@dataclass(frozen=True)
class Delta:
    """What happened between two readings.

    Attributes
    ----------
    values : dict
        Growth of every counter, and of the sum and count of every histogram.
    resets : tuple of str
        Counters that went backwards or vanished, so that their growth is not known; left out of ``values``.
    restarted : bool
        The server process is another one than before.
    """

    values: dict[str, float]
    resets: tuple[str, ...]
    restarted: bool

    def mean(self, histogram: str) -> float | None:
        """Mean of what a histogram saw in between; None when it saw nothing."""
        count = self.values.get(f"{histogram}_count", 0.0)
        return self.values[f"{histogram}_sum"] / count if count > 0 and f"{histogram}_sum" in self.values else None


def parse_metrics(text: str) -> dict[str, float]:
    """One number per name from the exposition format.

    Labels are summed over (engines of data parallelism, finish reasons, …) except for fractions, of which the
    largest is kept. Buckets, creation times and everything that is not vLLM's are left out,
    ``process_start_time_seconds`` apart, which tells a restart. Where a version exposes a quantity under its
    old and new name, the new one counts.

    Raises
    ------
    ValueError
        Not in the exposition format.
    """
    current: dict[str, float] = {}
    old: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "process_start_time_seconds":
                current[sample.name] = float(sample.value)
            if not sample.name.startswith(PREFIX) or sample.name.endswith(("_bucket", "_created", "_info")):
                continue
            name, renamed = _canonical(sample.name.removeprefix(PREFIX))
            into = old if renamed else current
            value = float(sample.value)
            if name.endswith(_FRACTIONS):
                into[name] = max(into.get(name, 0.0), value)
            else:
                into[name] = into.get(name, 0.0) + value
    return old | current


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> Delta:
    """Growth of the counters from one reading to a later one; resets are noticed, never subtracted."""
    values: dict[str, float] = {}
    resets = []
    started = "process_start_time_seconds"
    restarted = started in before and started in after and before[started] != after[started]
    for name in sorted(before.keys() | after.keys()):
        if not name.endswith(_COUNTING):
            continue
        grown = after.get(name, -1.0) - before.get(name, 0.0)
        if restarted or name not in after or grown < 0:
            resets.append(name)
        else:
            values[name] = grown
    return Delta(values, tuple(resets), restarted)


def _canonical(name: str) -> tuple[str, bool]:
    """Today's name, and whether it had to be translated."""
    for suffix in ("", *_COUNTING):
        stem = name.removesuffix(suffix) if suffix else name
        if stem in RENAMED and stem + suffix == name:
            return RENAMED[stem] + suffix, True
    return name, False
