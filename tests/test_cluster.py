"""A campaign on a Ray cluster: files carried home piece by piece, servers on a leash, and real raylets here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbook import paths
from perfbook.cli import call
from perfbook.cluster import mate as mates
from perfbook.cluster.campaign import needs
from perfbook.cluster.mate import Mate
from perfbook.errors import BadInput
from perfbook.micro import all_reduce
from perfbook.micro.spawn import Elsewhere
from perfbook.params import Variant, load_variant, make_variant
from perfbook.record import carry
from perfbook.record.carry import Piece, State
from perfbook.server import ranks
from perfbook.stream import calibrate
from rehearsal_probe import free_port

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(
    not HAS_RAY or " " in sys.executable,
    reason="Ray is not installed here" if not HAS_RAY else "Ray starts no worker of a Python whose path holds a space",
)
PARAMS = paths.params()


# -- files ----------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["records.jsonl", "a/b.png", "server-01.log"]), st.booleans(), st.binary(max_size=40)
        ),
        max_size=12,
    )
)
def test_what_was_carried_is_what_is_there(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    """Files grow, are rewritten, and are looked at in between: in the end both sides are equal."""
    here, there = tmp_path_factory.mktemp("node"), tmp_path_factory.mktemp("home")
    sent: dict[str, State] = {}
    clock = 0
    for name, rewrite, data in steps:
        path = here / name
        path.parent.mkdir(exist_ok=True)
        whole = rewrite and not name.endswith(carry.APPENDED)
        path.write_bytes(data if whole or not path.exists() else path.read_bytes() + data)
        clock += 1_000_000
        os.utime(path, ns=(clock, clock))
        _bring_home(here, there, sent)
    _bring_home(here, there, sent)
    assert _content(here) == _content(there)


def _bring_home(here: Path, there: Path, sent: dict[str, State]) -> None:
    for piece in carry.changes(here, sent):
        carry.write(there, [piece])
        sent[piece.name] = piece.reached


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_end_of_a_file_that_grows_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(b"one\n")
    first = list(carry.changes(tmp_path, {}))
    file.write_bytes(b"one\ntwo\n")
    os.utime(file, ns=(1, 1))
    second = list(carry.changes(tmp_path, {"records.jsonl": first[0].state}))
    assert [(piece.offset, piece.data) for piece in first + second] == [(0, b"one\n"), (4, b"two\n")]


def test_a_large_file_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "PIECE_BYTES", 3)
    (tmp_path / "trace.gz").write_bytes(b"12345678")
    assert [piece.data for piece in carry.changes(tmp_path, {})] == [b"123", b"456", b"78"]


def test_a_file_larger_than_an_answer_comes_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of a node goes on where the one before it ended; a file that is rewritten meanwhile begins anew."""
    monkeypatch.setattr(carry, "PIECE_BYTES", 3)
    here, there = tmp_path / "node", tmp_path / "home"
    here.mkdir()
    (here / "trace.gz").write_bytes(b"old")
    os.utime(here / "trace.gz", ns=(1, 1))
    sent: dict[str, State] = {}
    for content, clock in ((b"12345678", 2), (b"abcdefgh", 3)):
        (here / "trace.gz").write_bytes(content)
        os.utime(here / "trace.gz", ns=(clock, clock))
        for _ in range(2 if clock == 2 else 3):  # one piece an answer
            piece = next(carry.changes(here, sent))
            carry.write(there, [piece])
            sent[piece.name] = piece.reached
    assert _content(there) == {"trace.gz": b"abcdefgh"}
    assert list(carry.changes(here, sent)) == []


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/x"])
def test_no_node_writes_outside_of_its_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="outside of its run"):
        carry.write(tmp_path, [Piece(name, 0, b"x", (1, 1))])
    assert list(tmp_path.iterdir()) == []


# -- the leash ----------------------------------------------------------

