"""The processes that the demo starts, and their sure end.

Owns starting, watching and stopping; must not know what the processes do. Whatever they start in turn is a descendant
of this process to the end: an orphan is handed to it by the kernel, so that none can outlive it unnoticed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path
from typing import Final

import psutil

PR_SET_CHILD_SUBREAPER: Final = 36
TAIL_LINES: Final = 15


class PartError(Exception):
    """A process ended that should have run on."""


class Part:
    """One process in a group of its own, its output in a file."""

    def __init__(self, name: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                arguments,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises PartError, with the end of its log, when it has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise PartError(f"{self.name} {how}. The end of {self.log}:\n\n{tail(self.log)}")

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended in time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log that say something."""
    text = log.read_bytes()[-16384:].decode(errors="replace")
    return "\n".join([line[:300] for line in text.splitlines() if line.strip()][-lines:])


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def end_descendants(patience_seconds: float) -> None:
    """End whatever is left below this process: politely first, then not. Returns when nothing is left."""
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        left = psutil.Process().children(recursive=True)
        for process in left:
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=patience_seconds)
    # Those whose parents have just died were handed to this process only then.
    while left := psutil.Process().children(recursive=True):
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=1.0)
