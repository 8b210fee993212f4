"""Receive times: the kernel's own where it gives them, mapped to CLOCK_MONOTONIC.

Linux stamps a segment when it arrives, before any process is woken, and hands the stamp out with ``recvmsg``
(``SO_TIMESTAMPNS``, https://docs.kernel.org/networking/timestamping.html). The stamp is on CLOCK_REALTIME;
the offset to CLOCK_MONOTONIC is taken before and after each cell. Both clocks are slewed alike, so a
difference between the two offsets is a step of the wall clock.
"""

from __future__ import annotations

import socket
import time

import numpy as np
from numpy.typing import NDArray

SO_TIMESTAMPNS = 35
STAMP_BYTES = 16
NO_STAMP = bytes(STAMP_BYTES)
ANCILLARY_BYTES = socket.CMSG_SPACE(STAMP_BYTES)
"""Room for one SCM_TIMESTAMPNS message: a header and a timespec."""

STEP_NS = 50_000
"""Two offsets are each good to about a microsecond; a larger difference means that the clock was set."""


def want_kernel_times(sock: socket.socket) -> bool:
    """Ask for kernel receive times; false where the system has none."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return np.dtype(np.int_).itemsize == 8  # 16-byte timespecs only


def realtime_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC, from the tightest of 50 bracketed readings."""
    best = None
    offset = 0
    for _ in range(50):
        before = time.monotonic_ns()
        wall = time.time_ns()
        width = time.monotonic_ns() - before
        if best is None or width < best:
            best = width
            offset = wall - before - width // 2
    return offset


def kernel_ns(stamps: bytes | bytearray, offset_ns: int) -> NDArray[np.int64]:
    """Decode stored timespecs (16 bytes each) to CLOCK_MONOTONIC nanoseconds; -1 where the kernel gave
    none.
    """
    pairs = np.frombuffer(bytes(stamps), np.int64).reshape(-1, 2)
    wall = pairs[:, 0] * 1_000_000_000 + pairs[:, 1]
    return np.where(wall > 0, wall - offset_ns, -1)
