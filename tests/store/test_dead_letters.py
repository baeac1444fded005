"""Dead letters: kept, counted, looked at again, closed; and the books stay balanced."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, update

from flywheel.errors import StoreError
from flywheel.records.states import DeadLetterState, ReplyState, TaskState
from flywheel.store import dead_letters
from flywheel.store.dead_letters import DeadLetter, Next, dead_letter
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import replies, sources, tasks, traces
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.views import balance

DATA = Path(__file__).parent.parent / "data"
KEY = "t-1"


def source(conn: Connection, *, kind: str = "studio") -> int:
    return int(
        conn.execute(
            insert(sources).values(path=f"/{kind}", type=kind, rowid_done=77).returning(sources.c.id)
        ).scalar_one()
    )


def dead_row(conn: Connection, *, remembered: bool = True, kind: str = "studio") -> int:
    """A reply that could not be read, with its letter."""
    number = source(conn, kind=kind)
    conn.execute(
        insert(replies).values(
            source_id=number, span_id="s1", trace_id="x1", state=ReplyState.DEAD.value, created_at=utcnow()
        )
    )
    for trace in ("x1", "x2") if remembered else ("x2",):
        mark = {
            "source_id": number,
            "trace_id": trace,
            "rowids": "7-9",
            "digest": 5,
            "generation": 0,
            "is_open": False,
        }
        conn.execute(insert(traces).values(**mark))
    dead_letter(conn, "row", "s1", "no JSON", "{broken", number)
    return number


def dead_task(conn: Connection) -> None:
    """A converted reply whose task a filter broke on, with its letter."""
    number = source(conn)
    made = conn.execute(
        insert(tasks)
        .values(
            key=KEY,
            conversation_id="c",
            agent="a",
            started_at=utcnow(),
            split="train",
            state=TaskState.DEAD.value,
            retry_at="2099-01-01T00:00:00.000+00:00",
            payload={},
            created_at=utcnow(),
        )
        .returning(tasks.c.id)
    ).scalar_one()
    conn.execute(
        insert(replies).values(
            source_id=number,
            span_id="s1",
            trace_id="x1",
            state=ReplyState.CONVERTED.value,
            task_id=made,
            created_at=utcnow(),
        )
    )
    dead_letter(conn, "task", KEY, "filter python: ValueError: broken")


def every(conn: Connection) -> list[DeadLetter]:
    return dead_letters.in_states(conn, list(DeadLetterState))


async def test_a_unit_that_fails_twice_is_one_letter(store: Store) -> None:
    def fail(conn: Connection, error: str) -> None:
        dead_letter(conn, "task", KEY, error)

    await store.write(fail, "first")
    await store.write(fail, "second")
    [letter] = await store.read(every)
    assert (letter.state, letter.attempts, letter.error) == (DeadLetterState.OPEN, 1, "first")
    assert await store.read(dead_letters.count) == {"open": 1, "retried": 0, "dropped": 0}


async def test_long_errors_are_cut(store: Store) -> None:
    await store.write(dead_letter, "task", KEY, "e" * 5000, "x" * 5000)
    [letter] = await store.read(every)
    assert (len(letter.error), len(letter.excerpt)) == (2000, 2000)


async def test_a_task_that_is_retried_is_pending_and_counted_when_it_fails_again(store: Store) -> None:
    await store.write(dead_task)
    [(letter, then)] = await store.write(dead_letters.retry, [1])
    assert (letter.subject, then) == (KEY, Next.JUDGED)
    row = (await store.read(lambda conn: conn.execute(select(tasks.c.state, tasks.c.retry_at)).all()))[0]
    assert tuple(row) == ("pending", None)
    assert (await store.read(balance.balance)).balanced
    assert (await store.read(dead_letters.count))["open"] == 0

    def fail_again(conn: Connection) -> None:
        conn.execute(update(tasks).values(state=TaskState.DEAD.value))
        dead_letter(conn, "task", KEY, "still broken")

    await store.write(fail_again)
    [letter] = await store.read(every)
    assert (letter.state, letter.attempts, letter.error) == (DeadLetterState.OPEN, 2, "still broken")
    assert (await store.read(dead_letters.count))["open"] == 1
    history = await store.read(dead_letters.history_of, 1)
    assert [entry["state"] for entry in history] == ["open", "retried", "open"]


async def test_a_row_that_is_retried_has_its_trace_looked_at_and_no_other(store: Store) -> None:
    await store.write(dead_row)
    assert [then for _, then in await store.write(dead_letters.retry)] == [Next.READ]
    found = await store.read(lambda conn: conn.execute(select(traces).order_by(traces.c.trace_id)).all())
    assert [(row.trace_id, row.is_open, row.digest, row.rowids) for row in found] == [
        ("x1", True, 0, "7-9"),
        ("x2", False, 5, "7-9"),
    ]
    books = await store.read(balance.balance)
    assert books.balanced
    assert books.ends["dead"] == 1


async def test_a_row_of_a_trace_that_is_not_remembered_has_its_source_compared(store: Store) -> None:
    await store.write(dead_row, remembered=False)
    assert [then for _, then in await store.write(dead_letters.retry)] == [Next.SWEPT]
    found = await store.read(lambda conn: conn.execute(select(sources.c.swept_at)).scalar_one())
    assert found is not None
    assert found < "2000"
    assert await store.read(lambda conn: len(conn.execute(select(traces)).all())) == 1


async def test_a_line_that_is_retried_has_its_file_read_again(store: Store) -> None:
    await store.write(dead_row, remembered=False, kind="jsonl")
    assert [then for _, then in await store.write(dead_letters.retry)] == [Next.REREAD]
    assert await store.read(lambda conn: conn.execute(select(sources.c.rowid_done)).scalar_one()) == 0


async def test_what_is_alive_again_is_left_alone(store: Store) -> None:
    def heal(conn: Connection) -> None:
        dead_task(conn)
        conn.execute(update(tasks).values(state=TaskState.ACCEPTED.value))

    await store.write(heal)
    assert [then for _, then in await store.write(dead_letters.retry, [1])] == [Next.ALIVE]
    assert await store.read(lambda conn: conn.execute(select(tasks.c.state)).scalar_one()) == "accepted"
    assert await store.read(dead_letters.count) == {"open": 0, "retried": 1, "dropped": 0}


async def test_a_dropped_letter_stays_closed_and_its_unit_dead(store: Store) -> None:
    number = await store.write(dead_row)
    assert [letter.id for letter in await store.write(dead_letters.drop, [1])] == [1]
    await store.write(dead_letter, "row", "s1", "no JSON either", "", number)
    [letter] = await store.read(every)
    assert (letter.state, letter.attempts, letter.error) == (DeadLetterState.DROPPED, 1, "no JSON")
    books = await store.read(balance.balance)
    assert books.balanced
    assert books.ends["dead"] == 1
    assert (await store.read(dead_letters.count))["open"] == 0
    assert await store.write(dead_letters.retry) == []
    assert await store.write(dead_letters.drop) == []


async def test_one_letter_that_cannot_be_changed_changes_none(store: Store) -> None:
    def three(conn: Connection) -> None:
        for subject in "abc":
            dead_letter(conn, "task", subject, "broken")

    await store.write(three)
    await store.write(dead_letters.drop, [2])
    await store.write(dead_letters.retry, [3])
    for change, ids, why in [
        (dead_letters.retry, [1, 2], "retry dead letter 2: it was dropped"),
        (dead_letters.retry, [1, 99, 98], "find dead letter 98, 99"),
        (dead_letters.drop, [1, 3], "drop dead letter 3: it was retried"),
        (dead_letters.drop, [1, 99], "find dead letter 99"),
    ]:
        with pytest.raises(StoreError, match=why):
            await store.write(change, ids)
        assert await store.read(dead_letters.count) == {"open": 1, "retried": 1, "dropped": 1}


async def test_the_same_number_twice_is_one_letter(store: Store) -> None:
    await store.write(dead_task)
    assert len(await store.write(dead_letters.retry, [1, 1])) == 1
