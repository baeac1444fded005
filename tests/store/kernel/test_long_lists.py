"""Lists of numbers of any length, on a SQLite that takes 999 values in one statement, as its older builds do."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, select

from flywheel.store import dead_letters, ledger, rounds, task_file
from flywheel.store.kernel.bulk import CHUNK
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.views import task_list
from tests.factories.trace import batch, record, reply

COUNT = 2 * CHUNK + 100
OLD_LIMIT = 999


def put(conn: Connection) -> None:
    told = batch(*(reply(number) for number in range(COUNT)))
    record(conn, ledger.source_id(conn, "/a"), told, train_ratio=0.7, split_seed=42)
    for number in range(COUNT):
        dead_letters.dead_letter(conn, "row", f"s{number}", "broken")


LISTS: dict[str, Callable[[Connection, list[int]], list[Any]]] = {
    "lines of tasks": rounds.payloads,
    "tasks for export": task_list.with_verdicts,
    "dead letters": dead_letters.with_ids,
    "tasks of sources": lambda conn, ids: task_file._of_sources(conn, [*range(2, COUNT), 1]),
    "rejected tasks": lambda conn, ids: [*rounds.rejected(conn, ids), *ids],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTS)
async def test_a_list_may_be_longer_than_one_statement_takes(store: Store, name: str) -> None:
    await store.write(put)

    def found(conn: Connection) -> int:
        driver = conn.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, OLD_LIMIT)
        ids = list(conn.execute(select(tasks.c.id).order_by(tasks.c.id)).scalars())
        return len(LISTS[name](conn, ids))

    assert await store.read(found) == COUNT
