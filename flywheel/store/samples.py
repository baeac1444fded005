"""Samples: the tasks that a round may train on, and those that its gate may ask."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, exists, func, or_, select, true

from flywheel.states import Split, TaskState
from flywheel.store.judging import DECIDED, NOT_OF_THE_JUDGE, count, decided_by_others
from flywheel.store.schema import events, tasks, verdicts
from flywheel.store.transitions import record

LEFT_OUT: Final = "left out"
"""What the history of a task says that no round takes."""
WITH_IMAGE: Final = "its question holds an image, of which only a reference is kept (training.images)"


def free_samples(conn: Connection, limit: int, *, with_images: bool = True) -> list[int]:
    """The oldest accepted tasks of the training side."""
    which = select(tasks.c.id).where(free(), allowed(with_images=with_images))
    return list(conn.execute(which.order_by(tasks.c.id).limit(limit)).scalars())


def held_out(conn: Connection, limit: int, *, with_images: bool = True) -> list[int]:
    """The newest tasks for the gate. Both verdicts count: only the good ones would flatter the model."""
    which = select(tasks.c.id).where(of_the_gate(), allowed(with_images=with_images))
    return list(conn.execute(which.order_by(tasks.c.id.desc()).limit(limit)).scalars())


def free() -> ColumnElement[bool]:
    """Accepted tasks on the training side that no round has taken."""
    return and_(tasks.c.state == TaskState.ACCEPTED.value, tasks.c.split == Split.TRAIN.value)


def of_the_gate() -> ColumnElement[bool]:
    """Held-out tasks with a verdict of the judge, either way.

    What a filter or a person has put aside since is none of them: it repeats another one, or is kept from the judge.
    """
    put_aside = exists().where(verdicts.c.task_id == tasks.c.id, NOT_OF_THE_JUDGE)
    # Most were never put aside, which an index alone can tell; the times of verdicts are in no index.
    stands = or_(tasks.c.state == TaskState.ACCEPTED.value, ~put_aside, ~decided_by_others())
    decided = tasks.c.state.in_([state.value for state in DECIDED])
    return and_(decided, tasks.c.split == Split.HELD_OUT.value, stands)


def allowed(*, with_images: bool) -> ColumnElement[bool]:
    """Which tasks rounds may take as far as images go."""
    return true() if with_images else ~tasks.c.images


def count_free(conn: Connection, *, with_images: bool = True) -> int:
    """How many samples a round could take."""
    return _count_allowed(conn, free(), with_images)


def marks_of_free(conn: Connection, *, with_images: bool = True) -> tuple[int, ...]:
    """Numbers that change when other samples are free than before; cheap, for an index has them."""
    numbers = func.count(), func.coalesce(func.max(tasks.c.id), 0), func.coalesce(func.sum(tasks.c.id), 0)
    return tuple(conn.execute(select(*numbers).where(free(), allowed(with_images=with_images))).one())


def count_held_out(conn: Connection, *, with_images: bool = True, most: int | None = None) -> int:
    """How many tasks the gate could ask; it is not counted on beyond `most`."""
    if most is None:
        return _count_allowed(conn, of_the_gate(), with_images)
    some = select(tasks.c.id).where(of_the_gate(), allowed(with_images=with_images)).limit(most)
    return int(conn.execute(select(func.count()).select_from(some.subquery())).scalar_one())


def count_with_images(conn: Connection) -> int:
    """How many samples and tasks for the gate there are whose questions hold images."""
    return count(conn, free(), tasks.c.images) + count(conn, of_the_gate(), tasks.c.images)


def leave_out_images(conn: Connection, round_name: str) -> None:
    """Tell tasks with images in their history, once, that a round could have taken them and did not."""
    told = exists().where(
        events.c.kind == tasks.name, events.c.subject == cast(tasks.c.id, Text), events.c.new == LEFT_OUT
    )
    rows = conn.execute(
        select(tasks.c.id, tasks.c.state).where(tasks.c.images, or_(free(), of_the_gate()), ~told)
    ).all()
    for state in DECIDED:
        left_out = [str(row.id) for row in rows if row.state == state]
        record(conn, tasks.name, left_out, state, LEFT_OUT, f"of {round_name}: {WITH_IMAGE}")


def _count_allowed(conn: Connection, which: ColumnElement[bool], with_images: bool) -> int:
    # Both by an index alone: a count that asked every task for its images would look at every row.
    return count(conn, which) - (0 if with_images else count(conn, which, tasks.c.images))