PATIENT = """
import sys, time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""


def _leash(*command: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "perfbook.cluster.leash", "10", *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background job"])
def test_a_command_whose_holder_goes_is_interrupted_and_may_clean_up(disposition: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, disposition)
    leash = _leash(sys.executable, "-c", PATIENT)
    signal.signal(signal.SIGINT, before)
    assert leash.stdin is not None
    assert leash.stdout is not None
    assert leash.stdout.readline() == b"up\n"
    assert leash.wait(10) == 0  # the command is no child of whoever holds the leash
    leash.stdin.close()
    assert leash.stdout.read() == b"exit 7\n"


def test_a_command_that_ends_by_itself_says_how() -> None:
    leash = _leash(sys.executable, "-c", "print('done'); raise SystemExit(3)")
    assert leash.stdout is not None
    assert leash.stdout.read() == b"done\nexit 3\n"


# -- what a variant needs ----------------------------------------------------------


def test_what_a_node_must_offer() -> None:
    int4 = load_variant(PARAMS / "kimi-k2.5-int4.yaml")
    assert needs(int4, rehearsed=False) == {"GPU": 8.0, "measurement": 1.0}
    assert needs(int4, rehearsed=True) == {"CPU": 1.0, "measurement": 1.0}
    assert needs(load_variant(PARAMS / "smollm2-135m-cpu.yaml"), rehearsed=False) == {"CPU": 1.0, "measurement": 1.0}
    sizes = {"tensor-parallel-size": 4, "pipeline-parallel-size": 2, "data-parallel-size": 2}
    large = make_variant({"variant": "v", "server": {"model": "/m", "args": sizes}}, "test")
    assert needs(large, rehearsed=False)["GPU"] == 16.0


@pytest.mark.parametrize(
    ("args", "gpus"),
    [
        ({"tp": 8}, 8.0),
        ({"tensor-parallel-size": "8"}, 8.0),
        ({"tensor_parallel_size": 8, "pp": 2, "nnodes": 2}, 8.0),
        ({"tensor-parallel-size": 8, "data-parallel-size": 2, "n": 4}, 4.0),
    ],
)
def test_each_node_of_a_server_offers_its_share(args: dict[str, Any], gpus: float) -> None:
    one = make_variant({"variant": "v", "server": {"model": "/m", "args": args}}, "test")
    assert needs(one, rehearsed=False) == {"GPU": gpus, "measurement": 1.0}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"tensor-parallel-size": "many"}, "server.args.tensor-parallel-size: 'many' is not a whole number above 0"),
        ({"tp": True}, "server.args.tp: True is not a whole number above 0"),
        ({"tp": 8, "nnodes": 3}, "server.args.nnodes: 8 ranks (tensor x pipeline x data) do not divide by 3 nodes"),
    ],
)
def test_numbers_that_are_none_are_refused(args: dict[str, Any], said: str) -> None:
    one = make_variant({"variant": "v", "server": {"model": "/m", "args": args}}, "test")
    with pytest.raises(BadInput) as error:
        needs(one, rehearsed=False)
    assert str(error.value) == said


def test_a_server_larger_than_a_node_needs_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ranks.MATES, raising=False)
    large = make_variant({"variant": "v", "server": {"model": "/m", "args": {"tp": 16, "nnodes": 2}}}, "test")
    with pytest.raises(BadInput, match="2 nodes are started on a cluster; add --on ray to perfbook run"):
        ranks.require(large, rehearsed=False)
    assert ranks.require(large, rehearsed=True) is None


# -- a node's part of a larger server ----------------------------------------------------------

PART = """
import sys, time
print("args", *sys.argv[1:], flush=True)
if "--fail" in sys.argv:
    print("(Worker pid=7) ERROR 11-30 10:00:00 [worker.py:1] ValueError: no such device")
    sys.exit(3)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("going", flush=True)
