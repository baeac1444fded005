"""Snapshots of the ledger, for audits that compare it with the sources and the task file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, select

from flywheel.records.states import ReplyState
from flywheel.records.trace import Checkpoint, Cursor
from flywheel.store.checkpoints import checkpoints_of
from flywheel.store.kernel.bulk import count_rows, rows_in
from flywheel.store.kernel.schema import replies, tasks
from flywheel.store.ledger import cursor_of
from flywheel.store.task_file import exported_to


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply in the ledger; `content` is its content hash, None if an older state has none."""

    number: int
    state: ReplyState
    content: int | None


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """What the ledger holds of some traces of a source at one moment."""

    cursor: Cursor
    checkpoints: Mapping[str, Checkpoint]
    replies: Mapping[str, StoredReply]


def snapshot(conn: Connection, source: int, trace_ids: Sequence[str], spans: Sequence[str]) -> LedgerSnapshot:
    query = select(replies.c.span_id, replies.c.id, replies.c.state, replies.c.content)
    rows = rows_in(conn, query.where(replies.c.source_id == source), replies.c.span_id, spans)
    found = {row.span_id: StoredReply(row.id, ReplyState(row.state), row.content) for row in rows}
    return LedgerSnapshot(cursor_of(conn, source), checkpoints_of(conn, source, trace_ids), found)


def numbers_of(conn: Connection, source: int) -> set[int]:
    """The numbers of all replies of a source."""
    return set(conn.execute(select(replies.c.id).where(replies.c.source_id == source)).scalars())


def exported(conn: Connection) -> dict[str, int]:
    """The number of every task in the task file by key. Tasks are written in the order of their numbers."""
    rows = conn.execute(select(tasks.c.key, tasks.c.id).where(tasks.c.id <= exported_to(conn)))
    return {str(row.key): int(row.id) for row in rows}


def count_unexported(conn: Connection) -> int:
    """Tasks that are not written to the task file yet."""
    return count_rows(conn, tasks, tasks.c.id > exported_to(conn))


def unknown_keys(conn: Connection, keys: Sequence[str]) -> list[str]:
    """Those of these task keys that no task has."""
    known = {row.key for row in rows_in(conn, select(tasks.c.key), tasks.c.key, keys)}
    return [key for key in keys if key not in known]
