"""05: screen, predict, confirm; pure parts against literals, the chain with two real ranks."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfbook.desk import Desk
from perfbook.micro import AllReduce, Message
from perfbook.params import Setting, make_variant
from perfbook.record import findings
from perfbook.record.run import Run
from perfbook.record.summary import summarise
from perfbook.stats import Label
from perfbook.study.relaunch import Launch, doubtful, plan, schedule, verdicts
from perfbook.study.tuning import Decision, Screening, conclude, describe
from perfbook.study.tuning.decision import _decide, promise
from perfbook.study.tuning.screen import BASELINE, Prediction, Screened, judge, predict, screen


def test_the_order_mirrors_itself_and_ends_with_the_baseline() -> None:
    order = schedule(["a", "b"], 2)
    assert [launch.setting for launch in order] == ["a", "b", "b", "a", BASELINE]
    assert order[-1] == Launch(BASELINE, 1, 0)


def test_an_odd_number_of_turns_gives_the_baseline_one_more() -> None:
    order = schedule(["a"], 3)
    assert [(one.setting, one.number, one.block) for one in order] == [
        ("a", 0, 0), ("a", 1, 0), (BASELINE, 1, 0), (BASELINE, 2, 1), ("a", 2, 1), (BASELINE, 3, 1)
    ]  # fmt: skip
    assert schedule(["a"], 1) == [Launch("a", 0, 0), Launch(BASELINE, 1, 0)]
    assert schedule([], 6) == []


def test_a_budget_drops_launches_then_settings() -> None:
    whole = plan(["a", "b"], 2, 100.0, None)
    assert (len(whole.launches), whole.cost_s, whole.dropped) == (5, 500.0, "")
    fewer = plan(["a", "b"], 2, 100.0, 300.0)
    assert (len(fewer.launches), fewer.dropped) == (3, "1 of 2 launches each")
    one = plan(["a", "b"], 2, 100.0, 200.0)
    assert ([launch.setting for launch in one.launches], one.dropped) == (["a", BASELINE], "1 of 2 launches each, b")
    assert plan(["a"], 1, 100.0, 10.0).launches == ()


def reading(us: float, outcome: str = "ok", log: str = "", backend: str = "nccl") -> AllReduce:
    messages = (Message(14336, (us, us, us), 8),) if outcome == "ok" else ()
    return AllReduce(outcome, backend, 8, "" if outcome == "ok" else "why", messages, log)


READ = "NCCL INFO NCCL_PROTO set by environment to LL\n"


def test_the_screen_sorts_out_what_is_broken_or_ignored() -> None:
    env = {"NCCL_PROTO": "LL"}
    assert judge("a", env, [reading(21.0, log=READ)]).status == "ok"
    assert judge("a", env, [reading(21.0)]).status == "not taken"
    assert judge("a", {"NCCL_PROTO": "LL128"}, [reading(21.0, log=READ)]).status == "not taken"
    assert judge("a", env, [reading(21.0, log=READ), reading(0, "wrong sums")]).status == "wrong sums"
    assert judge("a", env, [reading(0, "hangs")]).reason == "why"
    assert judge("a", env, [reading(21.0, log=READ), reading(23.0, log=READ)]).latencies_us == {14336: (21.0, 23.0)}


def screened(name: str, *us: float) -> Screened:
    return Screened(name, "ok", "", {14336: us}, {})


def test_a_prediction_by_hand() -> None:
    """122 all-reduces that take 10 µs less are 1.22 ms of a 12.4 ms token: 9.84 %."""
    got = predict(
        screened(BASELINE, 30.0, 32.0), screened("ll", 20.0, 22.0), concurrency=1, message_bytes=14336,
        calls_per_step=122, tpot_ms=12.4,
    )  # fmt: skip
    assert got is not None
    assert got.predicted_pct == pytest.approx(-9.8387, abs=1e-3)
    assert got.best_pct == pytest.approx(-100 * 122 * 0.012 / 12.4)
    assert got.worst_pct == pytest.approx(-100 * 122 * 0.008 / 12.4)
    assert got.worth_a_reload(2.0)
    assert not got.worth_a_reload(12.0)


def test_no_prediction_without_the_size() -> None:
    assert (
        predict(
            screened(BASELINE, 30.0), screened("ll", 20.0), concurrency=8, message_bytes=114688, calls_per_step=122,
            tpot_ms=20.0,
        )
        is None
    )  # fmt: skip


def prediction(best_pct: float) -> Prediction:
    return Prediction("ll", 1, 14336, 31.0, 30.9, 122, 12.4, best_pct + 0.3, best_pct, best_pct + 0.6)


LL = Setting(env={"NCCL_PROTO": "LL"})


@pytest.mark.parametrize(
    ("best_pct", "confirm", "relaunched", "verdict"),
    [
        (-3.0, "predicted", True, None),
        (-0.4, "predicted", False, "not worth a reload"),
        (-0.4, "all", True, None),
        (-3.0, "none", False, "not relaunched"),
    ],
)
def test_only_what_can_matter_is_relaunched(
    best_pct: float, confirm: str, relaunched: bool, verdict: str | None
) -> None:
    screening = Screening("", {"ll": screened("ll", 20.0)}, {("ll", 1): prediction(best_pct)}, "")
    got = _decide("ll", LL, screening, confirm, 2.0, [1])
    assert got.relaunch is relaunched
    assert verdict in (None, got.verdict)


def test_what_is_broken_is_never_relaunched() -> None:
    screening = Screening("", {"ll": Screened("ll", "wrong sums", "rank 0: 3 of 8", {}, {})}, {}, "")
    got = _decide("ll", LL, screening, "all", 2.0, [1])
    assert (got.relaunch, got.verdict, got.why) == (False, "wrong sums", "rank 0: 3 of 8")


def test_what_cannot_be_predicted_says_why() -> None:
    screening = Screening("not applicable: one rank sums nothing over others", {}, {}, "")
    eager = _decide("eager", Setting(args={"enforce-eager": True}), screening, "predicted", 2.0, [1])
    assert (eager.relaunch, "changes more than NCCL" in eager.why) == (False, True)
    assert "one rank" in _decide("ll", LL, screening, "predicted", 2.0, [1]).why


def test_a_setting_can_matter_at_one_concurrency_and_not_at_another() -> None:
    """Each verdict carries its own number; the decision names them all."""
    expected = {("ll", 1): prediction(-1.5), ("ll", 64): replace(prediction(-0.1), concurrency=64)}
    got = _decide("ll", LL, Screening("", {"ll": screened("ll", 20.0)}, expected, ""), "predicted", 2.0, [1, 64])
    assert (got.verdict, got.why) == (
        "not worth a reload",
        "at best −1.50 % of TPOT at 1 stream, −0.100 % of TPOT at 64 streams, against a minimum effect of 2 %",
    )
    assert promise([expected["ll", 64]], 2.0) == (
        "at best −0.100 % of TPOT at 64 streams, against a minimum effect of 2 %"
    )


def test_a_setting_in_words() -> None:
    setting = Setting(env={"NCCL_PROTO": "LL"}, args={"enforce-eager": True, "max-num-seqs": 8})
    assert describe(setting) == "NCCL_PROTO=LL --enforce-eager --max-num-seqs 8"


def cells(setting: str, launches: list[float], concurrency: int = 1) -> list[dict[str, Any]]:
    return [
        {"setting": setting, "concurrency": concurrency, "launch": i, "block": i // 2, "tpot_ms": {"p50": ms}}
        for i, ms in enumerate(launches)
    ]


def test_six_launches_carry_a_verdict_and_one_does_not() -> None:
    base = [12.40, 12.44, 12.38, 12.41, 12.43, 12.39]
    six = verdicts(
        [*cells(BASELINE, base), *cells("ll", [ms * 0.95 for ms in base])], minimum_effect_pct=2, settings=["ll"]
    )
    assert six["ll", 1].label is Label.FASTER
    assert six["ll", 1].effect_pct == pytest.approx(-5.0, abs=0.5)
    one = verdicts([*cells(BASELINE, base[:2]), *cells("ll", [11.8])], minimum_effect_pct=2, settings=["ll"])
    assert one["ll", 1].label is Label.TOO_FEW
    assert one["ll", 1].effect_pct < -4


def test_launches_are_compared_within_blocks_only() -> None:
    """The machine slows by half between the blocks; within each, the setting is 4 % faster."""
    base, slow = [10.0, 10.1, 15.0, 15.1, 10.05, 10.15], [9.6, 9.7, 14.4, 14.5, 9.65, 9.75]
    got = verdicts([*cells(BASELINE, base), *cells("ll", slow)], minimum_effect_pct=2, settings=["ll"])["ll", 1]
    assert (got.label, got.blocks) == (Label.FASTER, 3)
    assert got.effect_pct == pytest.approx(-4.0, abs=0.6)


def test_a_block_without_one_side_does_not_count() -> None:
    lonely = [*cells(BASELINE, [10.0, 10.1]), *cells("ll", [9.0, 9.1, 9.2, 9.3])]
    got = verdicts(lonely, minimum_effect_pct=2, settings=["ll"])["ll", 1]
    assert (got.candidate, got.blocks) == ((9.0, 9.1), 1)
    assert verdicts(cells("ll", [9.0]), minimum_effect_pct=2, settings=["ll"]) == {}


def test_launches_that_are_not_valid_are_counted() -> None:
    measured = [
        {**cell, "validity": {"verdict": verdict}}
        for cell, verdict in zip(
            [*cells(BASELINE, [10.0, 10.1]), *cells("a", [9.0]), *cells("b", [9.0])],
            ["valid", "suspect", "invalid", "invalid"],
            strict=True,
        )
    ]
    assert doubtful(measured, "a", 1) == "2 of 3 launches"
    assert doubtful(measured[:1], "a", 1) == ""


def test_false_alarms_stay_rare_over_simulated_campaigns() -> None:
    """Two settings without effect at two concurrencies, 4 % launch noise: any false verdict in at most 5 %."""
    noise, alarms, campaigns = random.Random(7), 0, 300
    for _ in range(campaigns):
        launched: list[dict[str, Any]] = []
        for setting in (BASELINE, "a", "b"):
            for concurrency in (1, 8):
                launched += cells(setting, [20 * noise.lognormvariate(0, 0.04) for _ in range(6)], concurrency)
        got = verdicts(launched, minimum_effect_pct=2, settings=["a", "b"])
        assert len(got) == 4
        alarms += any(one.label in (Label.FASTER, Label.SLOWER) for one in got.values())
    assert alarms <= 0.05 * campaigns + 3 * (campaigns * 0.05 * 0.95) ** 0.5


FAULTS = """
import os
fault = os.environ.get("PB_TEST_FAULT")
if fault:
    import torch.distributed as dist
    right = dist.all_reduce
    def all_reduce(tensor, *args, **kwargs):
        if fault == "hang" and int(tensor.numel()) > 1:
            import time
            time.sleep(3600)
        done = right(tensor, *args, **kwargs)
        if fault == "wrong" and int(tensor.numel()) > 1:
            tensor[3] += 1
        return done
    dist.all_reduce = all_reduce
