"""A long history on its way: converted here or in a process, it arrives in order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from flywheel.config import Config, parse
from flywheel.errors import SourceError, StudioError
from flywheel.records.task import Batch, joined
from flywheel.records.trace import Cursor
from flywheel.sources import studio_connector
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.spans import extraction_process
from flywheel.sources.studio import database
from flywheel.sources.studio import reader as reading
from flywheel.sources.studio.reader import BATCH_ROWS, UNCOMMITTED
from flywheel.sources.studio_connector import JOINED_BATCHES, QUEUED_BATCHES, StudioConnector
from flywheel.store import checkpoints, ledger
from flywheel.store.kernel.database import Store
from tests.sources.studio.writer import (
    DATA,
    Studio,
    agent,
    chat,
    empty_like,
    insert,
    message,
    part,
    renamed,
)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is otherwise long."""
    monkeypatch.setattr(database, "PAGE_ROWS", 10)
    monkeypatch.setattr(database, "HOLD_SECONDS", 60.0)
    monkeypatch.setattr(reading, "BATCH_ROWS", 20)
    monkeypatch.setattr(reading, "NEAR_ROWS", 5)
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 40)
    monkeypatch.setattr(studio_connector, "JOINED_BATCHES", 1)


def config_of(path: Path, folder: Path) -> Config:
    return parse({"state": {"dir": "state"}, "sources": [{"path": str(path)}]}, "the test's", folder)


@pytest.fixture
async def connector(store: Store, tmp_path: Path) -> AsyncIterator[StudioConnector]:
    path = DATA / "new_v2.sqlite"
    connector = StudioConnector(path, config_of(path, tmp_path), store)
    yield connector
    await connector.close()


async def batches_of(connector: StudioConnector) -> list[Batch]:
    batches = [batch async for batch in connector.read(1, Cursor(), final=True)]
    connector.forget()
    return batches


def test_uncommitted_checkpoints_cover_what_is_read_ahead() -> None:
    # Batches that are being stored, queued, about to be queued and being read.
    assert (JOINED_BATCHES + QUEUED_BATCHES + 2) * BATCH_ROWS <= UNCOMMITTED


