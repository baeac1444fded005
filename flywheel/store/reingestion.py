"""A reply that is read again and looks different: its trace went on, or its rows were changed in place.

While no verdict has been paid for it, the reply is opened again and becomes what it is now. Afterwards the change is
an event, and the reply stays what was judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson
from sqlalchemy import (
    Connection,
    LargeBinary,
    Row,
    Text,
    bindparam,
    cast,
    delete,
    exists,
    or_,
    select,
    type_coerce,
    update,
)

from flywheel import exclusion
from flywheel.batch import Entry
from flywheel.exclusion import Exclusion
from flywheel.states import ReplyState, SkipReason, Split, TaskState
from flywheel.store import deduplication
from flywheel.store.bulk import Lookup
from flywheel.store.schema import replies, tasks, verdicts
from flywheel.store.transitions import move, record
from flywheel.store.verdicts import PERSON

CHANGED = "changed"


def retell(
    conn: Connection,
    known: Row[Any],
    entry: Entry,
    *,
    line: Callable[[Entry, Split], bytes],
    make: Callable[[Entry], int],
) -> bool:
    """Take a reply in once more; whether anything about it is new. `line` gives a task's final form on a side, `make`
    makes one and gives its number."""
    state = ReplyState(known.state)
    given_up = state is ReplyState.DEAD or known.skip_reason == SkipReason.UNFINISHED
    if known.content is None and not given_up and _reads_the_same(conn, known, entry):
        # How all of it looked is not known (an older state), and what it says is the same.
        _note(conn, known.id, entry)
        return False
    if known.content == entry.content or (entry.skip is SkipReason.UNFINISHED and not given_up):
        return False
    task: int | None = known.task_id
    if task is not None and not _is_free(conn, task):
        record(conn, replies.name, [str(known.id)], state, CHANGED, "after it was judged: it stays as it was")
        _note(conn, known.id, entry)
        return True
    move(conn, known.id, state, ReplyState.OPEN, "its agent span arrived late" if given_up else "its trace changed")
    move(conn, known.id, ReplyState.OPEN, ReplyState.CLOSED)
    _note(conn, known.id, entry)
    now: int | None = None
    if entry.skip is not None:
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
        now = renewed(conn, task, entry, line) or make(entry)
        move(conn, known.id, ReplyState.CLOSED, ReplyState.CONVERTED, skip_reason=None, detail="", task_id=now)
    if task is not None and task != now and not _is_told(conn, task):
        _due_again(conn, task)
        move(conn, task, TaskState.PENDING, TaskState.WITHDRAWN, "its reply is none any more, or another one")
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
    """Whether nothing has been paid for a task."""
    row = conn.execute(select(tasks.c.state).where(tasks.c.id == task)).one()
    paid = exists().where(verdicts.c.task_id == task, or_(verdicts.c.calls > 0, verdicts.c.rubric_hash == PERSON))
    return row.state in _FREE and not conn.execute(select(paid)).scalar_one()


_FREE: Final = frozenset({TaskState.PENDING, TaskState.UNDECIDED, TaskState.REJECTED, TaskState.HELD})
"""Where tasks can be that nothing was paid for: waiting, or put aside by what costs nothing."""


def _is_told(conn: Connection, task: int) -> bool:
    """Whether any source tells a task."""
    return bool(conn.execute(select(exists().where(replies.c.task_id == task))).scalar_one())


def _note(conn: Connection, reply: int, entry: Entry) -> None:
    conn.execute(
        update(replies)
        .where(replies.c.id == reply)
        .values(
            content=entry.content,
            trace_id=entry.trace_id,
            conversation_id=entry.conversation_id,
            agent=entry.agent,
        )
    )


def _due_again(conn: Connection, task: int) -> None:
    """What was found out about a task for nothing holds no more."""
    state = TaskState(conn.execute(select(tasks.c.state).where(tasks.c.id == task)).scalar_one())
    if state is not TaskState.PENDING:
        move(conn, task, state, TaskState.PENDING, "its reply changed, and nothing was paid for it", retry_at=None)
        conn.execute(delete(verdicts).where(verdicts.c.task_id == task))
    deduplication.forget(conn, task)


def renewed(conn: Connection, task: int | None, entry: Entry, line: Callable[[Entry, Split], bytes]) -> int | None:
    """The task of an entry, as it is now if it is the reply's own `task` or was withdrawn; None if there is none."""
    found = conn.execute(
        select(tasks.c.id, tasks.c.state, tasks.c.split, tasks.c.excluded).where(tasks.c.key == entry.key)
    ).one_or_none()
    if found is None:
        return None
    if found.id == task or found.state == TaskState.WITHDRAWN:
        _due_again(conn, found.id)
        # What a linked one begins with was found when it first came.
        still = {Exclusion.REPEATED} & set(exclusion.parsed(found.excluded)) if entry.linked else ()
        begins = found.split == Split.HELD_OUT and not entry.linked
        conn.execute(
            update(tasks)
            .where(tasks.c.id == found.id, tasks.c.state == TaskState.PENDING.value)
            .values(
                # A task stays on its side, whatever its conversation is called now.
                payload=type_coerce(line(entry, Split(found.split)).decode(), Text),
                conversation_id=entry.conversation_id,
                agent=entry.agent,
                adapter=entry.adapter,
                started_at=entry.started_at,
                model=entry.model,
                excluded=exclusion.column({*exclusion.parsed(entry.excluded), *still}),
                beginning=entry.beginning if begins else tasks.c.beginning,
            )
        )
    return int(found.id)


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
