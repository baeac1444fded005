"""The process that works on a state, as the state records it: a second one finds it also where the lock file was
removed, which both could lock otherwise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from flywheel.errors import LockedError, StoreError
from flywheel.store.kernel.database import Store, note, noted
from flywheel.system.lock import INSTANCE_LOCK, instance_lock

HOLDER_NOTE: Final = "holder"
"""Key of the note on the process that has the instance lock."""


@contextlib.asynccontextmanager
async def holding(store: Store, state_dir: Path) -> AsyncIterator[None]:
    """Record this process, which has the instance lock, as the holder. Raises LockedError if another one is."""
    await store.write(_hold, state_dir)
    try:
        yield
    finally:
        # Where it cannot be written, the next process finds that this one has ended.
        with contextlib.suppress(StoreError):
            await store.write(note, HOLDER_NOTE, "")


@contextlib.asynccontextmanager
async def locked(store: Store, state_dir: Path) -> AsyncIterator[None]:
    """Take the instance lock of an open state, as its holder. Raises LockedError and StoreError."""
    with instance_lock(state_dir):
        async with holding(store, state_dir):
            yield


def _hold(conn: Connection, state_dir: Path) -> None:
    if known := noted(conn, HOLDER_NOTE):
        pid = int(known.split()[0])
        if pid != os.getpid() and _process(pid, state_dir) == known:
            why = f"process {pid} works on it, although its file {INSTANCE_LOCK} was removed"
            raise LockedError(f"take {state_dir}", why, "Wait until it ends, or stop it.")
    note(conn, HOLDER_NOTE, _process(os.getpid(), state_dir))


def _process(pid: int, state_dir: Path) -> str:
    """The process with this id: process ids are used again, and in each container the daemon is process 1, but with
    its start, in ticks since a boot, it is one process. With the inode of the state directory: a copy of the state is
    not the state. Empty without such a process, or where the system does not tell."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{pid} {started} {boot} {state_dir.stat().st_ino}"
    except (OSError, IndexError):
        return ""
