"""Tasks on their way to a verdict, and the verdicts, which are never paid for twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Text,
    and_,
    exists,
    func,
    insert,
    or_,
    select,
    type_coerce,
    update,
)

from flywheel.batch import line_bytes, storable
from flywheel.states import Split, TaskState
from flywheel.store import spending, stored_verdicts
from flywheel.store.bulk import chunks
from flywheel.store.dead_letters import TASK, bury
from flywheel.store.schema import influences, tasks, verdicts
from flywheel.store.transitions import move, move_all, utcnow
from flywheel.terminal import quantity
from flywheel.verdict import Outcome, Verdict

CHAIN: Final = "chain:"
"""A verdict of a filter chain has this and the chain's hash where one of the judge has the rubric's hash."""
PERSON: Final = "person"
"""A verdict of a person has this there."""
DECIDED: Final = (TaskState.ACCEPTED, TaskState.REJECTED)
TRIABLE: Final = (TaskState.PENDING, TaskState.UNDECIDED, *DECIDED, TaskState.RESERVED, TaskState.CONSUMED)
"""Where tasks stand whose verdicts by two rubrics can be compared."""
CRASHES: Final = 3
"""How often in a row a process may end while a task is in work, before it is taken for the task's doing."""

NOT_OF_THE_JUDGE: Final = or_(verdicts.c.rubric_hash.startswith(CHAIN), verdicts.c.rubric_hash == PERSON)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task to be judged. `stored` is its verdict by the same rubric and judge, if there is one already; `earlier`
    are those of this judge by other rubrics, the newest first.

    `was` is where it stands: in `judging`, or where an earlier verdict has brought it, if that is looked at again.
    """

    id: int
    key: str
    line: dict[str, Any]
    stored: Verdict | None = None
    earlier: tuple[Verdict, ...] = ()
    was: TaskState = TaskState.JUDGING


def _due(now: str) -> ColumnElement[bool]:
    waiting = and_(tasks.c.state == TaskState.UNDECIDED.value, tasks.c.retry_at <= now)
    return or_(tasks.c.state == TaskState.PENDING.value, waiting)


def count_due(conn: Connection) -> int:
    return int(conn.execute(select(func.count()).select_from(tasks).where(_due(utcnow()))).scalar_one())


def count_decided(conn: Connection, rubric_hash: str, judge_hash: str) -> int:
    return count(conn, _in(DECIDED), _decided_otherwise(rubric_hash, judge_hash))


def count_triable(conn: Connection) -> int:
    return count(conn, _in(TRIABLE), ~decided_by_others())


def claim(conn: Connection, limit: int, rubric_hash: str, judge_hash: str) -> list[Claimed]:
    """Move up to `limit` due tasks, the oldest first, to `judging`; none that was in work when a process ended."""
    return _claim(conn, _oldest_due(conn, limit), rubric_hash, judge_hash)


def claim_suspect(conn: Connection, rubric_hash: str, judge_hash: str) -> list[Claimed]:
    """Move one due task that was in work when a process ended to `judging`. Whoever has it should have no other:
    then another end tells whose doing it was. Those that were in work least often come first."""
    return _claim(conn, _suspects_due(conn), rubric_hash, judge_hash)


def has_suspects(conn: Connection) -> bool:
    """Whether `claim_suspect` would find one."""
    return bool(_suspects_due(conn))


def _claim(conn: Connection, due: Sequence[tuple[int, str]], rubric_hash: str, judge_hash: str) -> list[Claimed]:
    ids = [task for task, state in due if move(conn, task, TaskState(state), TaskState.JUDGING)]
    return _with_verdicts(conn, ids, rubric_hash, judge_hash)


def _suspects_due(conn: Connection) -> list[tuple[int, str]]:
    one = (
        select(tasks.c.id, tasks.c.state)
        .where(tasks.c.crashes > 0, _due(utcnow()))
        .order_by(tasks.c.crashes, tasks.c.id)
        .limit(1)
    )
    return [(row.id, row.state) for row in conn.execute(one)]


def _oldest_due(conn: Connection, limit: int) -> list[tuple[int, str]]:
    # Each part is in the order of an index, so that nothing is sorted, however many are pending or were judged.
    pending = [
        select(tasks.c.id, tasks.c.state)
        .where(tasks.c.state == TaskState.PENDING.value, tasks.c.split == side.value, tasks.c.crashes == 0)
        .order_by(tasks.c.id)
        .limit(limit)
        for side in Split
    ]
    waiting = (
        select(tasks.c.id, tasks.c.state)
        .where(tasks.c.state == TaskState.UNDECIDED.value, tasks.c.retry_at <= utcnow(), tasks.c.crashes == 0)
        .order_by(tasks.c.id)
        .limit(limit)
    )
    rows = [(row.id, row.state) for part in (*pending, waiting) for row in conn.execute(part)]
    return sorted(rows)[:limit]


def decided(conn: Connection, limit: int, after: int, rubric_hash: str, judge_hash: str) -> list[Claimed]:
    """Tasks behind `after` that stand where another rubric or judge has brought them, the oldest first.

    Nothing is moved, and what a round has is never among them. What a filter or a person rejected is theirs.
    """
    which = _decided_otherwise(rubric_hash, judge_hash)
    return _where_they_stand(conn, limit, after, DECIDED, which, rubric_hash, judge_hash)


def triable(conn: Connection, limit: int, after: int, rubric_hash: str, judge_hash: str) -> list[Claimed]:
    """Tasks behind `after` that a rubric can be tried on, wherever they stand, the oldest first; nothing is moved."""
    return _where_they_stand(conn, limit, after, TRIABLE, ~decided_by_others(), rubric_hash, judge_hash)


def _where_they_stand(
    conn: Connection,
    limit: int,
    after: int,
    states: Sequence[TaskState],
    which: ColumnElement[bool],
    rubric_hash: str,
    judge_hash: str,
) -> list[Claimed]:
    # In the order of the ids from `after` on, not by state: what is behind is not sorted again for every batch.
    state = func.coalesce(tasks.c.state, "")
    rows = conn.execute(
        select(tasks.c.id, tasks.c.state)
        .where(tasks.c.id > after, state.in_([each.value for each in states]), which)
        .order_by(tasks.c.id)
        .limit(limit)
    ).all()
    stand = {row.id: TaskState(row.state) for row in rows}
    found = _with_verdicts(conn, list(stand), rubric_hash, judge_hash)
    return [replace(task, was=stand[task.id]) for task in found]


def _decided_otherwise(rubric_hash: str, judge_hash: str) -> ColumnElement[bool]:
    same = exists().where(
        verdicts.c.task_id == tasks.c.id,
        verdicts.c.rubric_hash == rubric_hash,
        verdicts.c.judge_hash == judge_hash,
        verdicts.c.outcome == tasks.c.state,
    )
    return and_(~same, ~decided_by_others())


def _in(states: Sequence[TaskState]) -> ColumnElement[bool]:
    return tasks.c.state.in_([state.value for state in states])


def decided_by_others() -> ColumnElement[bool]:
    """A filter's or a person's verdict is the newest one."""
    times = select(func.max(verdicts.c.created_at)).where(verdicts.c.task_id == tasks.c.id)
    others = times.where(NOT_OF_THE_JUDGE).scalar_subquery()
    judges = times.where(~NOT_OF_THE_JUDGE).scalar_subquery()
    # A filter behind the judge has its say in the same moment.
    return and_(others.is_not(None), others >= func.coalesce(judges, ""))


def _with_verdicts(conn: Connection, ids: Sequence[int], rubric_hash: str, judge_hash: str) -> list[Claimed]:
    said = stored_verdicts.of_tasks(conn, ids, judge_hash)
    found = []
    for some in chunks(ids):
        rows = select(tasks.c.id, tasks.c.key, tasks.c.payload).where(tasks.c.id.in_(some)).order_by(tasks.c.id)
        for row in conn.execute(rows):
            of_task = said.get(row.id, [])
            stored = next((verdict for rubric, verdict in of_task if rubric == rubric_hash), None)
            earlier = tuple(verdict for rubric, verdict in of_task if rubric != rubric_hash and verdict.judgements)
            found.append(Claimed(row.id, row.key, row.payload, stored, earlier))
    return found


def settle(
    conn: Connection, task: int, verdict: Verdict, rubric_hash: str, judge_hash: str, retry_seconds: float
) -> None:
    """Store a verdict and move its task out of `judging`, in one transaction."""
    store_verdict(conn, task, verdict, rubric_hash, judge_hash)
    apply(conn, task, verdict, retry_seconds)


def apply(conn: Connection, task: int, verdict: Verdict, retry_seconds: float) -> None:
    """Move a task out of `judging` by a verdict that is stored already."""
    if verdict.outcome is Outcome.UNDECIDED:
        retry_at = (datetime.now(UTC) + timedelta(seconds=retry_seconds)).isoformat(timespec="milliseconds")
        move(conn, task, TaskState.JUDGING, TaskState.UNDECIDED, verdict.error[:500], retry_at=retry_at, crashes=0)
    else:
        new = TaskState.ACCEPTED if verdict.outcome is Outcome.ACCEPTED else TaskState.REJECTED
        move(conn, task, TaskState.JUDGING, new, verdict.reason[:500], retry_at=None, crashes=0)


def apply_again(conn: Connection, task: int, was: TaskState, verdict: Verdict) -> bool:
    """Move a task from where an earlier verdict has brought it, if this one has another outcome; whether it moved.

    Undecided changes nothing, and neither does a task that a round has taken meanwhile.
    """
    if verdict.outcome is Outcome.UNDECIDED or verdict.outcome.value == was.value:
        return False
    if not move(conn, task, was, TaskState.PENDING, "judged again"):
        return False
    move(conn, task, TaskState.PENDING, TaskState.JUDGING)
    apply(conn, task, verdict, 0.0)
    return True


def store_verdict(conn: Connection, task: int, verdict: Verdict, rubric_hash: str, judge_hash: str) -> None:
    """Store a verdict and leave its task where it is."""
    spending.add(conn, verdict)
    same = and_(
        verdicts.c.task_id == task, verdicts.c.rubric_hash == rubric_hash, verdicts.c.judge_hash == judge_hash
    )
    values = {
        "outcome": verdict.outcome.value,
        "score": verdict.score,
        "results": [asdict(result) for result in verdict.results],
        "reason": storable(verdict.reason),
        "error": storable(verdict.error),
        "latency_seconds": verdict.latency_seconds,
        "created_at": utcnow(),
        "judgements": [asdict(judgement) for judgement in verdict.judgements],
    }
    # An earlier undecided answer of this judge is replaced, but what it cost stays counted; so is what a chain or a
    # person said before, which cost nothing.
    replaced = conn.execute(
        update(verdicts)
        .where(same, or_(verdicts.c.outcome == Outcome.UNDECIDED.value, NOT_OF_THE_JUDGE))
        .values(
            calls=verdicts.c.calls + verdict.calls,
            prompt_tokens=verdicts.c.prompt_tokens + verdict.prompt_tokens,
            completion_tokens=verdicts.c.completion_tokens + verdict.completion_tokens,
            **values,
        )
    )
    if replaced.rowcount == 0:
        conn.execute(
            insert(verdicts).values(
                task_id=task,
                rubric_hash=rubric_hash,
                judge_hash=judge_hash,
                calls=verdict.calls,
                prompt_tokens=verdict.prompt_tokens,
                completion_tokens=verdict.completion_tokens,
                **values,
            )
        )


def rewrite(conn: Connection, lines: Mapping[int, Mapping[str, Any]]) -> None:
    """Replace the lines of tasks, as filters that take something out of them want it."""
    for task, line in lines.items():
        text = line_bytes(dict(line)).decode()
        conn.execute(update(tasks).where(tasks.c.id == task).values(payload=type_coerce(text, Text)))


def release_held(conn: Connection, ids: Sequence[int]) -> list[int]:
    """Let held tasks go on, and never hold them again; those that could be."""
    released = move_all(conn, ids, TaskState.HELD, TaskState.PENDING, "released by a person")
    for task in released:
        conn.execute(update(influences).where(influences.c.task_id == task).values(released=True))
    return released


def reject_held(conn: Connection, ids: Sequence[int]) -> list[int]:
    """Reject held tasks, as a verdict of a person; those that could be."""
    rejected = move_all(conn, ids, TaskState.HELD, TaskState.REJECTED, "rejected by a person")
    for task in rejected:
        store_verdict(conn, task, Verdict(Outcome.REJECTED, 0.0, reason="rejected by a person"), PERSON, "")
    return rejected


def bury_task(conn: Connection, task: int, key: str, error: str) -> None:
    """A task that cannot be judged: kept as a dead letter, out of the way of the others."""
    if move(conn, task, TaskState.JUDGING, TaskState.DEAD, error[:500]):
        bury(conn, TASK, key, error)


def release(conn: Connection, ids: Sequence[int], why: str) -> int:
    """Give claimed tasks back that were not judged."""
    return len(move_all(conn, ids, TaskState.JUDGING, TaskState.PENDING, why))


def release_all(conn: Connection, why: str) -> int:
    """Give back all that is claimed; how many. Only the holder of the instance lock, or of a copy, may call this."""
    return release(conn, [row.id for row in _in_work(conn)], why)


def recover(conn: Connection) -> tuple[int, list[str]]:
    """Give back what a process had in work when it was ended or crashed: how many tasks, and the keys of those that
    are dead letters now, since that happened CRASHES times in a row. Only the holder of the instance lock may call
    this; a process that is told to stop leaves nothing in work.
    """
    again, dead = 0, []
    for row in _in_work(conn):
        if row.crashes + 1 < CRASHES:
            again += move(
                conn, row.id, TaskState.JUDGING, TaskState.PENDING, "its process died", crashes=row.crashes + 1
            )
        else:
            times = quantity(row.crashes + 1, "time")
            why = (
                f"while it was judged, the process ended {times} in a row: killed, crashed or stopped by the watchdog"
            )
            bury_task(conn, row.id, row.key, why)
            dead.append(row.key)
    return again, dead


def _in_work(conn: Connection) -> Sequence[Row[Any, Any, Any]]:
    judging = tasks.c.state == TaskState.JUDGING.value
    return conn.execute(select(tasks.c.id, tasks.c.key, tasks.c.crashes).where(judging)).all()


def count(conn: Connection, *where: ColumnElement[bool]) -> int:
    """How many tasks there are of which all of this is so."""
    return int(conn.execute(select(func.count()).select_from(tasks).where(*where)).scalar_one())
