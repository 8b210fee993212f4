"""What NCCL really used, from its debug output (pure).

Asked for with ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,ENV,TUNING``; only lines that were seen count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from perfbook.stats.result import Result

_SET = re.compile(r"(NCCL_\w+) set by environment to (.+?)\.?\s*$", re.M)
_CHOSEN = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+)", re.I)
_VIA = re.compile(r" via (P2P/[\w/]+|SHM/[\w/]+|NET/[\w/]+)")
_VERSION = re.compile(r"NCCL version (\S+)")


@dataclass(frozen=True)
class NcclLog(Result):
    """What one communicator said.

    Attributes
    ----------
    version : str or None
    read : dict
        Variables that NCCL says it took from the environment, with the values that it understood.
    chosen : dict
        Message size in bytes → ``RING LL``: algorithm and protocol of the all-reduce, where the log has them.
    transports : tuple of str
        How ranks reach each other: ``P2P/IPC``, ``SHM/direct/direct``.
    """

    version: str | None
    read: dict[str, str]
    chosen: dict[int, str]
    transports: tuple[str, ...]

    def took(self, name: str, value: str) -> bool:
        """Whether a variable was read as given; NCCL ignores what it does not know without a word."""
        return self.read.get(name, "").casefold() == value.casefold()


def read_nccl_log(text: str) -> NcclLog:
    """Read NCCL's debug output of one rank."""
    version = _VERSION.search(text)
    return NcclLog(
        version=version[1] if version else None,
        read={name: value.strip() for name, value in _SET.findall(text)},
        chosen={
            int(size): f"{algorithm.upper()} {protocol.upper()}" for size, algorithm, protocol in _CHOSEN.findall(text)
        },
        transports=tuple(sorted(set(_VIA.findall(text)))),
    )
