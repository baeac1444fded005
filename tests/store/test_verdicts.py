"""The current verdict of a task, whatever was said of it before and since."""

from __future__ import annotations

from sqlalchemy import Connection, select

from flywheel.records.states import TaskState
from flywheel.records.verdict import Outcome, Verdict
from flywheel.store import claims, verdicts
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move, recorded_at
from flywheel.store.samples import stands
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import accepted, rejected, settle, undecided

CHAIN = f"{verdicts.CHAIN}c"


def current(conn: Connection) -> tuple[str, str] | None:
    """Rubric and outcome of the current verdict of the only task."""
    query = select(schema.verdicts.c.rubric_hash, schema.verdicts.c.outcome)
    found = conn.execute(query.join(schema.tasks, schema.tasks.c.verdict_id == schema.verdicts.c.id)).one_or_none()
    return tuple(found) if found is not None else None


def again(conn: Connection, was: TaskState, verdict: Verdict, rubric: str) -> tuple[str, str] | None:
    verdicts.store(conn, 1, verdict, rubric, "j")
    claims.apply_again(conn, 1, was, verdict)
    return current(conn)


async def test_it_is_the_newest_one_with_the_outcome_of_the_state(store: Store) -> None:
    def said(conn: Connection) -> None:
        put_replies(conn, reply(1))
        assert current(conn) is None
        (task,) = claims.claim(conn, 1, "old", "j")
        settle(conn, task.id, undecided(), "old", "j", 0.0)
        assert current(conn) == ("old", "undecided")
        (task,) = claims.claim(conn, 1, "old", "j")
        settle(conn, task.id, accepted(), "old", "j", 0.0)
        assert current(conn) == ("old", "accepted")
        assert again(conn, TaskState.ACCEPTED, rejected(), "new") == ("new", "rejected")
        assert again(conn, TaskState.REJECTED, undecided(), "other") == ("new", "rejected"), "it decided nothing"
        claims.apply_again(conn, 1, TaskState.REJECTED, accepted())
        assert current(conn) == ("old", "accepted"), "the older one decides again"

    await store.write(said)


async def test_what_a_filter_rejects_while_a_round_has_it_is_set_aside_later(store: Store) -> None:
    def said(conn: Connection) -> None:
        put_replies(conn, reply(1))
        (task,) = claims.claim(conn, 1, "r", "j")
        settle(conn, task.id, accepted(), "r", "j", 0.0)
        move(conn, 1, TaskState.ACCEPTED, TaskState.RESERVED)
        standing = select(schema.tasks.c.id).where(stands())
        assert conn.execute(standing).scalars().all() == [1]
        rejection = Verdict(Outcome.REJECTED, 0.0, reason="too long")
        assert again(conn, TaskState.ACCEPTED, rejection, CHAIN) == ("r", "accepted"), "the round keeps it"
        move(conn, 1, TaskState.RESERVED, TaskState.CONSUMED)
        assert conn.execute(standing).scalars().all() == []

    await store.write(said)


async def test_what_the_judge_decides_later_counts(store: Store) -> None:
    def said(conn: Connection) -> None:
        put_replies(conn, reply(1))
        (task,) = claims.claim(conn, 1, "r", "j")
        standing = select(schema.tasks.c.id).where(stands())
        with recorded_at("2026-11-01T00:00:00.000+00:00"):
            settle(conn, task.id, Verdict(Outcome.REJECTED, 0.0, reason="too long"), CHAIN, "", 0.0)
        assert conn.execute(standing).scalars().all() == []
        for old, new in ((TaskState.REJECTED, TaskState.PENDING), (TaskState.PENDING, TaskState.JUDGING)):
            move(conn, 1, old, new)
        with recorded_at("2026-11-02T00:00:00.000+00:00"):
            settle(conn, task.id, rejected(), "r", "j", 0.0)
        assert current(conn) == ("r", "rejected")
        assert conn.execute(standing).scalars().all() == [1]

    await store.write(said)