@pytest.mark.slow
async def test_whoever_extracts_the_batches_are_the_same(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 10**9)
    here = await batches_of(connector)
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 40)
    for sent in (0, 1, 10**9):
        monkeypatch.setattr(studio_connector, "SENT_BATCHES", sent)
        assert await batches_of(connector) == here
    cursors = [batch.cursor.rowid for batch in here if batch.cursor is not None]
    assert cursors == [*range(20, 247, 20), 247]
    assert sum(len(batch.entries) for batch in here) == 105


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 5, 100])
async def test_what_is_stored_together_is_what_would_be_stored_one_by_one(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    alone = await batches_of(connector)
    monkeypatch.setattr(studio_connector, "JOINED_BATCHES", steps)
    together = await batches_of(connector)
    assert len(alone) == 13
    assert together == [joined(alone[start : start + steps]) for start in range(0, 13, steps)]
    assert sum(len(batch.entries) for batch in together) == 105
    assert together[-1].cursor == alone[-1].cursor


@pytest.mark.slow
async def test_a_source_that_fails_on_the_way_loses_nothing_of_what_was_read(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await batches_of(connector)
    monkeypatch.setattr(studio_connector, "JOINED_BATCHES", 100)
    read = connector.reader._next_rows
    left = iter(range(4))

    def pages(*args: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise StudioError("read it", "it is gone")
        return read(*args, **options)

    monkeypatch.setattr(connector.reader, "_next_rows", pages)
    stored: list[Batch] = []
    with pytest.raises(StudioError, match="it is gone"):
        async for batch in connector.read(1, Cursor(), final=True):
            stored.append(batch)
    assert stored == [joined(whole[:4])]


@pytest.mark.slow
async def test_a_process_that_dies_ends_the_pass_and_the_next_goes_on(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "SENT_BATCHES", 10**9)
    whole = await batches_of(connector)
    stored: list[Batch] = []
    with pytest.raises(StudioError, match="has died"):
        async for batch in connector.read(1, Cursor(), final=True):
            stored.append(batch)
            if len(stored) == 2:
                assert connector.process is not None
                os.kill(connector.process.pid, signal.SIGKILL)
    assert connector.process is None
    assert stored == whole[: len(stored)], "a whole prefix"
    cursor = stored[-1].cursor
    assert cursor is not None and cursor.rowid < 247
    assert await batches_of(connector) == whole


async def test_a_pass_that_is_left_leaves_no_process(connector: StudioConnector) -> None:
    async with aclosing(connector.read(1, Cursor(), final=True)) as batches:
        async for batch in batches:
            if batch.cursor is not None and batch.cursor.rowid >= 60:
                break
        child = connector.process and connector.process.pid
    assert child is not None and connector.process is None
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.slow
async def test_a_process_that_hangs_holds_up_nobody_who_leaves(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "SENT_BATCHES", 10**9)
    monkeypatch.setattr(studio_connector, "QUEUED_BATCHES", 3)
    stopped = asyncio.Event()

    async def read() -> None:
        async with aclosing(connector.read(1, Cursor(), final=True)) as batches:
            async for _ in batches:
                if (child := connector.process) is not None and not stopped.is_set():
                    os.kill(child.pid, signal.SIGSTOP)
                    stopped.set()

    reading = asyncio.create_task(read())
    await stopped.wait()
    # By now the reader's thread waits for room to ask.
    done, _ = await asyncio.wait((reading,), timeout=1)
    assert not done
    reading.cancel()
    done, _ = await asyncio.wait((reading,), timeout=60)
    assert done and reading.cancelled() and connector.process is None


async def test_a_trace_that_is_met_again_in_a_first_pass_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint was stored in this very pass, long enough ago that only the ledger remembers it."""
    monkeypatch.setattr(reading, "UNCOMMITTED", 1)
    asked = [message("system", part("s")), message("user", part("q"))]
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(
        agent("a1", "q", "a", trace="again", ended=3),
        *(agent(f"b{number}", trace=f"other {number}") for number in range(200)),
        chat("late", asked, "a", parent="a1", trace="again", ended=2),
        *(agent(f"c{number}", trace=f"more {number}") for number in range(30)),
    )
    store = await Store.open(tmp_path / "state")
    ingestion = Ingestion(store, config_of(studio.path, tmp_path))
    (source,) = ingestion.sources()
    report = await source.read(final=True)
    assert (report.counts.replies, report.counts.dead, report.error) == (231, 0, None)
    remembered = await store.read(checkpoints.checkpoints_of, report.source_id, ["again"])
    assert (remembered["again"].rowids, remembered["again"].is_open) == ((1, 202), False)
    await ingestion.close()
    await store.close()


async def test_large_rows_are_not_read_far_ahead(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many steps as of small rows would be a hundred times the memory."""
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 10**9)
    monkeypatch.setattr(studio_connector, "QUEUED_BYTES", 50_000)
    monkeypatch.setattr(database, "PAGE_ROWS", 1)
    monkeypatch.setattr(reading, "BATCH_ROWS", 1)
    monkeypatch.setattr(reading, "NEAR_ROWS", 1)
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*(agent(f"a{number}", "q", "x" * 10_000, trace=f"t{number}") for number in range(30)))
    connector = StudioConnector(studio.path, config_of(studio.path, tmp_path), store)
    batches = connector.read(1, Cursor(), final=True)
    told = 0
    async for batch in batches:
        told += len(batch.entries)
        # Until the reader waits.
        read = -1
        while read < connector.progress.read:
            read = connector.progress.read
            await connector.in_thread(lambda: None)
            await asyncio.sleep(0)
        assert read - told <= 5, "a line is longer than 10,000 bytes"
    assert told == 30
    await connector.close()


@pytest.mark.slow
async def test_many_long_histories_have_few_processes_and_all_of_them_end(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon may begin with fifty of them."""
    made: list[int] = []
    at_once: list[int] = []

    class Counted(extraction_process.ExtractionProcess):
        def __init__(self) -> None:
            super().__init__()
            made.append(self.pid)
            at_once.append(len(made))

        def close(self) -> None:
            super().close()
            made.remove(self.pid)

    monkeypatch.setattr(studio_connector, "ExtractionProcess", Counted)
    paths = [tmp_path / f"{number}.sqlite" for number in range(6)]
    for number, path in enumerate(paths):
        empty_like("new_v2", path)
        insert(path, renamed("new_v2", number))
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(path)} for path in paths]}, "t", tmp_path)
    ingestion = Ingestion(store, config)
    reports = await asyncio.gather(*(source.read(final=True) for source in ingestion.sources()))
    await ingestion.close()
    assert [(report.counts.replies, report.error) for report in reports] == [(105, None)] * 6
    assert 1 <= max(at_once) <= 2
    assert made == []
    assert ingestion._shares.budget.used == 0


async def test_long_histories_take_turns_and_a_short_pass_waits_for_none(store: Store, tmp_path: Path) -> None:
    """A pass that waits for its turn ends when everything is to end, and goes on with the next one."""
    short = Studio(tmp_path / "short.sqlite")
    short.write(agent("a1", "q", "a"))
    sources = [{"path": str(DATA / "new_v2.sqlite")}, {"path": str(short.path)}]
    ingestion = Ingestion(store, parse({"state": {"dir": "state"}, "sources": sources}, "the test's", tmp_path))
    long, quick = ingestion.sources()
    turns = ingestion._shares.turns
    for _ in range(4):
        await turns.acquire()
    stop = asyncio.Event()
    reading = asyncio.create_task(long.read(final=True, stop=stop))
    report = await asyncio.wait_for(quick.read(final=True, stop=stop), 60)
    assert (report.counts.replies, report.error) == (1, None)
    while long.connector.progress.read < 20:
        await asyncio.sleep(0)
    stop.set()
    report = await asyncio.wait_for(reading, 60)
    assert report.error is None
    assert report.counts.replies < 105
    for _ in range(4):
        turns.release()
    report = await asyncio.wait_for(long.read(final=True), 60)
    assert (report.counts.replies, report.error) == (105, None)
    assert ingestion._shares.budget.used == 0
    await ingestion.close()


async def test_rows_are_compared_with_their_checkpoints_unless_all_of_them_have_just_been_read(
    store: Store, tmp_path: Path
) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(agent("a1", "q", "a"))
    due = []
    for _ in range(2):
        ingestion = Ingestion(store, config_of(studio.path, tmp_path))
        (source,) = ingestion.sources()
        report = await source.read(final=True)
        assert (report.counts.replies, report.error) == (1, None)
        due.append(source.rescan_at < math.inf)
        await ingestion.close()
    assert due == [False, True]


async def test_damage_that_only_a_full_scan_meets_is_the_condition_of_the_source(
    store: Store, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{name}.sqlite" for name in ("damaged", "whole")]
    for path in paths:
        Studio(path).write(
            *(agent(f"a{number}", f"What is {number}? " * 30, trace=str(number)) for number in range(20))
        )
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(path)} for path in paths]}, "t", tmp_path)
    ingestion = Ingestion(store, config, export_tasks=False)

    async def conditions() -> list[str]:
        return [source.condition for source in await store.read(ledger.all_sources)]

    assert [report.error for report in await ingestion.run(final=True)] == [None, None]
    good = paths[0].read_bytes()
    at = good.index(b"What is 10?") // 4096 * 4096
    paths[0].write_bytes(good[:at] + bytes(4096) + good[at + 4096 :])
    damaged, whole = await ingestion.run(final=True, sweep=True)
    assert isinstance(damaged.error, SourceError) and damaged.error.condition == "damaged" and whole.error is None
    assert await conditions() == ["damaged", "ok"]
    assert (await ingestion.sources()[0].read()).error is None, "nothing new is to be read"
    assert await conditions() == ["damaged", "ok"], "its rows cannot be read all the same"
    paths[0].write_bytes(good)
    assert [report.error for report in await ingestion.run(final=True, sweep=True)] == [None, None]
    assert await conditions() == ["ok", "ok"]
    await ingestion.close()
