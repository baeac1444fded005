"""Dead letters: rows and tasks that cannot be processed, kept with their errors until they are retried or dropped.

A dead letter is never deleted. Retrying or dropping one changes no balance: its reply or task stays dead unless it is
processed with success.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Column, Connection, func, select, update

from flywheel.errors import StoreError
from flywheel.records.states import DeadLetterState, ReplyState, TaskState
from flywheel.records.task import storable
from flywheel.store.checkpoints import reopen
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import dead_letters, events, replies, sources, tasks
from flywheel.store.kernel.transitions import create, move

ROW: Final = "row"
"""A row or line of a source that could not be read; its subject is the span."""
TASK: Final = "task"
"""A task that broke a filter, that the judge left undecided each time, or that was in work each time when processes
ended; its subject is its key."""
_LONG_AGO: Final = "1970-01-01T00:00:00.000+00:00"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`created_at` is when its unit first failed, `attempts` how often it has failed."""

    id: int
    kind: str
    source: str
    subject: str
    state: DeadLetterState
    attempts: int
    error: str
    excerpt: str
    created_at: str


class Next(StrEnum):
    """What happens after a retry."""

    JUDGED = "judged"
    """the task is pending and is judged when tasks are judged next"""
    READ = "read"
    """the row's trace is read again when its source is read next"""
    SWEPT = "swept"
    """the row's trace has no checkpoint: a full scan compares its source with the ledger"""
    REREAD = "reread"
    """the JSONL file is read again from its beginning"""
    ALIVE = "alive"
    """nothing: it is not dead any more"""


AFTER_RETRY: Final = {
    Next.JUDGED: "the task is pending again: the daemon or `flywheel filter` judges it",
    Next.READ: "the daemon or `flywheel ingest` reads its trace again",
    Next.SWEPT: "its checkpoint is removed: the daemon or `flywheel ingest --sweep` finds it by a full scan",
    Next.REREAD: "the daemon or `flywheel ingest` reads its file again from the beginning",
    Next.ALIVE: "it is no longer dead: nothing is left to do",
}
"""What happens after a retry, in words. Nothing does before the next pass of the daemon or of that command."""


def dead_letter(
    conn: Connection, kind: str, subject: str, error: str, excerpt: str = "", source: int | None = None
) -> None:
    """Store a dead letter. One that was retried is open again, with one attempt more."""
    values = {"error": storable(error)[:2000], "excerpt": storable(excerpt)[:2000]}
    key = {"kind": kind, "subject": subject, "source_id": source}
    same = select(dead_letters.c.id, dead_letters.c.state).where(
        *(dead_letters.c[name] == value for name, value in key.items())
    )
    known = conn.execute(same).first()
    opened = DeadLetterState.OPEN
    if known is None:
        create(conn, opened, error[:500], attempts=1, **key, **values)
    elif known.state == DeadLetterState.RETRIED:
        attempts = dead_letters.c.attempts + 1
        move(conn, known.id, DeadLetterState.RETRIED, opened, error[:500], attempts=attempts, **values)


def count(conn: Connection) -> dict[str, int]:
    """How many dead letters are in each state."""
    rows = conn.execute(select(dead_letters.c.state, func.count()).group_by(dead_letters.c.state))
    return {state.value: 0 for state in DeadLetterState} | {str(state): int(number) for state, number in rows}


def errors_in(conn: Connection, states: Collection[DeadLetterState], newest: int) -> list[tuple[int, str, bool]]:
    """Number and error of the newest dead letters in these states, and whether each is open; the newest first."""
    query = select(dead_letters.c.id, dead_letters.c.error, dead_letters.c.state).where(
        dead_letters.c.state.in_([state.value for state in states])
    )
    rows = conn.execute(query.order_by(dead_letters.c.id.desc()).limit(newest))
    return [(row.id, row.error, row.state == DeadLetterState.OPEN) for row in rows]


def in_states(conn: Connection, states: Collection[DeadLetterState]) -> list[DeadLetter]:
    """The dead letters in these states, oldest first."""
    return sorted(_found(conn, dead_letters.c.state, [state.value for state in states]), key=lambda each: each.id)


def with_ids(conn: Connection, ids: Sequence[int]) -> list[DeadLetter]:
    """These dead letters. Raises StoreError if one does not exist."""
    found = _found(conn, dead_letters.c.id, sorted(set(ids)))
    if unknown := sorted({*ids} - {each.id for each in found}):
        numbers = ", ".join(map(str, unknown))
        raise StoreError(
            f"find dead letter {numbers}", "there is no such number", "See `flywheel dead-letters --all`."
        )
    return found


