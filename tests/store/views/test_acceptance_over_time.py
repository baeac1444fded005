"""Acceptance of adapters over time, and the intervals of its shares."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sqlalchemy import Connection, select

from flywheel.records.exclusion import TrainedModels
from flywheel.records.states import TaskState
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.kernel.transitions import move
from flywheel.store.views import acceptance
from tests.factories.trace import START, batch, record, reply
from tests.factories.verdict import accepted, rejected, settle


@given(st.integers(1, 500).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials))))
def test_intervals_are_those_of_wilson(counts: tuple[int, int]) -> None:
    expected = stats.binomtest(*counts).proportion_ci(method="wilson")
    assert acceptance.wilson(*counts) == pytest.approx((expected.low, expected.high), abs=1e-12)


async def test_each_judged_reply_of_the_alias_is_in_one_period(tmp_path: Path) -> None:
    """Adapters alternate, every third answer is accepted; another model and what is not judged do not count."""
    models = TrainedModels(alias="agent", base="base")

    def fill(conn: Connection) -> None:
        replies = [
            reply(
                number,
                started_at=START + timedelta(hours=number),
                adapter=("", "agent@r0001")[number % 2],
                model="agent",
            )
            for number in range(24)
        ]
        other = reply(100, started_at=START, model="other")
        pending = reply(101, started_at=START + timedelta(days=90))
        source = ledger.source_id(conn, "/a")
        record(conn, source, batch(*replies, other, pending), train_ratio=0.5, split_seed=1)
        numbers = conn.execute(select(tasks.c.id).order_by(tasks.c.id)).scalars().all()
        for place, number in enumerate(numbers[:-1]):
            move(conn, number, TaskState.PENDING, TaskState.JUDGING)
            settle(conn, number, rejected() if place % 3 else accepted(), "rubric", "judge", 60.0)

    store = await Store.open(tmp_path)
    try:
        assert await store.read(acceptance.over_time, models, 6) == []
        await store.write(fill)
        found = await store.read(acceptance.over_time, models, 6)
    finally:
        await store.close()
    assert {each.name for each in found} == {"", "agent@r0001"}
    assert sum(each.share.whole for each in found) == 24 and sum(each.share.part for each in found) == 8
    assert [each.begin for each in found] == sorted(each.begin for each in found)
    assert found[0].begin == START and len({each.begin for each in found}) in (6, 7)
    for each in found:
        lower, upper = each.share.interval
        assert lower <= each.share.value <= upper
