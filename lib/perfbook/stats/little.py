"""Little's law, held against the server: does it hold as many requests as the client keeps open?"""

from __future__ import annotations

from dataclasses import dataclass

from perfbook import units
from perfbook.errors import BadInput
from perfbook.stats.result import Result


@dataclass(frozen=True)
class LittlesLaw(Result):
    """Requests in the system, from the client's side and as the server saw them.

    Attributes
    ----------
    client : float
        Requests per second × mean time of a request.
    server : float
        The server's running + waiting, mean over the cell.
    ratio : float
        Server over client.
    """

    client: float
    server: float
    ratio: float

    @property
    def sentence(self) -> str:
        """Both sides, and what a gap between them means."""
        client, server = units.number(self.client), units.number(self.server)
        both = f"{client} requests in the system by the client's count, {server} by the server's"
        if self.ratio < 0.9:
            return f"{both}: the rest of the time passes before the server's queue (network, API server, client)."
        if self.ratio > 1.1:
            return f"{both}: the server also holds requests that are not ours, or its gauges lag."
        return f"{both}: they agree."


def littles_law(requests_s: float, mean_e2e_s: float, *, running: float, waiting: float) -> LittlesLaw:
    """Compare N = X·R (Little 1961) with the server's own count.

    From a closed loop's own numbers the law is nearly an identity; only the server's gauges make it a check.

    Parameters
    ----------
    requests_s : float
        Completed requests per second.
    mean_e2e_s : float
        Mean time of a request in seconds, not its median.
    running, waiting : float
        The server's gauges, as means over the same window, in requests.

    Raises
    ------
    BadInput
        When rate or mean time is not above zero.
    """
    if requests_s <= 0 or mean_e2e_s <= 0:
        raise BadInput("Little's law: needs a request rate and a mean request time above zero")
    client, server = requests_s * mean_e2e_s, running + waiting
    return LittlesLaw(client, server, server / client)
