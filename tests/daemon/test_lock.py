"""One instance at a time, and no trace of one that died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flywheel.daemon import requests
from flywheel.daemon.requests import perform
from flywheel.daemon.service import Service
from flywheel.errors import LockedError
from flywheel.records.states import RequestState
from flywheel.store import holder as holders
from flywheel.store.holder import HOLDER_NOTE, holding, locked
from flywheel.store.kernel.database import Store, noted
from flywheel.store.requests import RequestKind
from flywheel.system.lock import holder, instance_lock, is_lost
from tests.daemon.following import configuration
from tests.factories.config import make_config
from tests.factories.state import open_state
from tests.waiting import until

HOLD = """
import sys, time
from pathlib import Path
from flywheel.system.lock import instance_lock
with instance_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> object:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_a_second_instance_is_told_which_process_is_at_work(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(LockedError, match=str(other.pid)) as caught, instance_lock(tmp_path):
        pass
    assert caught.value.exit_code == 75
    assert holder(tmp_path) == other.pid


@pytest.mark.slow
def test_the_lock_of_a_killed_instance_is_free(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert holder(tmp_path) is None
    with instance_lock(tmp_path):
        assert holder(tmp_path) == os.getpid()
    assert holder(tmp_path) is None


def test_looking_makes_no_lock_file(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_who_looks_keeps_nobody_from_starting(tmp_path: Path) -> None:
    """`status --watch` looks every second, and a daemon that finds the lock taken would not be started again."""
    with instance_lock(tmp_path):
        pass
    looking = threading.Event()

    def look() -> None:
        while not looking.is_set():
            holder(tmp_path)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            with instance_lock(tmp_path):
                assert holder(tmp_path) == os.getpid()
    finally:
        looking.set()
        for thread in threads:
            thread.join()
    assert holder(tmp_path) is None


def test_a_lock_whose_file_was_removed_or_replaced_is_lost(tmp_path: Path) -> None:
    assert not is_lost(tmp_path)
    with instance_lock(tmp_path):
        assert not is_lost(tmp_path)
        (tmp_path / "lock").unlink()
        assert is_lost(tmp_path)
        (tmp_path / "lock").touch()
        assert is_lost(tmp_path)
    assert not is_lost(tmp_path)


async def test_a_daemon_without_its_lock_file_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(tmp_path, [])
    with instance_lock(config.state_dir):
        async with open_state(config.state_dir) as store:
            service = Service(config, store)
            running = asyncio.create_task(service.run())
            await until(lambda: service._unready() == "", "the start")
            (config.state_dir / "lock").unlink()
            with pytest.raises(LockedError, match="its file lock was removed or replaced"):
                await running


async def test_a_request_waits_for_the_holder_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lock file was removed, too: that process carries it out."""
    config = make_config(tmp_path)
    monkeypatch.setattr(requests, "WAIT_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "600"]) as first, contextlib.ExitStack() as ending:
        ending.callback(first.kill)
        async with open_state(config.state_dir) as store:
            with monkeypatch.context() as of_first:
                of_first.setattr(holders.os, "getpid", lambda: first.pid)
                await store.write(holders._hold, config.state_dir)
        asked = await perform(config, RequestKind.RETRY, {"letters": []}, "me")
        assert asked.state is RequestState.OPEN


async def test_a_second_process_finds_the_first_where_the_lock_file_was_removed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as first, contextlib.ExitStack() as ending:
        ending.callback(first.kill)
        with monkeypatch.context() as of_first:
            of_first.setattr(holders.os, "getpid", lambda: first.pid)
            await store.write(holders._hold, tmp_path)
        with pytest.raises(LockedError, match=f"process {first.pid} works on it, although its file lock was removed"):
            async with holding(store, tmp_path):
                pass
        with pytest.raises(LockedError, match=f"process {first.pid} works on it"):
            async with locked(store, tmp_path):
                pass
        recorded = await store.read(noted, HOLDER_NOTE)
        # A copy of the state in another folder, another process with the same id, and one before the last boot.
        (tmp_path / "copy").mkdir()
        async with holding(store, tmp_path / "copy"):
            pass
        pid, started, boot, folder = recorded.split()
        for other in (f"{pid} {int(started) - 1} {boot} {folder}", f"{pid} {started} {boot[::-1]} {folder}"):
            await store.write(holders.note, HOLDER_NOTE, other)
            async with holding(store, tmp_path):
                pass
        await store.write(holders.note, HOLDER_NOTE, recorded)
        first.kill()
    async with holding(store, tmp_path):
        assert str(os.getpid()) in await store.read(noted, HOLDER_NOTE)
    assert await store.read(noted, HOLDER_NOTE) == ""
