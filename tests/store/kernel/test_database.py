"""Opening, copying and refusing state databases."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from flywheel.errors import StoreError
from flywheel.store import claims, ledger
from flywheel.store.kernel import database
from flywheel.store.kernel.database import Store, read_once
from flywheel.store.kernel.schema import tasks
from tests.factories.trace import put_replies, reply


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def record(conn: Connection, number: int) -> int:
    return put_replies(conn, reply(number), source="/x.sqlite").new_tasks


def count(conn: Connection) -> int:
    counts = ledger.counts_by_source(conn).get(ledger.source_id(conn, "/x.sqlite"))
    return counts.tasks if counts else 0


async def test_what_is_written_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    await store.write(record, 1)
    await store.close()
    store = await Store.open(tmp_path)
    assert await store.read(count) == 1
    await store.close()


async def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    def record_and_die(conn: Connection) -> None:
        record(conn, 1)
        raise RuntimeError("died")

    with pytest.raises(RuntimeError):
        await store.write(record_and_die)
    assert await store.write(count) == 0


async def test_a_newer_schema_is_refused_by_every_way_in(tmp_path: Path) -> None:
    await (await Store.open(tmp_path)).close()
    with sqlite3.connect(tmp_path / "state.db") as conn:
        conn.execute("UPDATE meta SET value = '999' WHERE key = 'schema_version'")
    conn.close()
    for enter in (Store.open, Store.copy, Store.view):
        with pytest.raises(StoreError, match="999"):
            await enter(tmp_path)
    with pytest.raises(StoreError, match="999"):
        await read_once(tmp_path, count)


@pytest.mark.slow
async def test_the_state_of_another_pre_release_is_refused_by_every_way_in_and_stays_as_it_is(tmp_path: Path) -> None:
    """One whose tables have a column more."""
    make = (
        "import asyncio, sys, pathlib; from sqlalchemy import Column, Text;"
        "from flywheel.store.kernel import database, schema;"
        "schema.tasks.append_column(Column('mood', Text));"
        "store = asyncio.run(database.Store.open(pathlib.Path(sys.argv[1]))); asyncio.run(store.close())"
    )
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], check=True, timeout=60)
    before = files(tmp_path)
    assert b"mood" in before["state.db"]
    for enter in (Store.open, Store.copy, Store.view):
        with pytest.raises(StoreError, match="another pre-release of Flywheel made it"):
            await enter(tmp_path)
    with pytest.raises(StoreError, match="move the state directory away"):
        await read_once(tmp_path, count)
    assert files(tmp_path) == before


async def test_a_state_without_a_recorded_schema_is_one_of_another_pre_release(tmp_path: Path) -> None:
    await (await Store.open(tmp_path)).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as conn, conn:
        conn.execute("DELETE FROM meta WHERE key = 'schema_hash'")
        conn.execute("UPDATE meta SET value = 11 WHERE key = 'schema_version'")
    with pytest.raises(StoreError, match="another pre-release"):
        await Store.open(tmp_path)


async def test_an_older_schema_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await Store.open(tmp_path)).close()
    steps: list[int] = []
    monkeypatch.setattr(database, "SCHEMA_VERSION", 3)
    monkeypatch.setattr(database, "MIGRATIONS", {2: lambda _: steps.append(2), 3: lambda _: steps.append(3)})
    with pytest.raises(StoreError, match="version 1, not 3"):
        await read_once(tmp_path, count)
    store = await Store.open(tmp_path)
    assert (steps, await store.read(database.version_of)) == ([2, 3], 3)
    await store.close()
    await (await Store.open(tmp_path)).close()
    assert steps == [2, 3]


async def test_a_copy_and_a_view_write_nothing(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    await store.write(record, 1)
    await store.close()
    before = files(tmp_path)
    copy = await Store.copy(tmp_path)
    assert await copy.write(record, 2) == 1
    assert await copy.read(count) == 2
    await copy.close()
    view = await Store.view(tmp_path)
    assert await view.read(count) == 1
    with pytest.raises(StoreError, match="readonly"):
        await view.write(record, 3)
    await view.close()
    assert files(tmp_path) == before


@pytest.mark.slow
async def test_a_view_sees_what_a_running_writer_has_committed(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    await store.write(record, 1)
    view = await Store.view(tmp_path)
    assert await view.read(count) == 1
    await store.write(record, 2)
    assert await view.read(count) == 2
    await view.close()
    await store.close()


async def test_a_view_of_no_state_is_empty_and_makes_none(tmp_path: Path) -> None:
    view = await Store.view(tmp_path / "nothing")
    assert await view.read(count) == 0
    await view.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_single_read_is_one_transaction_beside_a_writer_and_writes_nothing(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    await store.write(record, 1)
    reading, written = threading.Event(), threading.Event()

    def count_twice(conn: Connection) -> tuple[int, int]:
        first = count(conn)
        reading.set()
        assert written.wait(30)
        return first, count(conn)

    async def write() -> None:
        other = await Store.open(tmp_path)
        await other.write(record, 2)
        await other.close()
        written.set()

    writer = threading.Thread(target=lambda: reading.wait(30) and asyncio.run(write()))
    writer.start()
    assert await read_once(tmp_path, count_twice) == (1, 1)
    writer.join()
    await store.close()
    before = files(tmp_path)
    assert await read_once(tmp_path, count) == 2
    with pytest.raises(StoreError, match="readonly"):
        await read_once(tmp_path, record, 3)
    assert files(tmp_path) == before


async def test_a_single_read_of_no_state_is_empty_and_makes_none(tmp_path: Path) -> None:
    assert await read_once(tmp_path / "nothing", count) == 0
    assert list(tmp_path.iterdir()) == []


async def test_a_single_read_of_a_damaged_file_names_it_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is not a database, really" * 100)
    with pytest.raises(StoreError, match=r"state\.db.*not a database.*Restore it from a backup"):
        await read_once(tmp_path, count)


async def write_to(state_dir: Path, *numbers: int) -> None:
    """As another process that begins, writes, and ends."""
    store = await Store.open(state_dir)
    for number in numbers:
        await store.write(record, number)
    await store.close()


@pytest.mark.slow
async def test_a_state_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    await write_to(tmp_path, 1)
    found: list[int] = []

    def count_slowly(conn: Connection) -> int:
        found.append(count(conn))
        if len(found) == 1:
            threads.submit(asyncio.run, write_to(tmp_path, *range(2, 200))).result()
        return len(conn.execute(select(tasks)).all())

    with ThreadPoolExecutor() as threads:
        assert await read_once(tmp_path, count_slowly) == 199
    assert found == [1, 199]


async def test_a_state_that_changes_whenever_it_is_read_is_named(tmp_path: Path) -> None:
    await write_to(tmp_path, 1)
    numbers = itertools.count(2)

    def change(conn: Connection) -> None:
        threads.submit(asyncio.run, write_to(tmp_path, next(numbers))).result()

    with ThreadPoolExecutor() as threads, pytest.raises(StoreError, match=r"to write it meanwhile\. Try again"):
        await read_once(tmp_path, change)


async def test_a_view_and_a_copy_of_a_state_that_changed_meanwhile_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_to(tmp_path, 1)
    view = await Store.view(tmp_path)
    assert await view.read(count) == 1
    await write_to(tmp_path, 2)
    with pytest.raises(StoreError, match="meanwhile"):
        await view.read(count)
    await view.close()

    def read_only(path: Path) -> sqlite3.Connection:
        opened = opening(path)
        with ThreadPoolExecutor() as threads:
            threads.submit(asyncio.run, write_to(path.parent, 3)).result()
        return opened

    opening = database._read_only
    monkeypatch.setattr(database, "_read_only", read_only)
    with pytest.raises(StoreError, match="meanwhile"):
        await Store.copy(tmp_path)


async def test_a_file_that_is_no_database_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is not a database, really" * 100)
    with pytest.raises(StoreError, match=r"state\.db.*not a database.*Restore it from a backup"):
        await Store.open(tmp_path)


async def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"state\.dir"):
        await Store.open(tmp_path / "file" / "state")


COPYING = """
import asyncio, sys
from pathlib import Path
from flywheel.store.kernel.database import Store, read_once
from flywheel.store.kernel.schema import tasks

