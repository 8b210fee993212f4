"""Confirm: settings launched in turn with the baseline, measured, and judged launch by launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfbook import stats
from perfbook.desk import Desk
from perfbook.errors import BadInput, ServerFailed
from perfbook.figures.cells import statistic
from perfbook.server import process
from perfbook.stats.verdict import Launches
from perfbook.stream.workload import RequestShape
from perfbook.study.tuning.screen import BASELINE

NOTEBOOK = "05_nccl_tuning"
CellRecord = Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """One launch: its setting, its number among the setting's, the block that it is compared within."""

    setting: str
    number: int
    block: int


def schedule(settings: Sequence[str], launches: int) -> list[Launch]:
    """The relaunches, interleaved: A B C, C B A, A B C … so that a slow drift meets all alike.

    The baseline's first launch is the server that is up already. Two turns are a block. The last one is the baseline
    again, measured as one launch more where it is, because the server stays up afterwards.
    """
    if not settings:
        return []
    names = [BASELINE, *settings]
    planned = [
        Launch(name, turn, turn // 2)
        for turn in range(launches)
        for name in (names if turn % 2 == 0 else reversed(names))
    ][1:]
    if planned[-1].setting != BASELINE:
        planned.append(Launch(BASELINE, launches, (launches - 1) // 2))
    return planned


@dataclass(frozen=True)
class Plan:
    """What is launched, what it costs, and what was left out for the budget.

    Attributes
    ----------
    launches : tuple of Launch
    cost_s : float
        Expected time in seconds.
    dropped : str
        What does not fit; empty when everything does.
    """

    launches: tuple[Launch, ...]
    cost_s: float
    dropped: str = ""


def plan(settings: Sequence[str], launches: int, each_s: float, budget_s: float | None) -> Plan:
    """Fewer launches where all do not fit into the budget, then fewer settings, from the end.

    Parameters
    ----------
    settings : sequence of str
    launches : int
        Of each.
    each_s : float
        Expected time of one launch with its measurement.
    budget_s : float or None
        None: no limit.
    """
    chosen, count = list(settings), launches
    while budget_s is not None and len(schedule(chosen, count)) * each_s > budget_s:
        if count > 1:
            count -= 1
        else:
            chosen.pop()
    left = [f"{launches - count} of {launches} launches each"] if count < launches and chosen else []
    left += settings[len(chosen) :]
    planned = schedule(chosen, count)
    return Plan(tuple(planned), len(planned) * each_s, ", ".join(left))


def confirm(desk: Desk, planned: Plan, progress: Callable[[str], None]) -> None:
    """Launch and measure as planned; the baseline is up at the end.

    A setting that does not start, or whose server hangs or dies while it is measured, is not launched again.
    """
    broken: set[str] = set()
    settings = desk.variant.tuning.settings
    try:
        for order, launch in enumerate(planned.launches, start=1):
            if launch.setting in broken:
                continue
            what = f"launch {order} of {len(planned.launches)}: {launch.setting}"
            progress(what)
            process.stop(desk.run)
            chosen = settings.get(launch.setting)
            try:
                handle = process.start(
                    desk.variant, desk.run, progress=lambda text, what=what: progress(f"{what}, {text}"),  # type: ignore[misc]
                    extra_args=chosen.args if chosen else None, extra_env=chosen.env if chosen else None,
                )  # fmt: skip
                measure_launch(desk, launch, order, handle.ready_s, progress)
            except (ServerFailed, BadInput) as error:
                if launch.setting == BASELINE:
                    raise
                broken.add(launch.setting)
                desk.record("tuning_failed", {"setting": launch.setting, "error": str(error)}, key=launch.setting)
        if broken and planned.launches:
            process.stop(desk.run)
    except BaseException:
        process.stop(desk.run)  # no later notebook may take a server with a setting for the baseline
        raise
    if desk.variant.server.base_url is None:
        desk.server()


def measure_launch(
    desk: Desk, launch: Launch, order: int, ready_s: float | None, progress: Callable[[str], None]
) -> None:
    """One cell per concurrency on the server that is up, after as many warm-up requests as it has streams."""
    plan, workload, sweep = desk.variant.tuning, desk.variant.workload, desk.variant.sweep
    shape = RequestShape(
        output_tokens=sweep.output_tokens,
        min_tokens=sweep.output_tokens if workload.ignore_eos else 0,
        ignore_eos=workload.ignore_eos,
        temperature=workload.temperature,
        extra_body=workload.extra_body,
    )
    with desk.measuring():
        for index, concurrency in enumerate(plan.concurrency):
            progress(f"{launch.setting}, launch {launch.number + 1}: {concurrency} streams")
            count = concurrency * plan.requests_per_stream
            seed = workload.seed + 5_000_000 + 1000 * (order * len(plan.concurrency) + index)
            key = f"{launch.setting}/{launch.number}/{concurrency}"
            prompts = desk.prompts(sweep.prompt_tokens, count + concurrency, seed)
            cell = desk.measure(prompts, shape, key=key, concurrency=concurrency, requests=count, warmup=concurrency)
            values = {
                "setting": launch.setting, "launch": launch.number, "block": launch.block, "order": order,
                "ready_s": ready_s,
            }  # fmt: skip
            desk.record_cell("tuning_cell", cell, values, key=key)


def verdicts(
    cells: Sequence[CellRecord], *, minimum_effect_pct: float, settings: Sequence[str]
) -> dict[tuple[str, int], stats.Verdict]:
    """TPOT of each setting against the baseline, per concurrency; all comparisons judged together (pure).

    One number per launch, its median TPOT; only blocks in which both sides were launched count.
    """
    launched: dict[tuple[str, int], dict[int, list[float]]] = {}
    for cell in cells:
        if (tpot_ms := statistic(cell, "tpot_ms", "p50")) is not None:
            blocks = launched.setdefault((cell["setting"], cell["concurrency"]), {})
            blocks.setdefault(cell["block"], []).append(tpot_ms)
    pairs: dict[str, tuple[Launches, Launches]] = {}
    keys = {}
    for (setting, concurrency), blocks in launched.items():
        base = launched.get((BASELINE, concurrency), {})
        shared = sorted(set(base) & set(blocks))
        if setting in settings and shared:
            name = f"{setting} at {concurrency} streams"
            keys[name] = (setting, concurrency)
            pairs[name] = ({b: base[b] for b in shared}, {b: blocks[b] for b in shared})
    judged = stats.compare_all(pairs, unit="ms", minimum_effect_pct=minimum_effect_pct) if pairs else {}
    return {keys[name]: verdict for name, verdict in judged.items()}


def doubtful(cells: Sequence[CellRecord], setting: str, concurrency: int) -> str:
    """``2 of 3 launches``: how many of the two sides have a cell that is not valid; empty when all are (pure)."""
    chosen = [
        cell["validity"]["verdict"]
        for cell in cells
        if cell["setting"] in (BASELINE, setting) and cell["concurrency"] == concurrency
    ]
    bad = sum(verdict != "valid" for verdict in chosen)
    return f"{bad} of {len(chosen)} launches" if bad else ""
