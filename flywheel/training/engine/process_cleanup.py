"""Ends the processes that a round leaves behind: orphans of Ray and vLLM are adopted by the worker and killed."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sys
from collections.abc import Sequence

import psutil

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 5.0
log = logging.getLogger(__name__)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants (a "child subreaper"): vLLM's children outlive a killed actor,
    and only descendants can be found again. Linux only; elsewhere such orphans are not found."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kill these processes, each by its id and start time, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=KILL_SECONDS)
    for process in alive:
        log.error("process %d would not end", process.pid)
