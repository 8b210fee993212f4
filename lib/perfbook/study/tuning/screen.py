"""Screen and predict: which settings of the all-reduce can matter at all, before anything is reloaded.

A reload can cost half an hour, an all-reduce benchmark seconds. What a setting saves per step is the latency that it
saves, times the all-reduces of a step; a setting that saves too little of a token's time is not worth the reload, and
the number that says so is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from perfbook.micro import AllReduce, all_reduce, read_nccl_log
from perfbook.stats.result import Result

BASELINE = "baseline"
OK, NOT_TAKEN = "ok", "not taken"


@dataclass(frozen=True)
class Screened(Result):
    """A setting after its all-reduce benchmarks.

    Attributes
    ----------
    setting : str
    status : str
        ``ok``, ``not taken``, ``wrong sums``, ``hangs`` or ``fails``.
    reason : str
        What speaks against it; empty when ok.
    latencies_us : dict
        Message size in bytes → latency in µs, one per round; empty unless ok.
    used : dict
        Message size in bytes → algorithm and protocol, as far as NCCL's log names them.
    """

    setting: str
    status: str
    reason: str
    latencies_us: Mapping[int, tuple[float, ...]]
    used: Mapping[int, str]


@dataclass(frozen=True)
class Prediction(Result):
    """What a setting should change at one concurrency; below zero is faster.

    Attributes
    ----------
    setting, concurrency, message_bytes
    baseline_us, setting_us : float
        Median latency of one all-reduce at that size.
    calls_per_step : int
    tpot_ms : float
        Measured without the setting.
    predicted_pct : float
        Change of TPOT, from the medians.
    best_pct, worst_pct : float
        From the most and the least favourable pair of rounds.
    """

    setting: str
    concurrency: int
    message_bytes: int
    baseline_us: float
    setting_us: float
    calls_per_step: int
    tpot_ms: float
    predicted_pct: float
    best_pct: float
    worst_pct: float

    def worth_a_reload(self, minimum_effect_pct: float) -> bool:
        """Whether at least the most favourable pair of rounds promises the minimum effect."""
        return self.best_pct <= -minimum_effect_pct


def screen(
    settings: Mapping[str, Mapping[str, str]],
    message_bytes: Sequence[int],
    ranks: int,
    *,
    reduce: Callable[..., AllReduce] = all_reduce,
    backend: str,
    env: Mapping[str, str] | None = None,
    baseline_bytes: Sequence[int] = (),
    rounds: int = 2,
    timeout_s: float = 120.0,
    progress: Callable[[str], None] = lambda text: None,
    keep: Callable[[str, int, AllReduce], None] = lambda setting, turn, reading: None,
) -> dict[str, Screened]:
    """Benchmark the all-reduce under every setting, baseline first; every other round in reverse order.

    Parameters
    ----------
    settings : mapping
        Name → environment variables on top of `env`.
    message_bytes : sequence of int
        The decode sizes.
    reduce : callable
        The benchmark.
    ranks, backend, timeout_s
        As in :func:`perfbook.micro.all_reduce`.
    env : mapping, optional
        What the server gets without a setting.
    baseline_bytes : sequence of int
        Further sizes for the baseline's first round.
    rounds : int
        Benchmarks per setting, each with a communicator of its own; a setting that broke is not tried again.
    keep : callable
        Gets every reading as it is made.

    Returns
    -------
    dict
        Name → :class:`Screened`, ``baseline`` among them.
    """
    names = [BASELINE, *settings]
    readings: dict[str, list[AllReduce]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            if readings[name] and readings[name][-1].outcome != OK:
                continue
            progress(f"all-reduce, round {turn + 1} of {rounds}: {name}")
            more = baseline_bytes if name == BASELINE and turn == 0 else ()
            reading = reduce(
                [*message_bytes, *more], ranks, backend=backend, timeout_s=timeout_s,
                env={**(env or {}), **settings.get(name, {})},
            )  # fmt: skip
            keep(name, turn, reading)
            readings[name].append(reading)
    return {name: judge(name, settings.get(name, {}), found) for name, found in readings.items()}


def judge(setting: str, env: Mapping[str, str], readings: Sequence[AllReduce]) -> Screened:
    """Broken, ignored, or ok with its latencies (pure)."""
    broken = next((one for one in readings if one.outcome != OK), None)
    if broken is not None:
        return Screened(setting, broken.outcome, broken.detail, {}, {})
    used: dict[int, str] = {}
    for one in readings:
        log = read_nccl_log(one.log)
        used |= log.chosen
        if one.backend == "nccl":
            ignored = [f"{name}={value}" for name, value in env.items() if _nccl(name) and not log.took(name, value)]
        else:
            ignored = [f"{name}={value}" for name, value in env.items() if _nccl(name)]
        if ignored:
            reason = f"{one.backend} did not say that it read {', '.join(ignored)}"
            return Screened(setting, NOT_TAKEN, reason, {}, used)
    sizes = {message.message_bytes for one in readings for message in one.messages}
    latencies = {
        size: tuple(us for one in readings if (us := one.latency_us(size)) is not None) for size in sorted(sizes)
    }
    return Screened(setting, OK, "", latencies, used)


def predict(
    baseline: Screened, setting: Screened, *, concurrency: int, message_bytes: int, calls_per_step: int, tpot_ms: float
) -> Prediction | None:
    """Calls per step × (latency with the setting − latency without), as per cent of TPOT (pure).

    It takes for granted that nothing overlaps the all-reduce, as in vLLM's decode step, and that the server's messages
    have this size. None where either was not measured.
    """
    now, then = baseline.latencies_us.get(message_bytes), setting.latencies_us.get(message_bytes)
    if not now or not then:
        return None

    def change_pct(after_us: float, before_us: float) -> float:
        return 100 * calls_per_step * (after_us - before_us) / 1e3 / tpot_ms

    return Prediction(
        setting.setting,
        concurrency,
        message_bytes,
        median(now),
        median(then),
        calls_per_step,
        tpot_ms,
        change_pct(median(then), median(now)),
        change_pct(min(then), max(now)),
        change_pct(max(then), min(now)),
    )


def _nccl(name: str) -> bool:
    return name.startswith("NCCL_")
