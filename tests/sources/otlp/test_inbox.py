"""The inbox's transactions: whole or not at all, whoever goes away in the middle, and one at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flywheel.errors import ReceiverError
from flywheel.sources.otlp.inbox import Inbox, Row
from flywheel.sources.otlp.rows import rows_of
from tests.sources.otlp.exporting import ids, request, span


def rows(first: int, count: int) -> list[Row]:
    return list(rows_of(request(*(span(number) for number in range(first, first + count)))).accepted)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Inbox]:
    box = Inbox(tmp_path / "inbox.sqlite")
    await box.open()
    yield box
    await box.close()


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 9])
async def test_a_caller_that_goes_away_leaves_no_half_transaction(box: Inbox, turns: int) -> None:
    storing = asyncio.create_task(box.store(rows(1, 2_000)))
    for _ in range(turns):
        await asyncio.sleep(0.001)
    storing.cancel()
    await asyncio.wait([storing])
    assert ids(box.path) in ([], list(range(1, 2_001)))
    with sqlite3.connect(box.path, timeout=0) as other:
        other.execute("BEGIN IMMEDIATE")
        other.rollback()
    other.close()
    await box.store(rows(3_001, 1))
    assert ids(box.path)[-1] == 3_001


async def test_those_who_store_at_once_take_turns(box: Inbox) -> None:
    await asyncio.gather(*(box.store(rows(first, 50)) for first in range(1, 1_001, 50)))
    assert sorted(ids(box.path)) == list(range(1, 1_001))


async def test_a_transaction_that_fails_leaves_nothing(box: Inbox) -> None:
    good = rows(1, 1)
    with pytest.raises(ReceiverError, match="cannot write to the inbox"):
        await box.store([*good, good[0][:3]])
    assert ids(box.path) == []
    await box.store(good)
    assert ids(box.path) == [1]
