"""What suits a long-running process: limits of glibc's malloc and of open files, and a closed memory.

By default glibc creates one malloc arena per busy thread, and after it has freed a large block it keeps blocks of up
to 32 MB for reuse. Python threads take turns, so extra arenas only retain memory: a first ingestion uses one sixth
more.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_PR_SET_DUMPABLE: Final = 4

ARENAS: Final = 2
MMAP_THRESHOLD_BYTES: Final = 256 * 1024
"""Blocks of at least this size are mapped separately and returned to the system when they are freed."""
OPEN_FILES: Final = 65_536
"""Shells and systemd often allow only 1,024."""


def tune_process() -> None:
    """Limit glibc's arenas and its mmap threshold, raise the limit of open files, and keep other processes of this
    user from reading its memory and environment. Call it before starting threads.

    Every JSONL file of a source stays open, because a file that is moved away is still read to its end.
    """
    import ctypes

    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        # Users' functions run as the same user, and could read the keys of this process in /proc.
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, ARENAS)
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def trim_malloc() -> None:
    """Return free memory of the C heap to the system. A first ingestion leaves about 80 MB. Nothing without glibc."""
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
