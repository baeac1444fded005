"""How the stages of the daemon do: what `status`, metrics and notices say of them. Commands that judge note it too.

A stage fails until its work has succeeded, or none is left: a pass that found nothing due says nothing. Its error is
a note of its own, in the place of which an erasure puts another one: it could quote what is erased.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import Final

import msgspec
from sqlalchemy import Connection, select

from flywheel.errors import FlywheelError
from flywheel.store import notices
from flywheel.store.kernel import database
from flywheel.store.kernel.schema import meta
from flywheel.store.kernel.transitions import utcnow

RECORD_OF: Final = "stage "
"""With the name of a stage: the key of the note with its record, without the error."""

RETRY_SECONDS: Final = 15.0
"""How often stages retry what nothing wakes them for: undecided tasks, an unreachable judge or server."""


class Pass(Enum):
    """What a pass of a stage without an error has done."""

    WORKED = auto()
    IDLE = auto()
    """There was nothing to do."""
    WAITING = auto()
    """There is something to do, but nothing was due."""


class StageRecord(msgspec.Struct, frozen=True):
    """When its work succeeded last, since when it fails (empty while it does not), when it is tried again, and why it
    fails. Times are in ISO 8601; empty: never, or not known."""

    last_ok: str = ""
    failing_since: str = ""
    waits_until: str = ""
    error: str = ""


def records(conn: Connection) -> dict[str, StageRecord]:
    """The record of each stage that has one, by its name."""
    rows = conn.execute(select(meta.c.key).where(meta.c.key.startswith(RECORD_OF)).order_by(meta.c.key)).scalars()
    return {name: record_of(conn, name) for name in (key.removeprefix(RECORD_OF) for key in rows)}


def record_of(conn: Connection, name: str) -> StageRecord:
    known = database.noted(conn, RECORD_OF + name)
    record = msgspec.json.decode(known, type=StageRecord) if known else StageRecord()
    return msgspec.structs.replace(record, error=database.noted(conn, database.ERROR_OF + name))


def forget_others(conn: Connection, names: Collection[str]) -> None:
    """Remove the records of stages that have other names, such as those of a webhook that is no longer there."""
    for name in records(conn).keys() - set(names):
        database.note(conn, RECORD_OF + name, "")
        database.note(conn, database.ERROR_OF + name, "")


def note(
    conn: Connection, name: str, result: Pass | FlywheelError, wait_seconds: float = 0.0, *, spent: bool = False
) -> None:
    """Note what came of a pass. After an error, the next attempt is in `wait_seconds`; `spent`: a budget is."""
    before, now = record_of(conn, name), utcnow()
    if result is Pass.WAITING:
        return
    if isinstance(result, FlywheelError):
        try:
            until = (datetime.now(UTC) + timedelta(seconds=wait_seconds)).isoformat(timespec="milliseconds")
        except OverflowError:
            until = ""  # Nobody knows when.
        after = StageRecord(before.last_ok, before.failing_since or now, until, str(result))
    else:
        after = StageRecord(now if result is Pass.WORKED else before.last_ok)
    if after == before:
        return
    if name == notices.JUDGE:
        notices.note_judge(conn, after.error, spent=spent)
    else:
        database.note(conn, database.ERROR_OF + name, after.error)
    without = msgspec.structs.replace(after, error="")
    database.note(conn, RECORD_OF + name, msgspec.json.encode(without).decode())
