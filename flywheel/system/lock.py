"""Locks between processes; the kernel releases them when their holder dies.

A process that writes tasks, verdicts or rounds holds `lock`. A process that moves the alias holds `swap.lock`
meanwhile, so that swaps run one after the other. A rollback takes it from a holder that does not end at once, which
keeps a lock on a file that is no longer in the directory; rollbacks hold `rollback.lock` together, so that no swap
begins beside them. A round's worker holds `worker.lock` in the directory of its round.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO, Final, TypeVar

from flywheel.errors import LockedError, StoreError
from flywheel.system.files import make_private, private
from flywheel.system.shortage import shortage_of

T = TypeVar("T")
log = logging.getLogger(__name__)

WORKER_LOCK: Final = "worker.lock"
INSTANCE_LOCK: Final = "lock"
SWAP_LOCK: Final = "swap.lock"
ROLLBACK_LOCK: Final = "rollback.lock"
STATE_LOCKS: Final = frozenset({INSTANCE_LOCK, SWAP_LOCK, ROLLBACK_LOCK})
"""The lock files of a state directory."""
LOOK_SECONDS: Final = 0.1
LOG_AT_ATTEMPT: Final = 10
"""The wait for a lock is logged at this attempt; there are ten per second."""
FLOCK: Final = "hhqqi4x"
"""C's struct flock: type, whence, start, length (0: all), process."""


_held: dict[Path, FileIO] = {}
"""The locks that this process holds, by path."""


def is_lost(state_dir: Path, name: str = INSTANCE_LOCK) -> bool:
    """Whether the file of a lock that this process holds is no longer the one at its path: another process can take
    the lock."""
    path = state_dir / name
    if (file := _held.get(path)) is None:
        return False
    with contextlib.suppress(OSError):
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    return True


@contextlib.contextmanager
def instance_lock(state_dir: Path, name: str = INSTANCE_LOCK) -> Iterator[None]:
    """Hold an advisory lock on a file in the state directory, which contains the holder's process id.

    Raises LockedError while another process holds it, and StoreError.
    """
    path = state_dir / name
    with _locked(state_dir, path) as file:
        fd = file.fileno()
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        except OSError as error:
            raise _not_locked(path, error) from error
        # A second lock, which `holder` can query without taking it. Some file systems do not support it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        _held[path] = file
        try:
            yield
        finally:
            # A rollback of this process may have taken a lock over from a swap of it.
            if _held.get(path) is file:
                del _held[path]
            file.truncate(0)


def _locked(state_dir: Path, path: Path) -> FileIO:
    """The file at a path, locked. Raises LockedError and StoreError."""
    while True:
        file = _opened(state_dir, path)
        try:
            _lock(file, path, fcntl.LOCK_EX)
        except LockedError:
            file.close()
            raise
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # It was taken over since it was opened.


def _opened(state_dir: Path, path: Path) -> FileIO:
    try:
        make_private(state_dir)
        return FileIO(private(path, os.O_RDWR | os.O_CREAT), "r+")
    except OSError as error:
        raise _not_locked(path, error) from error


def _not_locked(path: Path, error: OSError) -> StoreError:
    hint = "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write."
    lack = shortage_of(error)
    return StoreError(f"lock {path}", error.strerror or str(error), lack[1] if lack is not None else hint)


def _lock(file: FileIO, path: Path, how: int) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        why = f"another flywheel (process {_process_in(file) or 'unknown'}) holds it"
        hint = "Wait until it ends, or stop it; look with `flywheel status`."
        raise LockedError(f"take {path}", why, hint) from None


def holder(state_dir: Path) -> int | None:
    """The id of the process that holds the lock, if any. Neither takes nor creates the lock."""
    asked = struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    with contextlib.suppress(OSError), (state_dir / INSTANCE_LOCK).open("rb", buffering=0) as file:
        if struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK:
            text = _process_in(file)
            return int(text) if text.isdigit() else None
    return None


def _process_in(file: IO[bytes]) -> str:
    return file.read(32).decode(errors="replace").strip()


@contextlib.asynccontextmanager
async def swap_lock(
    state_dir: Path,
    wait_seconds: float,
    *,
    begin: Callable[[], Awaitable[T]] | None = None,
    take_over: bool = False,
) -> AsyncIterator[T | None]:
    """Hold `swap.lock`. No rollback begins or is in progress while `begin` runs, which is done first; its result is
    given.

    When another process holds the lock, or a rollback is in progress, for longer than `wait_seconds`, raises
    LockedError, or takes the lock over: what its holder may still do must be harmless, see
    `serving.client.adapter_swap`.
    """
    until, begun = time.monotonic() + wait_seconds, None
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count(1):
            try:
                with contextlib.ExitStack() as taken:
                    taken.enter_context(instance_lock(state_dir, SWAP_LOCK))
                    if begin is not None:
                        path = state_dir / ROLLBACK_LOCK
                        with _opened(state_dir, path) as file:
                            _lock(file, path, fcntl.LOCK_EX)
                            begun = await begin()
                    stack.enter_context(taken.pop_all())
                break
            except LockedError as error:
                if time.monotonic() >= until:
                    if not take_over:
                        raise
                    log.warning("going on without waiting for its swap: %s", error.why)
                    (state_dir / SWAP_LOCK).unlink(missing_ok=True)
                if attempt == LOG_AT_ATTEMPT:
                    log.info("waiting for a swap that is running: %s", error.why)
                await asyncio.sleep(LOOK_SECONDS)
        yield begun


@contextlib.asynccontextmanager
async def rollback_lock(state_dir: Path, wait_seconds: float) -> AsyncIterator[None]:
    """Hold `rollback.lock` together with other rollbacks: no swap begins meanwhile. A process that keeps it from
    rollbacks for longer than `wait_seconds` is stopped, and is not waited for."""
    until, path = time.monotonic() + wait_seconds, state_dir / ROLLBACK_LOCK
    with _opened(state_dir, path) as file:
        while time.monotonic() < until:
            with contextlib.suppress(LockedError):
                _lock(file, path, fcntl.LOCK_SH)
                break
            await asyncio.sleep(LOOK_SECONDS / 10)
        yield


@contextlib.contextmanager
def alone_in(directory: Path, attempted: str = "") -> Iterator[None]:
    """Lock the directory, as the worker does until its process ends. Raises LockedError when another process holds
    it."""
    with (directory / WORKER_LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                attempted or f"run the round in {directory}",
                "another worker is running it",
                "Wait for that one, or stop it first.",
                retryable=True,
            ) from None
        yield
