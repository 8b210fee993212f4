"""Which client tells the truth? perfbook and its peers against a server that says when it sent each token.

``python -m bench.stream_truth`` starts the ground-truth server (``perfbook.rehearsal.replay``) on one core
and each client on another, in turn, in the same run. For every client: the mean TTFT and the p99 gap that it
reports beside the server's own, and its CPU time per token. Perfbook's arrivals are also held against their
send times one by one.

CPU per token is a slope: the CPU time of the whole client process tree at seven times the tokens minus at one
time, over the tokens between, so that imports, set-up and tokenisers do not count and all clients are treated
alike. (With a shorter pair, seconds of set-up that vary by a tenth drown it.) Where the client is one process its
imports are taken off beforehand, since their noise is the largest.

A cell in which the server was late against its own schedule is repeated; the truth it is compared with is in
any case what was sent, not what was planned. Peers live in environments of their own, pinned, made on first
use."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests

from perfbook.stream import calibrate
from perfbook.stream.client import Endpoint
from perfbook.stream.load import measure
from perfbook.stream.workload import RequestShape, exact_prompts

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "bench"
TOKENIZER = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
VLLM_MAIN = (
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; from vllm.benchmarks.serve import *; "
    "import time; imports_s = time.process_time(); "
    "p = FlexibleArgumentParser(); add_cli_args(p); main(p.parse_args()); print(imports_s)"
)
TRIES = 3
LONGER = 7


@dataclass(frozen=True)
class Load:
    """``streams`` requests at once, ``tokens`` each, one every ``tick_ms``."""

    streams: int
    tick_ms: float
    tokens: int
    first_ms: float = 5.0


@dataclass(frozen=True)
class Reported:
    """What a client says, in ms, and what its process tree used."""

    ttft_mean_ms: float
    gap_p99_ms: float | None
    cpu_s: float
    detail: dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A client: how to call it for a load, and where it leaves its figures (TTFT mean, gap p99 or None)."""

    name: str
    package: str | None
    command: Callable[[Path, str, Load, Path], list[str]]
    figures: Callable[[Path, str], tuple[float, float | None, dict[str, Any]]]
    offline: bool = True


def _perfbook_command(python: Path, url: str, load: Load, out: Path) -> list[str]:
    load_words = [str(load.streams), str(load.tick_ms), str(load.tokens)]
    return [str(python), "-m", "bench.stream_truth", "--client", url, *load_words]


def _perfbook_figures(out: Path, text: str) -> tuple[float, float | None, dict[str, Any]]:
    found = json.loads(text.splitlines()[-1])
    return found["ttft_mean_ms"], found["gap_p99_ms"], found


def _vllm_command(python: Path, url: str, load: Load, out: Path) -> list[str]:
    return [
        str(python), "-c", VLLM_MAIN, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", url,
        "--model", "replay", "--tokenizer", str(TOKENIZER), "--dataset-name", "random", "--random-input-len", "16",
        "--random-output-len", str(load.tokens), "--num-prompts", str(load.streams), "--ready-check-timeout-sec", "0",
        "--disable-tqdm", "--save-result", "--result-dir", str(out), "--result-filename", "vllm.json",
    ]  # fmt: skip


def _vllm_figures(out: Path, text: str) -> tuple[float, float | None, dict[str, Any]]:
    found = json.loads((out / "vllm.json").read_text())
    return found["mean_ttft_ms"], found["p99_itl_ms"], {"aside_cpu_s": float(text.splitlines()[-1])}


def _aiperf_command(python: Path, url: str, load: Load, out: Path) -> list[str]:
    return [
        str(python.parent / "aiperf"), "profile", "--model", "replay", "--url", url, "--endpoint-type", "chat",
        "--streaming", "--concurrency", str(load.streams), "--request-count", str(load.streams),
        "--prompt-input-tokens-mean", "16", "--prompt-output-tokens-mean", str(load.tokens),
        "--prompt-output-tokens-stddev", "0", "--tokenizer", str(TOKENIZER), "--output-artifact-dir", str(out),
        "--ui", "none", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics",
    ]  # fmt: skip


def _aiperf_figures(out: Path, text: str) -> tuple[float, float | None, dict[str, Any]]:
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return found["time_to_first_token"]["avg"], found["inter_chunk_latency"]["p99"], {}


