"""Bursts in the store: the same ones are found in whatever order, and in however many pieces, their tasks arrive."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, select

from flywheel.judge.filters.deduplication import fingerprint
from flywheel.records.states import TaskState
from flywheel.store import deduplication, ledger
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from tests.factories.trace import START, batch, record, reply

SECONDS = 10.0
QUERY = "one two three four five six seven eight nine ten"


def in_bursts(times: Sequence[float], count: int) -> set[int]:
    """Those that share a window with enough others, by looking at every window."""
    windows = ({n for n, at in enumerate(times) if first <= at <= first + SECONDS} for first in times)
    return {n for window in windows if len(window) >= count for n in window}


def held_of(conn: Connection, pieces: Sequence[Sequence[tuple[int, float]]], count: int) -> set[int]:
    """Which of these tasks are held after all pieces have arrived, each task a number and a time."""
    source = ledger.source_id(conn, "/a")
    for piece in pieces:
        told = [
            reply(n, query=QUERY, started_at=START + timedelta(seconds=at), ended_at=START + timedelta(seconds=at))
            for n, at in piece
        ]
        before = {row.id for row in conn.execute(select(schema.tasks.c.id))}
        record(conn, source, batch(*told), train_ratio=1.0, split_seed=42)
        rows = [row for row in conn.execute(select(schema.tasks).order_by(schema.tasks.c.id)) if row.id not in before]
        entries = [deduplication.ComparedTask(row.id, row.key, fingerprint(row.payload, 0.8)) for row in rows]
        near = deduplication.enter(conn, entries, 0.8)
        deduplication.hold_bursts(conn, [task for task, others in near.items() if others], count, SECONDS)
    query = select(schema.tasks.c.payload).where(schema.tasks.c.state == TaskState.HELD.value)
    return {int(line["metadata"]["span_id"].removeprefix("span")) for line in conn.execute(query).scalars()}


async def test_a_burst_that_joins_two_others_holds_both(store: Store) -> None:
    # Those before and after had come already, and each is within the time of the last one only.
    def look(conn: Connection) -> set[int]:
        return held_of(conn, [[(0, 18.0), (1, 19.0)], [(2, 0.0), (3, 5.0), (4, 9.0)]], 3)

    assert await store.write(look) == {0, 1, 2, 3, 4}


QUARTERS = st.integers(0, 240).map(lambda n: n / 4)
PIECES = st.lists(st.lists(QUARTERS, max_size=5), min_size=1, max_size=5)


@pytest.mark.slow
@given(pieces=PIECES, count=st.integers(2, 5))
@example(pieces=[[18.0, 19.0], [0.0, 5.0, 9.0]], count=3)
@example(pieces=[[0.0, 1.0], [18.0, 14.0, 9.0]], count=3)
@settings(max_examples=40, deadline=None)
def test_the_same_bursts_are_found_in_whatever_order_and_pieces(pieces: list[list[float]], count: int) -> None:
    flat = [at for piece in pieces for at in piece]
    numbers = iter(range(len(flat)))
    numbered = [[(next(numbers), at) for at in piece] for piece in pieces]
    engine = create_engine("sqlite://")
    with engine.begin() as conn:
        schema.metadata.create_all(conn)
        assert held_of(conn, numbered, count) == in_bursts(flat, count)
    engine.dispose()
