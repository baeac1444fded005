"""Replies at the ends of the calendar, from each kind of source, and what the pages show of them."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import Connection, select

from flywheel.config.file import Config, parse
from flywheel.daemon.status import snapshot
from flywheel.records.states import TaskState
from flywheel.sources.ingestion import Ingestion
from flywheel.store import ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.kernel.transitions import move
from flywheel.store.views import balance
from flywheel.web.server import application
from tests.factories.trace import batch, record, reply
from tests.factories.verdict import accepted, settle
from tests.sources.studio.writer import DATA

ISO = [
    "9999-12-31T23:59:59+14:00", "9999-12-31T23:59:59.999999-14:00", "9999-12-31T23:59:59Z", "9999-12-31",
    "0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "1969-12-31T23:59:59Z", "2286-11-20T17:46:40Z",
    "2026-01-01T00:00:00+99:99", "", "9" * 5_000,
]  # fmt: skip
DECIMAL = ["0", "9223372036854775807", "9223372036854775808", "9999999999999999999", "10000000000000000000",
           "-1", "1e18", "9" * 5_000, "253402300799999999999"]  # fmt: skip
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2286, 11, 21, tzinfo=UTC)


def configured(folder: Path, **source: Any) -> Config:
    return parse({"sources": [source] if source else [], "state": {"dir": "state"}}, "test", folder)


async def pages_of(config: Config, store: Store) -> None:
    """Accept every task, and look at every page."""

    def judge(conn: Connection) -> None:
        for number in conn.execute(select(tasks.c.id)).scalars().all():
            move(conn, number, TaskState.PENDING, TaskState.JUDGING)
            settle(conn, number, accepted(), "rubric", "judge", 60.0)

    await store.write(judge)
    await store.read(snapshot, config)
    app = application(config, names=frozenset({"testserver"}))
    transport = httpx2.ASGITransport(app)
    seen, wanted = set[str](), ["/"]
    async with httpx2.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as client:
        while wanted and len(seen) < 40:
            seen.add(page := wanted.pop(0))
            answer = await client.get(page)
            assert answer.status_code == 200, f"{page}: {answer.text[-2000:]}"
            found = re.findall(r'href="(/[^"#]*)"', answer.text)
            wanted += [each.replace("&amp;", "&") for each in found if each not in {*seen, *wanted}]
    assert len(seen) > 8


async def ingested(config: Config) -> tuple[Store, list[datetime], int]:
    """The state, the times of its tasks, and the number of its dead letters."""
    store = await Store.open(config.state_dir)
    reading = Ingestion(store, config)
    [report] = await reading.run(final=True)
    await reading.close()
    assert report.error is None
    assert (await store.read(balance.balance)).balanced
    found = await store.read(lambda conn: conn.execute(select(tasks.c.started_at)).scalars().all())
    return store, [datetime.fromisoformat(each) for each in found], report.counts.dead


@pytest.mark.slow
async def test_a_line_with_such_a_time_is_dated_when_it_is_read(tmp_path: Path) -> None:
    lines = [
        {"question": f"{n}?", "answer": "a", "metadata": {"started_at": at, "ended_at": at}}
        for n, at in enumerate([*ISO, *DECIMAL])
    ]
    (tmp_path / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = configured(tmp_path, type="jsonl", path="lines.jsonl")
    store, times, dead = await ingested(config)
    assert (len(times), dead) == (len(lines), 0)
    assert all(datetime.now(UTC) - timedelta(hours=1) < at < LATEST for at in times)
    await pages_of(config, store)
    await store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns", "values"),
    [
        ("old", ("startTime", "endTime"), ISO),
        ("new_v2", ("startTimeUnixNano", "endTimeUnixNano"), DECIMAL),
    ],
)
async def test_a_span_with_such_a_time_is_its_own_dead_letter(
    name: str, columns: tuple[str, str], values: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "studio.sqlite"
    shutil.copy(DATA / f"{name}.sqlite", path)
    began, ended = columns
    with sqlite3.connect(path) as database:
        traces = [trace for (trace,) in database.execute("SELECT traceId FROM span_table GROUP BY 1 ORDER BY 1")]
        for number, value in enumerate(values):
            changed = f"{began} = ?, {ended} = ?" if number % 2 else f"{ended} = ?"
            row = (value, value) if number % 2 else (value,)
            database.execute(f"UPDATE span_table SET {changed} WHERE traceId = ?", (*row, traces[number]))
    database.close()
    config = configured(tmp_path, path=str(path))
    store, times, dead = await ingested(config)
    assert len(times) > 20
    assert dead >= len(values) - 4
    assert all(EARLIEST <= at < LATEST for at in times)
    await pages_of(config, store)
    await store.close()


async def test_times_that_an_earlier_version_stored_break_no_page(tmp_path: Path) -> None:
    config = configured(tmp_path)
    store = await Store.open(config.state_dir)
    ends = [datetime.min, datetime.max, datetime(9999, 12, 31, 9, 59, 59), datetime(2026, 1, 1)]

    def fill(conn: Connection) -> None:
        told = [
            reply(n, started_at=at.replace(tzinfo=UTC), ended_at=at.replace(tzinfo=UTC)) for n, at in enumerate(ends)
        ]
        record(conn, ledger.source_id(conn, "/a"), batch(*told), train_ratio=0.5, split_seed=1)

    await store.write(fill)
    await pages_of(config, store)
    await store.close()
