"""Duplicates in the store: what is compared with what, what is written down, and what is freed."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, func, select

from flywheel.judge.filters.deduplication import fingerprint
from flywheel.records.states import TaskState
from flywheel.store import deduplication, ledger
from flywheel.store.deduplication import ComparedTask, Repeats
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from tests.factories.trace import batch, record, reply

LONG = "one two three four five six seven eight nine ten"


def tell(conn: Connection, *queries: str) -> list[ComparedTask]:
    """Tasks 1, 2, … with these questions, all on the training side."""
    source = ledger.source_id(conn, "/a")
    told = [reply(n, query=query) for n, query in enumerate(queries)]
    record(conn, source, batch(*told), train_ratio=1.0, split_seed=42)
    rows = conn.execute(select(schema.tasks).order_by(schema.tasks.c.id)).all()
    return [ComparedTask(row.id, row.key, fingerprint(row.payload, 0.8)) for row in rows]


def near(conn: Connection, entry: ComparedTask, threshold: float = 0.8) -> list[tuple[int, float, bool, bool]]:
    (found,) = deduplication.enter(conn, [entry], threshold).values()
    return [(each.task, each.similarity, each.is_exact, each.kept) for each in found]


@pytest.mark.parametrize("at_once", [True, False])
async def test_what_is_near_is_found_within_a_batch_and_among_earlier_ones(store: Store, at_once: bool) -> None:
    def look(conn: Connection) -> None:
        entries = tell(conn, LONG, f"{LONG} eleven twelve", "another", f"{LONG} eleven", f"{LONG}!")
        found = {}
        for some in [entries] if at_once else [[entry] for entry in entries]:
            found |= deduplication.enter(conn, some, 0.8)
            deduplication.keep(conn, some)
        assert [(each.task, each.similarity) for each in found[4]] == [(2, round(11 / 12, 4)), (1, round(10 / 11, 4))]
        assert [(each.task, each.is_exact) for each in found[5]] == [(1, True), (4, False), (2, False)]
        assert found[1] == found[3] == []
        likes = conn.execute(select(schema.fingerprints.c.like).order_by(schema.fingerprints.c.task_id)).scalars()
        assert list(likes) == [1, 1, 3, 1, 1]

    await store.write(look)


async def test_only_kept_tasks_that_are_not_gone_stand_in_the_way(store: Store) -> None:
    def look(conn: Connection) -> None:
        first, second = tell(conn, LONG, LONG.upper())
        assert near(conn, first) == []
        assert near(conn, second) == [(1, 1.0, True, False)]
        deduplication.keep(conn, [first])
        assert near(conn, second) == [(1, 1.0, True, True)]
        move(conn, 1, TaskState.PENDING, TaskState.WITHDRAWN)
        assert near(conn, second) == [(1, 1.0, True, False)]
        assert near(conn, first) == []

    await store.write(look)


async def test_entering_again_keeps_what_was_decided_and_takes_a_changed_question(store: Store) -> None:
    def rows(conn: Connection) -> tuple[int, int]:
        def count(table: Any) -> int:
            return int(conn.execute(select(func.count()).select_from(table)).scalar_one())

        return count(schema.fingerprints), count(schema.fingerprint_bands)

    def look(conn: Connection) -> None:
        (entry,) = tell(conn, LONG)
        near(conn, entry)
        deduplication.keep(conn, [entry])
        before = rows(conn)
        near(conn, entry)
        deduplication.keep(conn, [entry])
        assert rows(conn) == before == (1, 16)
        payload = conn.execute(select(schema.tasks.c.payload)).scalar_one()
        other = fingerprint({**payload, "main_query": "quite another question"}, 0.8)
        near(conn, ComparedTask(1, entry.key, other))
        assert rows(conn) == (1, 16)
        exact, kept = conn.execute(select(schema.fingerprints.c.exact, schema.fingerprints.c.kept)).one()
        assert (exact, kept) == (other.exact, True)

    await store.write(look)


async def test_a_kept_task_is_found_although_it_is_like_an_earlier_one(store: Store) -> None:
    def look(conn: Connection) -> None:
        words = LONG.split()
        first = " ".join(words)
        second = " ".join([*words[1:], "eleven"])
        third = " ".join([*words[2:], "eleven", "twelve"])
        entries = tell(conn, first, second, third)
        found = deduplication.enter(conn, entries, 0.8)
        assert [each.task for each in found[2]] == [1]
        assert [each.task for each in found[3]] == [2]
        deduplication.keep(conn, entries)
        assert [task for task, *_ in near(conn, entries[2])] == [2]

    await store.write(look)


async def test_repetitions_of_a_task_that_is_rejected_are_due_again(store: Store) -> None:
    def look(conn: Connection) -> None:
        first, *rest = tell(conn, LONG, LONG.upper(), LONG.title())
        for entry in rest:
            for _ in range(2):
                deduplication.note(conn, entry.task, Repeats(1, first.key, 1.0, "exact"))
            move(conn, entry.task, TaskState.PENDING, TaskState.JUDGING)
            move(conn, entry.task, TaskState.JUDGING, TaskState.REJECTED)
        assert deduplication.free_repetitions(conn, [2]) == 0
        assert deduplication.free_repetitions(conn, [1]) == 2
        assert set(conn.execute(select(schema.tasks.c.state)).scalars()) == {"pending"}
        assert conn.execute(select(schema.duplicates)).all() == []

    await store.write(look)


async def test_a_vector_is_stored_once_per_model_and_text(store: Store) -> None:
    def look(conn: Connection) -> None:
        deduplication.store(conn, "m", {"a": b"1234", "b": b""})
        deduplication.store(conn, "m", {"a": b"other", "c": b"5678"})
        deduplication.store(conn, "n", {"a": b"9999"})
        assert deduplication.of_texts(conn, "m", ["a", "b", "c", "d"]) == {"a": b"1234", "b": b"", "c": b"5678"}
        assert deduplication.of_texts(conn, "n", ["a"]) == {"a": b"9999"}

    await store.write(look)


async def test_the_most_similar_vector_of_the_same_length_wins(store: Store) -> None:
    import numpy as np

    def vector(*values: float) -> bytes:
        made = np.array(values, dtype=np.float32)
        return (made / np.linalg.norm(made)).tobytes()

    def look(conn: Connection) -> None:
        entries = tell(conn, "alpha", "beta", "gamma", "delta", "epsilon")
        vectors = [vector(1, 0.1), vector(1, 0.4), vector(1, 0.35), vector(1, 0.3, 5), b""]
        texts = [entry.compared.text for entry in entries]
        deduplication.store(conn, "m", dict(zip(texts, vectors, strict=True)))
        deduplication.enter(conn, entries, 0.8)
        third = entries.pop(2)
        deduplication.keep(conn, entries)
        found = deduplication.nearest(conn, third, 0.8, "m", vectors[2])
        assert found is not None
        assert (found.task, found.method) == (2, "embedding")
        assert 0.99 < found.similarity <= 1
        assert deduplication.nearest(conn, third, 0.8, "m", vector(-1, 0.35)) is None
        assert deduplication.nearest(conn, third, 0.8, "another", vectors[2]) is None

    await store.write(look)