def kilobytes():
    # What `getrusage` says of a process includes what its parent was before.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

async def copy(path):
    store = await Store.copy(Path(path))
    size = await store.read(lambda conn: conn.exec_driver_sql("SELECT sum(length(value)) FROM meta").scalar_one())
    await store.close()
    return size

asyncio.run(copy(sys.argv[1]))
small = kilobytes()
assert asyncio.run(copy(sys.argv[2])) > 100_000_000
print(kilobytes() - small)
"""


@pytest.mark.slow
async def test_a_copy_of_a_large_state_takes_little_memory(tmp_path: Path) -> None:
    for name in ("small", "large"):
        await (await Store.open(tmp_path / name)).close()
    with sqlite3.connect(tmp_path / "large" / "state.db") as conn:
        conn.executemany("INSERT INTO meta VALUES (?, ?)", ((f"k{n}", "x" * 1_000_000) for n in range(120)))
    conn.close()
    before = files(tmp_path)
    run = [sys.executable, "-c", COPYING, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 60_000
    assert files(tmp_path) == before


async def test_a_copy_is_read_and_written_at_the_same_time(tmp_path: Path) -> None:
    store = await Store.copy(tmp_path / "state")
    try:
        await asyncio.gather(
            *(store.write(claims.release_all, "") for _ in range(20)),
            *(store.read(claims.count_due) for _ in range(20)),
        )
    finally:
        await store.close()


async def test_what_is_read_waits_for_no_writer_and_changes_nothing(store: Store) -> None:
    await store.write(record, 1)
    read_meanwhile = threading.Event()

    def write_slowly(conn: Connection) -> bool:
        record(conn, 2)
        return read_meanwhile.wait(60)

    writing = asyncio.create_task(store.write(write_slowly))
    assert await store.read(count) == 1
    read_meanwhile.set()
    assert await writing
    assert await store.read(count) == 2
    with pytest.raises(StoreError, match="readonly"):
        await store.read(record, 3)


async def test_a_write_that_is_cancelled_is_over_before_its_caller_goes_on(store: Store) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def write_slowly(conn: Connection) -> None:
        begun.set()
        may_end.wait(60)
        record(conn, 1)

    writing = asyncio.create_task(store.write(write_slowly))
    behind_it = asyncio.create_task(store.write(record, 2))
    await asyncio.to_thread(begun.wait, 60)
    writing.cancel()
    behind_it.cancel()
    # Without what it waits for, a task takes one or two turns of the loop to be cancelled.
    for _ in range(20):
        await asyncio.sleep(0)
    assert not writing.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await store.read(count) == 1, "what had begun is whole, and what had not never began"


async def test_a_state_that_cannot_be_looked_for_is_named(tmp_path: Path) -> None:
    there = tmp_path / ("x" * 300)
    for look in (Store.view, Store.copy):
        with pytest.raises(StoreError, match=r"look at the state database .*state\.dir"):
            await look(there)


def aged(directory: Path) -> None:
    """Set the times of the state's files back, as if nothing had been written for a minute."""
    for path in directory.glob("state.db*"):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - 60 * 10**9))


async def test_every_commit_changes_the_version_of_the_state_and_no_read_does(tmp_path: Path) -> None:
    store = await Store.open(tmp_path)
    try:
        await store.write(record, 1)
        # A second commit may leave the same times and sizes.
        assert store.version() is None
        aged(tmp_path)
        before = store.version()
        assert before is not None
        await store.read(count)
        assert store.version() == before
        other = await Store.open(tmp_path)
        try:
            await other.write(record, 2)
            assert store.version() is None
            aged(tmp_path)
            assert store.version() not in (None, before)
        finally:
            await other.close()
    finally:
        await store.close()
    empty = await Store.empty()
    assert empty.version() is None
    await empty.close()