"""


@pytest.mark.long
def test_the_chain_with_two_real_ranks(tmp_path: Path) -> None:
    """A setting that hangs, one that sums wrongly, one that gloo does not know, and one without effect."""
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    settings = {
        "hangs": {"PB_TEST_FAULT": "hang"},
        "wrong": {"PB_TEST_FAULT": "wrong"},
        "ignored": {"NCCL_PROTO": "LL"},
        "harmless": {"PB_TEST_NOTHING": "1"},
    }
    kept: list[str] = []
    got = screen(
        settings, [1152], 2, backend="gloo", env={"PYTHONPATH": str(tmp_path)}, rounds=2, timeout_s=45,
        keep=lambda name, turn, one: kept.append(f"{name}/{turn}"),
    )  # fmt: skip
    assert {name: one.status for name, one in got.items()} == {
        BASELINE: "ok", "hangs": "hangs", "wrong": "wrong sums", "ignored": "not taken", "harmless": "ok"
    }  # fmt: skip
    assert "first at 3: " in got["wrong"].reason
    assert kept.count("hangs/0") == 1
    assert "hangs/1" not in kept
    # Against a token of an hour nothing can matter; against one of a microsecond, anything may.
    for tpot_ms, relaunched in ((3.6e6, False), (1e-3, True)):
        base, other = got[BASELINE], got["harmless"]
        # The medians may lie either way on a busy machine: take the faster as the setting.
        first, second = sorted((base, other), key=lambda one: one.latencies_us[1152][0], reverse=True)
        expected = predict(first, second, concurrency=1, message_bytes=1152, calls_per_step=61, tpot_ms=tpot_ms)
        assert expected is not None
        screening = Screening("", {"harmless": other}, {("harmless", 1): expected}, "")
        assert _decide("harmless", LL, screening, "predicted", 2.0, [1]).relaunch is relaunched
    assert os.environ.get("PB_TEST_FAULT") is None


def test_what_is_recorded_feeds_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path))
    settings = {"ll": {"env": {"NCCL_PROTO": "LL"}}, "tree": {"env": {"NCCL_ALGO": "Tree"}}}
    values = {"variant": "v", "server": {"model": "/m"}, "tuning": {"settings": settings}}
    variant = make_variant(values, "test")
    desk = Desk("05_nccl_tuning", variant, Run.start(variant))
    for cell in [*cells(BASELINE, [12.4, 12.5]), *cells("ll", [11.8])]:
        valid = {"validity": {"verdict": "valid"}}
        desk.run.append("05_nccl_tuning", "tuning_cell", {**cell, **valid}, key=f"{cell['setting']}/{cell['launch']}")
    screening = Screening("", {}, {("ll", 1): prediction(-3.0)}, "")
    decisions = [Decision("ll", True, "promising"), Decision("tree", False, "at best −0.1 %", "not worth a reload")]
    said = conclude(desk, screening, decisions).sentence
    assert said.startswith("ll at 1 stream: too few launches: 2 + 1 launches")
    assert said.endswith("; not worth a reload: tree.")
    rows = summarise(desk.run)["tuning"]
    assert [(row["setting"], row["concurrency"], row["verdict"], row["launches"]) for row in rows] == [
        ("ll", 1, "too few launches", 1), ("tree", 1, "not worth a reload", 0)
    ]  # fmt: skip
    assert rows[0]["effect_pct"] == pytest.approx(-5.2, abs=0.1)
    assert rows[0]["predicted_pct"] == pytest.approx(-2.7)
    assert {f["id"] for f in findings.current(desk.run)} == {"setting_undecided:ll/1", "setting_not_tried:tree/1"}
