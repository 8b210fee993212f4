"""How fast, in how much memory, and how right traces are read: perfbook beside its peers, in one run.

``python bench/trace_speed.py`` makes traces of a known law (tensor-parallel decode with custom all-reduces), sets up
the peers in an environment of their own, runs every subject in a process of its own and prints a table with ratios;
then a trace ten times as large, and eight ranks at once. A line of JSON ends the output. It takes a few minutes on two
cores; ``--mb 20 --large-mb 200`` is a quick look.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEERS = ("HolisticTraceAnalysis==0.5.0", "pandas<3", "perfetto==0.59.1", "openpyxl", "orjson", "tqdm")
FULL_MB, LARGE_MB = 187, 2000
TIMEOUT_S = 90
LAYER = (
    ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", 4_000),
    ("nvjet_tst_64x16_64x16_4x1_v_bz_TNT", 30_000),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", 3_000),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>", 2_500),
    ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>", 14_000),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)", 20_000),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, silu_kernel>", 4_000),
)


# The subjects. Each takes a file and returns the communication share that it reports; peers are imported only inside.


def perfbook(path: Path) -> float:
    """This project."""
    from perfbook.trace import analyse
    from perfbook.trace.kernels import COMMUNICATION

    phase = analyse([path]).phases["all"]
    return sum(part.share for part in phase.categories if part.category in COMMUNICATION)


def hta(path: Path) -> float:
    """HolisticTraceAnalysis: its parser and its kernel breakdown, which sums concurrent time per type."""
    from hta.trace_analysis import TraceAnalysis

    types, _ = TraceAnalysis(trace_files={0: str(path)}, trace_dir="").get_gpu_kernel_breakdown(visualize=False)
    shares = dict(zip(types["kernel_type"], types["percentage"], strict=True))
    return float(shares.get("COMMUNICATION", 0.0)) / 100


def json_pandas(path: Path) -> float:
    """What one writes by hand: json, a data frame, and a search for "nccl"."""
    import pandas as pd

    with gzip.open(path) as file:
        frame = pd.DataFrame(json.load(file)["traceEvents"])
    kernels = frame[frame["cat"] == "kernel"]
    return float(kernels[kernels["name"].str.contains("nccl", case=False)]["dur"].sum() / kernels["dur"].sum())


def perfetto(path: Path) -> float:
    """Perfetto's trace processor: SQL over the imported trace. The program, not only its client, must be here."""
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    program = shutil.which("trace_processor_shell")
    if program is None:
        sys.exit("trace_processor_shell is not on the PATH (the Python package holds only a client)")
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=program)) as processor:
        query = "SELECT SUM(dur * (name GLOB '*nccl*')) * 1.0 / SUM(dur) AS share FROM slice WHERE category = 'kernel'"
        return float(next(iter(processor.query(query))).share)


def tracelens(path: Path) -> float:
    """TraceLens: its tree of the trace and its GPU timeline."""
    from TraceLens import TreePerfAnalyzer

    timeline = TreePerfAnalyzer.from_file(str(path), include_unlinked_kernels=True).get_df_gpu_timeline()
    ms = dict(zip(timeline["type"], timeline["time ms"], strict=True))
    return float(ms["total_comm_time"] / ms["busy_time"])


SUBJECTS: dict[str, tuple[str, Callable[[Path], float]]] = {
    "perfbook": ("perfbook.trace", perfbook),
    "hta": ("hta.trace_analysis", hta),
    "tracelens": ("TraceLens", tracelens),
    "json+pandas": ("pandas", json_pandas),
    "perfetto": ("perfetto.trace_processor", perfetto),
}


def one(name: str, path: Path) -> None:
    """Run a subject here and print what it took, once imported."""
    module, analyse = SUBJECTS[name]
    importlib.import_module(module)
    began = time.perf_counter()
    share = analyse(path)
    seconds = time.perf_counter() - began
    # Not ru_maxrss: a process inherits that from whoever started it.
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
    print(json.dumps({"seconds": seconds, "peak_mb": peak, "communication_share": share}))


