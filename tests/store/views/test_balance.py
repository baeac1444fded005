"""Each reply is counted once, also those whose texts were erased."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, select

from flywheel.errors import StoreError
from flywheel.records.states import ReplyState, Split, TaskState
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.store.samples import count_prompts
from flywheel.store.views.balance import balance
from tests.factories.trace import put_replies, replies_on


def erase(conn: Connection) -> None:
    """The first reply and its task; of the second one the task alone."""
    rows = conn.execute(select(schema.replies.c.id, schema.replies.c.task_id).order_by(schema.replies.c.id)).all()
    assert move(conn, rows[0].id, ReplyState.CONVERTED, ReplyState.ERASED)
    for row in rows[:2]:
        assert move(conn, row.task_id, TaskState.PENDING, TaskState.ERASED)


async def test_erased_replies_and_tasks_are_counted_once(store: Store) -> None:
    await store.write(put_replies, *replies_on(Split.TRAIN, 5))
    await store.write(erase)
    books = await store.read(balance)
    assert (books.balanced, books.problems, books.replies) == (True, [], 5)
    assert {end: number for end, number in books.ends.items() if number} == {"erased": 2, "pending": 3}
    assert (await store.read(count_prompts)).tasks == 3, "no count has them"


async def test_nothing_follows_erased(store: Store) -> None:
    await store.write(put_replies, *replies_on(Split.TRAIN, 2))
    await store.write(erase)
    for state in TaskState:
        with pytest.raises(StoreError, match="no legal transition"):
            await store.write(move, 1, TaskState.ERASED, state)
    for reply in ReplyState:
        with pytest.raises(StoreError, match="no legal transition"):
            await store.write(move, 1, ReplyState.ERASED, reply)
