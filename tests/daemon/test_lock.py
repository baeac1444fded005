"""One instance at a time, and no trace of one that died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flywheel.errors import LockedError
from flywheel.system.lock import holder, instance_lock

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
