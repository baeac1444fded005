"""Requests: each is carried out once, whole or not at all, and says who asked for it."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, insert, select

from flywheel.records.states import RequestState, TaskState
from flywheel.store import dead_letters, labels, requests
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.requests import RequestKind
from tests.factories.verdict import put_tasks


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(schema.tasks.c.key).order_by(schema.tasks.c.id)).scalars())


def break_tasks(conn: Connection, *wanted: str) -> None:
    """Dead tasks with their letters."""
    for key in wanted:
        conn.execute(schema.tasks.update().where(schema.tasks.c.key == key).values(state=TaskState.DEAD.value))
        dead_letters.dead_letter(conn, dead_letters.TASK, key, "it broke a filter")


async def test_a_label_is_stored_with_its_request(store: Store) -> None:
    await store.write(put_tasks, 3, 1)
    first = (await store.read(keys))[0]
    number = await store.write(requests.submit, RequestKind.LABEL, {"task_id": first, "label": "accept"}, "alice")
    found = await store.read(requests.with_id, number)
    assert (found.state, found.requested_by, found.result) == (RequestState.DONE, "alice", {"label": 1})
    [opinion] = await store.read(labels.listed)
    assert (opinion.task_id, opinion.labelled_by, opinion.label) == (first, "alice", "accept")


async def test_a_retry_waits_and_is_done_once(store: Store) -> None:
    await store.write(put_tasks, 3, 1)
    first, second, *_ = await store.read(keys)
    await store.write(break_tasks, first, second)
    number = await store.write(requests.submit, RequestKind.RETRY, {"ids": [1]}, "alice")
    assert (await store.read(requests.with_id, number)).state is RequestState.OPEN
    assert await store.write(requests.carry_out) == 1
    assert await store.write(requests.carry_out) == 0
    found = await store.read(requests.with_id, number)
    assert found.state is RequestState.DONE
    assert found.result == {"retried": [{"id": 1, "kind": "task", "subject": first, "next": "judged"}]}
    history = await store.read(dead_letters.history_of, 1)
    assert [each["state"] for each in history] == ["open", "retried"]
    assert await store.read(dead_letters.count) == {"open": 1, "retried": 1, "dropped": 0}


async def test_what_fails_changes_nothing_and_keeps_its_error(store: Store) -> None:
    await store.write(put_tasks, 3, 1)
    await store.write(break_tasks, (await store.read(keys))[0])
    number = await store.write(requests.submit, RequestKind.RETRY, {"ids": [1, 7]}, "alice")
    good = await store.write(requests.submit, RequestKind.RETRY, {"ids": None}, "bob")
    await store.write(requests.carry_out)
    found = await store.read(requests.with_id, number)
    assert found.state is RequestState.FAILED
    assert "cannot find dead letter 7: there is no such number" in str(found.error)
    # The other one is carried out all the same.
    assert (await store.read(requests.with_id, good)).result["retried"][0]["id"] == 1


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("fly", {}), ("retry", {}), ("label", {"task_id": "t"}), ("label", {"task_id": "t", "label": "maybe"})],
)
async def test_what_nobody_understands_fails(store: Store, kind: str, arguments: dict[str, str]) -> None:
    def ask(conn: Connection) -> None:
        row = {"kind": kind, "arguments": arguments, "requested_by": "x", "state": "open", "created_at": utcnow()}
        conn.execute(insert(schema.requests).values(**row))

    await store.write(ask)
    await store.write(requests.carry_out)
    query = select(schema.requests.c.state, schema.requests.c.error)
    state, error = await store.read(lambda conn: tuple(conn.execute(query).one()))
    assert state == "failed"
    assert error.startswith("cannot carry out request 1: it is not understood")
    assert await store.read(lambda conn: len(conn.execute(select(schema.labels)).all())) == 0


async def test_a_drop_says_who_closed_the_letter(store: Store) -> None:
    await store.write(put_tasks, 3, 1)
    await store.write(break_tasks, (await store.read(keys))[0])
    await store.write(requests.submit, RequestKind.DROP, {"ids": None}, "alice")
    assert (await store.read(dead_letters.history_of, 1))[-1]["detail"] == "by alice"


async def test_new_requests_are_told_with_their_kinds(store: Store) -> None:
    assert await store.read(requests.since, 0) == (0, frozenset())
    await store.write(requests.submit, RequestKind.RETRY, {"ids": None}, "alice")
    await store.write(requests.submit, RequestKind.DROP, {"ids": None}, "alice")
    assert await store.read(requests.since, 0) == (2, frozenset({RequestKind.RETRY, RequestKind.DROP}))
    assert await store.read(requests.since, 1) == (2, frozenset({RequestKind.DROP}))
    assert await store.read(requests.since, 2) == (2, frozenset())


async def test_recent_ones_are_told_without_their_results(store: Store) -> None:
    await store.write(put_tasks, 3, 1)
    await store.write(break_tasks, *(await store.read(keys))[:2])
    await store.write(requests.submit, RequestKind.RETRY, {"ids": [9]}, "alice")
    await store.write(requests.submit, RequestKind.DROP, {"ids": None}, "bob")
    await store.write(requests.submit, RequestKind.RETRY, {"ids": None}, "carol")
    await store.write(lambda conn: requests.submit(conn, RequestKind.LABEL, {}, "dave"))
    found = await store.read(requests.recent, (RequestKind.RETRY, RequestKind.DROP), 3)
    assert [(each.requested_by, each.state, units) for each, units in found] == [
        ("carol", "open", 0),
        ("bob", "done", 2),
        ("alice", "open", 0),
    ]
    await store.write(requests.carry_out)
    [(newest, _), _, (oldest, _)] = await store.read(requests.recent, (RequestKind.RETRY, RequestKind.DROP), 3)
    assert newest.error is None and "cannot find dead letter 9" in str(oldest.error)
