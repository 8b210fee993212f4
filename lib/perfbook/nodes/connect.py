"""The way to a Ray cluster."""

from __future__ import annotations

import os
import re
from typing import Any

from perfbook.errors import BadInput, ServerFailed

MEASUREMENT = "measurement"
"""The resource of which each node has one; who takes it has the node for himself."""


def connect(address: str) -> Any:
    """Ray, connected; as it is where this process already is.

    Raises
    ------
    BadInput
        It is not installed, or the address is none.
    ServerFailed
        Nothing answers there.
    """
    if not re.fullmatch(r"ray(:(//)?[^/\s]+:\d+)?", address):
        raise BadInput(f"--on {address}: write ray, ray://HOST:PORT (a client port) or ray:HOST:PORT")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise BadInput("--on ray: Ray is not installed here; pip install 'perfbook[ray]'") from None
    if ray.is_initialized():
        return ray
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address != "ray":
            ray.init(address if address.startswith("ray://") else address.removeprefix("ray:"), **quiet)
        else:
            try:
                ray.init("auto", **quiet)
            except ConnectionError:
                ray.init(resources={MEASUREMENT: 1}, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ServerFailed(f"--on {address}: no Ray cluster answers there ({said})") from None
    return ray
