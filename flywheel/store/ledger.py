"""The ledger of replies: what came out of each source, and the tasks made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from flywheel.states import ReplyState, SkipReason, TaskState
from flywheel.store.schema import dead_letters, replies, sources, tasks
from flywheel.store.transitions import move, record, utcnow
from flywheel.task import Task, split_of, task_id
from flywheel.trace import Batch, Cursor, DeadRow, Reply


@dataclass(frozen=True, slots=True)
class SourceCounts:
    """What the ledger holds of one source: `replies` is the sum of the rest."""

    replies: int
    tasks: int
    skipped: Mapping[str, int]
    dead: int


@dataclass(slots=True)
class Recorded:
    """What one batch changed."""

    new_tasks: int = 0
    new_replies: int = 0
    dead: int = 0
    warnings: list[str] = field(default_factory=list)


def source_id(conn: Connection, path: str) -> int:
    """The number of a source, given to it when it is first seen."""
    found = conn.execute(select(sources.c.id).where(sources.c.path == path)).scalar_one_or_none()
    if found is None:
        found = conn.execute(insert(sources).values(path=path).returning(sources.c.id)).scalar_one()
    return int(found)


def cursor_of(conn: Connection, source: int) -> Cursor:
    row = conn.execute(select(sources).where(sources.c.id == source)).one()
    return Cursor(row.rowid_done, row.identity, row.fingerprint, row.generation)


def note_source(conn: Connection, /, source: int, **values: Any) -> None:
    """Write what is known of a source besides its cursor: schema, error, longest read."""
    conn.execute(update(sources).where(sources.c.id == source).values(**values))


def record_batch(
    conn: Connection, source: int, path: str, batch: Batch, *, train_ratio: float, split_seed: int
) -> Recorded:
    """Store replies, tasks, dead letters and the cursor of one batch in the caller's transaction."""
    done = Recorded(warnings=list(batch.warnings))
    for reply in batch.replies:
        _record_reply(conn, source, path, reply, done, train_ratio, split_seed)
    for row in batch.dead:
        _record_dead(conn, source, row, done)
    cursor = batch.cursor
    note_source(
        conn,
        source,
        rowid_done=cursor.rowid,
        identity=cursor.identity,
        fingerprint=cursor.fingerprint,
        generation=cursor.generation,
        open_traces=batch.open_traces,
    )
    return done


def _record_reply(
    conn: Connection, source: int, path: str, reply: Reply, done: Recorded, train_ratio: float, split_seed: int
) -> None:
    known = conn.execute(
        select(replies.c.id, replies.c.state, replies.c.skip_reason).where(
            replies.c.source_id == source, replies.c.span_id == reply.span_id
        )
    ).one_or_none()
    if known is None:
        row = conn.execute(
            insert(replies)
            .values(
                source_id=source,
                span_id=reply.span_id,
                trace_id=reply.trace_id,
                conversation_id=reply.conversation_id,
                agent=reply.agent,
                state=ReplyState.CLOSED.value,
                created_at=utcnow(),
            )
            .returning(replies.c.id)
        ).scalar_one()
        done.new_replies += 1
    elif _given_up_too_early(known.state, known.skip_reason, reply):
        row = known.id
        move(conn, row, ReplyState(known.state), ReplyState.OPEN, "its agent span arrived late")
        move(conn, row, ReplyState.OPEN, ReplyState.CLOSED)
        conn.execute(
            update(replies)
            .where(replies.c.id == row)
            .values(skip_reason=None, detail="", conversation_id=reply.conversation_id, agent=reply.agent)
        )
    else:
        return
    if reply.skip is not None:
        detail = reply.skip_detail[:500]
        move(
            conn, row, ReplyState.CLOSED, ReplyState.SKIPPED, reply.skip, skip_reason=reply.skip.value, detail=detail
        )
        return
    task = _task_for(conn, path, reply, done, train_ratio, split_seed)
    move(conn, row, ReplyState.CLOSED, ReplyState.CONVERTED, task_id=task)


def _given_up_too_early(state: str, reason: str | None, reply: Reply) -> bool:
    """Whether a reply that was skipped or dead is told anew because its agent span arrived after all."""
    if state == ReplyState.DEAD:
        return reply.skip is None
    unfinished = state == ReplyState.SKIPPED and reason == SkipReason.UNFINISHED
    return unfinished and reply.skip is not SkipReason.UNFINISHED


def _task_for(conn: Connection, path: str, reply: Reply, done: Recorded, train_ratio: float, split_seed: int) -> int:
    key = task_id(reply.trace_id, reply.span_id)
    found = conn.execute(select(tasks.c.id).where(tasks.c.key == key)).scalar_one_or_none()
    if found is not None:
        # The same reply seen through another source (a copy, a backup): one task, judged and trained on once.
        return int(found)
    split = split_of(reply.conversation_id, reply.trace_id, train_ratio=train_ratio, seed=split_seed)
    task = Task(key, split, path, reply)
    row = conn.execute(
        insert(tasks)
        .values(
            key=key,
            conversation_id=reply.conversation_id,
            agent=reply.agent,
            adapter=reply.adapter,
            started_at=reply.started_at.isoformat(),
            split=split.value,
            state=TaskState.PENDING.value,
            payload=task.line(),
            created_at=utcnow(),
        )
        .returning(tasks.c.id)
    ).scalar_one()
    record(conn, tasks.name, [str(row)], None, TaskState.PENDING)
    done.new_tasks += 1
    return int(row)


def _record_dead(conn: Connection, source: int, row: DeadRow, done: Recorded) -> None:
    span = row.span_id or f"row {row.rowid}"
    known = select(replies.c.id).where(replies.c.source_id == source, replies.c.span_id == span)
    if conn.execute(known).first() is not None:
        return
    conn.execute(
        insert(replies).values(
            source_id=source,
            span_id=span,
            trace_id=row.trace_id,
            state=ReplyState.DEAD.value,
            detail=row.error[:500],
            created_at=utcnow(),
        )
    )
    bury(conn, "row", span, row.error, row.excerpt, source)
    done.dead += 1


def bury(conn: Connection, kind: str, subject: str, error: str, excerpt: str = "", source: int | None = None) -> None:
    """Keep a unit that cannot go on, with its error."""
    same = select(dead_letters.c.id).where(
        dead_letters.c.kind == kind, dead_letters.c.subject == subject, dead_letters.c.source_id == source
    )
    if conn.execute(same).first() is None:
        conn.execute(
            insert(dead_letters).values(
                kind=kind,
                source_id=source,
                subject=subject,
                error=error[:2000],
                excerpt=excerpt[:2000],
                created_at=utcnow(),
            )
        )


def counts_of(conn: Connection, source: int) -> SourceCounts:
    by_state = {
        str(row[0]): int(row[1])
        for row in conn.execute(
            select(replies.c.state, func.count()).where(replies.c.source_id == source).group_by(replies.c.state)
        )
    }
    skipped = {
        str(row[0]): int(row[1])
        for row in conn.execute(
            select(replies.c.skip_reason, func.count())
            .where(replies.c.source_id == source, replies.c.state == ReplyState.SKIPPED.value)
            .group_by(replies.c.skip_reason)
            .order_by(replies.c.skip_reason)
        )
    }
    return SourceCounts(
        sum(by_state.values()), by_state.get(ReplyState.CONVERTED, 0), skipped, by_state.get(ReplyState.DEAD, 0)
    )