def measure(python: Path | str, name: str, path: Path) -> dict[str, Any]:
    """Run a subject in a process of its own; an ``error`` instead of numbers where it does not work."""
    command = [str(python), __file__, "--one", name, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIMEOUT_S} s"}
    if done.returncode:
        return {"error": (done.stderr.strip() or "failed").splitlines()[-1][:90]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def peers_python(tracelens_source: str) -> Path:
    """The interpreter of the peers' environment, made where it is missing; TraceLens only where a checkout is given."""
    cache = Path(__file__).resolve().parents[1] / ".cache" / "bench" / "trace-peers"
    python = cache / "bin" / "python"
    stamp, wanted = cache / "peers.txt", "\n".join([*PEERS, tracelens_source])
    if not stamp.is_file() or stamp.read_text() != wanted:
        print("setting up the peers", flush=True)
        venv.create(cache, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        if subprocess.run([*install, *PEERS], timeout=300, check=False).returncode:
            sys.exit(f"the peers cannot be installed: pip install {' '.join(PEERS)}")
        if tracelens_source:  # without its dependencies: this part of it needs none of the large ones
            subprocess.run([*install, "--no-deps", tracelens_source], timeout=60, check=True)
        stamp.write_text(wanted)
    return python


def write_trace(path: Path, megabytes: float, rank: int = 0, ranks: int = 1) -> tuple[int, float]:
    """Write about so many MB of text, compressed; returns its bytes and the true communication share."""
    from perfbook.rehearsal.kineto import Kernel, StepLaw, decode_annotation, trace_text

    rng = random.Random(rank)
    kernels = tuple(Kernel(name, dur + rng.randrange(500)) for _ in range(30) for name, dur in LAYER)
    step = StepLaw(decode_annotation(16), kernels, graph=False, pause_ns=20_000)
    per_step = sum(map(len, trace_text([step], rank, ranks, host_events=4)))
    size = 0
    with gzip.open(path, "wt", compresslevel=1) as out:
        batch: list[str] = []
        for text in trace_text([step] * max(2, round(megabytes * 1e6 / per_step)), rank, ranks, host_events=4):
            size += len(text)
            batch.append(text)
            if len(batch) > 5_000:
                out.write("".join(batch))
                batch.clear()
        out.write("".join(batch))
    communicating = sum(k.dur_ns for k in kernels if "cross_device_reduce" in k.name)
    return size, communicating / sum(k.dur_ns for k in kernels)


def compare(folder: Path, megabytes: float, python: Path) -> dict[str, dict[str, Any]]:
    """Every subject on one trace; ``python`` has the peers."""
    path = folder / "full_rank0.json.gz"
    size, truth = write_trace(path, megabytes)
    print(f"{size / 1e6:.0f} MB of JSON, gzip; true communication share {100 * truth:.2f} %")
    print(f"{'subject':<14}{'seconds':>9}{'x perfbook':>12}{'peak MB':>9}{'communication':>15}")
    results: dict[str, dict[str, Any]] = {}
    for name in SUBJECTS:
        found = results[name] = measure(sys.executable if name == "perfbook" else python, name, path)
        if "error" in found and name == "perfbook":
            sys.exit(found["error"])
        if "error" in found:
            print(f"{name:<14}{'-':>9}  {found['error']}")
            continue
        ratio = found["seconds"] / results["perfbook"]["seconds"]
        share = f"{100 * found['communication_share']:.2f} %"
        print(f"{name:<14}{found['seconds']:>9.2f}{ratio:>12.1f}{found['peak_mb']:>9.0f}{share:>15}", flush=True)
    return results


def scale(folder: Path, megabytes: float, base: dict[str, Any], base_mb: float) -> dict[str, Any]:
    """Time and memory on a trace that is larger."""
    path = folder / "large_rank0.json.gz"
    size, _ = write_trace(path, megabytes)
    found = measure(sys.executable, "perfbook", path)
    if "error" in found:
        sys.exit(f"{size / 1e6:.0f} MB: {found['error']}")
    found["time_per_mb_ratio"] = found["seconds"] / (size / 1e6) / (base["seconds"] / base_mb)
    found["memory_ratio"] = found["peak_mb"] / base["peak_mb"]
    print(
        f"{size / 1e6:.0f} MB: {found['seconds']:.1f} s, {found['time_per_mb_ratio']:.2f} x the time per MB, "
        f"{found['peak_mb']:.0f} MB peak, {found['memory_ratio']:.2f} x the memory"
    )
    return found


def parallel(folder: Path, ranks: int, megabytes: float) -> dict[str, float]:
    """All ranks at once against one rank."""
    from perfbook.trace import analyse

    inside = folder / "ranks"
    inside.mkdir()
    for rank in range(ranks):
        write_trace(inside / f"rank{rank}.json.gz", megabytes, rank, ranks)

    def seconds(paths: list[Path]) -> float:
        began = time.perf_counter()
        analyse(paths)
        return time.perf_counter() - began

    alone = sum(seconds([path]) for path in sorted(inside.iterdir()))
    together = seconds([inside])
    cores = len(os.sched_getaffinity(0))
    print(
        f"{ranks} ranks: {alone:.2f} s one by one, {together:.2f} s together: {alone / together:.2f} x on {cores} cores"
    )
    return {"alone_s": alone, "together_s": together, "cores": cores}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("SUBJECT", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--mb", type=float, default=FULL_MB, help="text of one rank's trace (%(default)s)")
    parser.add_argument("--large-mb", type=float, default=LARGE_MB, help="text of a large one (%(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks read in parallel (%(default)s)")
    parser.add_argument("--tracelens", default="", metavar="CHECKOUT", help="compare TraceLens too; no registry has it")
    asked = parser.parse_args()
    if asked.one:
        one(asked.one[0], Path(asked.one[1]))
        return
    python = peers_python(asked.tracelens)
    with tempfile.TemporaryDirectory(prefix="perfbook-bench-") as name:
        folder = Path(name)
        subjects = compare(folder, asked.mb, python)
        large = scale(folder, asked.large_mb, subjects["perfbook"], asked.mb)
        results = {"subjects": subjects, "large": large, "parallel": parallel(folder, asked.ranks, asked.mb)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
