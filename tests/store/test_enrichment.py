"""What the state adds to a reply: which version answered, by the deployment history, and what earlier turns hid."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select

from flywheel.records import exclusion
from flywheel.records.exclusion import TrainedModels
from flywheel.records.states import DeploymentState
from flywheel.records.trace import Reply
from flywheel.store import deployments, ledger
from flywheel.store.kernel import schema, transitions
from flywheel.store.kernel.database import Store
from flywheel.store.views import acceptance, task_list
from tests.factories.trace import START, batch, record, reply

ALIAS = TrainedModels("my-agent", "/models/base")


def put(conn: Connection, *replies: Reply) -> None:
    told = batch(*replies, models=ALIAS)
    record(conn, ledger.source_id(conn, "/a"), told, train_ratio=0.7, split_seed=42)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def deployed(conn: Connection, adapter: str | None, requested: float, active: float | None) -> None:
    conn.execute(
        insert(schema.deployments).values(
            alias="my-agent",
            endpoints=[],
            adapter=adapter,
            state=(DeploymentState.RETIRED if active is not None else DeploymentState.FAILED).value,
            reason="test",
            created_at=at(requested),
            activated_at=None if active is None else at(active),
        )
    )


def told(conn: Connection) -> list[tuple[str, str, str]]:
    rows = conn.execute(select(schema.tasks.c.adapter, schema.tasks.c.payload).order_by(schema.tasks.c.id))
    return [
        (row.adapter, row.payload["metadata"]["adapter"], row.payload["metadata"]["adapter_source"]) for row in rows
    ]


HISTORY = [(10, ("", "history")), (100, ("my-agent@r0001", "history")), (205, ("", "")), (250, ("", "history"))]


@pytest.mark.parametrize(("began", "expected"), HISTORY)
async def test_the_deployment_history_decides_by_time(store: Store, began: int, expected: tuple[str, str]) -> None:
    def deploy(conn: Connection) -> None:
        deployed(conn, "r0001", 40, 50)
        deployed(conn, "r0002", 60, None)
        # Back to the base model, which takes ten seconds; what answered meanwhile is not known.
        deployed(conn, None, 200, 210)

    await store.write(deploy)
    await store.write(put, reply(began, model="my-agent"))
    assert await store.read(told) == [(expected[0], *expected)]


async def test_without_a_deployment_nothing_says_who_answered(store: Store) -> None:
    await store.write(put, reply(1, model="my-agent"))
    assert await store.read(told) == [("", "", "")]


@pytest.mark.parametrize(
    "values",
    [
        {"model": "my-agent", "adapter": "my-agent@r0009", "adapter_source": "id"},
        {"model": "my-agent", "adapter_source": "model"},
        {"model": "gpt-4o"},
        {"model": "/models/base"},
    ],
)
async def test_history_decides_only_where_nothing_else_does(store: Store, values: dict[str, Any]) -> None:
    await store.write(deployed, "r0001", 0, 1)
    await store.write(put, reply(100, **values))
    adapter = values.get("adapter", "")
    assert await store.read(told) == [(adapter, adapter, values.get("adapter_source", ""))]


async def test_a_reply_that_is_told_again_keeps_what_the_history_says(store: Store) -> None:
    await store.write(deployed, "r0001", 0, 1)
    await store.write(put, reply(100, model="my-agent"))
    await store.write(put, reply(100, model="my-agent", answer="another"))
    assert await store.read(told) == [("my-agent@r0001", "my-agent@r0001", "history")]
    events = select(schema.events.c.new).where(schema.events.c.new == "open")
    assert len(await store.read(lambda conn: conn.execute(events).all())) == 1
    await store.write(put, reply(100, model="my-agent", answer="another"))
    assert len(await store.read(lambda conn: conn.execute(events).all())) == 1, "what is the same changes nothing"


def test_a_request_that_a_swap_cuts_has_no_version() -> None:
    def time(seconds: float) -> datetime:
        return START + timedelta(seconds=seconds)

    known = [
        deployments.AliasVersion(time(10), time(20), "a@r1"),
        deployments.AliasVersion(time(30), time(40), "a@r2"),
    ]
    for start, end, version in (
        (0, 9, ""),
        (0, 10, None),
        (5, 45, None),
        (20, 21, None),
        (21, 29, "a@r1"),
        (35, 36, None),
        (41, 99, "a@r2"),
    ):
        assert deployments.answering(known, time(start), time(end)) == version


@pytest.mark.parametrize(
    ("end", "known"),
    [
        (None, {30: "", 150: "", 350: ""}),
        ("end_ab_test", {30: "", 150: "", 350: "my-agent@r0002"}),
        ("rollback", {30: "", 150: "", 350: "my-agent@r0001"}),
    ],
)
async def test_a_reply_during_an_ab_test_has_no_version_by_history(
    store: Store, monkeypatch: pytest.MonkeyPatch, end: str | None, known: dict[int, str]
) -> None:
    """Either version may have answered."""

    def deploy(conn: Connection) -> None:
        deployed(conn, "r0002", 10, 20)
        number = conn.execute(select(schema.deployments.c.id)).scalar_one()
        ab_test = {"other": "r0001", "share": 0.5, "salt": "s"}
        conn.execute(schema.deployments.update().values(ab_test=ab_test))
        if end == "rollback":
            deployed(conn, "r0001", 290, 300)
        if end == "end_ab_test":
            monkeypatch.setattr(transitions, "utcnow", lambda: at(300))
            deployments.end_ab_test(conn, number, "test")

    await store.write(deploy)
    for began in known:
        await store.write(put, reply(began, model="my-agent"))
    assert {began: told for began, (told, _, _) in zip(known, await store.read(told), strict=True)} == known


SYSTEM = {"role": "system", "content": "s"}
EARLIER = (SYSTEM, {"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"})


def hiding(number: int, **values: Any) -> Reply:
    return reply(number, **{"conversation_id": "c", "prompt_reason": exclusion.HIDDEN_MESSAGE, **values})


def following(number: int, **values: Any) -> Reply:
    return reply(number, **{"conversation_id": "c", "history": EARLIER, "turn": 1, **values})


def reasons(conn: Connection) -> list[tuple[str, bool, str]]:
    rows = conn.execute(select(schema.tasks.c.excluded, schema.tasks.c.payload).order_by(schema.tasks.c.started_at))
    about = [(row.excluded, row.payload["metadata"]) for row in rows]
    return [(excluded, metadata["prompt_exact"], metadata["prompt_reason"]) for excluded, metadata in about]


@pytest.mark.parametrize("together", [True, False])
async def test_a_message_that_was_hidden_in_an_earlier_turn_is_missing_in_the_later_ones(
    store: Store, together: bool
) -> None:
    turns = [hiding(1), following(2), following(3)]
    for some in [turns] if together else [[turn] for turn in turns]:
        await store.write(put, *some)
    later = ("hidden", False, exclusion.HIDDEN_EARLIER)
    assert await store.read(reasons) == [("hidden", False, exclusion.HIDDEN_MESSAGE), later, later]


@pytest.mark.parametrize(
    "other",
    [
        {"conversation_id": "another"},
        {"agent": "Another"},
        {"history": (SYSTEM,)},
        {"started_at": START, "ended_at": START},
    ],
)
async def test_what_was_hidden_from_others_is_no_matter_of_theirs(store: Store, other: dict[str, Any]) -> None:
    await store.write(put, hiding(1), following(2, **other))
    found = await store.read(reasons)
    assert ("", True, "") in found


async def test_ids_that_name_no_conversation_link_nothing(store: Store) -> None:
    await store.write(put, hiding(1, conversation_id="unknown"), following(2, conversation_id="unknown"))
    assert (await store.read(reasons))[1] == ("", True, "")


async def test_other_models_are_no_part_of_acceptance_by_adapter(store: Store) -> None:
    told = [
        reply(1, model="my-agent"),
        reply(2, model="helper-model"),
        reply(3, model="helper-model", adapter="helper@r1"),
        reply(4, model="my-agent", adapter="my-agent@r0001", adapter_source="id"),
        reply(5, model="gpt-4o"),
        reply(6, model=""),
        # The base model answered, whatever the request called it.
        reply(7, model="any-name", adapter="", adapter_source="id"),
    ]
    await store.write(put, *told)
    found, others = await store.read(acceptance.by_adapter, ALIAS)
    assert {entry.adapter: entry.other for entry in found} == {"": 2, "my-agent@r0001": 1, "unrecorded": 1}
    assert others == {"helper-model": 2, "gpt-4o": 1}
    named = await store.read(lambda conn: [*conn.execute(select(task_list.ADAPTER, task_list.MODEL))])
    assert ("base", "base") in [tuple(row) for row in named]
