"""The worker's process: a lock on its directory, output redirected to the log, and stop signals."""

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
    """A signal asked the worker to stop. A BaseException, so that libraries do not handle it as an error."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


_received: list[int] = []


def catch_signals() -> None:
    """Note SIGTERM and SIGINT for `check_stopped`. Called again after any library that installs handlers of its own.

    The handler does not raise: inside Ray's native code the exception would be replaced by another one.
    """
    for number in SIGNALS:
        signal.signal(number, lambda received, _: _received.append(received))


def check_stopped() -> None:
    """Raise Stopped after a signal. Waiting code waits in slices of POLL_SECONDS and calls this in between."""
    if _received:
        raise Stopped(_received[0])


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock the directory until the process ends. Raises LockedError when another worker holds it."""
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
    """Redirect all output of this process and its children to the log, including that of native code."""
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
