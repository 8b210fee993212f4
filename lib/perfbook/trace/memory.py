"""Memory that is free, but that the allocator keeps."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Hand freed memory back to the system, so that one stage's peak does not add to the next one's.

    glibc keeps what was freed in pieces; elsewhere this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
