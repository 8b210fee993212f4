"""Taking profiles: a bounded number of engine steps each, recorded with the inflation that profiling causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from perfbook import trace
from perfbook.desk import Desk, Verdict
from perfbook.errors import BadInput, ServerFailed
from perfbook.figures.cells import statistic
from perfbook.server import ranks
from perfbook.study import owner
from perfbook.trace import TraceReport
from perfbook.trace.compare import Inflation
from perfbook.units import count, number, quantity

TRACES = "*.pt.trace.json*"
STOP_TIMEOUT_S = 1800.0  # writing the traces of eight ranks takes many minutes


def step_name(phase: str) -> str:
    """What a step of a phase is called."""
    return "step" if phase == "all" else f"{phase} step"


@dataclass(frozen=True)
class Profile:
    """One profile: its concurrency, files, breakdown, and the inflation where an unprofiled TPOT is known."""

    concurrency: int
    files: tuple[Path, ...]
    report: TraceReport
    inflation: Inflation | None

    @property
    def streams(self) -> str:
        """``1 stream``, ``8 streams``."""
        return count(self.concurrency, "stream")

    @property
    def phase(self) -> str:
        """The phase shown: decode, or all where the trace has no decode step."""
        return "decode" if "decode" in self.report.phases else "all"

    @property
    def step(self) -> str:
        """``decode step``, or ``step`` where the trace does not say of which kind."""
        return step_name(self.phase)


def record_traces(desk: Desk, progress: Callable[[str], None]) -> list[Profile]:
    """Take and analyse one profile per concurrency; empty, with a finding, where the profiler is not armed."""
    server = desk.server()
    if not server.endpoints.can_profile():
        desk.find("no_profiler", evidence="the server's list of routes has no /start_profile")
        return []
    profiles = []
    with desk.measuring():
        for concurrency in concurrencies(desk):
            progress(count(concurrency, "stream"))
            files = take(desk, concurrency)
            if not files:
                desk.find(
                    "no_traces",
                    subject=str(concurrency),
                    concurrency=concurrency,
                    evidence=owner.why_no_traces(desk) or "no new file appeared",
                )
                continue
            report = trace.analyse(files)
            profiles.append(Profile(concurrency, files, report, _inflation(report, desk, concurrency)))
            _record(desk, profiles[-1])
    return profiles


def concurrencies(desk: Desk) -> list[int]:
    """Where to profile: as the parameters say, else at one stream and at the knee, where 04 found one."""
    if desk.variant.profile.concurrency is not None:
        return list(desk.variant.profile.concurrency)
    sweep = desk.run.record("sweep")
    knee = sweep["knee_concurrency"] if sweep else None
    return sorted({1, knee or 1})


def take(desk: Desk, concurrency: int) -> tuple[Path, ...]:
    """Profile a bounded number of steps of a cell; the new trace files."""
    plan, workload = desk.variant.profile, desk.variant.workload
    server, folder = desk.server(), desk.run.path / "traces"
    shape = desk.shape(plan.output_tokens)
    prompts = desk.prompts(desk.variant.sweep.prompt_tokens, 2 * concurrency, workload.seed + 7_000_000 + concurrency)
    owner.collect_traces(desk)  # what lies there from earlier profiles is not this one's
    before = set(folder.rglob(TRACES))
    # The warm-up cell takes what a first batch of this size costs (compilation, allocation) out of the trace.
    desk.measure(prompts[:concurrency], shape, key="warm-up", concurrency=concurrency, requests=concurrency)
    server.endpoints.start_profile(iterations=plan.iterations, prefix=f"c{concurrency}")
    try:
        desk.measure(prompts[concurrency:], shape, key="profiled", concurrency=concurrency, requests=concurrency)
    except ServerFailed:
        raise  # it hangs or is gone, and would not end the profile either
    except BaseException:
        server.endpoints.stop_profile(STOP_TIMEOUT_S)
        raise
    server.endpoints.stop_profile(STOP_TIMEOUT_S)
    owner.collect_traces(desk)
    if (mates := ranks.mates()) is not None:
        mates.gather(desk.run.path)
    return tuple(sorted(set(folder.rglob(TRACES)) - before))


def unprofiled_tpot_ms(desk: Desk, concurrency: int) -> float | None:
    """TPOT at a concurrency without the profiler: 04's median there, else 03's for one stream; None: not measured."""
    cells = [c for c in desk.run.records("sweep_cell") if c["concurrency"] == concurrency]
    known = [value for cell in cells if (value := statistic(cell, "tpot_ms", "p50")) is not None]
    if known:
        return median(known)
    single = desk.run.record("single_stream")
    return single["tpot_ms"] if single and concurrency == 1 else None


def _inflation(report: TraceReport, desk: Desk, concurrency: int) -> Inflation | None:
    tpot_ms = unprofiled_tpot_ms(desk, concurrency)
    if tpot_ms is None or "decode" not in report.phases:
        return None
    return trace.beside_unprofiled(report, tpot_ms, concurrency)


def _record(desk: Desk, profile: Profile) -> None:
    said = profile.report.to_json()
    phase = said["phases"].get(profile.phase)
    if phase is None:
        raise BadInput(f"{profile.files[0].name}: the trace holds no step; profile while requests are running")
    inflation = profile.inflation
    record = desk.record(
        "profile",
        {
            "concurrency": profile.concurrency,
            "phase": profile.phase,
            "step_ms": phase["step_ms"]["mean"],
            "steps": phase["steps"],
            "unprofiled_tpot_ms": inflation.tpot_ms if inflation else None,
            "inflation": inflation.ratio if inflation else None,
            "inflation_sits_in": inflation.placed if inflation else None,
            "busy_share": phase["busy_share"],
            "categories": phase["categories"],
            "unclassified_share": phase["unclassified_share"],
            "collectives": phase["collectives"],
            "ranks": said["ranks"],
            "files": [path.name for path in profile.files],
        },
        key=str(profile.concurrency),
    )
    sentence = top_sentence(profile)
    desk.record(
        "bottleneck",
        {"regime": f"{profile.streams} (profiled)", "sentence": sentence.removeprefix(f"At {profile.streams} ")},
        key=str(profile.concurrency),
    )
    desk.find(
        "step_goes_to",
        subject=str(profile.concurrency),
        sentence=sentence.rstrip("."),
        evidence=f"{phase['steps']} profiled steps on {count(len(said['ranks']), 'rank')}",
        verdict=inflation.sentence if inflation else "inflation unknown: no unprofiled TPOT at this concurrency",
        records=[record],
    )


def top_sentence(profile: Profile) -> str:
    """``At 1 stream all_reduce is 51.5 % of a decode step: 122 calls, 11.2 ms of 21.7 ms as profiled (…).``"""
    phase = profile.report.phases[profile.phase]
    top = max(phase.categories, key=lambda part: part.ms_per_step)
    whole = round(top.calls_per_step)
    exact = abs(top.calls_per_step - whole) < 1e-6
    calls = count(whole, "call") if exact else f"{number(top.calls_per_step)} calls"
    work = "all kernels" if any(rank.gpu_events for rank in profile.report.ranks) else "all traced operators"
    return (
        f"At {count(profile.concurrency, 'stream')} {top.category} is {number(100 * top.share_of_step)} % of a "
        f"{profile.step}: {calls}, {quantity(top.ms_per_step, 'ms')} of {quantity(phase.step_mean_ms, 'ms')} as "
        f"profiled ({work} together {number(100 * phase.busy_share)} %)."
    )


def conclude(desk: Desk, profiles: Sequence[Profile]) -> Verdict:
    """One sentence per profile, with the inflation."""
    if not profiles:
        return desk.conclude(
            "Not profiled: the server offers no profiler or wrote no trace; the rest of the workbook does not need it."
        )
    parts = []
    for profile in profiles:
        parts.append(top_sentence(profile))
        if profile.inflation is not None:
            parts.append(profile.inflation.sentence[:1].upper() + profile.inflation.sentence[1:])
    return desk.conclude(" ".join(parts))
