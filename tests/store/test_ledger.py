"""Every reply once, whatever comes twice; and a place for what cannot become a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, event, select

from flywheel.records.exclusion import Exclusion, Scope
from flywheel.records.round import GateTest
from flywheel.records.states import SkipReason, Split, TaskState
from flywheel.records.task import Batch
from flywheel.records.trace import DeadRow
from flywheel.store import claims, ledger, rounds, samples
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.ledger import Recorded
from flywheel.store.views import balance, left_out
from tests.factories.trace import batch, record, replies_on, reply
from tests.factories.verdict import accepted, rejected, settle, undecided


def put(conn: Connection, path: str, what: Batch) -> Recorded:
    return record(conn, ledger.source_id(conn, path), what, train_ratio=0.7, split_seed=42)


async def test_a_batch_that_comes_again_changes_nothing(store: Store) -> None:
    what = batch(reply(1), reply(2), reply(3, skip=SkipReason.ERROR), dead=(DeadRow(9, "s9", "t9", "no JSON"),))
    first = await store.write(put, "/a", what)
    again = await store.write(put, "/a", what)
    assert (first.new_tasks, first.new_replies, first.dead) == (2, 3, 1)
    assert (again.new_tasks, again.new_replies, again.dead) == (0, 0, 0)
    counts = (await store.read(ledger.counts_by_source, 1))[1]
    assert (counts.replies, counts.tasks, dict(counts.skipped), counts.dead) == (4, 2, {"error": 1}, 1)


async def test_the_same_reply_through_two_sources_is_one_task(store: Store) -> None:
    await store.write(put, "/a", batch(reply(1)))
    second = await store.write(put, "/copy-of-a", batch(reply(1)))
    assert second.new_tasks == 0
    books = await store.read(balance.balance)
    assert books.balanced
    assert books.task_states == {"pending": 1}


async def test_a_source_that_was_known_by_a_detour_stays_the_same(store: Store) -> None:
    await store.write(put, "/etc/../a", batch(reply(1)))
    assert await store.read(ledger.known_source, "/a") == 1
    assert (await store.write(put, "/a", batch(reply(1)))).new_replies == 0
    assert [row.path for row in await store.read(ledger.all_sources)] == ["/a"]
    await store.write(put, "/b", batch(reply(2)))
    assert [row.path for row in await store.read(ledger.all_sources)] == ["/a", "/b"]


async def test_an_agent_span_that_arrives_after_it_was_given_up_becomes_a_task(store: Store) -> None:
    await store.write(put, "/a", batch(reply(1, skip=SkipReason.UNFINISHED, answer="")))
    late = await store.write(put, "/a", batch(reply(1)))
    assert late.new_tasks == 1
    counts = (await store.read(ledger.counts_by_source, 1))[1]
    assert (counts.tasks, dict(counts.skipped)) == (1, {})


async def test_a_late_agent_span_that_makes_no_task_corrects_the_reason(store: Store) -> None:
    await store.write(put, "/a", batch(reply(1, skip=SkipReason.UNFINISHED), reply(2, skip=SkipReason.ERROR)))
    await store.write(put, "/a", batch(reply(1, skip=SkipReason.NESTED), reply(2, skip=SkipReason.UNFINISHED)))
    counts = (await store.read(ledger.counts_by_source, 1))[1]
    assert dict(counts.skipped) == {"error": 1, "nested": 1}
    assert (await store.read(balance.balance)).balanced


async def test_the_cursor_is_stored_with_the_replies(store: Store) -> None:
    await store.write(put, "/a", batch(reply(1), rowid=77))
    cursor = await store.read(ledger.cursor_of, 1)
    assert (cursor.rowid, cursor.identity) == (77, "1:2")


async def test_a_verdict_is_not_paid_for_twice(store: Store) -> None:
    await store.write(put, "/a", batch(reply(1)))
    [task] = await store.write(claims.claim, 10, "rubric", "judge")
    assert task.stored is None
    await store.write(settle, task.id, rejected(), "rubric", "judge", 0.0)
    assert await store.write(claims.claim, 10, "rubric", "judge") == []

    def again(conn: Connection) -> None:
        conn.exec_driver_sql("UPDATE tasks SET state = 'pending'")

    await store.write(again)
    [task] = await store.write(claims.claim, 10, "rubric", "judge")
    assert task.stored is not None
    assert task.stored.failed == ("correct",)
    await store.write(claims.release, [task.id], "")
    [task] = await store.write(claims.claim, 10, "another rubric", "judge")
    assert task.stored is None


async def test_undecided_is_retried_when_its_time_has_come_and_its_cost_is_kept(store: Store) -> None:
    await store.write(put, "/a", batch(reply(1)))
    [task] = await store.write(claims.claim, 1, "r", "j")
    await store.write(settle, task.id, undecided(), "r", "j", 3600.0)
    assert await store.write(claims.claim, 1, "r", "j") == []

    def due_now(conn: Connection) -> None:
        conn.exec_driver_sql("UPDATE tasks SET retry_at = '2020-01-01T00:00:00+00:00'")

    await store.write(due_now)
    [task] = await store.write(claims.claim, 1, "r", "j")
    await store.write(settle, task.id, accepted(), "r", "j", 3600.0)

    def calls(conn: Connection) -> list[tuple[str, int]]:
        return [(row[0], row[1]) for row in conn.exec_driver_sql("SELECT outcome, calls FROM verdicts")]

    assert await store.read(calls) == [("accepted", 5)]
    assert (await store.read(balance.balance)).balanced


def states(conn: Connection) -> dict[str, int]:
    return {row[0]: row[1] for row in conn.exec_driver_sql("SELECT state, count(*) FROM tasks GROUP BY state")}


async def test_the_audit_notices_what_is_wrong(store: Store) -> None:
    await store.write(put, "/a", batch(*replies_on(Split.TRAIN, 3)))
    assert (await store.read(balance.balance)).balanced
    damages = {
        "UPDATE tasks SET state = 'accepted' WHERE id = 1": "no verdict",
        "UPDATE tasks SET state = 'reserved' WHERE id = 1": "no live round",
        "UPDATE tasks SET state = 'consumed' WHERE id = 1": "no finished round",
        "UPDATE tasks SET state = 'nonsense' WHERE id = 1": "unknown state",
        "UPDATE replies SET task_id = NULL WHERE id = 1": "no task",
        "UPDATE replies SET state = 'skipped' WHERE id = 1": "no reason",
    }
    for damage, complaint in damages.items():

        def break_it(conn: Connection, damage: str = damage) -> balance.Balance:
            conn.exec_driver_sql("SAVEPOINT before")
            conn.exec_driver_sql(damage)
            books = balance.balance(conn)
            conn.exec_driver_sql("ROLLBACK TO before")
            return books

        books = await store.write(break_it)
        assert not books.balanced
        assert complaint in "; ".join(books.problems)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ingest", "again", "skip", "claim", "accept", "reject", "undecided", "release"]),
                  st.integers(0, 5)),
        max_size=25,
    )
)  # fmt: skip
async def test_the_books_balance_after_any_sequence(steps: list[tuple[str, int]]) -> None:
    store = await Store.copy(Path("/nonexistent"))
    claimed: list[int] = []
    try:
        for action, number in steps:
            if action == "ingest":
                await store.write(put, "/a", batch(reply(number)))
            elif action == "again":
                await store.write(put, "/b", batch(reply(number)))
            elif action == "skip":
                await store.write(put, "/a", batch(reply(number, skip=SkipReason.UNFINISHED)))
            elif action == "claim":
                claimed += [task.id for task in await store.write(claims.claim, number + 1, "r", "j")]
            elif claimed:
                task = claimed.pop()
                if action == "release":
                    await store.write(claims.release, [task], "")
                else:
                    verdict = {"accept": accepted(), "reject": rejected(), "undecided": undecided()}[action]
                    await store.write(settle, task, verdict, "r", "j", 0.0)
            books = await store.read(balance.balance)
            assert books.balanced, books.problems
            assert sum(books.ends.values()) == books.replies
        assert len(claimed) == (await store.read(states)).get(TaskState.JUDGING, 0)
    finally:
        await store.close()


async def test_a_round_takes_the_oldest_training_samples_and_never_a_held_out_one(store: Store) -> None:
    train, held = replies_on(Split.TRAIN, 5), replies_on(Split.HELD_OUT, 3)
    await store.write(put, "/a", batch(*train, *held))
    for task in await store.write(claims.claim, 100, "r", "j"):
        await store.write(settle, task.id, accepted(), "r", "j", 0.0)
    assert await store.read(samples.count_free) == 5
    assert await store.read(samples.count_held_out) == 3

    def plan(conn: Connection) -> tuple[str, list[int], list[int]]:
        aside = select(schema.tasks.c.id).where(schema.tasks.c.split == Split.HELD_OUT.value).limit(2)
        row = rounds.plan(
            conn, Path("/rounds"), [row.id for row in samples.candidates(conn, limit=4)],
            list(conn.execute(aside).scalars()),
            GateTest(epoch=1, number=1, alpha=0.01), trigger="t", seed=1, config_hash="c", rubric_hash="r",
        )  # fmt: skip
        return row.name, rounds.samples_of(conn, row.id, Split.TRAIN), rounds.samples_of(conn, row.id, Split.HELD_OUT)

    name, trained, tested = await store.write(plan)
    assert name == "r0001"
    assert len(trained) == 4
    assert len(tested) == 2
    books = await store.read(balance.balance)
    assert books.balanced
    assert books.task_states == {"reserved": 4, "accepted": 4}

    def sneak(conn: Connection) -> balance.Balance:
        conn.exec_driver_sql("UPDATE round_samples SET split = 'train'")
        return balance.balance(conn)

    assert any("held-out" in problem for problem in (await store.write(sneak)).problems)


async def test_tasks_that_rounds_take_are_counted_without_a_look_at_the_others(store: Store) -> None:
    """Counts are asked for every few seconds; held-out tasks grow for ever, and each line has kilobytes."""

    def plans(conn: Connection) -> list[str]:
        asked: list[tuple[str, Any]] = []
        event.listen(conn, "before_cursor_execute", lambda *call: asked.append((call[2], call[3])))
        image = frozenset({Exclusion.IMAGE})
        for scope in (Scope(image), Scope(image, "planner")):
            assert samples.count_free(conn, scope) == samples.count_held_out(conn, scope) == 0
        assert left_out.count_left_out(conn) == samples.count_with_tools(conn) == {}
        assert list(samples.recorded_lines(conn)) == []
        explained = [conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values) for text, values in list(asked)]
        return [str(row[3]) for rows in explained for row in rows if " tasks " in row[3]]

    found = await store.read(plans)
    assert len(found) == 7
    for plan in found:
        assert "COVERING INDEX" in plan


async def test_suspects_are_looked_for_in_their_own_index(store: Store) -> None:
    """A daemon at rest asks every few seconds; most tasks may be pending."""

    def plan(conn: Connection) -> str:
        asked: list[tuple[str, Any]] = []
        event.listen(conn, "before_cursor_execute", lambda *call: asked.append((call[2], call[3])))
        assert not claims.suspects(conn)
        ((text, values),) = list(asked)
        return str(conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all())

    assert "USING INDEX tasks_suspected" in await store.read(plan)
