"""The measuring client: requests in, every byte and its time out."""

from __future__ import annotations

from collections.abc import Sequence

from perfbook.stream.endpoint import Deadlines, Endpoint
from perfbook.stream.hotloop import HotLoop
from perfbook.stream.record import Progress, Recording, Schedule

__all__ = ["Deadlines", "Endpoint", "Progress", "Recording", "Schedule", "record"]

MAX_RESPONSE_BYTES = 64 * 2**20
SPOOL_BYTES = 512 * 2**20


def record(
    endpoint: Endpoint,
    requests: Sequence[bytes],
    schedule: Schedule,
    *,
    deadlines: Deadlines | None = None,
    progress: Progress | None = None,
    kernel_times: bool = True,
    spool_bytes: int = SPOOL_BYTES,
    max_response_bytes: int = MAX_RESPONSE_BYTES,
) -> Recording:
    """Send the requests as scheduled and record every byte that comes back.

    Parameters
    ----------
    endpoint : Endpoint
    requests : sequence of bytes
        Complete HTTP requests, in order.
    schedule : Schedule
    deadlines : Deadlines, optional
    progress : callable, optional
        See :data:`perfbook.stream.record.Progress`; what is out when it ends the cell fails as ``given_up``.
    kernel_times : bool
        Ask for kernel receive times; false forces user-space times.
    spool_bytes : int
        Response bytes kept in memory; more goes to a temporary file.
    max_response_bytes : int
        A longer response fails as ``oversized``.

    Raises
    ------
    ServerFailed
        The host cannot be resolved. A refused connection is a failed request, not an exception.
    """
    return HotLoop(
        endpoint,
        requests,
        schedule,
        deadlines or Deadlines(),
        progress,
        kernel_times,
        spool_bytes,
        max_response_bytes,
    ).run()
