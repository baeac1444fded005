"""What was judged after a point in the events of the state, for tools that show the scores of replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Column, Connection, Row, select

from flywheel.records.states import TaskState
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import events, replies, tasks, verdicts
from flywheel.store.kernel.transitions import JUDGED_AGAIN
from flywheel.store.verdicts import OF_JUDGES

_DECIDED: Final = frozenset({TaskState.ACCEPTED, TaskState.REJECTED})


def judged_after(conn: Connection, event: int, limit: int) -> tuple[list[tuple[Row[Any], Row[Any]]], int]:
    """The replies that were judged among the next `limit` events after this one, and the number of the last of these.

    Each has `id`, `trace_id`, `span_id`, and `key` and `started_at` of its task, and is given with its current
    verdict, which a judge gave. Tasks that a filter or a person decided are not among them.
    """
    rows = conn.execute(select(events).where(events.c.id > event).order_by(events.c.id).limit(limit)).all()
    judged = {
        int(row.subject)
        for row in rows
        if row.kind == tasks.name
        and (row.new == JUDGED_AGAIN or (row.old == TaskState.JUDGING and row.new in _DECIDED))
    }
    return _judged(conn, replies.c.task_id, sorted(judged)), rows[-1].id if rows else event


def of_reply(conn: Connection, number: int) -> tuple[Row[Any], Row[Any]] | None:
    """The reply of this number, as `judged_after` gives it; None if it is erased, or has no such verdict any more."""
    return next(iter(_judged(conn, replies.c.id, [number])), None)


def _judged(conn: Connection, column: Column[Any], numbers: Sequence[int]) -> list[tuple[Row[Any], Row[Any]]]:
    """Replies with the current verdicts of their tasks, those that a judge decided."""
    columns = replies.c.id, replies.c.trace_id, replies.c.span_id, tasks.c.verdict_id, tasks.c.key, tasks.c.started_at
    query = select(*columns).join(tasks).where(tasks.c.verdict_id.is_not(None))
    found = list(rows_in(conn, query, column, numbers))
    of_judges, current = select(verdicts).where(OF_JUDGES), sorted({row.verdict_id for row in found})
    judged = {row.id: row for row in rows_in(conn, of_judges, verdicts.c.id, current)}
    return [(row, judged[row.verdict_id]) for row in found if row.verdict_id in judged]
