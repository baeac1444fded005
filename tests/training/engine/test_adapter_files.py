"""Adapters as files that travel: what arrives is what was sent, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flywheel.errors import TrainError
from flywheel.serving.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from flywheel.system.files import file_sha256
from flywheel.training.engine.adapter_files import AdapterFiles, AdapterFolder
from tests.waiting import wait_for


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text("{}")
    (folder / WEIGHTS_FILE).write_bytes(os.urandom(1000))
    (folder / "README.md").write_text("of no use for an engine")
    return AdapterFiles.read(folder)


def test_what_arrives_is_what_was_sent(files: AdapterFiles, tmp_path: Path) -> None:
    files.write(tmp_path / "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}
    assert (tmp_path / "there" / WEIGHTS_FILE).read_bytes() == (tmp_path / "made" / WEIGHTS_FILE).read_bytes()
    assert files.sha256[WEIGHTS_FILE] == file_sha256(tmp_path / "made" / WEIGHTS_FILE)


def test_what_arrives_changed_is_refused(files: AdapterFiles, tmp_path: Path) -> None:
    weights = bytearray(files.contents[WEIGHTS_FILE])
    weights[500] ^= 1
    changed = replace(files, contents={**files.contents, WEIGHTS_FILE: bytes(weights)})
    with pytest.raises(TrainError, match=f"{WEIGHTS_FILE} arrived changed") as caught:
        changed.write(tmp_path / "there")
    assert caught.value.retryable


def test_a_folder_that_cannot_be_written_is_named(files: AdapterFiles, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=f"write an adapter to {tmp_path}/none/there: No such file"):
        files.write(tmp_path / "none" / "there")


def test_the_folder_of_a_process_is_private_and_ends_with_it(files: AdapterFiles, tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path / "made")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    files.write(folder.of(3))
    folder.remove(3)
    assert not folder.of(3).exists()
    files.write(folder.of(4))
    folder.close()
    assert not folder.path.exists()


def test_what_killed_processes_left_is_removed_and_what_others_use_is_not(tmp_path: Path) -> None:
    code = (
        "import signal, sys, pathlib; from flywheel.training.engine.adapter_files import AdapterFolder\n"
        "folder = AdapterFolder(pathlib.Path(sys.argv[1])); folder.of(1).mkdir(); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as other:
        try:
            wait_for(lambda: list(tmp_path.glob("*/1")), "the other process")
            [theirs] = tmp_path.iterdir()
            own = AdapterFolder(tmp_path)
            assert theirs.exists()
        finally:
            other.send_signal(signal.SIGKILL)
    next_own = AdapterFolder(tmp_path)
    assert not theirs.exists()
    assert own.path.exists()
    own.close()
    next_own.close()
    assert list(tmp_path.iterdir()) == []
