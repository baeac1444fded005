"""Who told what is stored under a key, for sources whose rows name themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sqlalchemy import Connection, LargeBinary, bindparam, cast, select

from flywheel.store.bulk import Lookup
from flywheel.store.schema import replies, tasks

_TELLERS: Final = Lookup(
    select(tasks.c.key.label("name"), replies.c.content).select_from(
        tasks.outerjoin(replies, replies.c.task_id == tasks.c.id)
    ),
    tasks.c.key,
)
_WITHOUT_TASK: Final = Lookup(
    select(replies.c.span_id.label("name"), replies.c.content).where(
        replies.c.source_id == bindparam("source"), replies.c.task_id.is_(None)
    ),
    replies.c.span_id,
)


class Told(NamedTuple):
    """What is stored under a key: a task, or a reply that is none."""

    has_task: bool
    contents: frozenset[int | None]
    """The hashes of the replies that told it, None where that is not known (an older state)."""


def told(conn: Connection, source: int, keys: Sequence[str]) -> dict[str, Told]:
    """What is known under these keys: tasks of any source, and replies of this one that are no tasks."""
    found: dict[str, Told] = {}
    for rows, has_task in ((_TELLERS.rows(conn, keys), True), (_WITHOUT_TASK.rows(conn, keys, source), False)):
        for row in rows:
            before = found.get(row.name, Told(has_task, frozenset()))
            found[row.name] = Told(before.has_task, before.contents | {row.content})
    return found


def line_of(conn: Connection, key: str) -> bytes:
    """The task of a key as its line."""
    return bytes(conn.execute(select(cast(tasks.c.payload, LargeBinary)).where(tasks.c.key == key)).scalar_one())
