"""Selection of tasks for `flywheel export`: their lines with the verdict that decided them. Read-only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, case, func, select

from flywheel.records.states import Split, TaskState
from flywheel.records.verdict import Outcome
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import tasks, verdicts

ACCEPTED: Final = (TaskState.ACCEPTED, TaskState.RESERVED, TaskState.CONSUMED)
"""An accepted task stays accepted when a round takes it."""


@dataclass(frozen=True, slots=True)
class Selected:
    """One task; `outcome` and `score` are those of the verdict that decided it, None without one."""

    id: int
    line: dict[str, Any]
    state: TaskState
    outcome: Outcome | None
    score: float | None


def counts(conn: Connection) -> dict[tuple[TaskState, Split], int]:
    """How many tasks there are by state and split."""
    rows = conn.execute(select(tasks.c.state, tasks.c.split, func.count()).group_by(tasks.c.state, tasks.c.split))
    return {(TaskState(state), Split(split)): number for state, split, number in rows}


def page(
    conn: Connection,
    states: Collection[TaskState],
    splits: Collection[Split],
    target: str | None = None,
    *,
    after: int,
    limit: int,
) -> list[int]:
    """The ids of the next tasks of a target (None: of all) behind `after`, the oldest first."""
    where: list[ColumnElement[bool]] = [
        tasks.c.id > after,
        tasks.c.state.in_([state.value for state in states]),
        tasks.c.split.in_([split.value for split in splits]),
    ]
    if target is not None:
        where.append(tasks.c.target == target)
    return list(conn.execute(select(tasks.c.id).where(*where).order_by(tasks.c.id).limit(limit)).scalars())


def read(conn: Connection, ids: Sequence[int]) -> list[Selected]:
    """The tasks with these ids, in the order of the ids; one that is gone is left out."""
    # After a change of rubric and back an older verdict decides again: it need not be the newest.
    decided = case(
        (tasks.c.state == TaskState.REJECTED.value, Outcome.REJECTED.value),
        (tasks.c.state.in_([state.value for state in ACCEPTED]), Outcome.ACCEPTED.value),
        else_=verdicts.c.outcome,
    )
    newest = (
        select(func.max(verdicts.c.id))
        .where(verdicts.c.task_id == tasks.c.id, verdicts.c.outcome == decided)
        .where(verdicts.c.outcome != Outcome.UNDECIDED.value)
        .correlate(tasks)
        .scalar_subquery()
    )
    query = select(tasks.c.id, tasks.c.payload, tasks.c.state, verdicts.c.outcome, verdicts.c.score).outerjoin(
        verdicts, verdicts.c.id == newest
    )
    found = {
        row.id: Selected(
            row.id,
            dict(row.payload),
            TaskState(row.state),
            None if row.outcome is None else Outcome(row.outcome),
            row.score,
        )
        for row in rows_in(conn, query, tasks.c.id, list(set(ids)))
    }
    return [found[number] for number in ids if number in found]
