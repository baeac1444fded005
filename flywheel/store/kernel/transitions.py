"""Changes of state by compare-and-set, each with its event in the same transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, Table, insert, update

from flywheel.errors import StoreError
from flywheel.records.states import (
    TRANSITIONS,
    AdapterState,
    DeadLetterState,
    DeploymentState,
    ReplyState,
    RequestState,
    RoundState,
    TaskState,
    WatchState,
)
from flywheel.records.task import storable
from flywheel.store.kernel import schema
from flywheel.store.kernel.bulk import insert_many

_TABLES: dict[type[StrEnum], Table] = {
    ReplyState: schema.replies,
    TaskState: schema.tasks,
    RoundState: schema.rounds,
    AdapterState: schema.adapters,
    DeploymentState: schema.deployments,
    WatchState: schema.watches,
    DeadLetterState: schema.dead_letters,
    RequestState: schema.requests,
}


JUDGED_AGAIN: Final = "judged again"
"""The new state in events of tasks that have another verdict and the same state."""


_recorded_at: ContextVar[str] = ContextVar("recorded_at", default="")


def utcnow() -> str:
    return _recorded_at.get() or datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def recorded_at(time: str) -> Iterator[None]:
    """Within it, changes happen at this time (UTC, ISO 8601): for what another state has recorded."""
    token = _recorded_at.set(time)
    try:
        yield
    finally:
        _recorded_at.reset(token)


def move(conn: Connection, /, row_id: int, old: StrEnum, new: StrEnum, why: str = "", **values: Any) -> bool:
    """Set the state of one row from `old` to `new`, with other columns; False if it was not in `old`.

    Raises StoreError for a transition that the table of states does not allow: that is a defect, never a race.
    """
    if type(old) is not type(new) or new not in TRANSITIONS[type(old)][old]:
        raise StoreError(f"move {type(old).__name__} {row_id}", f"{old} → {new} is no legal transition")
    table = _TABLES[type(old)]
    changed = conn.execute(
        update(table).where(table.c.id == row_id, table.c.state == old.value).values(state=new.value, **values)
    )
    if changed.rowcount != 1:
        return False
    record(conn, table.name, [str(row_id)], old, new, why)
    return True


def create(conn: Connection, state: StrEnum, why: str = "", **values: Any) -> int:
    """Insert a row in its first state; its number."""
    table = _TABLES[type(state)]
    added = insert(table).values(state=state.value, created_at=utcnow(), **values)
    number = int(conn.execute(added.returning(table.c.id)).scalar_one())
    record(conn, table.name, [str(number)], None, state, why)
    return number


def move_all(conn: Connection, row_ids: Iterable[int], old: StrEnum, new: StrEnum, why: str = "") -> list[int]:
    """Move rows from `old` to `new`; returns those that were in `old`."""
    return [row_id for row_id in row_ids if move(conn, row_id, old, new, why)]


def record(conn: Connection, kind: str, subjects: Iterable[str], old: str | None, new: str, detail: str = "") -> None:
    """Write an event for each of `subjects`. Events are never deleted."""
    now = utcnow()
    # Plain strings: the driver looks for an adapter of any other type, each time.
    kind, before, after, text = str(kind), None if old is None else str(old), str(new), storable(str(detail))
    rows = [(now, kind, subject, before, after, text) for subject in subjects]
    insert_many(conn, schema.events, ("at", "kind", "subject", "old", "new", "detail"), rows)