def _found(conn: Connection, column: Column[Any], values: Sequence[object]) -> list[DeadLetter]:
    query = select(dead_letters, func.coalesce(sources.c.path, "").label("source")).select_from(
        dead_letters.outerjoin(sources, dead_letters.c.source_id == sources.c.id)
    )
    found = []
    for row in rows_in(conn, query.order_by(dead_letters.c.id), column, values):
        values_of = {name: getattr(row, name) for name in DeadLetter.__slots__}
        found.append(DeadLetter(**values_of | {"state": DeadLetterState(row.state)}))
    return found


def history_of(conn: Connection, number: int) -> list[dict[str, str]]:
    """The events of a dead letter, oldest first."""
    found = conn.execute(
        select(events.c.at, events.c.new, events.c.detail)
        .where(events.c.kind == dead_letters.name, events.c.subject == str(number))
        .order_by(events.c.id)
    )
    return [{"at": row.at, "state": row.new, "detail": row.detail} for row in found]


def retry(conn: Connection, ids: Sequence[int] | None = None) -> list[tuple[DeadLetter, Next]]:
    """Have the units of these dead letters processed again, of all open ones if none are given.

    Raises StoreError, and changes nothing, if one does not exist or was dropped.
    """
    done = []
    for each in _chosen(conn, ids, "retry", DeadLetterState.DROPPED, "it was dropped, which is final"):
        then = _revive_task(conn, each) if each.kind == TASK else _read_again(conn, each)
        if each.state is DeadLetterState.OPEN:
            move(conn, each.id, DeadLetterState.OPEN, DeadLetterState.RETRIED, then)
        done.append((each, then))
    return done


def drop(conn: Connection, ids: Sequence[int] | None = None, by: str = "") -> list[DeadLetter]:
    """Close these dead letters for good, all open ones if none are given; their units stay dead.

    Raises StoreError, and changes nothing, if one does not exist or is being retried.
    """
    why = "it was retried and has not failed again so far"
    chosen = _chosen(conn, ids, "drop", DeadLetterState.RETRIED, why)
    for each in chosen:
        if each.state is DeadLetterState.OPEN:
            move(conn, each.id, DeadLetterState.OPEN, DeadLetterState.DROPPED, f"by {by or 'hand'}")
    return chosen


def _chosen(
    conn: Connection, ids: Sequence[int] | None, attempted: str, refused: DeadLetterState, why: str
) -> list[DeadLetter]:
    """These dead letters, all open ones if none are given; StoreError for one in the state that is refused."""
    chosen = in_states(conn, [DeadLetterState.OPEN]) if ids is None else with_ids(conn, ids)
    for each in chosen:
        if each.state is refused:
            raise StoreError(f"{attempted} dead letter {each.id}", why, "Leave it out; nothing was done.")
    return chosen


def _revive_task(conn: Connection, letter: DeadLetter) -> Next:
    task = conn.execute(
        select(tasks.c.id).where(tasks.c.key == letter.subject, tasks.c.state == TaskState.DEAD.value)
    ).scalar_one_or_none()
    if task is None:
        return Next.ALIVE
    why = f"dead letter {letter.id} was retried"
    move(conn, task, TaskState.DEAD, TaskState.PENDING, why, retry_at=None, crashes=0)
    return Next.JUDGED


def _read_again(conn: Connection, letter: DeadLetter) -> Next:
    """Have the next pass over its source read the row again."""
    reply = conn.execute(
        select(replies.c.source_id, replies.c.trace_id, sources.c.type)
        .join(sources, replies.c.source_id == sources.c.id)
        .where(
            sources.c.path == letter.source,
            replies.c.span_id == letter.subject,
            replies.c.state == ReplyState.DEAD.value,
        )
    ).one_or_none()
    if reply is None:
        return Next.ALIVE
    source = update(sources).where(sources.c.id == reply.source_id)
    if reply.type == "jsonl":
        # Lines have no trace. The file is read from its beginning; the ledger's keys prevent duplicates. A pass that
        # is running has the old generation, and stores no cursor any more.
        conn.execute(source.values(rowid_done=0, generation=sources.c.generation + 1))
        return Next.REREAD
    if reopen(conn, reply.source_id, [reply.trace_id]):
        return Next.READ
    conn.execute(source.values(swept_at=_LONG_AGO))
    return Next.SWEPT
