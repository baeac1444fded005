"""What the ledger holds of a source and of the task file, for whoever compares it with those themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from flywheel.states import ReplyState
from flywheel.store.bulk import chunks
from flywheel.store.checkpoints import checkpoints_of
from flywheel.store.ledger import cursor_of
from flywheel.store.schema import replies, tasks
from flywheel.store.task_file import exported_to
from flywheel.trace import Checkpoint, Cursor


@dataclass(frozen=True, slots=True)
class Held:
    """A reply in the ledger; `content` is the hash of how it was told, None if that is not known."""

    number: int
    state: ReplyState
    content: int | None


@dataclass(frozen=True, slots=True)
class Holdings:
    """What there is at one moment about some traces of a source: all of it of one transaction."""

    cursor: Cursor
    checkpoints: Mapping[str, Checkpoint]
    replies: Mapping[str, Held]


def holdings(conn: Connection, source: int, trace_ids: Sequence[str], spans: Sequence[str]) -> Holdings:
    found: dict[str, Held] = {}
    for some in chunks(spans):
        rows = conn.execute(
            select(replies.c.span_id, replies.c.id, replies.c.state, replies.c.content).where(
                replies.c.source_id == source, replies.c.span_id.in_(some)
            )
        )
        found |= {row.span_id: Held(row.id, ReplyState(row.state), row.content) for row in rows}
    return Holdings(cursor_of(conn, source), checkpoints_of(conn, source, trace_ids), found)


def numbers_of(conn: Connection, source: int) -> set[int]:
    """The numbers of all replies of a source."""
    return set(conn.execute(select(replies.c.id).where(replies.c.source_id == source)).scalars())


def exported(conn: Connection) -> dict[str, int]:
    """The number of every task that stands in a task file, by key. They are written in the order of their numbers."""
    rows = conn.execute(select(tasks.c.key, tasks.c.id).where(tasks.c.id <= exported_to(conn)))
    return {str(row.key): int(row.id) for row in rows}


def count_unexported(conn: Connection) -> int:
    """Tasks that still have to be written to the task file."""
    waiting = select(func.count()).select_from(tasks).where(tasks.c.id > exported_to(conn))
    return int(conn.execute(waiting).scalar_one())


def unknown_keys(conn: Connection, keys: Sequence[str]) -> list[str]:
    """Those of these task keys that no task has."""
    known: set[str] = set()
    for some in chunks(keys):
        known.update(conn.execute(select(tasks.c.key).where(tasks.c.key.in_(some))).scalars())
    return [key for key in keys if key not in known]
