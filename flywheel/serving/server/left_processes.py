"""Processes that a killed server leaves behind: vLLM's engine outlives its API server and keeps the GPU's memory.

`flywheel serve` puts its state directory and its own process into the environment, which all processes of the server
inherit. A process that has both while that server is gone was left behind; nothing is recognised by its name.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STATE_VARIABLE: Final = "FLYWHEEL_SERVER_STATE"
SERVER_VARIABLE: Final = "FLYWHEEL_SERVER_PROCESS"
"""The server's process id and start time, which stay when it becomes vLLM, and a nonce of this start."""
KEEP_ENVIRONMENT: Final = "SPT_NOENV"
"""Without it, vLLM's titles of processes overwrite what /proc shows of their environment (setproctitle)."""
PATIENCE_SECONDS: Final = 10.0
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class LeftProcess:
    """A process whose server, with process id `server`, is gone. `mark` is what its environment says of it."""

    pid: int
    server: int
    mark: str

    def __str__(self) -> str:
        return f"process {self.pid} was left by the server {self.server}, which is gone"

    def end(self, state_dir: Path) -> bool:
        """End it, politely first; False if it stays."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                # The descriptor stays that of one process; its id may have been given to another before.
                if _mark(self.pid, state_dir) != self.mark:
                    return True
                signal.pidfd_send_signal(descriptor, number)
                if select.select([descriptor], [], [], PATIENCE_SECONDS)[0]:
                    return True
            return False
        except OSError:
            return False
        finally:
            os.close(descriptor)


def environment(state_dir: Path) -> dict[str, str]:
    """The variables of a server that this process becomes."""
    mark = f"{os.getpid()} {_started(os.getpid())} {secrets.token_hex(8)}"
    return {STATE_VARIABLE: os.path.realpath(state_dir), SERVER_VARIABLE: mark, KEEP_ENVIRONMENT: "1"}


def left_processes(state_dir: Path) -> Iterator[LeftProcess]:
    """Processes of this user whose server of this state is gone."""
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        server, _, rest = _mark(pid, state_dir).partition(" ")
        started = rest.partition(" ")[0]
        if pid != os.getpid() and server.isdigit() and started and _started(int(server)) != started:
            yield LeftProcess(pid, int(server), f"{server} {rest}")


def _mark(pid: int, state_dir: Path) -> str:
    """What the environment of a process says of its server; empty for processes of others."""
    folder = _PROC / str(pid)
    try:
        # Elsewhere, as seen from outside of a container, a process id in the environment is that of another process.
        is_here = (folder / "ns/pid").readlink() == (_PROC / "self/ns/pid").readlink()
        if folder.stat().st_uid != os.getuid() or not is_here or not _started(pid):
            return ""
        lines = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    found = dict(line.decode(errors="surrogateescape").partition("=")[::2] for line in lines)
    is_ours = found.get(STATE_VARIABLE) == os.path.realpath(state_dir)
    return found.get(SERVER_VARIABLE, "") if is_ours else ""


def _started(pid: int) -> str:
    """When a process started, in clock ticks since the machine did; empty if it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
