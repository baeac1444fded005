"""Folders of processes: private, and nothing of them is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flywheel.system.process_folder import ProcessFolder
from tests.waiting import wait_for


def test_it_is_private_and_ends_with_its_process(tmp_path: Path) -> None:
    folder = ProcessFolder(tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_killed_processes_left_is_removed_and_what_others_use_is_not(tmp_path: Path) -> None:
    code = (
        "import signal, sys, pathlib; from flywheel.system.process_folder import ProcessFolder\n"
        "folder = ProcessFolder(pathlib.Path(sys.argv[1])); (folder.path / 'file').touch(); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as other:
        try:
            wait_for(lambda: list(tmp_path.glob("*/file")), "the other process")
            [theirs] = tmp_path.iterdir()
            own = ProcessFolder(tmp_path)
            assert theirs.exists()
        finally:
            other.send_signal(signal.SIGKILL)
    after = ProcessFolder(tmp_path)
    assert not theirs.exists()
    assert own.path.exists()
    own.remove()
    after.remove()
    assert list(tmp_path.iterdir()) == []
