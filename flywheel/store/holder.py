"""The process that works on a state, as the state records it: a second one finds it also where the lock file was
removed, which both could lock otherwise."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
from sqlalchemy import Connection

from flywheel.errors import LockedError
from flywheel.store.kernel.database import Store, note, noted
from flywheel.system.lock import INSTANCE_LOCK

HOLDER_NOTE: Final = "holder"


class Holder(msgspec.Struct, frozen=True):
    """Process ids are used again, and in each container the daemon is process 1: with its start, in ticks since the
    boot, it is one process. `folder` is the inode of the state directory: a copy of the state is not the state."""

    pid: int
    started: int
    boot: str
    folder: int


@asynccontextmanager
async def holding(store: Store, state_dir: Path) -> AsyncIterator[None]:
    """Record this process, which has the instance lock, as the holder. Raises LockedError if another one is."""
    await store.write(_hold, state_dir)
    try:
        yield
    finally:
        await store.write(note, HOLDER_NOTE, "")


def _hold(conn: Connection, state_dir: Path) -> None:
    if known := noted(conn, HOLDER_NOTE):
        holder = msgspec.json.decode(known, type=Holder)
        if holder.pid != os.getpid() and _process(holder.pid, state_dir) == holder:
            why = f"process {holder.pid} works on it, although its file {INSTANCE_LOCK} was removed"
            raise LockedError(f"take {state_dir}", why, "Wait until it ends, or stop it.")
    own = _process(os.getpid(), state_dir)
    note(conn, HOLDER_NOTE, msgspec.json.encode(own).decode() if own is not None else "")


def _process(pid: int, state_dir: Path) -> Holder | None:
    """The process with this id; None without one, or where the system does not tell."""
    try:
        started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Holder(pid, started, boot, state_dir.stat().st_ino)
    except (OSError, ValueError, IndexError):
        return None