"""


@pytest.fixture
def mate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mate]:
    """A mate whose vLLM is a process that only waits."""
    part = tmp_path / "part.py"
    part.write_text(PART)
    monkeypatch.setattr(mates, "headless_entry_point", lambda: [sys.executable, str(part)])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Mate(1)
    yield made
    made.leave()
    assert list(tmp_path.glob("perfbook-node-*")) == []


def _large(**args: Any) -> Variant:
    return make_variant({"variant": "v", "server": {"model": "org/m", "args": {"tp": 2, "nnodes": 2, **args}}}, "test")


def test_a_mate_starts_watches_and_ends_its_part(mate: Mate) -> None:
    mate.launch(_large(), "server-01.log", {"master-addr": "10.0.0.1", "master-port": 5555}, {})
    _until(lambda: any(b"args" in piece.data for piece in mate.pieces({})[0]), "it speaks", 20)
    assert mate.failure() == ""
    assert mate.stop() == ""
    (log,) = mate.pieces({})[0]
    assert log.name == "server-01-node1.log"
    said = log.data.decode()
    assert all(
        word in said for word in ("--nnodes 2", "--node-rank 1", "--headless", "--master-addr 10.0.0.1", "going")
    )
    assert mate.about()["node_rank"] == 1


def test_a_part_that_ends_by_itself_says_why(mate: Mate) -> None:
    mate.launch(_large(fail=True), "server-02.log", {}, {})
    _until(lambda: mate.failure() != "", "it fails", 20)
    assert mate.failure() == ("its part of the server ended: ValueError: no such device (log: server-02-node1.log)")


def test_sums_and_times_over_ranks_of_two_nodes() -> None:
    """Real gloo ranks, of which one is started as another node's would be."""

    other, pool = Mate(1), ThreadPoolExecutor(1)

    def begin(module: str, jobs: Any, env: Any, timeout_s: float) -> Any:
        (own,) = jobs
        running = pool.submit(other.run_jobs, module, own, env, timeout_s)
        return lambda: [running.result()]

    elsewhere = Elsewhere("127.0.0.1", 1, begin)
    lo = {"GLOO_SOCKET_IFNAME": "lo"}
    result = all_reduce([64, 4096], 2, backend="gloo", env=lo, repeats=3, elsewhere=elsewhere)
    assert (result.outcome, result.ranks) == ("ok", 2), result.detail
    assert [message.message_bytes for message in result.messages] == [64, 4096]
    assert all(min(message.repeats_us) > 0 for message in result.messages)
    other.leave()


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert call(["run", str(PARAMS / "kimi-k2.5-int4.yaml"), "--rehearse", "--on", "ray"]) == 2
    assert capsys.readouterr().err == "perfbook: --on ray: Ray is not installed here; pip install 'perfbook[ray]'\n"


@pytest.mark.parametrize("address", ["foo", "ray://", "ray:x", "ray://h:1/path"])
def test_an_address_that_is_none_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", str(PARAMS / "kimi-k2.5-int4.yaml"), "--rehearse", "--on", address]) == 2
    assert f"--on {address}: write ray, ray://HOST:PORT" in capsys.readouterr().err


# -- real raylets ----------------------------------------------------------


class Cluster:
    """Nodes on this machine, each with a host lock of its own, ended by pid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        # not in ``folder``: the sockets below it have names of a hundred characters at most
        self.ray_folder = tempfile.mkdtemp(prefix="pbray-", dir="/tmp")

    def add(self) -> subprocess.Popen[bytes]:
        """Start a node in the foreground of a process of ours, and wait until it is part of the cluster."""
        where = ["--address", self.address]
        if not self.nodes:
            where = ["--head", "--port", self.address.split(":")[1], "--node-ip-address", "127.0.0.1"]
            where += ["--include-dashboard", "false", "--temp-dir", self.ray_folder]
        words = ["--num-cpus", "1", "--resources", '{"measurement": 1}', "--object-store-memory", "100000000"]
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *where,
            *words,
            "--block",
            "--disable-usage-stats",
        ]
        env = os.environ | {
            "PERFBOOK_LOCK": str(self.folder / f"lock{len(self.nodes)}"), "TMPDIR": self.ray_folder,
            "RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3",
            "RAY_health_check_initial_delay_ms": "0", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        with (self.folder / f"node{len(self.nodes)}.log").open("wb") as log:
            node = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(node)
        end = time.monotonic() + 90
        while b"--block" not in (text := (self.folder / f"node{len(self.nodes) - 1}.log").read_bytes()):
            assert node.poll() is None, text.decode()
            assert time.monotonic() < end, text.decode()
            time.sleep(0.2)
        return node

    def perfbook(self, *words: str) -> subprocess.Popen[str]:
        """``perfbook run … --on`` this cluster."""
        command = [sys.executable, "-m", "perfbook", "run", *words, "--on", f"ray:{self.address}"]
        here = {"PERFBOOK_OUTPUTS": str(self.folder / "outputs"), "PERFBOOK_LOCK": str(self.folder / "lock")}
        return subprocess.Popen(
            command,
            env=os.environ | here,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def summary(self, variant: str) -> dict[str, Any]:
        """The summary that came home."""
        path = self.folder / "outputs" / variant / "latest-rehearsal" / "summary.json"
        return json.loads(path.read_text())

    def stand_ins(self) -> list[int]:
        """Stand-ins that serve below this machine's node folders."""
        return [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if any("perfbook-node-" in word for word in process.info["cmdline"] or ())
            and "perfbook.rehearsal.server" in (process.info["cmdline"] or ())
        ]

    def busiest(self) -> int:
        """Most stand-ins of one node, told apart by its lock."""
        owners = []
        for pid in self.stand_ins():
            try:
                owners.append(psutil.Process(pid).environ().get("PERFBOOK_LOCK"))
            except psutil.Error:
                continue
        return max(map(owners.count, owners), default=0)

    def left(self) -> list[str]:
        """Folders of variants on the nodes."""
        return [path.name for path in Path(self.ray_folder).glob("perfbook-node-*")]

    def close(self) -> None:
        """End every node by its id, children first, and leave none of Ray's files."""
        for node in reversed(self.nodes):
            _kill_tree(node.pid)
            node.wait(20)
        shutil.rmtree(self.ray_folder, ignore_errors=True)


