"""TLS, a wall clock that is set, and endings that straddle reads."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from perfbook.stream import client, tables
from perfbook.stream.client import Deadlines, Endpoint, Schedule
from perfbook.stream.load import measure
from perfbook.stream.record import Recorded, Recording, Spool
from perfbook.stream.workload import RequestShape, fixed_prompts

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
BODY = b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def stamp(ns: int) -> bytes:
    return (ns // 10**9).to_bytes(8, "little") + (ns % 10**9).to_bytes(8, "little")


def recording(step_ns: int) -> Recording:
    """One token read at 7 ms and [DONE] at 9 ms; the kernel saw both 1 ms before."""
    rec = Recorded(0)
    rec.start_ns = 5_000_000
    cut = len(HEAD) + BODY.index(b"e\r\ndata: [DONE]")
    whole = HEAD + BODY
    rec.fresh = [whole[:cut], whole[cut:]]
    rec.join()
    rec.user_ns.extend([7_000_000, 9_000_000])
    offset = 10**18
    rec.stamps = bytearray(stamp(offset + 6_000_000) + stamp(offset + 8_000_000))
    return Recording(Spool(1000), [rec], offset_before_ns=offset, offset_after_ns=offset + step_ns)


def test_kernel_times_are_mapped_to_the_monotonic_clock():
    made = tables.tabulate(recording(0), [tables.Asked(None, None)], "c")
    row = made.requests.to_pylist()[0]
    assert (row["ok"], row["clock"], row["ttft_ms"]) == (True, "kernel", 1.0)
    assert made.events["arrival_ns"].to_pylist() == [6_000_000]
    assert made.lag_ms.tolist() == [1.0, 1.0]
    assert made.clock_step_ms == 0.0


def test_a_wall_clock_that_was_set_moves_the_cell_to_user_space_times():
    made = tables.tabulate(recording(3_000_000_000), [tables.Asked(None, None)], "c")
    row = made.requests.to_pylist()[0]
    assert (row["clock"], row["ttft_ms"]) == ("user", 2.0)
    assert made.clock_step_ms == 3000.0


def test_a_read_without_a_stamp_takes_the_user_time_and_marks_the_request():
    one = recording(0)
    one.responses[0].stamps = bytearray(16) + one.responses[0].stamps[16:]
    row = tables.tabulate(one, [tables.Asked(None, None)], "c").requests.to_pylist()[0]
    assert (row["clock"], row["ttft_ms"]) == ("user", 2.0)


def serve_pieces(listener: socket.socket, pieces: list[bytes], wrap: ssl.SSLContext | None, times: int) -> None:
    """Answer ``times`` requests on one connection, each in the given pieces."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if wrap is not None:
            sock = wrap.wrap_socket(sock, server_side=True)
        for _ in range(times):
            seen = b""
            while b"}]" not in seen or not seen.endswith(b"}"):
                seen += sock.recv(65536)
            for piece in pieces:
                sock.sendall(piece)
    except OSError:
        pass
    finally:
        sock.close()


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_the_end_is_seen_wherever_it_is_cut_and_the_connection_used_again(cut: int):
    whole = HEAD + BODY
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pieces = [whole[:-cut], whole[-cut:]]
        threading.Thread(target=serve_pieces, args=(listener, pieces, None, 3), daemon=True).start()
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        request = endpoint.request(RequestShape(1).body(endpoint, fixed_prompts("x", 1)[0]))
        limits = Deadlines(connect_s=2, first_byte_s=2, stall_s=2, total_s=5)
        seen = client.record(endpoint, [request] * 3, Schedule(1), deadlines=limits)
    assert [(r.error, b"".join(r.blocks)) for r in seen.responses] == [(None, whole)] * 3


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert),
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    return key, cert


def test_tls_is_measured_with_user_space_times(certificate, monkeypatch):
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_pieces, args=(listener, [HEAD, BODY], context, 2), daemon=True)
        thread.start()
        endpoint = Endpoint(f"https://127.0.0.1:{listener.getsockname()[1]}", "m")
        limits = Deadlines(connect_s=5, first_byte_s=5, stall_s=5, total_s=10)
        cell = measure(
            endpoint, fixed_prompts("x", 1), RequestShape(1), concurrency=1, requests=2, warmup=0, deadlines=limits
        )
    assert (cell.summary["ok"], cell.summary["clock"]) == (2, "user")
    assert cell.requests["text"].to_pylist() == ["x", "x"]


def test_a_certificate_that_is_not_trusted_is_a_tls_error(certificate):
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_pieces, args=(listener, [HEAD, BODY], context, 1), daemon=True).start()
        endpoint = Endpoint(f"https://127.0.0.1:{listener.getsockname()[1]}", "m")
        limits = Deadlines(connect_s=1, first_byte_s=1, stall_s=1, total_s=2)
        cell = measure(
            endpoint, fixed_prompts("x", 1), RequestShape(1), concurrency=1, requests=1, warmup=0, deadlines=limits
        )
    assert cell.summary["failed"] == 1
    assert set(cell.summary["errors"]) <= {"tls", "connect_timeout"}
