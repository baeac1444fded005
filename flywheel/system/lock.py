"""Locks between processes; the kernel releases them when their holder dies.

A process that writes tasks, verdicts or rounds holds `lock`. A process that moves the alias holds `swap.lock`
meanwhile, so that swaps run one after the other. A rollback takes it from a holder that does not end at once, which
keeps a lock on a file that is no longer in the directory. A round's worker holds `worker.lock` in the round's
directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import struct
import time
from collections.abc import AsyncIterator, Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Final

from flywheel.errors import LockedError, StoreError
from flywheel.system.files import make_private, private

log = logging.getLogger(__name__)

WORKER_LOCK: Final = "worker.lock"
SWAP_LOCK: Final = "swap.lock"
LOOK_SECONDS: Final = 0.1
LOG_AT_ATTEMPT: Final = 10
"""The wait for a lock is logged at this attempt; there are ten per second."""
FLOCK: Final = "hhqqi4x"
"""C's struct flock: type, whence, start, length (0: all), process."""


@contextlib.contextmanager
def instance_lock(state_dir: Path, name: str = "lock") -> Iterator[None]:
    """Hold an advisory lock on a file in the state directory, which contains the holder's process id.

    Raises LockedError while another process holds it, and StoreError.
    """
    path = state_dir / name
    with _locked(state_dir, path) as file:
        fd = file.fileno()
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        # A second lock, which `holder` can query without taking it. Some file systems do not support it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        try:
            yield
        finally:
            file.truncate(0)


def _locked(state_dir: Path, path: Path) -> FileIO:
    while True:
        try:
            make_private(state_dir)
            fd = private(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            hint = "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write."
            raise StoreError(f"lock {path}", error.strerror or str(error), hint) from error
        file = FileIO(fd, "r+")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                why = f"another flywheel (process {_process_in(file) or 'unknown'}) holds it"
            raise LockedError(
                f"take {path}", why, "Wait until it ends, or stop it; look with `flywheel status`."
            ) from None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return file
        file.close()  # It was taken over since it was opened.


def holder(state_dir: Path) -> int | None:
    """The id of the process that holds the lock, if any. Neither takes nor creates the lock."""
    asked = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError), (state_dir / "lock").open("rb", buffering=0) as file:
        if struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK:
            text = _process_in(file)
            return int(text) if text.isdigit() else None
    return None


def _process_in(file: IO[bytes]) -> str:
    return file.read(32).decode(errors="replace").strip()


@contextlib.asynccontextmanager
async def swap_lock(state_dir: Path, wait_seconds: float, *, take_over: bool = False) -> AsyncIterator[None]:
    """Hold `swap.lock`. When another process holds it for longer than `wait_seconds`, raises LockedError, or takes it
    over: what that process may still do must be harmless, see `serving.client.adapter_swap`."""
    until = time.monotonic() + wait_seconds
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count(1):
            try:
                stack.enter_context(instance_lock(state_dir, SWAP_LOCK))
                break
            except LockedError as error:
                if time.monotonic() >= until:
                    if not take_over:
                        raise
                    log.warning("it does not end its swap: %s", error.why)
                    (state_dir / SWAP_LOCK).unlink(missing_ok=True)
                if attempt == LOG_AT_ATTEMPT:
                    log.info("waiting for a swap that is running: %s", error.why)
                await asyncio.sleep(LOOK_SECONDS)
        yield


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock the directory until the process ends. Raises LockedError when another worker holds it."""
    with (directory / WORKER_LOCK).open("a") as file:
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
