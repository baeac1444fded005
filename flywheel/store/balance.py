"""The balance of the ledger: every reply is counted exactly once, and every reference has a target.

Everything is computed from the database, by queries that share no code with the code that wrote the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, FromClause, Select, exists, func, not_, select

from flywheel.states import LIVE_ROUND, ReplyState, RoundState, Split, TaskState
from flywheel.store.schema import adapters, deployments, replies, round_samples, rounds, tasks, verdicts

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
    reply_states = _count_by(conn, select(replies.c.state, func.count()).group_by(replies.c.state))
    task_states = _count_by(conn, select(tasks.c.state, func.count()).group_by(tasks.c.state))
    skipped = _count_by(
        conn,
        select(replies.c.skip_reason, func.count())
        .where(replies.c.state == ReplyState.SKIPPED.value)
        .group_by(replies.c.skip_reason),
    )
    converted = _count_by(
        conn,
        select(tasks.c.state, func.count())
        .select_from(replies.join(tasks, replies.c.task_id == tasks.c.id))
        .where(replies.c.state == ReplyState.CONVERTED.value)
        .group_by(tasks.c.state),
    )
    ends = dict.fromkeys(("skipped", "pending", "accepted", "rejected", "undecided", "dead"), 0)
    ends["skipped"] = reply_states.get(ReplyState.SKIPPED, 0)
    ends["pending"] = reply_states.get(ReplyState.OPEN, 0) + reply_states.get(ReplyState.CLOSED, 0)
    ends["dead"] = reply_states.get(ReplyState.DEAD, 0)
    problems = []
    for state, number in converted.items():
        if state not in BUCKET:
            problems.append(f"{number} tasks are in the unknown state {state!r}")
            continue
        ends[BUCKET[TaskState(state)]] += number
    replies_total = int(conn.execute(select(func.count()).select_from(replies)).scalar_one())
    if sum(ends.values()) != replies_total:
        problems.append(f"{replies_total} replies were read, but {sum(ends.values())} are accounted for")
    problems += [f"{number} {text}" for text, query in _CHECKS if (number := _number(conn, query))]
    return Balance(replies_total, ends, reply_states, task_states, skipped, problems)


def _count_by(conn: Connection, query: Select[str, int]) -> dict[str, int]:
    return {str(row[0]): int(row[1]) for row in conn.execute(query)}


def _number(conn: Connection, query: Select[int]) -> int:
    return int(conn.execute(query).scalar_one())


def _rows(of: FromClause, *where: ColumnElement[bool]) -> Select[int]:
    return select(func.count()).select_from(of).where(*where)


_judged = [TaskState.ACCEPTED.value, TaskState.REJECTED.value, TaskState.RESERVED.value, TaskState.CONSUMED.value]
_has_verdict = exists().where(verdicts.c.task_id == tasks.c.id, verdicts.c.outcome.in_(["accepted", "rejected"]))
_has_reply = exists().where(replies.c.task_id == tasks.c.id)


def _trained_in(*states: RoundState) -> ColumnElement[bool]:
    return exists().where(
        round_samples.c.task_id == tasks.c.id,
        round_samples.c.split == Split.TRAIN.value,
        rounds.c.id == round_samples.c.round_id,
        rounds.c.state.in_([state.value for state in states]),
    )


_CHECKS: list[tuple[str, Select[int]]] = [
    (
        "converted replies have no task",
        _rows(replies, replies.c.state == ReplyState.CONVERTED.value, replies.c.task_id.is_(None)),
    ),
    (
        "skipped replies have no reason",
        _rows(replies, replies.c.state == ReplyState.SKIPPED.value, replies.c.skip_reason.is_(None)),
    ),
    ("tasks belong to no reply", _rows(tasks, not_(_has_reply), tasks.c.state != TaskState.WITHDRAWN.value)),
    ("judged tasks have no verdict", _rows(tasks, tasks.c.state.in_(_judged), not_(_has_verdict))),
    (
        "reserved tasks are in no live round",
        _rows(tasks, tasks.c.state == TaskState.RESERVED.value, not_(_trained_in(*LIVE_ROUND))),
    ),
    (
        "consumed tasks are in no finished round",
        _rows(
            tasks,
            tasks.c.state == TaskState.CONSUMED.value,
            not_(_trained_in(RoundState.PROMOTED, RoundState.REJECTED)),
        ),
    ),
    (
        "held-out tasks were reserved for training",
        _rows(
            round_samples.join(tasks, round_samples.c.task_id == tasks.c.id),
            round_samples.c.split == Split.TRAIN.value,
            tasks.c.split == Split.HELD_OUT.value,
        ),
    ),
    (
        "rounds are marked wrongly as live or finished",
        _rows(rounds, rounds.c.live.is_(None) == rounds.c.state.in_([state.value for state in LIVE_ROUND])),
    ),
    (
        "active deployments name an adapter that does not exist",
        _rows(
            deployments,
            deployments.c.active_alias.is_not(None),
            deployments.c.adapter.is_not(None),
            deployments.c.adapter.not_in(select(adapters.c.name)),
        ),
    ),
]
