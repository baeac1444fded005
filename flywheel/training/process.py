"""The worker as a process: alone in its directory, its output in the log, and stoppable."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from flywheel.errors import LockedError

LOCK_FILE = "worker.lock"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 0.5


class Stopped(BaseException):
    """A signal asked the worker to end. No library may mistake it for a failure it can handle."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


_received: list[int] = []


def catch_signals() -> None:
    """Note SIGTERM and SIGINT for `check_stopped`. Called again after any library that installs handlers of its own.

    The handler raises nothing itself: inside Ray's native code an exception would come out as another one.
    """
    for number in SIGNALS:
        signal.signal(number, lambda received, _: _received.append(received))


def check_stopped() -> None:
    """Raise Stopped when a signal has come. Whoever waits does so in slices of POLL_SECONDS and asks in between."""
    if _received:
        raise Stopped(_received[0])


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory. Raises LockedError when another worker does. The lock goes with the process."""
    with (directory / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"run the round in {directory}",
                "another worker is running it",
                "Wait for that one, or stop it first.",
                retryable=True,
            ) from None
        yield


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send everything that this process and its children print to the log: much of it comes from native code."""
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with log.open("ab") as file:
        for number, _ in kept:
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