def _guidellm_command(python: Path, url: str, load: Load, out: Path) -> list[str]:
    return [
        str(python.parent / "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=replay",
        "--profile", f"kind=concurrent,streams={load.streams}",
        "--constraint", f"kind=max_requests,count={load.streams}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={load.tokens}",
        "--output", f"kind=json,path={out / 'guidellm.json'}", "--disable-console",
    ]  # fmt: skip


def _guidellm_figures(out: Path, text: str) -> tuple[float, float | None, dict[str, Any]]:
    metrics = json.loads((out / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    # It reports the mean gap of each request only, so there is no gap percentile to compare.
    return metrics["time_to_first_token_ms"]["successful"]["mean"], None, {}


PERFBOOK = Peer("perfbook", None, _perfbook_command, _perfbook_figures)
PEERS = [
    Peer("vllm bench serve", None, _vllm_command, _vllm_figures),
    # aiperf takes a tokenizer's folder for a hub name when it is told to stay offline.
    Peer("aiperf 0.13.0", "aiperf==0.13.0", _aiperf_command, _aiperf_figures, offline=False),
    Peer("guidellm 0.8.1", "guidellm==0.8.1", _guidellm_command, _guidellm_figures),
]


def environment(peer: Peer) -> Path:
    """The peer's Python, its environment made if there is none. vLLM is the one that perfbook is installed
    with.
    """
    if peer.package is None:
        return Path(sys.executable)
    folder = CACHE / peer.package.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"setting up {peer.package} (minutes) …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", peer.package]
        subprocess.run(pip, check=True)
        (folder / "ready").touch()
    return python


def run(peer: Peer, python: Path, url: str, load: Load) -> Reported:
    """One run of a client; CPU time of its whole process tree."""
    with tempfile.TemporaryDirectory(prefix="perfbook-bench-") as folder:
        out = Path(folder)
        paths = [str(ROOT), str(ROOT / "lib")] if peer is PERFBOOK else []
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if peer.offline:
            env["HF_HUB_OFFLINE"] = "1"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            peer.command(python, url, load, out), capture_output=True, text=True, timeout=300, env=env, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"exit {done.returncode}: {last[:160]}")
        ttft, gap, detail = peer.figures(out, done.stdout)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - detail.get("aside_cpu_s", 0.0)
    return Reported(ttft, gap, cpu_s, detail)


def held_against_truth(peer: Peer, python: Path, control: str, load: Load) -> tuple[Reported, dict[str, Any]]:
    """Run until the server kept its schedule (its late p99 within half a tick), at most three times."""
    for _ in range(TRIES):
        law = {"tick_ms": load.tick_ms, "first_ms": load.first_ms}
        requests.post(f"{control}/replay/law", json=law, timeout=10).raise_for_status()
        said = run(peer, python, control, load)
        truth = requests.get(f"{control}/replay/truth", timeout=10).json()
        if (truth["late_ms"]["p99"] or 0.0) < load.tick_ms / 2:
            break
    return said, truth


def client(url: str, load: Load) -> dict[str, Any]:
    """Perfbook's own part, in a process of its own: measure, and hold every arrival against its send time.

    ``aside_cpu_s`` is CPU time that is none of the client's: imports, and the comparison with the truth.
    """
    imports_s = time.process_time()
    cell = measure(
        Endpoint(url, "replay"),
        exact_prompts(None, 16, min(load.streams, 256), seed=1),
        RequestShape(load.tokens),
        concurrency=load.streams,
        requests=load.streams,
        warmup=0,
        cell="bench",
    )
    truth = requests.get(f"{url}/replay/truth", timeout=10).json()
    checking = time.process_time()
    floor = calibrate.floor(cell, truth, None, load.tick_ms)
    return {
        "aside_cpu_s": imports_s + time.process_time() - checking,
        "ttft_mean_ms": cell.summary["ttft_ms"]["mean"],
        "gap_p99_ms": cell.summary["gap_ms"]["p99"],
        "cpu_us": cell.summary["client_cpu_us_per_token"],
        "hot_us": cell.summary["hot_path_cpu_us_per_token"],
        "bytes_per_token": cell.details["client_bytes_per_token"],
        "lag_p99_ms": cell.details["lag_ms"]["p99"],
        "floor": floor.as_dict(),
    }


def compare(peers: list[Peer], control: str, load: Load) -> list[list[str]]:
    """One row per client at one load."""
    rows = []
    own_us: float | None = None
    for peer in peers:
        try:
            python = environment(peer)
            said, truth = held_against_truth(peer, python, control, load)
            longer = replace(load, tokens=LONGER * load.tokens)
            more, _ = held_against_truth(peer, python, control, longer)
        except (RuntimeError, OSError, KeyError, subprocess.SubprocessError) as error:
            rows.append([peer.name, f"could not be run: {str(error)[:120]}", "", "", "", ""])
            continue
        slope_us = (more.cpu_s - said.cpu_s) * 1e6 / ((LONGER - 1) * load.tokens * load.streams)
        own_us = own_us or slope_us
        error_ms = said.ttft_mean_ms - truth["ttft_ms"]["mean"]
        arrival = said.detail.get("floor", {}).get("arrival_error_ms", {}).get("p99")
        rows.append(
            [
                peer.name,
                f"{said.ttft_mean_ms:.2f} / {truth['ttft_ms']['mean']:.2f} ({error_ms:+.2f})",
                "per request only"
                if said.gap_p99_ms is None
                else f"{said.gap_p99_ms:.2f} / {truth['gap_ms']['p99']:.2f}",
                "" if arrival is None else f"{arrival:.4f}",
                f"{slope_us:.1f} (x {slope_us / own_us:.2f})",
                f"{truth['late_ms']['p99']:.2f}",
            ]
        )
    return rows


def alone(control: str, loads: list[Load]) -> list[list[str]]:
    """Perfbook over many loads: errors, CPU and memory per token."""
    rows = []
    for load in loads:
        said, truth = held_against_truth(PERFBOOK, Path(sys.executable), control, load)
        detail, floor = said.detail, said.detail["floor"]
        rows.append(
            [
                f"{load.streams}",
                f"{load.tokens}",
                f"{floor['tok_s']:,.0f}",
                f"{floor['arrival_error_ms']['p99']:.4f}",
                f"{floor['ttft_error_ms']['mean']:.4f}",
                f"{floor['gap_error_ms']['p99']:.4f}",
                f"{floor['merged_share']:.2%}",
                f"{detail['cpu_us']:.1f}",
                f"{detail['hot_us']:.1f}",
                f"{detail['bytes_per_token']:.0f}",
                f"{truth['late_ms']['p99']:.2f}",
            ]
        )
    return rows


def show(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print one table."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    print(f"\n{title}")
    for row in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print the tables."""
    parser = argparse.ArgumentParser(
        prog="bench.stream_truth", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only-perfbook", action="store_true", help="leave the peers out")
    parser.add_argument("--quick", action="store_true", help="a third of the tokens")
    parser.add_argument("--client", nargs=4, metavar=("URL", "STREAMS", "TICK", "TOKENS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.client:
        url, streams, tick, tokens = given.client
        print(json.dumps(client(url, Load(int(streams), float(tick), int(tokens)))))
        return 0
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        print("client and server would share the only core: nothing here could be believed", file=sys.stderr)
        return 1
    os.sched_setaffinity(0, {cpus[0]})  # inherited by every client
    part = 3 if given.quick else 1
    peers = [PERFBOOK, *([] if given.only_perfbook else PEERS)]
    began = time.monotonic()
    with calibrate.replay(10.0, 5.0, None, {cpus[-1]}) as (port, _):
        control = f"http://127.0.0.1:{port}"
        header = ["client", "mean TTFT ms, reported / true", "gap p99 ms, reported / true", "arrival error p99 ms",
                  "client CPU µs/token", "server late p99 ms"]  # fmt: skip
        for title, load in (
            ("256 streams in a burst, 100 tok/s each (25,600 tok/s)", Load(256, 10.0, 150 // part)),
            ("256 streams in a burst, 250 tok/s each (64,000 tok/s)", Load(256, 4.0, 300 // part)),
        ):
            show(title, header, compare(peers, control, load))
        header = ["streams", "tokens each", "tok/s", "arrival p99 ms", "TTFT mean ms", "gap p99 ms", "merged", "CPU µs",
                  "hot µs", "bytes", "server late p99 ms"]  # fmt: skip
        loads = [
            Load(1, 4.0, 600 // part), Load(16, 4.0, 600 // part), Load(256, 10.0, 100), Load(256, 2.0, 900 // part),
            Load(1024, 20.0, 100), Load(1024, 10.0, 100), Load(8, 1.0, 8192 // part),
        ]  # fmt: skip
        show("perfbook alone: errors of its times, cost and memory per token", header, alone(control, loads))
    print(f"\n{time.monotonic() - began:.0f} s; client on CPU {cpus[0]}, server on CPU {cpus[-1]} of {len(cpus)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
