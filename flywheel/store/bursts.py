"""Bursts of near-identical questions, which are held for a person, and the groups that limit a task's share of a
round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Row, exists, insert, select, update

from flywheel.records.states import Split, TaskState
from flywheel.store.kernel.bulk import rows_in
from flywheel.store.kernel.schema import fingerprints, influences, tasks
from flywheel.store.kernel.transitions import move

NOT_YET_USED: Final = (TaskState.PENDING, TaskState.JUDGING, TaskState.UNDECIDED, TaskState.ACCEPTED)
"""States in which a task of a burst can still be held."""


FREE: Final = (TaskState.ACCEPTED.value, TaskState.RESERVED.value)
"""Reserved tasks may be returned."""


class Weighed(Protocol):
    """The weight of a task, see `flywheel.judge.filters.influence`."""

    @property
    def conversation(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def template(self) -> int: ...
    @property
    def origin(self) -> str: ...
    @property
    def at(self) -> float: ...


def enter(conn: Connection, weights: Mapping[int, Weighed]) -> None:
    """Store the weights of these tasks."""
    stored = rows_in(conn, select(influences.c.task_id), influences.c.task_id, list(weights))
    known = {row.task_id for row in stored}
    rows = []
    for task, weight in weights.items():
        values = {name: getattr(weight, name) for name in ("conversation", "user", "template", "origin", "at")}
        if task in known:
            conn.execute(update(influences).where(influences.c.task_id == task).values(**values))
        else:
            rows.append({"task_id": task, "released": False, **values})
    if rows:
        conn.execute(insert(influences), rows)


def unknown(conn: Connection, limit: int) -> list[Row[Any]]:
    """Samples (id, payload) without a weight: they were accepted before the filter was configured."""
    weighed = exists().where(influences.c.task_id == tasks.c.id)
    return list(
        conn.execute(
            select(tasks.c.id, tasks.c.payload)
            .where(tasks.c.state.in_(FREE), tasks.c.split == Split.TRAIN.value, ~weighed)
            .order_by(tasks.c.id)
            .limit(limit)
        )
    )


def hold_bursts(conn: Connection, asked: Sequence[int], count: int, seconds: float) -> list[int]:
    """Hold the tasks of bursts: `count` or more near-identical questions of one origin within `seconds`.

    Only bursts with one of the tasks `asked` are looked for. Their other tasks are held as well, unless a round has
    them. Returns the tasks that are held now. Tasks that a person released are neither counted nor held again.
    """
    held: list[int] = []
    for group in _groups(conn, asked):
        times = _alike(conn, group, seconds)
        burst = _bursts(times, group.asked, count, seconds)
        for row in times:
            if row.task_id in burst and TaskState(row.state) in NOT_YET_USED:
                why = f"one of {len(burst)} near-identical questions within {seconds:g} s"
                if move(conn, row.task_id, TaskState(row.state), TaskState.HELD, why, retry_at=None):
                    held.append(row.task_id)
    return held


@dataclass(slots=True)
class _BurstGroup:
    """Near-identical questions of one origin, with the times of the first and the last in seconds."""

    origin: str
    like: int
    first: float
    last: float
    asked: set[int] = field(default_factory=set)


def _groups(conn: Connection, asked: Sequence[int]) -> list[_BurstGroup]:
    groups: dict[tuple[str, int], _BurstGroup] = {}
    query = (
        select(influences.c.task_id, influences.c.origin, influences.c.at, fingerprints.c.like)
        .join(fingerprints, fingerprints.c.task_id == influences.c.task_id)
        .where(influences.c.released.is_(False))
        .order_by(influences.c.task_id)
    )
    for row in rows_in(conn, query, influences.c.task_id, asked):
        group = groups.setdefault((row.origin, row.like), _BurstGroup(row.origin, row.like, row.at, row.at))
        group.first, group.last = min(group.first, row.at), max(group.last, row.at)
        group.asked.add(row.task_id)
    return list(groups.values())


def _alike(conn: Connection, group: _BurstGroup, seconds: float) -> list[Row[Any]]:
    """All tasks that can be in a window with one of the group, in the order of their times."""
    return list(
        conn.execute(
            select(influences.c.task_id, influences.c.at, tasks.c.state)
            .join(fingerprints, fingerprints.c.task_id == influences.c.task_id)
            .join(tasks, tasks.c.id == influences.c.task_id)
            .where(
                influences.c.origin == group.origin,
                influences.c.at.between(group.first - seconds, group.last + seconds),
                influences.c.released.is_(False),
                fingerprints.c.like == group.like,
            )
            .order_by(influences.c.at, influences.c.task_id)
        )
    )


def _bursts(times: Sequence[Row[Any]], asked: Set[int], count: int, seconds: float) -> set[int]:
    """The tasks of all windows of `seconds` with `count` or more tasks, one of them in `asked`."""
    burst: set[int] = set()
    start = 0
    newest = -1  # the last position of a task in `asked`
    done = 0  # all positions before are done
    for end, row in enumerate(times):
        if row.task_id in asked:
            newest = end
        while row.at - times[start].at > seconds:
            start += 1
        if end - start + 1 >= count and newest >= start:
            burst |= {each.task_id for each in times[max(start, done) : end + 1]}
            done = end + 1
    return burst
