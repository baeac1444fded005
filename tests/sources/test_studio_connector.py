"""A long history on its way: converted here or in a process, it arrives in order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

from flywheel.config.file import Config, parse
from flywheel.errors import SourceError, StudioError
from flywheel.records.task import Batch, joined
from flywheel.records.trace import Cursor
from flywheel.sources import studio_connector
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.studio import database, extraction, workers
from flywheel.sources.studio import reader as reading
from flywheel.sources.studio.extraction import Extraction, TraceExtractor
from flywheel.sources.studio.reader import BATCH_ROWS, COMPLETE_ROWS, UNCOMMITTED
from flywheel.sources.studio.workers import TURNS, Workers
from flywheel.sources.studio_connector import STEPS_AHEAD, StudioConnector
from flywheel.store import checkpoints, ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import replies
from flywheel.system.signals import Stop, StopReason
from tests.sources.studio.writer import (
    DATA,
    RENUMBER,
    Studio,
    agent,
    chat,
    empty_like,
    execute,
    expected_skip,
    insert,
    labels,
    message,
    part,
    renamed,
    rows,
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


def processes() -> list[psutil.Process]:
    """The workers of this process."""
    return [each for each in psutil.Process().children() if "studio.workers" in " ".join(each.cmdline())]


def test_uncommitted_checkpoints_cover_what_is_read_ahead() -> None:
    # Steps that are under way or being stored, and the one that is scanned.
    assert (STEPS_AHEAD + 1) * max(BATCH_ROWS, COMPLETE_ROWS) <= UNCOMMITTED


@pytest.mark.slow
async def test_whoever_extracts_the_batches_are_the_same(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 10**9)
    here = await batches_of(connector)
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 40)
    for most in (1, STEPS_AHEAD):
        monkeypatch.setattr(studio_connector, "STEPS_AHEAD", most)
        assert await batches_of(connector) == here
    cursors = [batch.cursor.rowid for batch in here if batch.cursor is not None]
    assert cursors == [*range(20, 247, 20), 247]
    assert sum(len(batch.entries) for batch in here) == 105


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2, 5, STEPS_AHEAD])
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
    monkeypatch.setattr(studio_connector, "STEPS_AHEAD", 2)
    whole = await batches_of(connector)
    stored: list[Batch] = []
    with pytest.raises(StudioError, match="has died"):
        async for batch in connector.read(1, Cursor(), final=True):
            stored.append(batch)
            if len(stored) == 2:
                for process in processes():
                    os.kill(process.pid, signal.SIGKILL)
    assert processes() == []
    assert stored == whole[: len(stored)], "a whole prefix"
    cursor = stored[-1].cursor
    assert cursor is not None and cursor.rowid < 247
    assert await batches_of(connector) == whole


async def test_a_pass_that_is_left_leaves_no_process(connector: StudioConnector) -> None:
    async with aclosing(connector.read(1, Cursor(), final=True)) as batches:
        async for batch in batches:
            if batch.cursor is not None and batch.cursor.rowid >= 60:
                break
        assert processes()
    assert processes() == []


@pytest.mark.slow
async def test_a_process_that_hangs_holds_up_nobody_who_leaves(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "STEPS_AHEAD", 2)
    stopped = asyncio.Event()

    async def read() -> None:
        async with aclosing(connector.read(1, Cursor(), final=True)) as batches:
            async for _ in batches:
                if not stopped.is_set():
                    for process in processes():
                        os.kill(process.pid, signal.SIGSTOP)
                    stopped.set()

    reading = asyncio.create_task(read())
    await stopped.wait()
    done, _ = await asyncio.wait((reading,), timeout=1)
    assert not done
    reading.cancel()
    done, _ = await asyncio.wait((reading,), timeout=60)
    assert done and reading.cancelled() and processes() == []


async def test_a_trace_that_is_met_again_in_a_first_pass_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint was stored in this very pass, long enough ago that only the ledger remembers it."""
    monkeypatch.setattr(reading, "UNCOMMITTED", 1)
    monkeypatch.setattr(studio_connector, "STEPS_AHEAD", 2)
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


@pytest.mark.parametrize("is_long", [False, True])
async def test_large_rows_are_not_extracted_far_ahead(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """As many steps as of small rows would be a hundred times the memory."""
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 1 if is_long else 10**9)
    monkeypatch.setattr(studio_connector, "STEPS_AHEAD", 2)
    monkeypatch.setattr(extraction, "MAX_BYTES", 50_000)
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*(agent(f"a{number}", "q", "x" * 10_000, trace=f"t{number}") for number in range(60)))
    connector = StudioConnector(studio.path, config_of(studio.path, tmp_path), store, workers=Here())
    extracted = 0
    extract = TraceExtractor.extract

    def counted(self: TraceExtractor, traces: Any) -> Extraction:
        nonlocal extracted
        done = extract(self, traces)
        extracted += done.count
        assert done.count < 5
        return done

    monkeypatch.setattr(TraceExtractor, "extract", counted)
    told = 0
    async for batch in connector.read(1, Cursor(), final=True):
        told += len(batch.entries)
        await asyncio.sleep(0.05)
        assert extracted - told <= 12
        # Five of each step are near its end, and handed on in the next one.
        assert (batch.cursor is None) == (told not in (15, 35, 55, 60)), "no cursor passes what is to come"
    assert told == 60
    await connector.close()


