"""What a process has started, found in /proc: for limits on memory and so that nothing is left behind.

Only the standard library: it runs in the user's interpreter. Without /proc (macOS), a tree is empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """A running process; equal numbers with different start times are different processes."""

    pid: int
    started: int
    resident_bytes: int

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    @property
    def name(self) -> str:
        """Its command line, shortened."""
        try:
            words = (PROC / str(self.pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            words = []
        return b" ".join(words).decode(errors="replace").strip()[:80] or "a process"


def children_by_parent() -> dict[int, list[Process]]:
    """All processes of the machine that have not ended, by the pid of their parent."""
    found: dict[int, list[Process]] = defaultdict(list)
    try:
        folders = [folder for folder in PROC.iterdir() if folder.name.isdigit()]
    except OSError:
        return found
    for folder in folders:
        try:
            text = (folder / "stat").read_bytes()
        except OSError:
            continue  # it has just ended
        # See proc(5). The second field is a name in parentheses, which may have spaces and parentheses itself.
        fields = text[text.rindex(b")") + 2 :].split()
        if fields[0] not in (b"Z", b"X"):
            resident = int(fields[21]) * PAGE_BYTES
            found[int(fields[1])].append(Process(int(folder.name), int(fields[19]), resident))
    return found


def descendants(root: int, children: Mapping[int, list[Process]] | None = None) -> list[Process]:
    """What this process has started that has not ended, without itself, parents first."""
    children = children_by_parent() if children is None else children
    found: list[Process] = []
    open_pids = [root]
    while open_pids:
        below = children.get(open_pids.pop(), [])
        found += below
        open_pids += [process.pid for process in below]
    return found


def kill(processes: Iterable[Process]) -> None:
    """Kill them, in this order."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def shared_evenly(process: Process) -> int:
    """Its resident bytes, each page divided by the number of processes that share it; slow."""
    try:
        lines = (PROC / str(process.pid) / "smaps_rollup").read_text().splitlines()
    except PermissionError:
        return process.resident_bytes
    except OSError:
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
