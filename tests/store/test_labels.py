"""Labels: the last of each person counts, and what they show of the judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from flywheel.errors import StoreError
from flywheel.records.states import Label, TaskState
from flywheel.records.verdict import CriterionResult, Judgement, Outcome, Verdict
from flywheel.store import claims, labels
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.verdicts import CHAIN
from flywheel.store.verdicts import store as store_verdict
from tests.factories.trace import put_replies, reply
from tests.factories.verdict import put_tasks, rejected, settle


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(schema.tasks.c.key).order_by(schema.tasks.c.id)).scalars())


def judge(conn: Connection, task: int, *, accept: bool, score: float = 0.9, rubric: str = "r2", **more: Any) -> None:
    outcome = Outcome.ACCEPTED if accept else Outcome.REJECTED
    results = (CriterionResult("correct", "yes" if accept else "no", float(accept), accept),)
    verdict = Verdict(outcome, score, results, **more)
    store_verdict(conn, task, verdict, rubric, "j")
    claims.apply_again(conn, task, TaskState.ACCEPTED, verdict)


async def fill(store: Store, *decisions: bool) -> list[str]:
    """Tasks with these verdicts; their ids."""
    await store.write(put_tasks, len(decisions), 0)
    for task, accept in enumerate(decisions, 1):
        await store.write(lambda conn, task=task, accept=accept: judge(conn, task, accept=accept))
    return await store.read(keys)


async def test_the_last_label_of_a_person_counts_and_all_stay(store: Store) -> None:
    first, *_ = await fill(store, True)
    for label in (Label.ACCEPT, Label.REJECT, Label.REJECT, Label.UNSURE):
        await store.write(labels.add, first, label, "alice", comment="why")
    await store.write(labels.add, first, Label.ACCEPT, "bob")
    assert [(each.labelled_by, each.label) for each in await store.read(labels.listed)] == [
        ("bob", "accept"),
        ("alice", "unsure"),
    ]
    history = await store.read(labels.of_task, 1)
    # The same label again is stored once.
    assert [(each["label"], each["counts"]) for each in history] == [
        ("accept", True),
        ("unsure", True),
        ("reject", False),
        ("accept", False),
    ]
    assert [each.labelled_by for each in await store.read(lambda conn: labels.listed(conn, by="bob"))] == ["bob"]


async def test_a_label_has_the_verdict_of_its_time(store: Store) -> None:
    first, *_ = await fill(store, True)
    await store.write(labels.add, first, Label.REJECT, "alice")
    await store.write(lambda conn: judge(conn, 1, accept=False, rubric="r3"))
    await store.write(labels.add, first, Label.REJECT, "bob")
    seen = [each["verdict_id"] for each in await store.read(labels.of_task, 1)]
    assert len(set(seen)) == 2
    # Agreement is with the newest verdict.
    assert [each.accepted for each in await store.read(labels.listed)] == [False, False]


@pytest.mark.parametrize(
    ("task", "values", "why"),
    [
        ("t-nobody", {}, "there is no task with this id"),
        ("", {"criterion": "charming"}, "no criterion 'charming', but correct"),
        ("", {"comment": "x" * 2_001}, "more than 2,000 characters"),
    ],
)
async def test_what_cannot_be_labelled_is_explained(
    store: Store, task: str, values: dict[str, str], why: str
) -> None:
    first, *_ = await fill(store, True)
    with pytest.raises(StoreError, match=why):
        await store.write(lambda conn: labels.add(conn, task or first, Label.ACCEPT, "alice", **values))


async def test_agreement_is_of_decided_labels_and_judged_replies(store: Store) -> None:
    found = await fill(store, True, True, False, False)
    said = (Label.ACCEPT, Label.REJECT, Label.REJECT, Label.UNSURE)
    for key, label in zip(found, said, strict=True):
        await store.write(labels.add, key, label, "alice", is_blind=label is Label.ACCEPT)
    await store.write(labels.add, found[0], Label.REJECT, "bob")
    await store.write(labels.add, found[2], Label.REJECT, "alice", criterion="correct")
    pairs = labels.agreements(await store.read(labels.listed))
    assert +pairs.judge.counts == {(False, False): 1, (False, True): 2, (True, True): 1}
    assert +pairs.judge_blind.counts == {(True, True): 1}
    assert pairs.criteria["correct"].counts == {(False, False): 1}
    assert pairs.people.counts == {(True, False): 1}


async def test_the_file_has_a_line_for_each_reply_with_the_verdict_of_most(store: Store) -> None:
    found = await fill(store, True, True, True)
    for key, label, by in (
        (found[0], Label.ACCEPT, "alice"),
        (found[0], Label.ACCEPT, "bob"),
        (found[0], Label.REJECT, "carol"),
        (found[1], Label.ACCEPT, "alice"),
        (found[1], Label.REJECT, "bob"),
        (found[2], Label.UNSURE, "alice"),
    ):
        await store.write(labels.add, key, label, by, comment=f"{by} says so")
    lines = await store.read(labels.label_file)
    assert [(line["task_id"], line["verdict"]) for line in lines] == [
        (found[0], "accept"),
        (found[1], None),
        (found[2], None),
    ]
    assert lines[0]["reason"] == "alice says so; bob says so; carol says so"
    assert lines[0]["main_query"]


async def test_the_queue_has_what_is_worth_a_look_and_not_what_was_labelled(store: Store) -> None:
    found = await fill(store, *[True] * 30)

    def set_up(conn: Connection) -> None:
        for task in range(1, 31):
            conn.execute(update(schema.verdicts).where(schema.verdicts.c.task_id == task).values(score=task / 30))
        answers = tuple(Judgement(outcome, 0.5) for outcome in (Outcome.ACCEPTED, Outcome.REJECTED))
        judge(conn, 7, accept=True, rubric="r4", judgements=answers)
        judge(conn, 8, accept=True, rubric="r4", judgements=answers[:1] * 3)
        labels.add(conn, found[8], Label.REJECT, "bob")
        labels.add(conn, found[9], Label.ACCEPT, "bob")

    await store.write(set_up)
    queue = await store.read(labels.queue, "alice", 0.5)
    assert [task for task, why in queue if why == "disputed"] == [9, 7]
    assert [task for task, why in queue if why == "threshold"][:4] == [15, 16, 14, 17]
    assert len({task for task, _ in queue}) == len(queue)
    await store.write(labels.add, found[14], Label.UNSURE, "alice")
    assert 15 not in dict(await store.read(labels.queue, "alice", 0.5))
    assert 15 in dict(await store.read(labels.queue, "bob", 0.5))


async def test_about_a_tenth_of_all_tasks_is_in_the_random_part(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, *[True] * 200)
    monkeypatch.setattr(labels, "QUEUE", 1_000)
    # All have the same score, which is not near the threshold.
    queue = await store.read(labels.queue, "alice", 0.5)
    assert {why for _, why in queue} == {"random"}
    assert 10 <= len(queue) <= 35
    assert await store.read(labels.queue, "bob", 0.5) == queue


async def test_a_label_stays_when_the_reply_changes_before_a_verdict_was_paid_for(store: Store) -> None:
    await store.write(put_replies, reply(1, answer="old"))
    (task,) = await store.write(claims.claim, 10, "r", "j")
    await store.write(settle, task.id, replace(rejected(), calls=0), f"{CHAIN}c", "", 60.0)
    await store.write(labels.add, task.key, Label.ACCEPT, "alice")
    await store.write(put_replies, reply(1, answer="new"))
    assert [each["verdict_id"] for each in await store.read(labels.of_task, task.id)] == [None]