def _kill_tree(pid: int) -> None:
    try:
        top = psutil.Process(pid)
        tree = [*top.children(recursive=True), top]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        for _ in range(nodes):
            made.add()
        yield made
    finally:
        made.close()


def _until(condition: Any, what: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.3)


@needs_ray
@pytest.mark.server
@pytest.mark.timeout(240)
def test_a_variant_runs_on_a_node_and_comes_home(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as ray:
        run = ray.perfbook(str(PARAMS / "minimax-m2.5-fp8.yaml"), "--only", "01", "--rehearse")
        out, err = run.communicate(timeout=180)
        assert run.returncode == 0, err
        report = Path(out.strip())
        assert report.is_relative_to(tmp_path / "outputs")
        assert "rehearsal" in report.read_text()
        assert ray.summary("minimax-m2.5-fp8")["rehearsed"] is True
        assert "✓ 01_deploy" in err
        assert (ray.stand_ins(), ray.left()) == ([], [])
        kept = ray.perfbook(str(PARAMS / "minimax-m2.5-fp8.yaml"), "--rehearse", "--keep-server")
        assert "--keep-server is for runs of this machine" in kept.communicate(timeout=60)[1]
        refused = ray.perfbook(str(PARAMS / "minimax-m2.5-fp8.yaml"), "--only", "01", "--rehearse", "--resume")
        assert "--resume is for runs of this machine" in refused.communicate(timeout=60)[1]
        assert refused.returncode == 2


@needs_ray
@pytest.mark.server
@pytest.mark.timeout(240)
def test_two_workers_on_two_nodes_are_one_client(tmp_path: Path) -> None:
    """Every token once, and every arrival within the stated error of the clocks from the moment it was sent."""
    with cluster(tmp_path, 2) as ray, calibrate.replay(10, 5) as (port, _):
        words = ["--base-url", f"http://127.0.0.1:{port}", "--model", "replay", "--concurrency", "4", "--requests", "8"]
        words += ["--max-tokens", "50", "--workers", "2", "--on", f"ray:{ray.address}", "--json", "-"]
        command = [sys.executable, "-m", "perfbook", "load", *words, "--out", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        alone = subprocess.run(
            [*command[: command.index("--workers")], "--json", "-", "--out", str(tmp_path / "alone")],
            capture_output=True, text=True, timeout=100, check=True,
        )  # fmt: skip
    cell, single = report["cells"][0], json.loads(alone.stdout)["cells"][0]
    assert (cell["ok"], cell["failed"], cell["output_tokens"]) == (8, 0, 400)
    assert (single["ok"], single["output_tokens"]) == (8, 400)
    workers = cell["workers"]
    assert [(one["requests"], one["streams"], one["output_tokens"]) for one in workers] == [(4, 2, 200)] * 2
    assert done.stdout.count("clock_error_ms") == 2
    error_ms = max(one["clock_error_ms"] for one in workers)
    assert 0 < error_ms < 50
    for table, allowed_ms in (("out", error_ms), ("alone", 0.0)):
        events = pq.read_table(tmp_path / table / "events.parquet").to_pandas()
        late_ms = (events.arrival_ns - events.text.astype("int64")) / 1e6
        assert sorted(events.request.unique()) == list(range(8))
        assert late_ms.min() >= -allowed_ms - calibrate.SEND_SLACK_MS
        assert late_ms.median() <= allowed_ms + 1.0  # a kernel's stamp on loopback: microseconds


SHORT = ["--rehearse", "--set", "single_stream={output_tokens: [32, 64], repeats: 1}", "--only", "01,03"]
FOUR = [
    str(PARAMS / f"{name}.yaml") for name in ("kimi-k2.5-int4", "kimi-k2.5-nvfp4", "minimax-m2.5-fp8", "glm-5-nvfp4")
]


@needs_ray
@pytest.mark.server
@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_variants_on_two_nodes_of_which_one_dies(tmp_path: Path) -> None:
    """All four come home; no node ever serves two; what was finished before the node died is not lost."""
    with cluster(tmp_path, 2) as ray:
        run = ray.perfbook(*FOUR, *SHORT)
        _until(lambda: len(ray.stand_ins()) == 2, "both nodes measure")
        outputs = tmp_path / "outputs"
        _until(lambda: any(outputs.glob("*/2*/records.jsonl")), "records come home while the run goes on")
        before = {path: path.stat().st_size for path in outputs.glob("*/2*/records.jsonl")}
        _kill_tree(ray.nodes[1].pid)
        most = 0
        while run.poll() is None:
            most = max(most, ray.busiest())
            time.sleep(0.5)
        _out, err = run.communicate(timeout=20)
        assert run.returncode == 0, err
        assert most == 1
        assert "its node was lost; begun again elsewhere" in err
        for file in FOUR:
            assert ray.summary(Path(file).stem)["single_stream"]["decode_tok_s"] > 10
        assert all(path.stat().st_size >= size for path, size in before.items())
        _until(lambda: ray.stand_ins() == [], "no server is left", 180)


@needs_ray
@pytest.mark.server
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_server_outlives_its_driver(tmp_path: Path, how: signal.Signals) -> None:
    with cluster(tmp_path, 1) as ray:
        run = ray.perfbook(FOUR[0], *SHORT)
        _until(lambda: ray.stand_ins() != [], "the stand-in serves")
        run.send_signal(how)
        run.communicate(timeout=200)
        assert run.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 130)
        _until(lambda: ray.stand_ins() == [], "no server is left", 180)
        if how is signal.SIGINT:
            assert ray.left() == []


@needs_ray
@pytest.mark.server
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_server_larger_than_a_node(tmp_path: Path) -> None:
    """The real engine, a tensor-parallel rank on each of three nodes: traces, logs and provenance of all come home."""
    file = tmp_path / "tp3.yaml"
    args = {"max-model-len": 1024, "max-num-seqs": 16, "enforce-eager": True, "tensor-parallel-size": 3, "nnodes": 3}
    server = {
        "model": "embedded:smollm2-135m-instruct", "served_name": "smollm2", "port": 0, "args": args,
        "env": {"VLLM_CPU_KVCACHE_SPACE": 1, "VLLM_CPU_NUM_OF_RESERVED_CPU": 0},
    }  # fmt: skip
    profile = {"concurrency": [1], "output_tokens": 16, "iterations": 4}
    file.write_text(json.dumps({"variant": "tp3", "server": server, "profile": profile}))
    with cluster(tmp_path, 3) as ray:
        run = ray.perfbook(str(file), "--only", "01,06")
        _, err = run.communicate(timeout=700)
        assert run.returncode == 0, err
        assert ray.left() == []
        short = ray.perfbook(str(file), "--only", "01", "--set", "server.args.nnodes=4")
        assert "do not divide by 4 nodes" in short.communicate(timeout=60)[1]
    (home,) = (tmp_path / "outputs" / "tp3").glob("2*")
    records = [json.loads(line) for line in (home / "records.jsonl").read_text().splitlines()]
    (profiled,) = [record for record in records if record["kind"] == "profile"]
    assert [one["rank"] for one in profiled["ranks"]] == [0, 1, 2]
    (reduces,) = [one for one in profiled["categories"] if one["category"] == "all_reduce"]
    assert reduces["calls_per_step"] == 61  # two in each of 30 layers, and the embedding's
    assert {path.name for path in home.glob("server-01*.log")} == {
        "server-01.log", "server-01-node1.log", "server-01-node2.log",
    }  # fmt: skip
    nodes = json.loads((home / "run.json").read_text())["provenance"]["nodes"]
    assert [node["node_rank"] for node in nodes] == [1, 2]
    assert "node 2" in (home / "report.html").read_text()
