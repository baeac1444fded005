"""The balance of the ledger: every reply is counted exactly once, and every reference has a target.

Everything is computed from the database, by queries that share no code with the functions that write the rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, Connection, FromClause, and_, exists, func, not_, select

from flywheel.records.states import ABSENT, JUDGED, LIVE_ROUND, ReplyState, RoundState, Split, TaskState
from flywheel.store.kernel.bulk import count_rows
from flywheel.store.kernel.schema import adapters, deployments, replies, round_samples, rounds, tasks, verdicts

BUCKET: dict[TaskState, str] = {
    TaskState.PENDING: "pending",
    TaskState.JUDGING: "pending",
    TaskState.HELD: "pending",
    TaskState.ACCEPTED: "accepted",
    TaskState.RESERVED: "accepted",
    TaskState.CONSUMED: "accepted",
    TaskState.REJECTED: "rejected",
    TaskState.UNDECIDED: "undecided",
    TaskState.DEAD: "dead",
    TaskState.ERASED: "erased",
}
"""The outcome under which the balance counts each state of a task."""


@dataclass(frozen=True, slots=True)
class Balance:
    """`ends`, by outcome, sum to `replies` if the ledger is balanced; `problems` names what is wrong."""

    replies: int
    ends: dict[str, int]
    reply_states: dict[str, int]
    task_states: dict[str, int]
    skipped: dict[str, int]
    problems: list[str]

    @property
    def balanced(self) -> bool:
        return not self.problems


def balance(conn: Connection) -> Balance:
    """Count all replies and tasks, and check everything that must hold."""
    reply_states, skipped = Counter[str](), Counter[str]()
    # In the order of an index: sorting a hundred thousand rows takes as long as all else here.
    columns = replies.c.source_id, replies.c.state, replies.c.skip_reason
    for _, state, reason, number in conn.execute(select(*columns, func.count()).group_by(*columns)):
        reply_states[state] += number
        if state == ReplyState.SKIPPED:
            skipped[str(reason)] += number
    with_task = replies.join(tasks, replies.c.task_id == tasks.c.id)
    converted = _count_by(conn, tasks.c.state, with_task, replies.c.state == ReplyState.CONVERTED.value)
    ends = dict.fromkeys(("skipped", "pending", "accepted", "rejected", "undecided", "dead", "erased"), 0)
    ends["skipped"] = reply_states[ReplyState.SKIPPED]
    ends["pending"] = reply_states[ReplyState.OPEN] + reply_states[ReplyState.CLOSED]
    ends["dead"] = reply_states[ReplyState.DEAD]
    ends["erased"] = reply_states[ReplyState.ERASED]
    problems = []
    for state, number in converted.items():
        if state in BUCKET:
            ends[BUCKET[TaskState(state)]] += number
        else:
            problems.append(f"{number} tasks are in the unknown state {state!r}")
    total = reply_states.total()
    if sum(ends.values()) != total:
        problems.append(f"{total} replies were read, but {sum(ends.values())} are accounted for")
    problems += [f"{number} {text}" for text, table, where in _CHECKS if (number := count_rows(conn, table, where))]
    return Balance(total, ends, dict(reply_states), _count_by(conn, tasks.c.state, tasks), dict(skipped), problems)


def _count_by(
    conn: Connection, column: Column[Any], table: FromClause, *where: ColumnElement[bool]
) -> dict[str, int]:
    query = select(column, func.count()).select_from(table).where(*where).group_by(column)
    return {str(value): int(number) for value, number in conn.execute(query)}


_judged = [state.value for state in JUDGED]
_has_verdict = exists().where(verdicts.c.task_id == tasks.c.id, verdicts.c.outcome.in_(["accepted", "rejected"]))
_has_reply = exists().where(replies.c.task_id == tasks.c.id)


def _trained_in(*states: RoundState) -> ColumnElement[bool]:
    return exists().where(
        round_samples.c.task_id == tasks.c.id,
        round_samples.c.split == Split.TRAIN.value,
        rounds.c.id == round_samples.c.round_id,
        rounds.c.state.in_([state.value for state in states]),
    )


_CHECKS: Final[tuple[tuple[str, FromClause, ColumnElement[bool]], ...]] = (
    (
        "converted replies have no task",
        replies,
        and_(replies.c.state == ReplyState.CONVERTED.value, replies.c.task_id.is_(None)),
    ),
    (
        "skipped replies have no reason",
        replies,
        and_(replies.c.state == ReplyState.SKIPPED.value, replies.c.skip_reason.is_(None)),
    ),
    ("tasks belong to no reply", tasks, and_(not_(_has_reply), tasks.c.state.not_in(ABSENT))),
    ("judged tasks have no verdict", tasks, and_(tasks.c.state.in_(_judged), not_(_has_verdict))),
    (
        "reserved tasks are in no live round, and in none that waits",
        tasks,
        and_(tasks.c.state == TaskState.RESERVED.value, not_(_trained_in(*LIVE_ROUND, RoundState.PASSED))),
    ),
    (
        "consumed tasks are in no finished round",
        tasks,
        and_(tasks.c.state == TaskState.CONSUMED.value, not_(_trained_in(RoundState.PROMOTED, RoundState.REJECTED))),
    ),
    (
        "held-out tasks were reserved for training",
        round_samples.join(tasks, round_samples.c.task_id == tasks.c.id),
        and_(round_samples.c.split == Split.TRAIN.value, tasks.c.split == Split.HELD_OUT.value),
    ),
    (
        "rounds are marked wrongly as live or finished",
        rounds,
        rounds.c.live.is_(None) == rounds.c.state.in_([state.value for state in LIVE_ROUND]),
    ),
    (
        "active deployments name an adapter that does not exist",
        deployments,
        and_(
            deployments.c.active_alias.is_not(None),
            deployments.c.adapter.is_not(None),
            deployments.c.adapter.not_in(select(adapters.c.name)),
        ),
    ),
)
