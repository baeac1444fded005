"""Replies that are extracted again: their trace went on, or their rows were changed in place.

While no verdict has been paid for its task, a changed reply is opened again and replaced. Afterwards the change is an
event, and the reply stays as it was judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
from sqlalchemy import Connection, LargeBinary, Row, bindparam, cast, exists, or_, select, update

from flywheel.records.batch import Entry, KnownReply
from flywheel.records.states import ReplyState, SkipReason, TaskState
from flywheel.store import reply_calls
from flywheel.store.kernel.bulk import Lookup
from flywheel.store.kernel.schema import replies, tasks, verdicts
from flywheel.store.kernel.transitions import move, record
from flywheel.store.task_records import TaskRecords, make_due
from flywheel.store.verdicts import PERSON

CHANGED: Final = "changed"
_FREE: Final = frozenset({TaskState.PENDING, TaskState.UNDECIDED, TaskState.REJECTED, TaskState.HELD})
"""States that a task can have for which nothing was paid."""
_REPLIES_OF_TASKS: Final = Lookup(
    select(tasks.c.key.label("key"), replies.c.content).select_from(
        tasks.outerjoin(replies, replies.c.task_id == tasks.c.id)
    ),
    tasks.c.key,
)
_REPLIES_WITHOUT_TASK: Final = Lookup(
    select(replies.c.span_id.label("key"), replies.c.content).where(
        replies.c.source_id == bindparam("source"), replies.c.task_id.is_(None)
    ),
    replies.c.span_id,
)


def reingest(conn: Connection, known: Row[Any], entry: Entry, records: TaskRecords) -> bool:
    """Bring a known reply up to date with its entry; whether anything about it is new."""
    state = ReplyState(known.state)
    given_up = state is ReplyState.DEAD or known.skip_reason == SkipReason.UNFINISHED
    if known.content is None and not given_up and _reads_the_same(conn, known, entry):
        # An older state has no hash of the whole reply, and what it says is the same.
        _set(conn, known.id, entry)
        return False
    if known.content == entry.content or (entry.skip is SkipReason.UNFINISHED and not given_up):
        return False
    if entry.missing and reply_calls.were_found(conn, known.id, entry.missing):
        # Its calls have been pruned since: what they showed stays.
        return False
    task: int | None = known.task_id
    if task is not None and not _is_free(conn, task):
        record(conn, replies.name, [str(known.id)], state, CHANGED, "after it was judged: it stays as it was")
        _set(conn, known.id, entry)
        return True
    move(conn, known.id, state, ReplyState.OPEN, "its agent span arrived late" if given_up else "its trace changed")
    move(conn, known.id, ReplyState.OPEN, ReplyState.CLOSED)
    _set(conn, known.id, entry)
    now: int | None = None
    if entry.skip is not None:
        values = {"skip_reason": entry.skip.value, "detail": entry.detail[:500], "task_id": None}
        move(conn, known.id, ReplyState.CLOSED, ReplyState.SKIPPED, entry.skip, **values)
    else:
        now = records.renew(entry, task) or records.store([entry])[entry.key]
        move(conn, known.id, ReplyState.CLOSED, ReplyState.CONVERTED, skip_reason=None, detail="", task_id=now)
    has_reply = exists().where(replies.c.task_id == task)
    if task is not None and task != now and not conn.execute(select(has_reply)).scalar_one():
        make_due(conn, task)
        move(conn, task, TaskState.PENDING, TaskState.WITHDRAWN, "its reply is none any more, or another one")
    return True


def _reads_the_same(conn: Connection, known: Row[Any], entry: Entry) -> bool:
    """Whether a reply has the same question and answer, or is skipped for the same reason."""
    if known.task_id is None:
        return bool(known.skip_reason == entry.skip)
    if entry.skip is not None:
        return False
    payload = conn.execute(select(tasks.c.payload).where(tasks.c.id == known.task_id)).scalar_one()
    return bool(payload["metadata"]["qa_hash"] == orjson.loads(entry.line)["metadata"]["qa_hash"])


def _is_free(conn: Connection, task: int) -> bool:
    """Whether nothing has been paid for a task."""
    state = conn.execute(select(tasks.c.state).where(tasks.c.id == task)).scalar_one()
    paid = exists().where(verdicts.c.task_id == task, or_(verdicts.c.calls > 0, verdicts.c.rubric_hash == PERSON))
    return state in _FREE and not conn.execute(select(paid)).scalar_one()


def _set(conn: Connection, reply: int, entry: Entry) -> None:
    names = ("content", "trace_id", "conversation_id", "agent")
    values = {name: getattr(entry, name) for name in names}
    conn.execute(update(replies).where(replies.c.id == reply).values(**values))


def known_replies(conn: Connection, source: int, keys: Sequence[str]) -> dict[str, KnownReply]:
    """What is stored under these keys: tasks of any source, and replies of this source that have no task."""
    found: dict[str, KnownReply] = {}
    with_task, without = _REPLIES_OF_TASKS.rows(conn, keys), _REPLIES_WITHOUT_TASK.rows(conn, keys, source)
    for rows, has_task in ((with_task, True), (without, False)):
        for row in rows:
            before = found.get(row.key, KnownReply(has_task, frozenset()))
            found[row.key] = KnownReply(before.has_task, before.contents | {row.content})
    return found


def line_of(conn: Connection, key: str) -> bytes:
    """The line of a task by its key."""
    return bytes(conn.execute(select(cast(tasks.c.payload, LargeBinary)).where(tasks.c.key == key)).scalar_one())