class Here(Workers):
    """Extracts in a thread of this process."""

    def extract(self, request: workers.ExtractionRequest, is_left: threading.Event) -> Future[Extraction]:
        of = (request.source, request.file, request.scan, request.schema, request.selection, request.calls)
        return self._threads.submit(lambda: workers._extractor_of(*of).extract(request.traces))


@pytest.mark.slow
async def test_many_long_histories_have_few_processes_and_all_of_them_end(store: Store, tmp_path: Path) -> None:
    """A daemon may begin with fifty of them."""
    paths = [tmp_path / f"{number}.sqlite" for number in range(6)]
    for number, path in enumerate(paths):
        empty_like("new_v2", path)
        insert(path, renamed("new_v2", number))
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(path)} for path in paths]}, "t", tmp_path)
    ingestion = Ingestion(store, config)
    reading = asyncio.gather(*(source.read(final=True) for source in ingestion.sources()))
    at_once = [0]
    while not reading.done():
        at_once.append(len(processes()))
        await asyncio.sleep(0.02)
    reports = await reading
    await ingestion.close()
    assert [(report.counts.replies, report.error) for report in reports] == [(105, None)] * 6
    assert 1 <= max(at_once) <= 2
    assert processes() == []


@pytest.mark.parametrize("is_long", [False, True])
async def test_rows_that_are_renumbered_beside_a_writer_in_mid_pass_are_all_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """Between the scan of a trace and the reading of its rows."""
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 1 if is_long else 10**9)
    path = tmp_path / "studio.sqlite"
    Studio(path).write(*(agent(f"gone{number}", trace=f"gone{number}") for number in range(30)))
    insert(path, rows("new_v2"))
    calls = 0
    extracted = StudioConnector._extracted

    async def disturbed(self: StudioConnector, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (4, 9):
            execute(path, f"DELETE FROM span_table WHERE id LIKE 'gone{calls % 3}%'", *RENUMBER)
        Studio(path).write(agent(f"new{calls}", trace=f"new{calls}"))
        return await extracted(self, *args, **options)

    monkeypatch.setattr(StudioConnector, "_extracted", disturbed)
    ingestion = Ingestion(store, config_of(path, tmp_path))
    (source,) = ingestion.sources()
    report = await source.read(final=True)
    assert (report.error, report.counts.dead) == (None, 0)
    monkeypatch.setattr(StudioConnector, "_extracted", extracted)
    report = await source.read(final=True)
    assert calls > 9
    names = set(await store.read(lambda conn: conn.execute(select(replies.c.span_id)).scalars().all()))
    told = {label["span_id"] for label in labels("new_v2") if label["span_in_db"]}
    assert told <= names and {f"new{number}" for number in range(1, calls + 1)} <= names
    assert report.counts.replies == len(names) == 105 + calls + sum(name.startswith("gone") for name in names)
    assert report.counts.skipped == {
        reason: count for reason, count in Counter(map(expected_skip, labels("new_v2"))).items() if reason
    }
    await ingestion.close()


async def test_a_full_scan_goes_on_behind_rows_that_are_deleted_meanwhile(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = Studio(tmp_path / "studio.sqlite")
    studio.write(*(agent(f"a{number}", f"What is {number}?", trace=f"t{number}") for number in range(90)))
    ingestion = Ingestion(store, config_of(studio.path, tmp_path))
    (source,) = ingestion.sources()
    assert (await source.read(final=True)).counts.replies == 90
    execute(studio.path, "UPDATE span_table SET attributes = replace(attributes, 'What is 88', 'Why 88')")
    extracted = StudioConnector._extracted

    async def disturbed(self: StudioConnector, *args: Any) -> Any:
        execute(studio.path, "DELETE FROM span_table WHERE id = 'a3'")
        return await extracted(self, *args)

    monkeypatch.setattr(StudioConnector, "_extracted", disturbed)
    assert (await source.rescan(whole=True, throttled=False)).re_extracted == 1
    assert (await source.read(final=True)).counts.replies == 90
    await ingestion.close()


async def test_rows_that_move_whenever_they_are_read_are_an_error(
    connector: StudioConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 10**9)
    moved = Extraction(Batch(None))
    monkeypatch.setattr(TraceExtractor, "extract", lambda *_: moved)
    with pytest.raises(StudioError, match="its rows move while they are read") as caught:
        await batches_of(connector)
    assert caught.value.retryable


async def test_long_histories_take_turns_and_a_short_pass_waits_for_none(store: Store, tmp_path: Path) -> None:
    """A pass that waits for its turn ends when everything is to end, and goes on with the next one."""
    short = Studio(tmp_path / "short.sqlite")
    short.write(agent("a1", "q", "a"))
    sources = [{"path": str(DATA / "new_v2.sqlite")}, {"path": str(short.path)}]
    ingestion = Ingestion(store, parse({"state": {"dir": "state"}, "sources": sources}, "the test's", tmp_path))
    long, quick = ingestion.sources()
    turns = ingestion._workers.turns
    for _ in range(TURNS):
        await turns.acquire()
    stop = Stop()
    reading = asyncio.create_task(long.read(final=True, stop=stop))
    report = await asyncio.wait_for(quick.read(final=True, stop=stop), 60)
    assert (report.counts.replies, report.error) == (1, None)
    while long.connector.progress.read < 20:
        await asyncio.sleep(0)
    stop.ask(StopReason.FINISHED)
    report = await asyncio.wait_for(reading, 60)
    assert report.error is None
    assert report.counts.replies < 105
    for _ in range(TURNS):
        turns.release()
    report = await asyncio.wait_for(long.read(final=True), 60)
    assert (report.counts.replies, report.error) == (105, None)
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
