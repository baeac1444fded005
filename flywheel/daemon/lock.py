"""Locks between processes; the kernel releases them when their holder dies.

A process that writes tasks, verdicts or rounds holds `lock`. A process that moves the alias holds `swap.lock`
meanwhile, so that a manual rollback and the daemon's swaps run one after the other.
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
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from flywheel.errors import LockedError, StoreError
from flywheel.files import make_private, private

log = logging.getLogger(__name__)

LOG_AT_ATTEMPT: Final = 10
"""The wait for a lock is logged at this attempt; there are ten per second."""
FLOCK: Final = "hhqqi4x"
"""C's struct flock: type, whence, start, length (0: all), process."""


class InstanceLock:
    """An advisory lock on a file in the state directory, which contains the holder's process id."""

    def __init__(self, state_dir: Path, name: str = "lock") -> None:
        self._path = state_dir / name
        self._fd: int | None = None

    def __enter__(self) -> Self:
        try:
            make_private(self._path.parent)
            fd = private(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreError(
                f"lock {self._path}",
                error.strerror or str(error),
                "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write.",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip()
            os.close(fd)
            raise LockedError(
                f"take {self._path}",
                f"another flywheel (process {holder or 'unknown'}) holds it",
                "Wait until it ends, or stop it; look with `flywheel status`.",
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        # A second lock, which `holder` can query without taking it. Some file systems do not support it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def holder(state_dir: Path) -> int | None:
    """The id of the process that holds the lock, if any. Neither takes nor creates the lock."""
    try:
        fd = os.open(state_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        if struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] == fcntl.F_UNLCK:
            return None
        text = os.read(fd, 32).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    except OSError:
        return None
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def swap_lock(state_dir: Path, wait_seconds: float) -> AsyncIterator[None]:
    """Hold `swap.lock`. Raises LockedError when another process holds it for longer than `wait_seconds`."""
    lock = InstanceLock(state_dir, "swap.lock")
    until = time.monotonic() + wait_seconds
    for attempt in itertools.count(1):
        try:
            lock.__enter__()
            break
        except LockedError as error:
            if time.monotonic() >= until:
                raise
            if attempt == LOG_AT_ATTEMPT:
                log.info("waiting for a swap that is running: %s", error.why)
            await asyncio.sleep(0.1)
    with contextlib.ExitStack() as stack:
        stack.push(lock.__exit__)
        yield
