"""Processes that a killed server leaves behind: vLLM's engine outlives its API server and keeps the GPU's memory.

`flywheel serve` puts its state directory and a mark of its own into the environment, which it keeps when it becomes
vLLM and which all processes of the server inherit. A process whose server, the one with that mark, is gone was left
behind; nothing is recognised by its name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

STATE_VARIABLE: Final = "FLYWHEEL_SERVER_STATE"
SERVER_VARIABLE: Final = "FLYWHEEL_SERVER_PROCESS"
"""The mark: the server's process id, and a nonce of this start."""
KEEP_ENVIRONMENT: Final = "SPT_NOENV"
"""Without it, vLLM's titles of processes overwrite what /proc shows of their environment (setproctitle)."""
PATIENCE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class LeftProcess:
    """A process whose server, with process id `server`, is gone."""

    process: psutil.Process
    server: int

    def __str__(self) -> str:
        return f"process {self.process.pid} was left by the server {self.server}, which is gone"

    def end(self) -> bool:
        """End it, politely first; False if it stays."""
        for ask in (self.process.terminate, self.process.kill):
            with contextlib.suppress(psutil.Error):
                ask()
            if psutil.wait_procs([self.process], PATIENCE_SECONDS)[0]:
                return True
        return False


def environment(state_dir: Path) -> dict[str, str]:
    """The variables of a server that this process becomes."""
    mark = f"{os.getpid()} {secrets.token_hex(8)}"
    return {STATE_VARIABLE: os.path.realpath(state_dir), SERVER_VARIABLE: mark, KEEP_ENVIRONMENT: "1"}


def left_processes(state_dir: Path) -> Iterator[LeftProcess]:
    """Processes of this user whose server of this state is gone."""
    for process in psutil.process_iter():
        mark = _mark(process.pid, state_dir)
        server = mark.partition(" ")[0]
        if server.isdigit() and process.pid != os.getpid() and _mark(int(server), state_dir) != mark:
            yield LeftProcess(process, int(server))


def _mark(pid: int, state_dir: Path) -> str:
    """What the environment of a process says of its server; empty for processes of others."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        # Elsewhere, as seen from outside of a container, a process id in the environment is that of another process.
        is_here = Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
        if is_here and process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
            found = process.environ()
            if found.get(STATE_VARIABLE) == os.path.realpath(state_dir):
                return str(found.get(SERVER_VARIABLE, ""))
    return ""
