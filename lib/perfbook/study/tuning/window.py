"""The window in which the devices are free: everything that 05 measures without a server, in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from perfbook.desk import Desk
from perfbook.figures.cells import statistic
from perfbook.micro import AllReduce, DeviceBench
from perfbook.params import Setting
from perfbook.server import process
from perfbook.server.launch import own_environment
from perfbook.study import bench, doubts, owner, relaunch
from perfbook.study.bench import Served
from perfbook.study.profile import unprofiled_tpot_ms
from perfbook.study.tuning.screen import BASELINE, Prediction, Screened, predict, screen

ALL_SIZES = tuple(2**power for power in range(10, 27))  # 1 KiB to 64 MiB


@dataclass(frozen=True)
class Screening:
    """What the window with free devices gave.

    Attributes
    ----------
    skipped : str
        Why there was no screen; empty when there was.
    screened : dict
        Setting → result, ``baseline`` among them; empty without a screen.
    predictions : dict
        (setting, concurrency) → prediction, where one can be made.
    devices : DeviceBench or str
        Bandwidth and products, or why they were not measured.
    """

    skipped: str
    screened: Mapping[str, Screened]
    predictions: Mapping[tuple[str, int], Prediction]
    devices: DeviceBench | str


def no_screen(desk: Desk, served: Served) -> str:
    """Why the all-reduce cannot be screened here; empty when it can."""
    gpus = len(desk.hardware.gpus())
    if served.ranks == 1:
        return "not applicable: one rank sums nothing over others"
    if gpus == 0:
        return "not applicable: CPU ranks sum through shared memory of vLLM's own, which NCCL variables do not reach"
    if gpus < served.ranks:
        return f"{gpus} GPUs here for {served.ranks} ranks: a benchmark on fewer would not stand for the server"
    if served.shape.hidden is None:
        return f"the size of a message is unknown ({served.unknown})"
    return ""


def measure_baseline(desk: Desk, progress: Callable[[str], None]) -> None:
    """Measure the running server: the baseline's first launch."""
    if desk.variant.tuning.settings:
        handle = desk.server()
        relaunch.measure_launch(desk, relaunch.Launch(BASELINE, 0, 0), 0, handle.ready_s, progress)


def measure_devices(desk: Desk, progress: Callable[[str], None]) -> Screening:
    """Stop the server where that is needed, and measure what needs the devices free.

    An idle server does not disturb bandwidth and products; it is stopped for the all-reduce screen, whose ranks need
    the GPUs' memory, and where settings are relaunched afterwards anyway. An attached server is stopped and started
    again by its owner's commands, where they are allowed.
    """
    with owner.devices_freed(desk, progress) as kept:
        return _measure_devices(desk, kept, progress)


def _measure_devices(desk: Desk, kept: str, progress: Callable[[str], None]) -> Screening:
    """``kept``: why an attached server goes on holding its devices; empty when they are free, or ours to free."""
    served = bench.served_model(owner.described(desk), desk.hardware)
    reason = kept or no_screen(desk, served)
    plan = desk.variant.tuning
    to_screen = {name: dict(one.env) for name, one in plan.settings.items() if is_screened(one)}
    skipped = reason or ("" if to_screen else "no setting changes NCCL")
    if desk.variant.server.base_url is None and (not skipped or (plan.settings and plan.confirm == "all")):
        progress("stopping the server")
        process.stop(desk.run)
    progress("memory bandwidth and matrix products")
    measured = f"Not measured: {kept}." if kept else bench.measure(desk, served, freed=True)
    screened: dict[str, Screened] = {}
    if not reason:

        def keep(name: str, turn: int, reading: AllReduce) -> None:
            desk.record("micro_all_reduce", {"setting": name, "round": turn, **reading.to_json()}, key=f"{name}/{turn}")

        with desk.measuring():
            screened = screen(
                to_screen, [message_size(served, count) for count in plan.concurrency], served.ranks,
                reduce=desk.hardware.all_reduce, backend="nccl", env=own_environment(desk.variant),
                baseline_bytes=[*ALL_SIZES, *(message_size(served, c) for c in desk.variant.sweep.concurrency)],
                rounds=plan.screen_rounds, timeout_s=plan.screen_timeout_s, progress=progress, keep=keep,
            )  # fmt: skip
    return Screening(skipped, screened, predictions(desk, served, screened), measured)


def predictions(desk: Desk, served: Served, screened: Mapping[str, Screened]) -> dict[tuple[str, int], Prediction]:
    """What each screened setting should change, per concurrency."""
    calls, _ = bench.all_reduce_count(desk, served)
    found: dict[tuple[str, int], Prediction] = {}
    for name, one in screened.items():
        for concurrency in desk.variant.tuning.concurrency:
            tpot_ms = baseline_tpot_ms(desk, concurrency)
            if name == BASELINE or calls is None or tpot_ms is None:
                continue
            expected = predict(
                screened[BASELINE], one, concurrency=concurrency, message_bytes=message_size(served, concurrency),
                calls_per_step=calls, tpot_ms=tpot_ms,
            )  # fmt: skip
            if expected is not None:
                found[name, concurrency] = expected
    return found


def baseline_tpot_ms(desk: Desk, concurrency: int) -> float | None:
    """TPOT without any setting: measured here, else in 04 or 03."""
    for cell in doubts.usable(desk.run.records("tuning_cell")):
        if cell["setting"] == BASELINE and cell["concurrency"] == concurrency:
            return statistic(cell, "tpot_ms", "p50")
    return unprofiled_tpot_ms(desk, concurrency)


def is_screened(setting: Setting) -> bool:
    """Whether the all-reduce benchmark shows all that a setting does."""
    return bool(setting.env) and not setting.args and all(name.startswith("NCCL_") for name in setting.env)


def message_size(served: Served, streams: int) -> int:
    """Bytes that one all-reduce of a decode step sums at so many streams; 0 where the model is not known."""
    return served.message_bytes(streams) or 0
