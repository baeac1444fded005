"""Influence: whose task each one is, what a round may choose from, and bursts that are set aside for a person."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sqlalchemy import Connection, Row, exists, func, insert, select, update

from flywheel.exclusion import Exclusion
from flywheel.states import Split, TaskState
from flywheel.store.bulk import rows_in
from flywheel.store.samples import allowed, free, tried
from flywheel.store.schema import fingerprints, influences, tasks
from flywheel.store.transitions import move

NOT_YET_USED: Final = (TaskState.PENDING, TaskState.JUDGING, TaskState.UNDECIDED, TaskState.ACCEPTED)
"""A task of a burst in one of these can still be set aside."""


FREE: Final = (TaskState.ACCEPTED.value, TaskState.RESERVED.value)
"""What a round has reserved may come back."""


class Weighed(Protocol):
    """What this module stores of a task, see `flywheel.filtering.influence.Weight`."""

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
    """Remember by what the shares of these tasks are counted."""
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


def unknown(conn: Connection, limit: int | None) -> list[Row[Any]]:
    """Samples (id, payload) that a round may take, or give back, and that are not weighed: the filter came later."""
    weighed = exists().where(influences.c.task_id == tasks.c.id)
    return list(
        conn.execute(
            select(tasks.c.id, tasks.c.payload)
            .where(tasks.c.state.in_(FREE), tasks.c.split == Split.TRAIN.value, ~weighed)
            .order_by(tasks.c.id)
            .limit(limit)
        )
    )


def candidates(conn: Connection, takes: Collection[Exclusion] = ()) -> list[Row[Any]]:
    """Free samples (id, conversation, user, template), in the order in which rounds take them.

    What is not known of one is empty.
    """
    return list(
        conn.execute(
            select(
                tasks.c.id,
                func.coalesce(influences.c.conversation, "").label("conversation"),
                func.coalesce(influences.c.user, "").label("user"),
                func.coalesce(influences.c.template, 0).label("template"),
            )
            .outerjoin(influences, influences.c.task_id == tasks.c.id)
            .where(free(), allowed(takes))
            .order_by(tried(), tasks.c.id)
        )
    )


def hold_bursts(conn: Connection, asked: Sequence[int], count: int, seconds: float) -> list[int]:
    """Set aside every task that is one of `count` or more near-identical questions of one origin within `seconds`.

    Looks where the tasks `asked` stand; what earlier ones of the burst had reached is taken back, unless a round has
    them already. Gives the tasks that are held now. What a person released is neither counted nor held again.
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
class _Group:
    """Near-identical questions of one origin, and when they were asked, from first to last."""

    origin: str
    like: int
    first: float
    last: float
    asked: set[int] = field(default_factory=set)


def _groups(conn: Connection, asked: Sequence[int]) -> list[_Group]:
    groups: dict[tuple[str, int], _Group] = {}
    query = (
        select(influences.c.task_id, influences.c.origin, influences.c.at, fingerprints.c.like)
        .join(fingerprints, fingerprints.c.task_id == influences.c.task_id)
        .where(influences.c.released.is_(False))
        .order_by(influences.c.task_id)
    )
    for row in rows_in(conn, query, influences.c.task_id, asked):
        group = groups.setdefault((row.origin, row.like), _Group(row.origin, row.like, row.at, row.at))
        group.first, group.last = min(group.first, row.at), max(group.last, row.at)
        group.asked.add(row.task_id)
    return list(groups.values())


def _alike(conn: Connection, group: _Group, seconds: float) -> list[Row[Any]]:
    """All that can share a window with one of the group, in the order in which they were asked."""
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
    """The tasks of all windows of `seconds` that hold `count` or more, one of them asked."""
    burst: set[int] = set()
    start = 0
    newest = -1  # the last place of one that is asked
    done = 0  # all before are looked at
    for end, row in enumerate(times):
        if row.task_id in asked:
            newest = end
        while row.at - times[start].at > seconds:
            start += 1
        if end - start + 1 >= count and newest >= start:
            burst |= {each.task_id for each in times[max(start, done) : end + 1]}
            done = end + 1
    return burst
