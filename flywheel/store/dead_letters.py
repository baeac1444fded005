"""Dead letters: units that cannot go on, kept with their errors until somebody retries or drops them.

A letter is never deleted. Retrying or dropping one leaves the balance as it is: a reply or task that is not brought
back to life by being looked at again stays dead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from flywheel.batch import storable
from flywheel.errors import StoreError
from flywheel.states import LetterState, ReplyState, TaskState
from flywheel.store.bulk import chunks
from flywheel.store.checkpoints import reopen
from flywheel.store.schema import dead_letters, events, replies, sources, tasks
from flywheel.store.transitions import move, record, utcnow

ROW: Final = "row"
"""A row or line of a source that could not be read; its subject is the span."""
TASK: Final = "task"
"""A task that a filter broke on, or that was in work each time when processes ended; its subject is its key."""
_LONG_AGO: Final = "1970-01-01T00:00:00.000+00:00"


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. `created_at` is when its unit first failed, `attempts` how often it did."""

    id: int
    kind: str
    source: str
    subject: str
    state: LetterState
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
    """nothing is remembered of the row's trace: its whole source is compared with the ledger"""
    REREAD = "reread"
    """the file of lines is read again from its beginning"""
    ALIVE = "alive"
    """nothing: it is not dead any more"""


def dead_letter(
    conn: Connection, kind: str, subject: str, error: str, excerpt: str = "", source: int | None = None
) -> None:
    """Keep a unit that cannot go on, with its error. One that was retried is open again, and counted."""
    error, excerpt = storable(error), storable(excerpt)
    same = select(dead_letters.c.id, dead_letters.c.state).where(
        dead_letters.c.kind == kind, dead_letters.c.subject == subject, dead_letters.c.source_id == source
    )
    known = conn.execute(same).first()
    if known is None:
        made = conn.execute(
            insert(dead_letters)
            .values(
                kind=kind,
                source_id=source,
                subject=subject,
                state=LetterState.OPEN.value,
                attempts=1,
                error=error[:2000],
                excerpt=excerpt[:2000],
                created_at=utcnow(),
            )
            .returning(dead_letters.c.id)
        ).scalar_one()
        record(conn, dead_letters.name, [str(made)], None, LetterState.OPEN, error[:500])
    elif known.state == LetterState.RETRIED:
        move(
            conn,
            known.id,
            LetterState.RETRIED,
            LetterState.OPEN,
            error[:500],
            error=error[:2000],
            excerpt=excerpt[:2000],
            attempts=dead_letters.c.attempts + 1,
        )


def count(conn: Connection) -> dict[str, int]:
    """How many letters are in each state."""
    found = conn.execute(select(dead_letters.c.state, func.count()).group_by(dead_letters.c.state))
    numbers = {str(row[0]): int(row[1]) for row in found}
    return {state.value: numbers.get(state.value, 0) for state in LetterState}


def letters_in(conn: Connection, states: Collection[LetterState]) -> list[Letter]:
    """The letters in these states, oldest first."""
    return _letters(conn, dead_letters.c.state.in_([state.value for state in states]))


def letters_of(conn: Connection, ids: Sequence[int]) -> list[Letter]:
    """These letters. Raises StoreError if one does not exist."""
    found = [letter for some in chunks(sorted(set(ids))) for letter in _letters(conn, dead_letters.c.id.in_(some))]
    if unknown := sorted({*ids} - {letter.id for letter in found}):
        numbers = ", ".join(map(str, unknown))
        raise StoreError(
            f"find dead letter {numbers}", "there is no such number", "See `flywheel dead-letters --all`."
        )
    return found


def _letters(conn: Connection, wanted: ColumnElement[bool]) -> list[Letter]:
    found = conn.execute(
        select(dead_letters, sources.c.path)
        .select_from(dead_letters.outerjoin(sources, dead_letters.c.source_id == sources.c.id))
        .where(wanted)
        .order_by(dead_letters.c.id)
    )
    return [
        Letter(
            id=row.id,
            kind=row.kind,
            source=row.path or "",
            subject=row.subject,
            state=LetterState(row.state),
            attempts=row.attempts,
            error=row.error,
            excerpt=row.excerpt,
            created_at=row.created_at,
        )
        for row in found
    ]


def history_of(conn: Connection, letter: int) -> list[dict[str, str]]:
    """What became of a letter, oldest first."""
    found = conn.execute(
        select(events.c.at, events.c.new, events.c.detail)
        .where(events.c.kind == dead_letters.name, events.c.subject == str(letter))
        .order_by(events.c.id)
    )
    return [{"at": row.at, "state": row.new, "detail": row.detail} for row in found]


def retry(conn: Connection, ids: Sequence[int] | None = None) -> list[tuple[Letter, Next]]:
    """Have these letters' units looked at again, all open ones if none are given.

    Raises StoreError, and changes nothing, if one does not exist or was dropped.
    """
    done = []
    for letter in _chosen(conn, ids):
        if letter.state is LetterState.DROPPED:
            raise StoreError(
                f"retry dead letter {letter.id}",
                "it was dropped, which is for good",
                "Leave it out; nothing was done.",
            )
        then = _revive_task(conn, letter) if letter.kind == TASK else _look_again(conn, letter)
        if letter.state is LetterState.OPEN:
            move(conn, letter.id, LetterState.OPEN, LetterState.RETRIED, then)
        done.append((letter, then))
    return done


def drop(conn: Connection, ids: Sequence[int] | None = None) -> list[Letter]:
    """Close these letters for good, all open ones if none are given; their units stay dead.

    Raises StoreError, and changes nothing, if one does not exist or is being retried.
    """
    chosen = _chosen(conn, ids)
    for letter in chosen:
        if letter.state is LetterState.RETRIED:
            raise StoreError(
                f"drop dead letter {letter.id}",
                "it was retried and did not fail again so far",
                "Leave it out; nothing was done.",
            )
        if letter.state is LetterState.OPEN:
            move(conn, letter.id, LetterState.OPEN, LetterState.DROPPED, "by hand")
    return chosen


def _chosen(conn: Connection, ids: Sequence[int] | None) -> list[Letter]:
    return letters_in(conn, [LetterState.OPEN]) if ids is None else letters_of(conn, ids)


def _revive_task(conn: Connection, letter: Letter) -> Next:
    task = conn.execute(
        select(tasks.c.id).where(tasks.c.key == letter.subject, tasks.c.state == TaskState.DEAD.value)
    ).scalar_one_or_none()
    if task is None:
        return Next.ALIVE
    why = f"dead letter {letter.id} was retried"
    move(conn, task, TaskState.DEAD, TaskState.PENDING, why, retry_at=None, crashes=0)
    return Next.JUDGED


def _look_again(conn: Connection, letter: Letter) -> Next:
    """See to it that the row is read once more; it is the next pass over its source that does it."""
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
    if reply.type == "jsonl":
        # Lines have no trace. A file is read from its beginning; the ledger's keys stop duplicates.
        conn.execute(update(sources).where(sources.c.id == reply.source_id).values(rowid_done=0))
        return Next.REREAD
    if reopen(conn, reply.source_id, [reply.trace_id]):
        return Next.READ
    conn.execute(update(sources).where(sources.c.id == reply.source_id).values(swept_at=_LONG_AGO))
    return Next.SWEPT
