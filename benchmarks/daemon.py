"""A real `flywheel run` for benchmarks that measure the daemon from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def running(config: Path, module: str = "flywheel") -> Iterator[psutil.Popen]:
    """`flywheel run` with this configuration, of another module that starts it; its log is `daemon.log` beside it."""
    with (config.parent / "daemon.log").open("wb") as log:
        process = psutil.Popen(
            [sys.executable, "-m", module, "run", "-c", str(config)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(process: psutil.Popen, folder: Path, is_done: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait until `is_done`. Exits with the end of the log if the daemon ends first, or after `seconds`."""
    end = time.monotonic() + seconds
    while not is_done():
        if process.poll() is not None or time.monotonic() > end:
            log = (folder / "daemon.log").read_text(errors="replace")[-2000:]
            sys.exit(f"the daemon did not {what} (exit status {process.poll()}):\n{log}")
        time.sleep(0.5)


def has_tasks(folder: Path, tasks: int) -> bool:
    """Whether the task file of the state in `folder` has so many lines."""
    file = folder / "state" / "tasks.jsonl"
    return file.exists() and file.read_bytes().count(b"\n") >= tasks
