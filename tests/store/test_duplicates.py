"""Duplicates in the store: what is compared with what, what is written down, and what is freed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select

from flywheel.filtering.deduplication import Fingerprint, fingerprint
from flywheel.states import TaskState
from flywheel.store import duplicates, ledger, schema
from flywheel.store.database import Store
from flywheel.store.duplicates import Repeats
from flywheel.store.transitions import move
from tests.samples import batch, reply

LONG = "one two three four five six seven eight nine ten"


def tell(conn: Connection, *queries: str) -> list[Fingerprint]:
    """Tasks 1, 2, … with these questions, all on the training side, entered."""
    source = ledger.source_id(conn, "/a")
    told = [reply(n, query=query) for n, query in enumerate(queries)]
    ledger.record_batch(conn, source, batch(*told), train_ratio=1.0, split_seed=42)
    rows = conn.execute(select(schema.tasks).order_by(schema.tasks.c.id)).all()
    prints = [fingerprint(row.payload, 0.8) for row in rows]
    for row, print_ in zip(rows, prints, strict=True):
        duplicates.enter(conn, row.id, print_, 0.8)
    return prints


def repeated(conn: Connection, task: int, print_: Fingerprint, **values: Any) -> Repeats | None:
    given = {"threshold": 0.8, "model": None, "vector": b"", **values}
    return duplicates.repeated(conn, task, print_, given["threshold"], given["model"], given["vector"])


async def test_only_kept_tasks_are_repeated_and_the_nearest_is_named(store: Store) -> None:
    def look(conn: Connection) -> None:
        prints = tell(conn, LONG, f"{LONG} eleven twelve", f"{LONG} eleven", "another")
        assert repeated(conn, 3, prints[2]) is None
        duplicates.keep(conn, 1, prints[0])
        found = repeated(conn, 3, prints[2])
        assert found is not None
        assert (found.task, found.method, found.similarity) == (1, "words", round(10 / 11, 4))
        duplicates.keep(conn, 2, prints[1])
        nearest = repeated(conn, 3, prints[2])
        assert nearest is not None
        assert nearest.task == 2
        assert repeated(conn, 4, prints[3]) is None
        assert repeated(conn, 1, prints[0], threshold=0.9) is None

    await store.write(look)


async def test_a_task_does_not_repeat_itself_nor_one_that_is_gone(store: Store) -> None:
    def look(conn: Connection) -> None:
        prints = tell(conn, LONG, LONG.upper())
        duplicates.keep(conn, 1, prints[0])
        assert repeated(conn, 1, prints[0]) is None
        found = repeated(conn, 2, prints[1])
        assert found is not None
        assert (found.method, found.similarity) == ("exact", 1.0)
        move(conn, 1, TaskState.PENDING, TaskState.WITHDRAWN)
        assert repeated(conn, 2, prints[1]) is None

    await store.write(look)


async def test_entering_twice_changes_nothing_and_another_question_replaces_the_first(store: Store) -> None:
    def rows(conn: Connection) -> tuple[int, int]:
        def count(table: Any) -> int:
            return int(conn.execute(select(func.count()).select_from(table)).scalar_one())

        return count(schema.fingerprints), count(schema.fingerprint_bands)

    def look(conn: Connection) -> None:
        (print_,) = tell(conn, LONG)
        duplicates.keep(conn, 1, print_)
        before = rows(conn)
        duplicates.enter(conn, 1, print_, 0.8)
        duplicates.keep(conn, 1, print_)
        assert rows(conn) == before == (1, 16)
        payload = conn.execute(select(schema.tasks.c.payload)).scalar_one()
        other = fingerprint({**payload, "main_query": "quite another question"}, 0.8)
        duplicates.enter(conn, 1, other, 0.8)
        assert rows(conn)[0] == 1
        exact, kept = conn.execute(select(schema.fingerprints.c.exact, schema.fingerprints.c.kept)).one()
        assert (exact, kept) == (other.exact, True)

    await store.write(look)


async def test_the_first_that_is_alike_leads(store: Store) -> None:
    def look(conn: Connection) -> list[int]:
        tell(conn, LONG, f"{LONG} please", "another", f"so {LONG}")
        return list(
            conn.execute(select(schema.fingerprints.c.like).order_by(schema.fingerprints.c.task_id)).scalars()
        )

    assert await store.write(look) == [1, 1, 3, 1]


async def test_repetitions_of_a_task_that_is_rejected_are_due_again(store: Store) -> None:
    def look(conn: Connection) -> None:
        prints = tell(conn, LONG, LONG.upper(), LONG.title())
        duplicates.keep(conn, 1, prints[0])
        for task in (2, 3):
            found = repeated(conn, task, prints[task - 1])
            assert found is not None
            duplicates.note(conn, task, found)
            duplicates.note(conn, task, found)
            move(conn, task, TaskState.PENDING, TaskState.JUDGING)
            move(conn, task, TaskState.JUDGING, TaskState.REJECTED)
        assert duplicates.free_repetitions(conn, [2]) == 0
        assert duplicates.free_repetitions(conn, [1]) == 2
        assert set(conn.execute(select(schema.tasks.c.state)).scalars()) == {"pending"}
        assert conn.execute(select(schema.duplicates)).all() == []

    await store.write(look)


async def test_a_vector_is_stored_once_per_model_and_text(store: Store) -> None:
    def look(conn: Connection) -> None:
        duplicates.store_vectors(conn, "m", {"a": b"1234", "b": b""})
        duplicates.store_vectors(conn, "m", {"a": b"other", "c": b"5678"})
        duplicates.store_vectors(conn, "n", {"a": b"9999"})
        assert duplicates.vectors(conn, "m", ["a", "b", "c", "d"]) == {"a": b"1234", "b": b"", "c": b"5678"}
        assert duplicates.vectors(conn, "n", ["a"]) == {"a": b"9999"}

    await store.write(look)


async def test_the_most_similar_vector_of_the_same_length_wins(store: Store) -> None:
    import numpy as np

    def vector(*values: float) -> bytes:
        made = np.array(values, dtype=np.float32)
        return (made / np.linalg.norm(made)).tobytes()

    def look(conn: Connection) -> None:
        prints = tell(conn, "alpha", "beta", "gamma", "delta", "epsilon")
        vectors = [vector(1, 0.1), vector(1, 0.4), vector(1, 0.35), vector(1, 0.3, 5), b""]
        duplicates.store_vectors(conn, "m", {p.text: v for p, v in zip(prints, vectors, strict=True)})
        for task in (1, 2, 4, 5):
            duplicates.keep(conn, task, prints[task - 1])
        found = repeated(conn, 3, prints[2], model="m", vector=vectors[2])
        assert found is not None
        assert (found.task, found.method) == (2, "embedding")
        assert 0.99 < found.similarity <= 1
        assert repeated(conn, 3, prints[2], model="m", vector=vector(-1, 0.35)) is None
        assert repeated(conn, 3, prints[2], model="another", vector=vectors[2]) is None

    await store.write(look)
