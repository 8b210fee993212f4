"""The field campaign rehearsed through the notebooks: what they compute must be what the law holds, and nothing else.

A number that misses its tolerance fails, unless the cells it comes from say themselves that other processes kept this
machine busy: then the stand-in was late, too, and the test is skipped with that reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfbook import paths
from perfbook.errors import BadInput, ServerFailed
from perfbook.params import load_variant
from perfbook.record.run import Run
from perfbook.server import preflight, process
from rehearsed import NO_DIFFERENCE, Campaign, busy, holds

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

SHORT = [
    "single_stream={output_tokens: [32, 512, 2048], repeats: 1}",
    "sweep={concurrency: [1, 128, 256], requests_per_stream: 1, repeats: 1}",
    "profile={concurrency: [1], iterations: 16, output_tokens: 40}",
    "tuning.concurrency=[1]",
    "tuning.requests_per_stream=1",
]


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("int4"), "kimi-k2.5-int4", SHORT)


def test_every_notebook_completes_and_everything_says_rehearsal(int4: Campaign) -> None:
    assert int4.done.returncode == 0, int4.done.stderr
    header = json.loads((int4.path / "run.json").read_text())
    assert {entry["status"] for entry in header["notebooks"]} == {"completed"}
    assert header["rehearsed"] is True
    assert int4.summary["rehearsed"] is True
    assert all(record["rehearsed"] is True for record in int4.records)
    page = (int4.path / "report.html").read_text()
    assert "· rehearsal</p>" in page
    assert page.count("Rehearsal, not measured on this hardware") >= 6  # every figure's alternative text
    assert "rehears" in (int4.path / "results.md").read_text().lower()


def test_no_figure_of_this_machine_enters_the_report(int4: Campaign) -> None:
    provenance = json.loads((int4.path / "run.json").read_text())["provenance"]
    assert provenance["hardware"] == "8 × NVIDIA RTX PRO 6000 Blackwell Server Edition, rehearsed"
    assert len(provenance["gpus"]) == 8
    assert not {"cpu", "memory_bytes", "nvidia_driver"} & set(provenance)
    device = int4.of("micro_device")[-1]
    assert "rehearsed" in device["device"]
    read = next(one for one in device["bandwidth"] if one["kind"] == "read")
    assert max(read["repeats_gb_s"]) == pytest.approx(1500, rel=0.03)  # the law's


def test_a_rehearsal_is_never_the_run_that_a_measurement_continues(
    int4: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(int4.path.parent.parent))
    assert Run.latest("kimi-k2.5-int4") is None
    assert Run.latest("kimi-k2.5-int4", rehearsed=True) == Run(int4.path)
    assert not (int4.path.parent / "latest").exists()
    assert Run.open("kimi-k2.5-int4").path == int4.path.resolve()


def test_blended_rates_and_slope_are_the_campaigns(int4: Campaign) -> None:
    single, cells = int4.summary["single_stream"], int4.of("single_stream_cell")
    holds(single["blended_tok_s"]["512"], 80, 83, cells)  # 81.9 found there, prompt a few tokens shorter
    holds(single["blended_tok_s"]["2048"], 75.6, 77.2, cells)  # 76.2
    holds(single["tpot_slope_us_per_token"], 1.1, 1.35, cells)  # the law: 1.22
    holds(single["ttft_ms"], 27, 34, cells)  # 28.35 for 28 prompt tokens


def test_the_gap_is_attributed_with_the_right_signs(int4: Campaign) -> None:
    attribution = int4.summary["single_stream"]["attribution"]
    seconds = {part["cause"]: part["seconds"] for part in attribution["parts"]}
    cells = int4.of("single_stream_cell")
    assert attribution["ratio"] == 4  # 2048 against 512 tokens
    assert seconds["prefill"] < 0  # it weighs less on the longer answer: it cannot explain the loss
    holds(attribution["gap_s"], 1.65, 2.1, cells)  # 26.88 - 4 x 6.25 = 1.88 s in the field
    holds(seconds["prefill"], -0.12, -0.07, cells)  # -3 x 28 ms
    holds(seconds["context slope"], 1.7, 2.15, cells)  # more than the whole gap
    holds(abs(seconds["remainder"]), 0, 0.15, cells)


def test_the_first_request_is_told_as_warm_up(int4: Campaign) -> None:
    warm = int4.summary["warmup"]
    assert warm["first_request_tok_s"] < 0.4 * warm["steady_tok_s"]
    assert any(found["id"].startswith("warm_up") for found in int4.summary["findings"])


def test_the_plateau_is_a_limit_of_step_time(int4: Campaign) -> None:
    sweep = int4.summary["sweep"]
    top = [cell for cell in sweep["cells"] if cell["concurrency"] >= 128]
    rates = {cell["concurrency"]: cell["output_tok_s_plateau"] for cell in sweep["cells"]}
    holds(rates[128], 1490, 1580, top)  # 1536
    holds(rates[256] / rates[128], 0.96, 1.04, top)  # none gained
    if busy(top) and sweep["knee_concurrency"] != 128:
        pytest.skip(f"no knee at 128, but {busy(top)[0]}")
    assert sweep["knee_concurrency"] == 128
    assert sweep["limit"] == "step time"
    assert "step time saturates" in int4.summary["bottleneck"]["128 streams and more"]


def test_all_reduce_is_half_of_a_profiled_step_which_is_inflated(int4: Campaign) -> None:
    profile, cells = int4.summary["profile"][0], int4.of("sweep_cell")
    top = profile["categories"][0]
    assert top["category"] == "all_reduce"
    assert top["share_of_step"] == pytest.approx(0.515, abs=0.003)
    assert top["calls_per_step"] == 122
    assert top["ms_per_step"] == pytest.approx(11.17, abs=0.2)
    holds(profile["inflation"], 1.68, 1.84, cells)  # 1.75
    sentence = int4.summary["bottleneck"]["1 stream (profiled)"]
    assert sentence.startswith("all_reduce is 51.")
    assert "122 calls" in sentence


def test_the_sweep_ends_with_a_count_of_a_steps_all_reduces(int4: Campaign) -> None:
    calls = {part["category"]: part["calls_per_step"] for part in int4.of("step_trace")[-1]["categories"]}
    assert calls["all_reduce"] == 122


def test_no_setting_of_nccl_is_worth_a_reload(int4: Campaign) -> None:
    tuning = {entry["setting"]: entry for entry in int4.summary["tuning"]}
    for name in ("proto-ll", "algo-tree", "channels-8"):
        assert tuning[name]["verdict"] == "not worth a reload"
        assert abs(tuning[name]["predicted_pct"]) < 2  # below the minimum effect
    assert tuning["compile-3"]["verdict"] == "not relaunched"


def test_the_ceiling_is_computed_from_the_laws_machine(int4: Campaign) -> None:
    ceiling = int4.summary["ceiling"]
    # (21.1 + 571 x 8/384) GB over 8 ranks at 1500 GB/s, the cache of 1057 tokens, 122 all-reduces of about 41 us
    assert ceiling["floor_ms"] == pytest.approx(2.75 + 0.05 + 5.0, rel=0.04)
    holds(ceiling["ratio"], 1.55, 1.8, int4.of("single_stream_cell"))


def test_targets_are_met_and_the_answers_verified(int4: Campaign) -> None:
    assert int4.summary["answers"] == "verified"
    assert {target["name"]: target["met"] for target in int4.summary["targets"]} == {
        "single-stream decode rate": True,
        "single-stream TTFT": True,
    }


@pytest.mark.long
def test_an_answer_cut_at_64_tokens_is_recognised_as_truncated(tmp_path: Path) -> None:
    """Its 97 tokens of thinking do not fit: neither right nor wrong, and nothing is measured on such an answer."""
    campaign = Campaign(tmp_path, "kimi-k2.5-nvfp4", ["verify.max_tokens=64"], "--only", "01,02,03")
    assert campaign.done.returncode == 1
    assert any(found["id"].startswith("answers_truncated") for found in campaign.summary["findings"])
    verdict = campaign.of("verdict_on_answers")[-1]
    assert (verdict["right"], verdict["wrong"], verdict["cut_off"]) == (0, 0, 2)
    first = campaign.of("first_request")[-1]
    holds(first["blended_tok_s"], 15, 17, [first])  # 107 tokens in 6.7 s
    assert campaign.summary["single_stream"] is None


def test_a_variant_without_a_law_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perfbook", "run", str(paths.params() / "smollm2-135m-cpu.yaml"), "--rehearse"]
    environment = {"PERFBOOK_OUTPUTS": str(tmp_path / "outputs"), "PERFBOOK_LOCK": str(tmp_path / "lock")}
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "perfbook: smollm2-135m-cpu: nothing to rehearse with: the file has no rehearsal: section (a law)"
    ]
    assert not (tmp_path / "outputs" / "smollm2-135m-cpu").exists()


def test_a_removed_flag_is_refused_with_its_fate_before_anything_starts() -> None:
    variant = load_variant(paths.params() / "kimi-k2.5-int4.yaml", ["server.args.num-scheduler-steps=10"])
    problems = [one for one in preflight.check(variant, rehearsed=True) if one.level == "error"]
    if not problems:
        pytest.skip("no vLLM is installed here to ask")
    assert len(problems) == 1
    assert "num-scheduler-steps" in str(problems[0])
    with pytest.raises(BadInput, match="num-scheduler-steps"):
        preflight.require(variant, rehearsed=True)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("server.args.kv-cache-dtype=fp8", "kv_cache_dtype fp8 .* is not supported by the selected attention backend"),
        ("server.args.max-model-len=262144", "max seq len .262144.*larger than the available KV cache memory"),
    ],
)
def test_a_dead_launch_gives_its_first_error(
    setting: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFBOOK_OUTPUTS", str(tmp_path))
    variant = load_variant(paths.params() / "kimi-k2.5-nvfp4.yaml", [setting])
    run = Run.start(variant, rehearsed=True)
    with pytest.raises(ServerFailed, match=error):
        process.start(variant, run)
    assert process.find(run) is None


@pytest.mark.long
def test_the_same_plateau_by_queueing_is_told_apart(tmp_path: Path) -> None:
    sweep = "sweep={concurrency: [64, 128, 256], requests_per_stream: 2, repeats: 1}"
    campaign = Campaign(tmp_path, "kimi-k2.5-int4", [sweep, "server.args.max-num-seqs=128"], "--only", "01,04")
    assert campaign.done.returncode == 0, campaign.done.stderr
    found = campaign.summary["sweep"]
    rates = {cell["concurrency"]: cell["output_tok_s_plateau"] for cell in found["cells"]}
    holds(rates[128], 1480, 1590, found["cells"])
    holds(rates[256], 1480, 1590, found["cells"])
    assert found["knee_concurrency"] == 128
    assert found["limit"] == "queueing"
    assert "max_num_seqs" in found["limitation"]["cause"]


@pytest.mark.long
def test_forced_confirmations_detect_no_difference(tmp_path: Path) -> None:
    """Six launches each of LL, compilation mode 3 and the baseline; the law says that none matters."""
    tuning = (
        "tuning={settings: {proto-ll: {env: {NCCL_PROTO: LL}}, compile-3: {args: {compilation-config: {mode: 3}}}},"
        " concurrency: [1], launches: 6, confirm: all, requests_per_stream: 2}"
    )
    campaign = Campaign(
        tmp_path, "kimi-k2.5-int4", [tuning, "sweep.output_tokens=128", "profile.concurrency=[1]"], "--only", "01,05"
    )
    assert campaign.done.returncode == 0, campaign.done.stderr
    cells = campaign.of("tuning_cell")
    assert {(cell["setting"], cell["launch"]) for cell in cells} >= {("proto-ll", 5), ("compile-3", 5), ("baseline", 5)}
    for entry in campaign.summary["tuning"]:
        if entry["verdict"] not in NO_DIFFERENCE and (reasons := busy(cells)):
            pytest.skip(f"{entry['setting']}: {entry['verdict']}, but {reasons[0]}")
        assert entry["verdict"] in NO_DIFFERENCE, entry
        assert entry["launches"] == 6


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "top", "share"),
    [("glm-5-nvfp4", "unrolled_elementwise_kernel", 0.69), ("kimi-k2.5-nvfp4", "nccl", 0.67)],
)
def test_where_the_other_variants_steps_go(variant: str, top: str, share: float, tmp_path: Path) -> None:
    settings = ["profile={concurrency: [1], iterations: 12, output_tokens: 32}"]
    campaign = Campaign(tmp_path, variant, settings, "--only", "01,06")
    assert campaign.done.returncode == 0, campaign.done.stderr
    category = campaign.summary["profile"][0]["categories"][0]
    assert category["share_of_step"] == pytest.approx(share, abs=0.005)
    page = (campaign.path / "report.html").read_text()
    assert top in page


@pytest.mark.long
def test_minimax_reaches_nearly_four_thousand(tmp_path: Path) -> None:
    sweep = "sweep={concurrency: [128, 256, 512], requests_per_stream: 1, repeats: 1}"
    campaign = Campaign(tmp_path, "minimax-m2.5-fp8", [sweep], "--only", "01,04")
    assert campaign.done.returncode == 0, campaign.done.stderr
    found = campaign.summary["sweep"]
    holds(found["best_tok_s"], 3700, 4150, found["cells"])


@pytest.mark.long
def test_the_quarter_rate_of_nvfp4s_first_request_is_warm_up(tmp_path: Path) -> None:
    settings = ["single_stream={output_tokens: [107, 512], repeats: 2}"]
    campaign = Campaign(tmp_path, "kimi-k2.5-nvfp4", settings, "--only", "01,03")
    assert campaign.done.returncode == 0, campaign.done.stderr
    cells, warm = campaign.of("single_stream_cell"), campaign.summary["warmup"]
    holds(warm["first_request_tok_s"], 15, 17, campaign.of("first_request"))  # 107 tokens in 6.7 s
    holds(campaign.summary["single_stream"]["blended_tok_s"]["512"], 58.5, 61.5, cells)  # 512 tokens in 8.5 s
    assert any(found["id"].startswith("warm_up") for found in campaign.summary["findings"])


@pytest.mark.long
def test_a_server_without_profiler_is_looked_at_from_outside_only(tmp_path: Path) -> None:
    settings = ['server.args.profiler-config={profiler: null, torch_profiler_dir: ""}']
    campaign = Campaign(tmp_path, "kimi-k2.5-int4", settings, "--only", "01,06")
    assert campaign.done.returncode == 0, campaign.done.stderr
    assert campaign.summary["profile"] is None
    assert any(found["id"].startswith("no_profiler") for found in campaign.summary["findings"])
