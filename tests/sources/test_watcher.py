"""Events of a source wake us; other files, and our own reading, do not."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from watchdog.observers import inotify_c

from flywheel.sources.watcher import Watcher
from tests.waiting import SOON, until


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Watcher, asyncio.Event, Path]]:
    wake = asyncio.Event()
    path = tmp_path / "studio" / "database.sqlite"
    watcher = Watcher()
    watcher.watch(path, wake.set)
    yield watcher, wake, path
    watcher.stop()


async def first(wake: asyncio.Event) -> None:
    """What happened before the watch began was not seen, so it begins with a wake."""
    await asyncio.wait_for(wake.wait(), SOON)
    wake.clear()


async def test_a_commit_wakes_in_a_directory_that_appeared_later(
    watched: tuple[Watcher, asyncio.Event, Path],
) -> None:
    watcher, wake, path = watched
    path.parent.mkdir()
    watcher.refresh()
    await first(wake)
    conn = sqlite3.connect(path)
    conn.execute("CREATE TABLE t (x)")
    conn.commit()
    await asyncio.wait_for(wake.wait(), SOON)
    wake.clear()
    conn.execute("INSERT INTO t VALUES (1)")
    conn.commit()
    await asyncio.wait_for(wake.wait(), SOON)
    conn.close()


async def test_other_files_and_reading_do_not_wake(watched: tuple[Watcher, asyncio.Event, Path]) -> None:
    watcher, wake, path = watched
    path.parent.mkdir()
    path.write_bytes(b"x")
    watcher.refresh()
    await first(wake)
    (path.parent / "other.txt").write_text("x")
    path.read_bytes()
    (path.parent / "other.txt").rename(path.parent / "another.txt")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wake.wait(), 0.5)
    path.write_bytes(b"y")
    await asyncio.wait_for(wake.wait(), SOON)


async def test_replacing_the_file_wakes(watched: tuple[Watcher, asyncio.Event, Path]) -> None:
    watcher, wake, path = watched
    path.parent.mkdir()
    path.write_bytes(b"old")
    watcher.refresh()
    await first(wake)
    (path.parent / "new").write_bytes(b"new")
    (path.parent / "new").replace(path)
    await asyncio.wait_for(wake.wait(), SOON)


async def test_a_directory_that_was_made_anew_is_watched_again(
    watched: tuple[Watcher, asyncio.Event, Path],
) -> None:
    watcher, wake, path = watched
    path.parent.mkdir()
    watcher.refresh()
    await first(wake)
    path.parent.rename(path.parent.with_name("away"))
    path.parent.mkdir()
    watcher.refresh()
    await first(wake)
    path.write_bytes(b"x")
    await asyncio.wait_for(wake.wait(), SOON)


async def test_a_directory_that_was_deleted_and_made_anew_is_watched_again_whatever_its_number(
    watched: tuple[Watcher, asyncio.Event, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many file systems give the number of what was deleted to what is made next.
    monkeypatch.setattr("flywheel.sources.watcher._identity", lambda path: (1, 1) if path.is_dir() else None)
    watcher, wake, path = watched
    path.parent.mkdir()
    watcher.refresh()
    await first(wake)
    path.write_bytes(b"x")
    await asyncio.wait_for(wake.wait(), SOON)
    path.unlink()
    path.parent.rmdir()
    path.parent.mkdir()
    watch = watcher._directories[path.parent]
    await until(lambda: watch.was_deleted, "the event of its deletion")
    wake.clear()
    watcher.refresh()
    await first(wake)
    path.write_bytes(b"x")
    await asyncio.wait_for(wake.wait(), SOON)


async def test_a_directory_that_sends_no_events_is_told_of_once_and_tried_again(
    watched: tuple[Watcher, asyncio.Event, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watcher, wake, path = watched

    def no_more_watches(handler: object, path: str) -> None:
        raise OSError(24, "inotify instance limit reached")

    path.parent.mkdir()
    with monkeypatch.context() as changed:
        changed.setattr(watcher._observer, "schedule", no_more_watches)
        for _ in range(3):
            watcher.refresh()
    assert [record.getMessage() for record in caplog.records] == [
        f"no file system events from {path.parent}: polling only. [Errno 24] inotify instance limit reached: raise "
        "the sysctl fs.inotify.max_user_instances, or `LimitNOFILE=`"
    ]
    watcher.refresh()
    await first(wake)
    path.write_bytes(b"x")
    await asyncio.wait_for(wake.wait(), SOON)


async def test_what_a_link_leads_to_is_watched(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "links").mkdir()
    real, link = tmp_path / "real" / "studio.sqlite", tmp_path / "links" / "database.sqlite"
    real.write_bytes(b"x")
    link.symlink_to(real)
    wake = asyncio.Event()
    watcher = Watcher()
    watcher.watch(link, wake.set)
    await first(wake)
    real.write_bytes(b"y")
    await asyncio.wait_for(wake.wait(), SOON)
    watcher.stop()


@pytest.mark.parametrize(("number", "limit"), [(errno.EMFILE, "instances"), (errno.ENOSPC, "watches")])
async def test_without_inotify_there_is_a_warning_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, limit: str
) -> None:
    wake = asyncio.Event()
    call = {"instances": "inotify_init", "watches": "inotify_add_watch"}[limit]

    def fails(*given: Any) -> int:
        ctypes.set_errno(number)
        return -1

    with monkeypatch.context() as during:
        during.setattr(inotify_c, call, fails)
        watcher = Watcher()
        watcher.watch(tmp_path / "tasks.jsonl", wake.set)
        watcher.refresh()
    [said] = caplog.messages
    assert "polling only" in said and f"sysctl fs.inotify.max_user_{limit}" in said
    watcher.refresh()
    await first(wake)
    (tmp_path / "tasks.jsonl").touch()
    await first(wake)
    watcher.stop()
