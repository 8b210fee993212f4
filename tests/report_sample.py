"""A realistic run's folder, made of what the real notebooks leave, for the tests of report and index."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

from perfbook import figures
from perfbook.params import make_variant
from perfbook.record import findings, summary
from perfbook.record.findings import Finding
from perfbook.record.run import Run
from perfbook.report.table import Column, Table

SECRET = "sk-do-not-print-me"
HOSTILE = '<script>alert("x")</script><img src="http://evil.test/p.png" onerror="alert(1)">'
PARTS_MS = {"all_reduce": 11.17, "gemm": 4.2, "moe": 1.9, "attention": 1.1, "norm": 0.6, "cast_copy": 0.4}
NAMES = ["01_deploy", "02_verify", "03_single_stream", "04_sweep", "05_nccl_tuning", "07_ceiling", "08_findings"]


def start(*, rehearsed: bool = False, variant: str = "minimax-m2.5-fp8") -> Run:
    """A run that has only begun."""
    parameters = {
        "variant": variant,
        "server": {
            "model": "/data/models/MiniMax-M2.5-FP8",
            "args": {"tensor-parallel-size": 8, "max-num-seqs": 128},
            "env": {"NCCL_PROTO": "LL"},
        },
        "targets": {"single_stream_tok_s": 50, "ttft_ms": 25, "best_tok_s": 1500},
    }
    run = Run.start(make_variant(parameters, "sample"), rehearsed=rehearsed)
    run.write_header(
        {
            "started": "2026-11-30T09:12:03.000Z",
            "provenance": {
                "server_is_here": True,
                "os": "Debian GNU/Linux 12 (bookworm)",
                "kernel": "6.1.0-28-amd64",
                "cpu": {"model": "AMD EPYC 9575F", "usable_threads": 128},
                "memory_bytes": 1024 * 2**30,
                "gpus": [{"index": i, "name": "RTX PRO 6000 Blackwell", "memory_bytes": 96 * 2**30} for i in range(8)],
                "nvidia_driver": "580.95",
                "python": "3.12.3",
                "versions": {"perfbook": "0.1.0", "vllm": "0.16.0rc2", "torch": "2.9.1"},
                "git": {"commit": "0123456789abcdef0123", "dirty": False},
                "clock": {"source": "tsc"},
                "environment": {"NCCL_DEBUG": "INFO", "HF_TOKEN": SECRET},
            },
        }
    )
    header = json.loads((run.path / "run.json").read_text())
    header["parameters"]["server"]["env"]["HF_TOKEN"] = SECRET  # a run of somebody who was less careful than we are
    header["provenance"]["environment"]["HF_TOKEN"] = SECRET
    (run.path / "run.json").write_text(json.dumps(header))
    return run


def cells() -> list[dict[str, Any]]:
    """A sweep of two repeats that saturates at 128 streams; one cell is suspect."""
    made = []
    for streams in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for repeat in (0, 1):
            at_once = min(streams, 128)
            tpot_ms = 11.9 + 0.555 * at_once + 0.3 * repeat
            queued_ms = 1900.0 if streams > 128 else 0.0
            suspect = streams == 2 and repeat == 1
            made.append(
                {
                    "concurrency": streams,
                    "repeat": repeat,
                    "requests": 4 * streams,
                    "ok": 4 * streams,
                    "failed": 0,
                    "output_tok_s": 0.93e3 * at_once / tpot_ms,
                    "output_tok_s_plateau": 1e3 * at_once / tpot_ms,
                    "ttft_ms": _spread(28.0 + 1.7 * streams + queued_ms, 0.35),
                    "tpot_ms": _spread(tpot_ms, 0.1),
                    "validity": {
                        "verdict": "suspect" if suspect else "valid",
                        "reasons": ["4.1 % of reads were merged"] if suspect else [],
                    },
                }
            )
    return made


def _spread(middle: float, width: float) -> dict[str, float]:
    return {
        "mean": middle,
        "p50": middle * 0.98,
        "p90": middle * (1 + width),
        "p99": middle * (1 + 2 * width),
        "min": middle * 0.8,
        "max": middle * (1 + 3 * width),
    }


def measured(run: Run) -> None:
    """Records and findings of a run in which everything worked."""
    for name in NAMES:
        run.begin(name)
    run.append("01_deploy", "engine", {"vllm_version": "0.16.0rc2", "model": "MiniMax-M2.5-FP8"})
    run.append("01_deploy", "verdict", {"sentence": "The server is up after 8 min 43 s; CUDA graphs are on."})
    run.append("02_verify", "verdict_on_answers", {"ok": True})
    run.append("02_verify", "verdict", {"sentence": "The server answers correctly: 2 of 2 known answers."})
    single = run.append(
        "03_single_stream",
        "single_stream",
        {
            "ttft_ms": 28.1,
            "tpot_ms": 12.21,
            "decode_tok_s": 81.9,
            "tpot_slope_us_per_token": 1.22,
            "estimates": {
                "decode": {"value_tok_s": 81.9, "low_tok_s": 81.2, "high_tok_s": 82.6, "n": 5, "confidence": 0.95},
                "ttft": {"value_ms": 28.1, "low_ms": 27.4, "high_ms": 30.2, "n": 10, "confidence": 0.95},
            },
        },
    )
    run.append("03_single_stream", "verdict", {"sentence": "One stream decodes at 81.9 tok/s [81.2, 82.6], n = 5."})
    for cell in cells():
        run.append("04_sweep", "sweep_cell", cell, key=f"{cell['concurrency']}/{cell['repeat']}")
    sweep = run.append(
        "04_sweep",
        "sweep",
        {"best_tok_s": 1536.4, "knee_concurrency": 128, "knee": {"low": 64, "high": 128}, "limit": "queueing"},
    )
    run.append(
        "04_sweep",
        "bottleneck",
        {"regime": "one stream", "sentence": "AllReduce is 51.5 % of a decode step: 122 calls, 11.2 ms."},
        key="1",
    )
    run.append(
        "04_sweep",
        "bottleneck",
        {"regime": "plateau", "sentence": "Above 128 streams requests queue: max_num_seqs is 128 and 128 wait."},
        key="2",
    )
    run.append(
        "04_sweep", "verdict", {"sentence": "Throughput stops rising at 128 streams: 1536 tok/s; requests queue above."}
    )
    for setting, effect, verdict in (
        ("NCCL_PROTO=LL", 0.6, "equivalent within 2 %"),
        ("NCCL_ALGO=Tree", -3.1, "slower"),
    ):
        values = {
            "setting": setting,
            "concurrency": 1,
            "verdict": verdict,
            "effect_pct": effect,
            "launches": 10,
            "predicted_pct": 1.4,
        }
        run.append("05_nccl_tuning", "tuning", values, key=setting)
    run.append("07_ceiling", "ceiling", {"floor_ms": 8.6, "ratio": 1.42})
    run.append(
        "08_findings",
        "targets",
        {
            "targets": [
                {"name": "single-stream decode rate", "unit": "tok_s", "target": 50, "value": 81.9, "met": True},
                {"name": "single-stream TTFT", "unit": "ms", "target": 25, "value": 28.1, "met": False},
                {"name": "best throughput", "unit": "tok_s", "target": 1500, "value": 1536.4, "met": True},
            ]
        },
    )
    for finding in (
        Finding(
            "context_slope",
            "03_single_stream",
            "info",
            "Decode slows by 1.22 µs per token of context",
            "fit over 2555 tokens, 95 % interval 1.15 to 1.29 µs",
            "",
            "Compare attention backends at the longest context.",
            (single,),
        ),
        Finding(
            "plateau",
            "04_sweep",
            "warning",
            "The plateau is a scheduler limit, not a saturated device",
            "128 running and 128 waiting at 256 streams; TTFT steps from 242 ms to 2.3 s",
            "queueing",
            "Raise max-num-seqs above 128 and sweep again.",
            (sweep,),
        ),
        Finding(
            "target:ttft_ms",
            "08_findings",
            "problem",
            "Target missed: time to first token",
            "28.1 ms against 25 ms",
            "",
            "Look at prefill: chunk size, prefix caching.",
            (single,),
        ),
        Finding(
            "answers_right",
            "02_verify",
            "good",
            "The server answers correctly: 2 of 2 known answers",
            "Paris, Rome",
            "",
            "",
            (),
        ),
    ):
        findings.record(run, finding)
    summary.write(run)


def finish(run: Run, **changed: dict[str, Any]) -> None:
    """Close a run: every notebook completed, but for those named with other entries."""
    entries = [
        {"notebook": name, "status": "completed", "reason": "", "seconds": 21.4} | changed.get(f"nb{name[:2]}", {})
        for name in NAMES
    ]
    run.write_header({"finished": "2026-11-30T10:04:44.000Z", "notebooks": entries})


def good_run() -> Run:
    """A run in which everything worked."""
    run = start()
    measured(run)
    for name, notebook in notebooks().items():
        write(run, name, notebook)
    finish(run)
    return run


def write(run: Run, name: str, notebook: Any) -> None:
    """Put an executed notebook where papermill leaves it."""
    nbformat.write(notebook, run.path / "notebooks" / f"{name}.ipynb")


def code(source: str, *outputs: Any, count: int | None = 1, tags: list[str] | None = None) -> Any:
    """An executed code cell; ``count`` None leaves it unexecuted."""
    return v4.new_code_cell(source, outputs=list(outputs), execution_count=count, metadata={"tags": tags or []})


def shown(thing: Any) -> Any:
    """What displaying an object leaves."""
    return v4.new_output("display_data", data={"text/html": thing._repr_html_(), "text/plain": repr(thing)})


def said(text: str) -> Any:
    """What a print leaves."""
    return v4.new_output("stream", name="stdout", text=text)


def failed(name: str, value: str) -> Any:
    """What an error of ours leaves."""
    return v4.new_output("error", ename=name, evalue=value, traceback=[f"{name}: {value}"])


def notebook(title: str, *body: Any) -> Any:
    """A notebook with a title, a parameters cell and injected parameters that hold a secret."""
    return v4.new_notebook(
        cells=[
            v4.new_markdown_cell(
                f"# {title}\n\nThe question in a paragraph: what is measured here, and how to read it."
            ),
            code('variant = "minimax-m2.5-fp8"  # which parameter file', tags=["parameters"]),
            code(f'server = {{"env": {{"HF_TOKEN": "{SECRET}"}}}}', tags=["injected-parameters"]),
            *body,
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}},
    )


def notebooks() -> dict[str, Any]:
    """Executed notebooks of a good run, each call its own copies."""
    return copy.deepcopy(_notebooks())


@cache
def _notebooks() -> dict[str, Any]:
    sweep = cells()
    positions = [float(i) for _ in range(5) for i in range(1, 512)]
    tokens_ms = [
        11.87 + 1.22e-3 * x + 0.35 * abs(math.sin(91.7 * i)) + (9 if i % 700 == 3 else 0)
        for i, x in enumerate(positions)
    ]
    fit = {"intercept_ms": 12.09, "slope_us_per_token": 1.22}
    rates = [
        {"output_tokens": 128, "decode_tok_s": 83.0, "blended_tok_s": 80.0, "decode_tok_s_interval": [82.5, 83.4]},
        {"output_tokens": 512, "decode_tok_s": 82.5, "blended_tok_s": 81.5, "decode_tok_s_interval": [82.0, 83.0]},
        {"output_tokens": 2048, "decode_tok_s": 76.5, "blended_tok_s": 76.2, "decode_tok_s_interval": [76.1, 76.8]},
    ]
    sweep_rows = [
        (
            cell["concurrency"],
            cell["output_tok_s_plateau"],
            *(cell[key][which] for key in ("ttft_ms", "tpot_ms") for which in ("p50", "p99")),
            cell["failed"],
            cell["validity"]["verdict"],
        )
        for cell in sweep
        if cell["repeat"] == 0
    ]
    columns = [
        "concurrency", Column("throughput", "tok_s"), Column("TTFT p50", "ms"), Column("TTFT p99", "ms"),
        Column("TPOT p50", "ms"), Column("TPOT p99", "ms"), "failed", "validity",
    ]  # fmt: skip
    log = "".join(
        f"INFO 11-30 09:{12 + i // 60:02d}:{i % 60:02d} loading shard {i + 1} of 62 from {Path.home()}/models\n"
        for i in range(62)
    )
    return {
        "01_deploy": notebook(
            "Is the server up, and what did the engine really decide?",
            v4.new_markdown_cell("## Start\n\nThe profiler is armed from the start; see `server-00.log`."),
            code("handle = desk.server()", said(log)),
            v4.new_markdown_cell("## What the engine decided"),
            code(
                "deploy.engine_table(facts)",
                shown(
                    Table(
                        ["what", "value", "evidence"],
                        [
                            ("vLLM", "0.16.0rc2", "V1 engine"),
                            ("torch.compile", "on (VLLM_COMPILE)", "line 41: compilation_config={'mode': 3, …"),
                            ("CUDA graphs", "on (FULL_AND_PIECEWISE)", "line 212: Graph capturing finished in 31 secs"),
                            ("KV cache", "1,204,224 tokens", ""),
                        ],
                        "What the engine decided, from its start-up log",
                    )
                ),
            ),
        ),
        "02_verify": notebook(
            "Is it really working?",
            code(
                "verify.answers_table(checked)",
                shown(
                    Table(
                        ["question", "answer", "status", Column("output", "tokens")],
                        [
                            ("What is the capital of France?", f"Paris. {HOSTILE}", "right", 9),
                            ("What is the capital of Italy?", "Rome is the capital of Italy.", "right", 8),
                        ],
                        "Known answers",
                    )
                ),
            ),
            code("print(answer)", said(f"raw answer: {HOSTILE}\n")),
        ),
        "03_single_stream": notebook(
            "How fast is one request, and why do two lengths disagree?",
            v4.new_markdown_cell("## Rates at each length"),
            code("single_stream.rates_figure(result)", shown(figures.rates_by_length(rates))),
            v4.new_markdown_cell("## Time per token over position\n\nA line that rises: decode slows with context."),
            code(
                "single_stream.position_figure(result)",
                shown(figures.tpot_over_position(positions, tokens_ms, fit)),
            ),
            code("desk.conclude(result)", said("Decode slows by 1.22 µs per token of context\n")),
        ),
        "04_sweep": notebook(
            "Where does it saturate, and what stops it?",
            v4.new_markdown_cell("## Throughput"),
            code("sweep.table(result)", shown(Table(columns, sweep_rows, "Median of each cell, first repeat"))),
            code(
                "sweep.throughput_figure(result)",
                shown(figures.throughput_over_concurrency(sweep, knee=128, best=1536.4, slo=64)),
            ),
            v4.new_markdown_cell("## Latency"),
            code("sweep.latency_figure(result)", shown(figures.latency_over_concurrency(sweep, slo_ttft_ms=500))),
            v4.new_markdown_cell("## What each user gets"),
            code("sweep.pareto_figure(result)", shown(figures.throughput_latency(sweep))),
        ),
        "07_ceiling": notebook(
            "How far from the floor?",
            code(
                "breakdown",
                shown(
                    figures.step_breakdown(
                        [
                            {
                                "label": "decode, 1 stream",
                                "step_ms": 21.7,
                                "categories": [{"category": c, "ms_per_step": ms} for c, ms in PARTS_MS.items()],
                            }
                        ]
                    )
                ),
            ),
        ),
        "08_findings": notebook("What limits, and what to try next?", code("desk.findings()", said("see the top\n"))),
    }
