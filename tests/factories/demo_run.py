"""The demo as a process, and the processes that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent


def start(folder: Path, *arguments: str, program: str = "demo") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", program, "--dir", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def belongings(folder: Path) -> list[psutil.Process]:
    """Processes that were started for a run in `folder`, by what their environment or command line names."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("FLYWHEEL_ALIAS_FILE", "")]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            found.append(process)
    return found


def end(process: subprocess.Popen[str], folder: Path) -> None:
    """Whatever a failed test has left."""
    process.kill()
    process.communicate()
    for left in belongings(folder):
        left.kill()
