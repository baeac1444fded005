"""A reply that looks different when it is read again: opened again while nothing is paid for it, noted after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.judge.filters.deduplication import fingerprint
from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply
from flywheel.records.verdict import Verdict
from flywheel.store import claims, deduplication, verdicts
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import events, replies, tasks
from flywheel.store.views import balance
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import accepted, rejected, settle, undecided


def look(conn: Connection) -> list[tuple[str, str | None, str, str]]:
    rows = conn.execute(
        select(replies.c.state, replies.c.skip_reason, tasks.c.state, tasks.c.payload)
        .select_from(replies.outerjoin(tasks, replies.c.task_id == tasks.c.id))
        .order_by(replies.c.id)
    )
    return [(state, skip, of or "", payload["answer"] if payload else "") for state, skip, of, payload in rows]


def story(conn: Connection, kind: str) -> list[str]:
    query = select(events.c.new).where(events.c.kind == kind).order_by(events.c.id)
    return list(conn.execute(query).scalars())


async def test_before_a_verdict_the_task_becomes_what_the_reply_is_now(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    done = await store.write(put_replies, reply(1, answer="new"))
    assert (done.re_extracted, done.new_replies, done.new_tasks) == (1, 0, 0)
    assert await store.read(look) == [("converted", None, "pending", "new")]
    assert await store.read(story, "replies") == ["converted", "open", "closed", "converted"]
    assert (await store.read(balance.balance)).balanced


async def test_after_a_verdict_the_change_is_an_event(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    (task,) = await store.write(claims.claim, 10, "r", "j")
    await store.write(settle, task.id, accepted(), "r", "j", 60.0)
    for _ in range(2):
        await store.write(put_replies, reply(1, answer="new"))
    assert await store.read(look) == [("converted", None, "accepted", "old")]
    assert await store.read(story, "replies") == ["converted", "changed"], "once, however often it is read"
    assert (await store.read(balance.balance)).balanced


async def test_while_it_is_judged_it_stays_as_it_is(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    await store.write(claims.claim, 10, "r", "j")
    await store.write(put_replies, reply(1, answer="new"))
    assert await store.read(look) == [("converted", None, "judging", "old")]


async def test_a_reply_that_is_none_any_more_takes_its_task_back_and_may_return(store: Store) -> None:
    await store.write(put_replies, reply(1))
    await store.write(put_replies, reply(1, skip=SkipReason.ERROR, skip_detail="it failed after all"))
    assert await store.read(look) == [("skipped", "error", "", "")]
    assert await store.read(story, "tasks") == ["pending", "withdrawn"]
    books = await store.read(balance.balance)
    assert books.balanced and books.ends["pending"] == 0
    await store.write(put_replies, reply(1, answer="right"))
    assert await store.read(look) == [("converted", None, "pending", "right")]
    assert books.balanced


async def test_a_partial_view_changes_nothing(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="whole"))
    await store.write(put_replies, reply(1, answer="", skip=SkipReason.UNFINISHED))
    assert await store.read(look) == [("converted", None, "pending", "whole")]


async def test_a_reply_that_two_sources_tell_is_what_the_last_one_to_change_says(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    await store.write(put_replies, reply(1, answer="old"), source="/b")
    await store.write(put_replies, reply(1, answer="new"), source="/b")
    assert await store.read(look) == [("converted", None, "pending", "new")] * 2
    await store.write(put_replies, reply(1, answer="", skip=SkipReason.ERROR, skip_detail="it failed"), source="/b")
    assert await store.read(look) == [("converted", None, "pending", "new"), ("skipped", "error", "", "")]
    assert (await store.read(balance.balance)).balanced
    await store.write(put_replies, reply(1, answer="", skip=SkipReason.ERROR, skip_detail="it failed"))
    assert await store.read(look) == [("skipped", "error", "", "")] * 2
    assert (await store.read(story, "tasks"))[-1] == "withdrawn", "none tells it any more"
    assert (await store.read(balance.balance)).balanced


@pytest.mark.parametrize(
    ("verdict", "rubric", "is_free"),
    [
        (replace(undecided(), calls=0), "r", True),
        (replace(rejected(), calls=0), f"{verdicts.CHAIN}c", True),
        (undecided(), "r", False),
        (rejected(), "r", False),
        (replace(rejected(), calls=0), verdicts.PERSON, False),
        (accepted(), "r", False),
    ],
)
async def test_what_nothing_was_paid_for_may_change(
    store: Store, verdict: Verdict, rubric: str, is_free: bool
) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    (task,) = await store.write(claims.claim, 10, rubric, "j")
    await store.write(settle, task.id, replace(verdict, calls=verdict.calls * (not is_free)), rubric, "j", 60.0)
    ((_, _, before, _),) = await store.read(look)
    await store.write(put_replies, reply(1, answer="new"))
    now = ("pending", "new") if is_free else (before, "old")
    assert await store.read(look) == [("converted", None, *now)]
    assert (await store.read(balance.balance)).balanced
    assert len(await store.write(claims.claim, 10, rubric, "j")) == is_free


async def test_a_task_that_was_put_aside_for_nothing_is_withdrawn_with_its_reply(store: Store) -> None:
    await store.write(put_replies, reply(1))
    (task,) = await store.write(claims.claim, 10, "r", "j")
    await store.write(settle, task.id, replace(undecided(), calls=0), "r", "j", 60.0)
    await store.write(put_replies, reply(1, skip=SkipReason.NESTED, skip_detail="another agent called it"))
    assert await store.read(look) == [("skipped", "nested", "", "")]
    assert await store.read(story, "tasks") == ["pending", "judging", "undecided", "pending", "withdrawn"]
    assert (await store.read(balance.balance)).balanced


async def test_a_task_that_was_withdrawn_comes_back_with_whoever_tells_it(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    await store.write(put_replies, reply(1, skip=SkipReason.NESTED, skip_detail="another agent called it"))
    await store.write(put_replies, reply(1, answer="whole"), source="/b")
    assert await store.read(look) == [("skipped", "nested", "", ""), ("converted", None, "pending", "whole")]
    assert (await store.read(balance.balance)).balanced


@pytest.mark.parametrize("becomes", ["another question", "none"])
async def test_what_repeated_a_task_that_is_another_now_is_due_again(store: Store, becomes: str) -> None:
    query = "A train travels at 150 km/h for 7 hours. How many kilometres does it cover?"
    await store.write(put_replies, reply(1, query=query), reply(2, query=query.lower()))
    first, second = await store.write(claims.claim, 10, "r", "j")
    entries = [deduplication.ComparedTask(task.id, task.key, fingerprint(task.line, 0.8)) for task in (first, second)]
    near = await store.write(deduplication.enter, entries, 0.8)
    assert [one.task for one in near[second.id]] == [first.id]
    await store.write(deduplication.keep, entries[:1])
    repeats = deduplication.Repeats(first.id, first.key, 1.0, "minhash")
    await store.write(deduplication.note, second.id, repeats)
    await store.write(settle, first.id, replace(undecided(), calls=0), "r", "j", 60.0)
    await store.write(settle, second.id, replace(rejected(), calls=0), f"{verdicts.CHAIN}c", "", 60.0)
    if becomes == "none":
        await store.write(put_replies, reply(1, skip=SkipReason.NESTED, skip_detail="another agent called it"))
    else:
        await store.write(put_replies, reply(1, query="Who wrote the Odyssey?"))
    assert (await store.read(look))[1][2] == "pending"
    third = deduplication.ComparedTask(10**6, "third", entries[0].compared)
    near = await store.write(lambda conn: {third.task: deduplication._near(conn, third, 0.8)})
    assert first.id not in [one.task for one in near[third.task]], "it does not ask that any more"


async def test_a_reply_in_another_trace_is_another_reply(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    await store.write(put_replies, reply(1, answer="old", trace_id="another"))
    assert await store.read(look) == 2 * [("converted", None, "pending", "old")]
    names = select(replies.c.span_id, replies.c.trace_id).order_by(replies.c.id)
    first, second = await store.read(lambda conn: conn.execute(names).all())
    assert (first.trace_id, second.trace_id) == (reply(1).trace_id, "another")
    assert second.span_id == f"{first.span_id}@another"
    assert (await store.read(balance.balance)).balanced


async def test_a_conversation_that_gets_another_id_stays_on_its_side(store: Store) -> None:
    turns = [(n, {"conversation_id": f"c{n // 4}", "turn": n % 4, "query": f"question {n}"}) for n in range(40)]
    await store.write(put_replies, *(reply(n, **values) for n, values in turns))
    told = select(tasks.c.split, tasks.c.payload, tasks.c.conversation_id).order_by(tasks.c.id)
    before = await store.read(lambda conn: conn.execute(told).all())
    assert {row.split for row in before} == {"train", "held-out"}
    # The last turns first: they do not say how the conversation began.
    for n, values in reversed(turns):
        await store.write(put_replies, reply(n, **{**values, "conversation_id": f"new {n // 4}"}))
    await store.write(put_replies, *(reply(100 + n, conversation_id=f"new {n}", turn=4) for n in range(10)))
    after = await store.read(lambda conn: conn.execute(told).all())
    assert [row.split for row in after[:40]] == [row.split for row in before]
    assert [row.conversation_id for row in after[:40]] == [f"new {n // 4}" for n in range(40)]
    assert [row.payload["metadata"]["split"] for row in after] == [row.split for row in after]
    assert [row.split for row in after[40:]] == [before[4 * n].split for n in range(10)]


async def test_turns_that_their_spans_do_not_show_are_found_by_conversation_and_time(store: Store) -> None:
    def turn(number: int, **more: Any) -> Reply:
        return reply(
            number, conversation_id="k", history=(), model="", query=f"q{number}", answer=f"a{number}", **more
        )

    await store.write(put_replies, turn(1), turn(3))
    await store.write(
        put_replies, turn(5), turn(2, agent="Other"), reply(4, conversation_id="unknown", history=(), model="")
    )
    rows = await store.read(lambda conn: conn.execute(select(tasks.c.payload)).scalars().all())
    by_span = {row["metadata"]["span_id"]: row for row in rows}
    said = {int(span[4:]): [m["content"] for m in row["prompt"]] for span, row in by_span.items()}
    assert said[1] == ["q1"] and said[3] == ["q1", "a1", "q3"]
    assert said[5] == ["q1", "a1", "q3", "a3", "q5"]
    assert said[2] == ["q2"], "another agent's conversation"
    assert len(said[4]) == 1, "an id that is none links nothing"
    assert {int(span[4:]): row["metadata"]["turn"] for span, row in by_span.items()}[5] == 2
