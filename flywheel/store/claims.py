"""Claims: tasks that are due for judging are claimed, and get their state by a verdict or are given back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, exists, func, literal_column, or_, select, true, update

from flywheel.records.states import Split, TaskState
from flywheel.records.verdict import Judgement, Outcome, Verdict
from flywheel.store.dead_letters import TASK, dead_letter
from flywheel.store.kernel.bulk import chunks, count_rows, rows_in
from flywheel.store.kernel.schema import tasks, verdicts
from flywheel.store.kernel.transitions import JUDGED_AGAIN, move, move_all, record, utcnow
from flywheel.store.verdicts import PERSON, decided_by_others, of_tasks, point
from flywheel.store.verdicts import store as store_verdict
from flywheel.system.terminal import quantity

DECIDED: Final = (TaskState.ACCEPTED, TaskState.REJECTED)
TRIABLE: Final = (TaskState.PENDING, TaskState.UNDECIDED, *DECIDED, TaskState.RESERVED, TaskState.CONSUMED)
"""States of tasks whose verdicts by two rubrics can be compared."""
CRASHES: Final = 3
"""A task that is in work when a process ends, so many times in a row, is a dead letter."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task to be judged. `stored` is its verdict by the same rubric and judge, if there is one already; `earlier`
    are its decided verdicts, also by other rubrics, the newest first; `attempts` are the judgements that left it
    undecided by this rubric so far.

    `was` is the state of the task: `judging`, or the state that an earlier verdict gave it if it is judged again.
    `target` is its target, empty without `targets`.
    """

    id: int
    key: str
    line: dict[str, Any]
    stored: Verdict | None = None
    earlier: tuple[Verdict, ...] = ()
    was: TaskState = TaskState.JUDGING
    target: str = ""
    attempts: tuple[Judgement, ...] = ()


class Judged(NamedTuple):
    """Tasks that one rubric judges: those of these targets, or those of all others."""

    targets: tuple[str, ...] = ()
    others: bool = False

    @property
    def condition(self) -> ColumnElement[bool]:
        if not self.targets:
            return true()
        return tasks.c.target.not_in(self.targets) if self.others else tasks.c.target.in_(self.targets)


ALL: Final = Judged()


def _due(state: ColumnElement[str] = tasks.c.state) -> ColumnElement[bool]:
    waiting = and_(state == TaskState.UNDECIDED.value, tasks.c.retry_at <= utcnow())
    return or_(state == TaskState.PENDING.value, waiting)


def count_due(conn: Connection, which: Judged = ALL) -> int:
    return count_rows(conn, tasks, _due(), which.condition)


def count_decided(
    conn: Connection, rubric_hash: str, judge_hash: str, which: Judged = ALL, *, every: bool = False
) -> int:
    """The number of tasks that `decided` gives."""
    return count_rows(conn, tasks, _in(DECIDED), _decided_otherwise(rubric_hash, judge_hash, every), which.condition)


def triable(conn: Connection) -> tuple[int, dict[int, str]]:
    """How many tasks there are, and the states of those that a rubric can be tried on, by number, oldest first."""
    query = select(tasks.c.id, tasks.c.state).where(_in(TRIABLE), ~decided_by_others()).order_by(tasks.c.id)
    return count_rows(conn, tasks), {row.id: row.state for row in conn.execute(query)}


def make_due(conn: Connection, ids: Sequence[int]) -> None:
    """Make these tasks due and no others, wherever they stand. Only for a copy of the state that is thrown away."""
    waiting = _in((TaskState.PENDING, TaskState.UNDECIDED))
    conn.execute(update(tasks).where(waiting).values(state=TaskState.HELD.value))
    for some in chunks(ids):
        conn.execute(update(tasks).where(tasks.c.id.in_(some)).values(state=TaskState.PENDING.value, crashes=0))


def claim(
    conn: Connection, limit: int, rubric_hash: str, judge_hash: str, suspect: bool = False, which: Judged = ALL
) -> list[Claimed]:
    """Move up to `limit` due tasks, the oldest first, to `judging`; none that was in work when a process ended.

    With `suspect`, one of those instead. The caller should have no other task in work: if the process ends again, the
    cause is known.
    """
    if suspect:
        due = suspects(conn, which)
    else:
        # Each part is in the order of an index: nothing is sorted, however many tasks are pending or judged.
        parts = [
            *(and_(_in((TaskState.PENDING,)), tasks.c.split == split.value) for split in Split),
            and_(tasks.c.state == TaskState.UNDECIDED.value, tasks.c.retry_at <= utcnow()),
        ]
        due = []
        for part in parts:
            query = select(tasks.c.id, tasks.c.state).where(part, tasks.c.crashes == 0, which.condition)
            due += [(row.id, row.state) for row in conn.execute(query.order_by(tasks.c.id).limit(limit))]
        due = sorted(due)[:limit]
    claimed = {
        task: TaskState.JUDGING for task, state in due if move(conn, task, TaskState(state), TaskState.JUDGING)
    }
    return _with_verdicts(conn, claimed, rubric_hash, judge_hash)


def suspects(conn: Connection, which: Judged = ALL) -> list[tuple[int, str]]:
    """The due task (number, state) that was in work when a process ended, one with the fewest crashes, if any."""
    # The literal 0 and `coalesce` make SQLite use the index of suspects, not one by state: most tasks may be due.
    suspected = tasks.c.crashes > literal_column("0")
    query = select(tasks.c.id, tasks.c.state).where(
        suspected, _due(func.coalesce(tasks.c.state, "")), which.condition
    )
    return [(row.id, row.state) for row in conn.execute(query.order_by(tasks.c.crashes, tasks.c.id).limit(1))]


def decided(
    conn: Connection, limit: int, after: int, rubric_hash: str, judge_hash: str, of: Judged, every: bool
) -> list[Claimed]:
    """Tasks with ids above `after` that another rubric or judge decided, or `every` one that any decided, the oldest
    first. Nothing is moved.

    Tasks of a round are left out, and so are those that a filter or a person rejected.
    """
    # `coalesce` keeps SQLite from the index by state: by id, earlier tasks are not sorted again for every batch.
    state, which = func.coalesce(tasks.c.state, ""), _decided_otherwise(rubric_hash, judge_hash, every)
    rows = conn.execute(
        select(tasks.c.id, tasks.c.state)
        .where(tasks.c.id > after, state.in_([each.value for each in DECIDED]), which, of.condition)
        .order_by(tasks.c.id)
        .limit(limit)
    ).all()
    return _with_verdicts(conn, {row.id: TaskState(row.state) for row in rows}, rubric_hash, judge_hash)


def _decided_otherwise(rubric_hash: str, judge_hash: str, every: bool) -> ColumnElement[bool]:
    same = exists().where(
        verdicts.c.task_id == tasks.c.id,
        verdicts.c.rubric_hash == rubric_hash,
        verdicts.c.judge_hash == judge_hash,
        verdicts.c.outcome == tasks.c.state,
    )
    return ~decided_by_others() if every else and_(~same, ~decided_by_others())


def _in(states: Sequence[TaskState]) -> ColumnElement[bool]:
    return tasks.c.state.in_([state.value for state in states])


def _with_verdicts(
    conn: Connection, states: dict[int, TaskState], rubric_hash: str, judge_hash: str
) -> list[Claimed]:
    """The tasks with these ids, in the order of the ids, each with what its judge said before."""
    stored = of_tasks(conn, list(states), judge_hash)
    found = []
    query = select(tasks.c.id, tasks.c.key, tasks.c.payload, tasks.c.target).order_by(tasks.c.id)
    for row in rows_in(conn, query, tasks.c.id, list(states)):
        of_task = stored.get(row.id, [])
        decided = [(rubric, each) for rubric, each in of_task if each.outcome is not Outcome.UNDECIDED]
        same = next((verdict for rubric, verdict in decided if rubric == rubric_hash), None)
        earlier = tuple(verdict for _, verdict in decided if verdict.judgements)
        attempts = next((each.judgements for rubric, each in of_task if rubric == rubric_hash and not same), ())
        found.append(Claimed(row.id, row.key, row.payload, same, earlier, states[row.id], row.target, attempts))
    return found


def apply(conn: Connection, task: int, verdict: Verdict, retry_seconds: float) -> None:
    """Move a task out of `judging` by a verdict that is stored already."""
    retry_at = None
    new, why = TaskState(verdict.outcome.value), verdict.reason
    if verdict.outcome is Outcome.UNDECIDED:
        why = verdict.error
        retry_at = _after(retry_seconds)
    move(conn, task, TaskState.JUDGING, new, why[:500], retry_at=retry_at, crashes=0)
    point(conn, [task])


def apply_again(conn: Connection, task: int, was: TaskState, verdict: Verdict) -> bool:
    """Move a task from the state that an earlier verdict gave it, if the new outcome differs; whether it was moved.

    An undecided verdict changes nothing. A task that a round has taken meanwhile stays.
    """
    if verdict.outcome is Outcome.UNDECIDED:
        return False
    if verdict.outcome.value == was.value:
        record(conn, tasks.name, [str(task)], was, JUDGED_AGAIN)
        return False
    if not move(conn, task, was, TaskState.PENDING, JUDGED_AGAIN):
        return False
    move(conn, task, TaskState.PENDING, TaskState.JUDGING)
    apply(conn, task, verdict, 0.0)
    return True


def hold(conn: Connection, keys: Sequence[str], why: str) -> None:
    """Hold pending tasks for a person."""
    pending = select(tasks.c.id).where(tasks.c.state == TaskState.PENDING.value)
    ids = [row.id for row in rows_in(conn, pending, tasks.c.key, keys)]
    move_all(conn, ids, TaskState.PENDING, TaskState.HELD, why)


def release_held(conn: Connection, ids: Sequence[int], by: str = "a person") -> list[int]:
    """Let held tasks go on, and never hold them again. Returns those that were held."""
    why = f"released by {by}"
    return [task for task in ids if move(conn, task, TaskState.HELD, TaskState.PENDING, why, released=True)]


def reject_held(conn: Connection, ids: Sequence[int], by: str = "a person") -> list[int]:
    """Reject held tasks by a verdict of a person. Returns those that were held."""
    rejected = move_all(conn, ids, TaskState.HELD, TaskState.REJECTED, f"rejected by {by}")
    for task in rejected:
        store_verdict(conn, task, Verdict(Outcome.REJECTED, 0.0, reason="rejected by a person"), PERSON, "")
    return rejected


def dead_letter_task(conn: Connection, task: int, key: str, error: str, excerpt: str = "") -> None:
    """Make a dead letter of a claimed task that cannot be judged."""
    if move(conn, task, TaskState.JUDGING, TaskState.DEAD, error[:500]):
        dead_letter(conn, TASK, key, error, excerpt)


def release(conn: Connection, ids: Sequence[int], why: str) -> int:
    """Give back claimed tasks that were not judged; how many."""
    return len(move_all(conn, ids, TaskState.JUDGING, TaskState.PENDING, why))


def release_all(conn: Connection, why: str) -> int:
    """Give back all claimed tasks; how many. The caller holds the instance lock, or works on a copy of the state."""
    in_work = select(tasks.c.id).where(tasks.c.state == TaskState.JUDGING.value)
    return release(conn, conn.execute(in_work).scalars().all(), why)


def bound_waits(conn: Connection, retry_seconds: float) -> None:
    """Let no undecided task wait for longer than that, also if it was judged under a clock that was wrong."""
    latest = _after(retry_seconds)
    late = and_(tasks.c.state == TaskState.UNDECIDED.value, tasks.c.retry_at > latest)
    conn.execute(update(tasks).where(late).values(retry_at=latest))


def next_due(conn: Connection) -> str | None:
    """When a task is due, as `utcnow`; empty if one is pending, None if none is left to judge."""
    if conn.execute(select(tasks.c.id).where(_in((TaskState.PENDING,))).limit(1)).first() is not None:
        return ""
    first: str | None = conn.execute(select(func.min(tasks.c.retry_at)).where(_in((TaskState.UNDECIDED,)))).scalar()
    return first


def _after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def recover(conn: Connection) -> tuple[int, list[str]]:
    """Give back the tasks that a process had in work when it was killed or crashed.

    Returns how many, and the keys of those that are dead letters now because this was the `CRASHES`th time in a row.
    A process that stops in order leaves nothing in work. The caller holds the instance lock.
    """
    again, dead = 0, []
    in_work = select(tasks.c.id, tasks.c.key, tasks.c.crashes).where(tasks.c.state == TaskState.JUDGING.value)
    for row in conn.execute(in_work).all():
        crashes = row.crashes + 1
        if crashes < CRASHES:
            again += move(conn, row.id, TaskState.JUDGING, TaskState.PENDING, "its process died", crashes=crashes)
        else:
            why = (
                f"while it was judged, the process ended {quantity(crashes, 'time')} in a row:"
                " killed, crashed or stopped by the watchdog"
            )
            dead_letter_task(conn, row.id, row.key, why)
            dead.append(row.key)
    return again, dead
