"""The task file follows the state: every task once and in order, whatever happened between append and mark."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import Connection, func, select

from flywheel.config.file import parse
from flywheel.errors import StoreError
from flywheel.sources import ingestion
from flywheel.sources.ingestion import Ingestion, SourceIngestion, SourceReport
from flywheel.store import ledger, task_file
from flywheel.store.kernel.bulk import CHUNK
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.schema import tasks
from flywheel.store.task_file import FileState, TaskFile, exported_to
from tests.factories.task import written_keys
from tests.factories.trace import put_numbered
from tests.sources.studio.writer import DATA
from tests.waiting import SOON

MANY = 2 * CHUNK + 7


def keys(conn: Connection) -> list[str]:
    return list(conn.execute(select(tasks.c.key).order_by(tasks.c.id)).scalars())


def waiting(conn: Connection) -> int:
    return int(conn.execute(select(func.count()).where(tasks.c.id > exported_to(conn))).scalar_one())


@pytest.mark.parametrize("count", [1, CHUNK, MANY])
async def test_every_task_is_a_line_once_and_in_order(store: Store, tmp_path: Path, count: int) -> None:
    file = TaskFile(tmp_path / "tasks.jsonl")
    assert await file.follow(store) == 0
    await store.write(put_numbered, 0, count)
    assert await file.follow(store) == count
    assert await file.follow(store) == 0
    await store.write(put_numbered, count, 3)
    assert await file.follow(store) == 3
    assert written_keys(file.path) == await store.read(keys)
    assert await store.read(waiting) == 0


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_file_keeps_its_mode_and_so_does_the_one_that_follows_it(
    store: Store, tmp_path: Path, restarts: bool
) -> None:
    path = tmp_path / "tasks.jsonl"
    file = TaskFile(path)

    async def written(number: int) -> int:
        await store.write(put_numbered, number, 1)
        await file.follow(store)
        return stat.S_IMODE(path.stat().st_mode)

    before = os.umask(0o022)
    try:
        assert await written(0) == 0o600
        path.chmod(0o664)
        assert await written(1) == 0o664
        path.rename(tmp_path / "rotated")
        await file.follow(store)
        file = TaskFile(path) if restarts else file
        assert await written(2) == 0o664
        assert written_keys(path) == (await store.read(keys))[2:]
        file = TaskFile(path := tmp_path / "other.jsonl")
        assert await written(3) == 0o600
    finally:
        os.umask(before)


async def test_long_lines_are_written_a_few_at_a_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_file, "PAGE_BYTES", 4000)
    sizes: list[int] = []
    append = task_file.append_lines

    def counted(path: Path, lines: list[bytes], *, mode: int) -> int:
        sizes.append(len(lines))
        return append(path, lines, mode=mode)

    monkeypatch.setattr(task_file, "append_lines", counted)
    await store.write(put_numbered, 0, 100)
    assert await TaskFile(tmp_path / "tasks.jsonl").follow(store) == 100
    assert max(sizes) < 20 and sum(sizes) == 100
    source = await store.read(ledger.source_id, "/a")
    assert await task_file.export_sources(store, tmp_path / "other.jsonl", [source]) == 100
    assert written_keys(tmp_path / "tasks.jsonl") == written_keys(tmp_path / "other.jsonl") == await store.read(keys)


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("pages", [1, 2])
async def test_what_was_appended_and_not_marked_is_not_appended_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool, pages: int
) -> None:
    await store.write(put_numbered, 0, MANY)
    file = TaskFile(tmp_path / "tasks.jsonl")
    mark, left = task_file._mark, pages

    def die(conn: Connection, rows: list[task_file._TaskRow], found: FileState | None) -> list[task_file._TaskRow]:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("died")
        return mark(conn, rows, found)

    monkeypatch.setattr(task_file, "_mark", die)
    with pytest.raises(RuntimeError):
        await file.follow(store)
    monkeypatch.setattr(task_file, "_mark", mark)
    assert len(written_keys(file.path)) == pages * CHUNK
    assert await store.read(waiting) == MANY - (pages - 1) * CHUNK
    await (TaskFile(file.path) if anew else file).follow(store)
    assert written_keys(file.path) == await store.read(keys)
    assert await store.read(waiting) == 0


async def test_the_file_follows_while_a_pass_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse({"state": {"dir": "state"}, "sources": [{"path": str(DATA / "new_v2.sqlite")}]}, "test", tmp_path)
    monkeypatch.setattr(ingestion, "EXPORT_SECONDS", 0.01)
    read = SourceIngestion.read

    async def read_and_wait(self: SourceIngestion, **how: Any) -> SourceReport:
        report = await read(self, **how)
        async with asyncio.timeout(60):
            # Counted by their ends: the last line may just be being written.
            while not config.task_file.exists() or config.task_file.read_bytes().count(b"\n") < report.counts.tasks:
                await asyncio.sleep(0.01)
        return report

    monkeypatch.setattr(SourceIngestion, "read", read_and_wait)
    store = await Store.open(config.state_dir)
    reading = Ingestion(store, config)
    (report,) = await reading.run(final=True)
    assert len(set(written_keys(config.task_file))) == len(written_keys(config.task_file)) == report.counts.tasks > 0
    assert await store.read(waiting) == 0
    await reading.close()
    await store.close()


LONE = b'{"question":"mine","answer":"42"}'
FOREIGN = {
    "text": b"one long line without an end",
    "lines of text": b"line 1\nline 2 unfinished",
    "a database": (DATA / "new_v2.sqlite").read_bytes(),
    "a record without its line end": LONE,
    "records without the last line end": b'{"task_id": "1"}\n' + LONE,
    "a record that is being written": b'{"task_id": "1"}\n{"task_id": "2", "main_query": "wh',
    "a record that begins with another key": b'{"task_id":"1"}\n{"task_id":"2","question":"wh',
    "records of another kind": LONE + b"\n",
}


@pytest.mark.parametrize("whole", [0, 3])
@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_file_that_is_none_of_ours_keeps_every_byte(
    store: Store, tmp_path: Path, kind: str, whole: int
) -> None:
    await store.write(put_numbered, 0, 3)
    path = tmp_path / "notes"
    before = b'{"task_id":"old"}\n' * whole + FOREIGN[kind]
    path.write_bytes(before)
    source = await store.read(lambda conn: ledger.source_id(conn, "/a"))
    for work in (TaskFile(path).follow(store), task_file.export_sources(store, path, [source])):
        with pytest.raises(StoreError, match="only to files of its own"):
            await work
        assert path.read_bytes() == before
    assert await store.read(waiting) == 3


@pytest.mark.parametrize("how", ["follow", "export_sources"])
@pytest.mark.parametrize("left", [1, 7, 12, 20, 33, 40, 60, 200, -2, -1])
async def test_a_torn_line_of_ours_is_written_again(store: Store, tmp_path: Path, how: str, left: int) -> None:
    await store.write(put_numbered, 0, 3)
    path = tmp_path / "tasks.jsonl"
    await TaskFile(path).follow(store)
    await store.write(put_numbered, 3, 2)
    source = await store.read(lambda conn: ledger.source_id(conn, "/a"))
    lines = await store.read(lambda conn: list(conn.execute(select(tasks.c.payload).order_by(tasks.c.id)).scalars()))
    with path.open("ab") as file:
        file.write((orjson.dumps(lines[3]) + b"\n")[:left])
    await (TaskFile(path).follow(store) if how == "follow" else task_file.export_sources(store, path, [source]))
    assert written_keys(path) == await store.read(keys)


async def test_a_marked_task_whose_line_lost_its_end_is_kept(store: Store, tmp_path: Path) -> None:
    await store.write(put_numbered, 0, 2)
    path = tmp_path / "tasks.jsonl"
    await TaskFile(path).follow(store)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    await store.write(put_numbered, 2, 1)
    await TaskFile(path).follow(store)
    assert written_keys(path) == await store.read(keys)


@pytest.mark.parametrize("slow", ["append_lines", "last_lines"])
async def test_the_loop_goes_on_while_the_disk_is_slow(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Else a scan or an fsync on a busy disk stops the receiver, the watchdog and every other source."""
    asked, go_on = threading.Event(), threading.Event()
    real = getattr(task_file, slow)

    def slowly(*given: Any, **how: Any) -> Any:
        asked.set()
        assert go_on.wait(SOON), "the event loop waits for the disk"
        return real(*given, **how)

    monkeypatch.setattr(task_file, slow, slowly)
    (tmp_path / "tasks.jsonl").touch()
    await store.write(put_numbered, 0, 3)
    following = asyncio.create_task(TaskFile(tmp_path / "tasks.jsonl").follow(store))
    while not asked.is_set():
        await asyncio.sleep(0.01)
    go_on.set()
    assert await following == 3


async def test_an_append_has_ended_when_its_caller_is_cancelled(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Event(), threading.Event()
    append = task_file.append_lines

    def slowly(path: Path, lines: list[bytes], *, mode: int) -> int:
        asked.set()
        go_on.wait(60)
        return append(path, lines, mode=mode)

    monkeypatch.setattr(task_file, "append_lines", slowly)
    await store.write(put_numbered, 0, 3)
    file = TaskFile(tmp_path / "tasks.jsonl")
    following = asyncio.create_task(file.follow(store))
    while not asked.is_set():
        await asyncio.sleep(0.01)
    following.cancel()
    # Without what it waits for, a task takes one or two turns of the loop to be cancelled.
    for _ in range(20):
        await asyncio.sleep(0)
    assert not following.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert len(written_keys(file.path)) == 3
