"""Tasks on their way to a verdict, and the verdicts, which are never paid for twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, func, insert, or_, select, update

from flywheel.states import Split, TaskState
from flywheel.store import spending
from flywheel.store.letters import TASK, bury
from flywheel.store.schema import influences, tasks, verdicts
from flywheel.store.transitions import move, move_all, utcnow
from flywheel.verdict import CriterionResult, Outcome, Verdict

CHAIN: Final = "chain:"
"""A verdict of a filter chain has this and the chain's hash where one of the judge has the rubric's hash."""
PERSON: Final = "person"
"""A verdict of a person has this there."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A task in `judging`; `stored` is a verdict that was paid for before, if there is one."""

    id: int
    key: str
    line: dict[str, Any]
    stored: Verdict | None


def _due(now: str) -> ColumnElement[bool]:
    waiting = and_(tasks.c.state == TaskState.UNDECIDED.value, tasks.c.retry_at <= now)
    return or_(tasks.c.state == TaskState.PENDING.value, waiting)


def count_due(conn: Connection) -> int:
    return int(conn.execute(select(func.count()).select_from(tasks).where(_due(utcnow()))).scalar_one())


def claim(conn: Connection, limit: int, rubric_hash: str, judge_hash: str) -> list[Claimed]:
    """Move up to `limit` due tasks, the oldest first, to `judging`."""
    rows = conn.execute(
        select(tasks.c.id, tasks.c.key, tasks.c.state, tasks.c.payload)
        .where(_due(utcnow()))
        .order_by(tasks.c.id)
        .limit(limit)
    ).all()
    claimed = []
    for row in rows:
        if move(conn, row.id, TaskState(row.state), TaskState.JUDGING):
            claimed.append(
                Claimed(row.id, row.key, row.payload, stored_verdict(conn, row.id, rubric_hash, judge_hash))
            )
    return claimed


def stored_verdict(conn: Connection, task: int, rubric_hash: str, judge_hash: str) -> Verdict | None:
    """The decided verdict of a task by this rubric and judge."""
    row = conn.execute(
        select(verdicts).where(
            verdicts.c.task_id == task,
            verdicts.c.rubric_hash == rubric_hash,
            verdicts.c.judge_hash == judge_hash,
            verdicts.c.outcome != Outcome.UNDECIDED.value,
        )
    ).one_or_none()
    if row is None:
        return None
    results = tuple(CriterionResult(**result) for result in row.results)
    return Verdict(Outcome(row.outcome), row.score, results, row.reason)


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
        move(conn, task, TaskState.JUDGING, TaskState.UNDECIDED, verdict.error[:500], retry_at=retry_at)
    else:
        new = TaskState.ACCEPTED if verdict.outcome is Outcome.ACCEPTED else TaskState.REJECTED
        move(conn, task, TaskState.JUDGING, new, verdict.reason[:500], retry_at=None)


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
        "reason": verdict.reason,
        "error": verdict.error,
        "latency_seconds": verdict.latency_seconds,
        "created_at": utcnow(),
        "judgements": [asdict(judgement) for judgement in verdict.judgements],
    }
    # An earlier undecided answer of this judge is replaced, but what it cost stays counted; so is what a chain or a
    # person said before, which cost nothing.
    free = or_(verdicts.c.rubric_hash.startswith(CHAIN), verdicts.c.rubric_hash == PERSON)
    replaced = conn.execute(
        update(verdicts)
        .where(same, or_(verdicts.c.outcome == Outcome.UNDECIDED.value, free))
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
        conn.execute(update(tasks).where(tasks.c.id == task).values(payload=dict(line)))


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
    """A task that a filter broke on: kept as a dead letter, out of the way of the others."""
    if move(conn, task, TaskState.JUDGING, TaskState.DEAD, error[:500]):
        bury(conn, TASK, key, error)


def release(conn: Connection, ids: Sequence[int], why: str) -> int:
    """Give claimed tasks back that were not judged."""
    return len(move_all(conn, ids, TaskState.JUDGING, TaskState.PENDING, why))


def release_all(conn: Connection, why: str) -> int:
    """Give back what a process that died had claimed. Only the holder of the instance lock may call this."""
    ids = conn.execute(select(tasks.c.id).where(tasks.c.state == TaskState.JUDGING.value)).scalars().all()
    return release(conn, ids, why)


def count_free(conn: Connection) -> int:
    """Samples that a round could take: accepted, on the training side."""
    return _count(conn, tasks.c.state == TaskState.ACCEPTED.value, tasks.c.split == Split.TRAIN.value)


def count_held_out(conn: Connection) -> int:
    """Held-out tasks with a verdict, either way: what the gate can ask."""
    decided = [TaskState.ACCEPTED.value, TaskState.REJECTED.value]
    return _count(conn, tasks.c.state.in_(decided), tasks.c.split == Split.HELD_OUT.value)


def _count(conn: Connection, *where: ColumnElement[bool]) -> int:
    return int(conn.execute(select(func.count()).select_from(tasks).where(*where)).scalar_one())
