"""Lists of tasks in each order: pages together have each task exactly once, in order."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, select

from flywheel.records.states import TaskState
from flywheel.records.verdict import CriterionResult, Outcome, Verdict
from flywheel.store import ledger, verdicts
from flywheel.store.kernel import schema
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import move
from flywheel.store.views import task_list
from flywheel.store.views.task_list import Order, Position
from tests.factories.trace import batch, record, reply
from tests.factories.verdict import settle, undecided

SCORES = st.sampled_from([None, 0.0, 0.1, 0.1 + 0.2, 0.5, 2 / 3, 1.0]) | st.floats(0, 1)


def put(conn: Connection, scores: list[float | None], earlier: list[float]) -> None:
    """A task for each score; None is undecided, or not judged. Some have an earlier verdict with another score."""
    replies = [reply(number) for number in range(len(scores))]
    record(conn, ledger.source_id(conn, "/a"), batch(*replies), train_ratio=0.5, split_seed=1)
    ids = conn.execute(select(schema.tasks.c.id).order_by(schema.tasks.c.id)).scalars().all()
    for place, (task, score) in enumerate(zip(ids, scores, strict=True)):
        result = (CriterionResult("correct", "yes", 1.0, place % 2 == 0),)
        if place < len(earlier):
            verdicts.store(conn, task, Verdict(Outcome.ACCEPTED, earlier[place], result), "earlier", "judge")
        if score is None and place % 2:
            continue
        move(conn, task, TaskState.PENDING, TaskState.JUDGING)
        found = undecided() if score is None else Verdict(Outcome.REJECTED, score, result)
        settle(conn, task, found, "rubric", "judge", 60.0)


def pages(conn: Connection, order: Order, limit: int, wanted: task_list.Conditions, seconds: float) -> list[Any]:
    found: list[Any] = []
    at: Position | None = None
    while True:
        rows, at = task_list.search(conn, wanted, limit, at, seconds, order)
        assert len(rows) <= limit
        found += rows
        if at is None:
            return found
        at = Position.parse(str(at))


@pytest.mark.slow
@given(
    scores=st.lists(SCORES, max_size=25),
    earlier=st.lists(st.floats(0, 1), max_size=6),
    order=st.sampled_from(Order),
    limit=st.integers(1, 7),
    step=st.integers(1, 9),
    is_narrow=st.booleans(),
    is_hasty=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_pages_visit_each_task_exactly_once_in_order(
    scores: list[float | None],
    earlier: list[float],
    order: Order,
    limit: int,
    step: int,
    is_narrow: bool,
    is_hasty: bool,
) -> None:
    """Whatever the size of a page, the part that one statement looks at, and the time that a search has."""

    async def visit() -> tuple[list[Any], list[Any]]:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(task_list, "_FIRST_STEP", step)
            patch.setattr(task_list, "_LONGEST_STEP", 2 * step)
            store = await Store.open(Path(folder))
            try:
                await store.write(put, scores, earlier)
                wanted = task_list.conditions(criterion="correct") if is_narrow else []
                seconds = 0.0 if is_hasty else float("inf")
                return await store.read(pages, order, limit, wanted, seconds), list(
                    await store.read(task_list.listed, wanted)
                )
            finally:
                await store.close()

    found, every = asyncio.run(visit())

    def key(row: Any) -> tuple[Any, ...]:
        if order in (Order.NEWEST, Order.OLDEST):
            return (row.id if order is Order.OLDEST else -row.id,)
        if row.score is None:
            return (True, -row.id)
        return (False, row.score, row.id) if order is Order.LOWEST else (False, -row.score, -row.id)

    assert [row.id for row in found] == [row.id for row in sorted(every, key=key)]
    if not is_narrow:
        assert len(found) == len(scores)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1:", "1:nan", "1:inf", "1:-0.5", "1" * 19, "1:0.5:2", "١", "1:1e999999"]
)
def test_a_place_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no place in a list"):
        Position.parse(text)


@given(st.builds(Position, st.integers(0, 10**17), st.none() | st.floats(0, 1)))
def test_a_place_is_read_as_it_was_written(place: Position) -> None:
    assert Position.parse(str(place)) == place


async def test_a_list_by_score_reads_an_index(tmp_path: Path) -> None:
    """The first page of 100,000 tasks sorts nothing: it reads the index of scores."""
    store = await Store.open(tmp_path)

    def plan(conn: Connection) -> str:
        place = schema.verdicts.c.score, schema.verdicts.c.task_id
        query = select(*place).where(place[0].is_not(None)).order_by(*place).limit(1).offset(500)
        compiled = query.compile(conn, compile_kwargs={"literal_binds": True})
        return str(conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {compiled}").all())

    try:
        found = await store.read(plan)
        assert "verdicts_by_score" in found and "TEMP B-TREE" not in found
    finally:
        await store.close()
