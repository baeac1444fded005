"""How the C library allocates for a process that runs for months: what is free is shared, and goes back.

By default glibc gives every busy thread an arena of its own, and keeps blocks of up to 32 MB once it has met such.
Python's threads take turns, so arenas bring them nothing, and each keeps what a burst needed: a first ingestion
takes a sixth more.
"""

from __future__ import annotations

from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

ARENAS: Final = 2
LARGE_BYTES: Final = 256 * 1024
"""From this size on a block is a mapping of its own, which ends when it is freed."""


def economise() -> bool:
    """To be called before there are threads; whether the C library takes such settings (glibc does)."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_ARENA_MAX, ARENAS) and mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
