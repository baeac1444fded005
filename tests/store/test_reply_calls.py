"""Replies of several sources with the same recorded calls: one task, whatever comes first."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.records.states import ReplyState, SkipReason, TaskState
from flywheel.records.trace import Checkpoint, Reply
from flywheel.store import claims, ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import replies, tasks, traces
from flywheel.store.views.balance import balance
from tests.factories.trace import batch, record, reply
from tests.factories.verdict import accepted, settle

TRACE, CALLS = "/traces", "/calls"
KINDS = {TRACE: "studio", "/copy": "studio", CALLS: "calls"}
EARLY = datetime(2020, 1, 1, tzinfo=UTC)


def put(conn: Connection, source: str, *told: Reply, checkpoints: tuple[Checkpoint, ...] = ()) -> ledger.Recorded:
    found = batch(*told, source=source, checkpoints=checkpoints)
    number = ledger.source_id(conn, source, KINDS[source])
    return record(conn, number, found, train_ratio=0.5, split_seed=1)


def outcomes(conn: Connection) -> list[tuple[str, str | None]]:
    found = conn.execute(select(replies.c.state, replies.c.skip_reason).order_by(replies.c.id))
    return [(row.state, row.skip_reason) for row in found]


def pending(conn: Connection) -> int:
    return len(conn.execute(select(tasks.c.id).where(tasks.c.state == TaskState.PENDING.value)).all())


TASK = (ReplyState.CONVERTED.value, None)
RECORDED = (ReplyState.SKIPPED.value, SkipReason.RECORDED.value)


@pytest.mark.parametrize("order", [(TRACE, CALLS), (CALLS, TRACE)])
async def test_a_trace_and_its_calls_are_one_task(store: Store, order: tuple[str, str]) -> None:
    told = {TRACE: reply(1, calls=("a", "b", "c")), CALLS: reply(2, calls=("b",))}
    for _ in range(2):
        for source in order:
            await store.write(put, source, told[source])
    assert await store.read(outcomes) == [TASK, RECORDED]
    assert await store.read(pending) == 1
    books = await store.read(balance)
    assert books.balanced
    assert books.skipped == {"recorded": 1}
    detail = await store.read(lambda conn: conn.execute(select(replies.c.detail)).scalars().all())
    assert detail[1] == f"reply {told[order[0]].span_id} of {order[0]} has the same model calls"


async def test_replies_with_other_calls_are_not_touched(store: Store) -> None:
    await store.write(put, TRACE, reply(1, calls=("a",)), reply(2), reply(3, calls=("a",)))
    await store.write(put, CALLS, reply(4, calls=("b",)))
    assert await store.read(outcomes) == [TASK] * 4, "two agents of one source may share a call"


async def test_a_copy_of_a_source_is_the_same_reply(store: Store) -> None:
    for source in (TRACE, "/copy"):
        await store.write(put, source, reply(1, calls=("a",)))
    assert await store.read(outcomes) == [TASK, TASK]
    assert await store.read(pending) == 1


async def test_what_a_trace_shows_to_be_no_task_is_none_through_its_calls(store: Store) -> None:
    nested = {"skip": SkipReason.NESTED, "skip_detail": "another agent called it as a tool"}
    await store.write(put, TRACE, reply(1, calls=("a",), **nested))
    await store.write(put, CALLS, reply(2, calls=("a",)))
    assert await store.read(outcomes) == [("skipped", "nested"), RECORDED]


async def test_a_failed_call_alone_does_not_keep_its_trace_from_being_a_task(store: Store) -> None:
    await store.write(put, CALLS, reply(1, calls=("a",), skip=SkipReason.ERROR, skip_detail="HTTP 500"))
    await store.write(put, TRACE, reply(2, calls=("a", "b")))
    assert await store.read(outcomes) == [("skipped", "error"), TASK]


async def test_a_call_that_its_reply_names_no_more_is_free_for_others(store: Store) -> None:
    unfinished = {"skip": SkipReason.UNFINISHED, "skip_detail": "its agent span is not there"}
    failed = {"skip": SkipReason.ERROR, "skip_detail": "the agent's span has no output"}
    await store.write(put, TRACE, reply(1, calls=("a",), **unfinished))
    await store.write(put, TRACE, reply(1, **failed))
    await store.write(put, CALLS, reply(2, calls=("a",)))
    assert await store.read(outcomes) == [("skipped", "error"), TASK]
    assert (await store.read(balance)).balanced


async def test_calls_that_a_failed_reply_names_stay_no_task(store: Store) -> None:
    await store.write(put, TRACE, reply(1, calls=("a", "b"), skip=SkipReason.UNFINISHED))
    await store.write(put, TRACE, reply(1, calls=("a",), skip=SkipReason.ERROR, skip_detail="HTTP 500"))
    await store.write(put, CALLS, reply(2, calls=("a",)), reply(3, calls=("b",)))
    assert await store.read(outcomes) == [("skipped", "error"), RECORDED, TASK]


@pytest.mark.parametrize("skip", [SkipReason.UNFINISHED, SkipReason.ERROR])
async def test_a_reply_that_was_skipped_for_a_released_call_is_read_again(store: Store, skip: SkipReason) -> None:
    kept, freed = reply(2, calls=("a",)), reply(3, calls=("b",))
    await store.write(put, TRACE, reply(1, calls=("a", "b"), skip=SkipReason.UNFINISHED))
    of_calls = tuple(Checkpoint(each.trace_id, (1,), 7) for each in (kept, freed))
    await store.write(put, CALLS, kept, freed, checkpoints=of_calls)
    assert await store.read(outcomes) == [("skipped", "unfinished"), RECORDED, RECORDED]
    done = await store.write(put, TRACE, reply(1, calls=("a",), skip=skip))
    assert done.reopened == {2} and set(await store.read(open_traces)) == {kept.trace_id, freed.trace_id}
    for _ in range(2):
        done = await store.write(put, CALLS, kept, freed, checkpoints=of_calls)
        assert await store.read(outcomes) == [("skipped", skip.value), RECORDED, TASK]
        assert (await store.read(pending), done.reopened) == (1, set())
    assert (await store.read(balance)).balanced


async def test_a_judged_reply_keeps_its_calls_as_it_keeps_its_task(store: Store) -> None:
    await store.write(put, TRACE, reply(1, calls=("a",)))
    (task,) = await store.write(claims.claim, 10, "r", "j")
    await store.write(settle, task.id, accepted(), "r", "j", 60.0)
    await store.write(put, TRACE, reply(1, answer="another"))
    await store.write(put, CALLS, reply(2, calls=("a",)))
    assert await store.read(outcomes) == [TASK, RECORDED]


async def test_a_reply_that_another_source_has_keeps_its_calls(store: Store) -> None:
    await store.write(put, TRACE, reply(1, calls=("a",)))
    await store.write(put, CALLS, reply(2, calls=("b",)))
    await store.write(put, TRACE, reply(1, calls=("a", "b")))
    await store.write(put, "/copy", reply(3, calls=("a",)))
    assert await store.read(outcomes) == [TASK, TASK, RECORDED]


def missing(conn: Connection) -> list[str]:
    return ledger.missing_calls(conn, EARLY)


def open_traces(conn: Connection) -> list[str]:
    return list(conn.execute(select(traces.c.trace_id).where(traces.c.is_open)).scalars())


async def test_a_call_that_was_missing_opens_its_trace_again_once(store: Store) -> None:
    late: dict[str, Any] = {"calls": ("a", "b"), "missing": ("b",)}
    told = reply(1, **late)
    checkpoint = Checkpoint(told.trace_id, (1, 2), 7)
    await store.write(put, TRACE, told, reply(2, calls=("c",)), checkpoints=(checkpoint,))
    assert await store.read(missing) == ["b"]
    assert await store.read(ledger.lack_calls, ["a", "c"]) is False
    assert await store.write(ledger.reopen_for_calls, ["a", "b"]) == {1: 1}
    assert await store.read(open_traces) == [told.trace_id]
    exact = reply(1, calls=("a", "b"), prompt=({"role": "user", "content": "What is 1 plus 1?"},))
    done = await store.write(put, TRACE, exact, checkpoints=(checkpoint,))
    assert done.re_extracted == 1
    assert await store.read(missing) == []
    assert await store.write(ledger.reopen_for_calls, ["b"]) == {}
    line = await store.read(lambda conn: conn.execute(select(tasks.c.payload).where(tasks.c.id == 1)).scalar_one())
    assert (line["metadata"]["prompt_source"], line["metadata"]["prompt_exact"]) == ("calls", True)


async def test_calls_that_were_pruned_since_take_nothing_back(store: Store) -> None:
    prompt = ({"role": "user", "content": "What is 1 plus 1?"},)
    await store.write(put, TRACE, reply(1, calls=("a",), prompt=prompt))
    done = await store.write(put, TRACE, reply(1, calls=("a",), missing=("a",), prompt_reason="gone"))
    assert done.re_extracted == 0
    assert await store.read(missing) == []
    line = await store.read(lambda conn: conn.execute(select(tasks.c.payload)).scalar_one())
    assert line["metadata"]["prompt_exact"]
