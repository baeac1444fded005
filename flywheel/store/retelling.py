"""A reply that is read again and looks different: its trace went on, or its rows were changed in place.

While no verdict has been paid for it, the reply is opened again and becomes what it is now. Afterwards the change is
an event, and the reply stays what was judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from sqlalchemy import Connection, Row, Text, exists, func, select, type_coerce, update

from flywheel.batch import Entry
from flywheel.states import ReplyState, SkipReason, TaskState
from flywheel.store.schema import replies, tasks, verdicts
from flywheel.store.transitions import move, record

CHANGED = "changed"


def retell(
    conn: Connection,
    known: Row[Any],
    entry: Entry,
    *,
    line: Callable[[Entry], bytes],
    make: Callable[[Entry], int],
) -> bool:
    """Take a reply in once more; whether anything about it is new. `line` gives a task's final form, `make` makes one
    and gives its number."""
    state = ReplyState(known.state)
    given_up = state is ReplyState.DEAD or known.skip_reason == SkipReason.UNFINISHED
    if known.content is None and not given_up and _reads_the_same(conn, known, entry):
        # How all of it looked is not known (an older state), and what it says is the same.
        _note(conn, known.id, entry)
        return False
    if known.content == entry.content or (entry.skip is SkipReason.UNFINISHED and not given_up):
        return False
    if state is ReplyState.CONVERTED and not _is_free(conn, known.task_id):
        record(conn, replies.name, [str(known.id)], state, CHANGED, "after it was judged: it stays as it was")
        _note(conn, known.id, entry)
        return True
    move(conn, known.id, state, ReplyState.OPEN, "its agent span arrived late" if given_up else "its trace changed")
    move(conn, known.id, ReplyState.OPEN, ReplyState.CLOSED)
    _note(conn, known.id, entry)
    if entry.skip is not None:
        _withdraw(conn, known.task_id)
        move(
            conn,
            known.id,
            ReplyState.CLOSED,
            ReplyState.SKIPPED,
            entry.skip,
            skip_reason=entry.skip.value,
            detail=entry.detail[:500],
            task_id=None,
        )
    else:
        move(
            conn,
            known.id,
            ReplyState.CLOSED,
            ReplyState.CONVERTED,
            skip_reason=None,
            detail="",
            task_id=_renewed(conn, known.task_id, entry, line) or make(entry),
        )
    return True


def _reads_the_same(conn: Connection, known: Row[Any], entry: Entry) -> bool:
    """Whether a reply has the same question and answer, or the same reason to be none."""
    if known.task_id is None:
        return bool(known.skip_reason == entry.skip)
    if entry.skip is not None:
        return False
    payload = conn.execute(select(tasks.c.payload).where(tasks.c.id == known.task_id)).scalar_one()
    return bool(payload["metadata"]["qa_hash"] == orjson.loads(entry.line)["metadata"]["qa_hash"])


def _is_free(conn: Connection, task: int) -> bool:
    """Whether nothing has been paid for a task, and no other source tells it too."""
    row = conn.execute(select(tasks.c.state).where(tasks.c.id == task)).one()
    judged = conn.execute(select(exists().where(verdicts.c.task_id == task))).scalar_one()
    tellers = conn.execute(select(func.count()).select_from(replies).where(replies.c.task_id == task)).scalar_one()
    return row.state == TaskState.PENDING and not judged and tellers == 1


def _note(conn: Connection, reply: int, entry: Entry) -> None:
    conn.execute(
        update(replies)
        .where(replies.c.id == reply)
        .values(content=entry.content, conversation_id=entry.conversation_id, agent=entry.agent)
    )


def _withdraw(conn: Connection, task: int | None) -> None:
    if task is not None:
        move(conn, task, TaskState.PENDING, TaskState.WITHDRAWN, "its reply is none any more")


def _renewed(conn: Connection, task: int | None, entry: Entry, line: Callable[[Entry], bytes]) -> int | None:
    """The task that a reply was made into before, as it is now; None if there was none."""
    found = conn.execute(select(tasks.c.id, tasks.c.state).where(tasks.c.key == entry.key)).one_or_none()
    if found is None:
        return None
    if found.state == TaskState.WITHDRAWN:
        move(conn, found.id, TaskState.WITHDRAWN, TaskState.PENDING, "its reply is one after all")
    if task is not None or found.state == TaskState.WITHDRAWN:
        payload = type_coerce(line(entry).decode(), Text)
        conn.execute(
            update(tasks)
            .where(tasks.c.id == found.id, tasks.c.state == TaskState.PENDING.value)
            .values(payload=payload, agent=entry.agent, adapter=entry.adapter, started_at=entry.started_at)
        )
    return int(found.id)
