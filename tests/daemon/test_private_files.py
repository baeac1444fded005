"""Files of the state are for their user alone, whatever the umask is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from flywheel.config.file import Config, parse
from flywheel.daemon.rounds.worker_process import WorkerProcess
from flywheel.records.round import ERROR_FILE, LOG_FILE, SPEC_FILE
from flywheel.serving.alias_target import AliasTarget
from flywheel.serving.server.alias_table import AliasTable
from flywheel.system.lock import instance_lock
from tests.daemon.following import Following, exported
from tests.factories.round import round_spec
from tests.sources.otlp.exporting import PROTOBUF, fixture, request_of
from tests.waiting import until


@pytest.fixture(params=[0o000, 0o022, 0o077])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    """What others may do with the files and directories in and below a directory."""
    found = [directory, *directory.rglob("*")]
    return {str(path): stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in found}


def configured(tmp_path: Path, **ingest: object) -> Config:
    raw = {
        "state": {"dir": str(tmp_path / "above" / "state")},
        "sources": [{"type": "otlp", "listen": "127.0.0.1:0"}],
        "ingest": {"settle_seconds": 0, **ingest},
    }
    return parse(raw, "test", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_umask")
async def test_what_a_daemon_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with instance_lock(config.state_dir):
        async with Following(config) as following, httpx.AsyncClient() as client:
            url = following._sources._receivers[0].url
            content = request_of(fixture("new_v2")).SerializeToString()
            assert (await client.post(url, content=content, headers=PROTOBUF)).status_code == 200
            await until(lambda: len(list(exported(config))) > 3, "tasks")
            found = modes(tmp_path / "above")
    names = {Path(path).name for path in found}
    assert {"state", "state.db", "state.db-wal", "state.db-shm", "tasks.jsonl", "lock", "otlp"} <= names
    assert any(name.endswith(".sqlite-wal") for name in names)
    assert set(found.values()) == {0}, found


@pytest.mark.slow
@pytest.mark.usefixtures("_umask")
async def test_a_task_file_elsewhere_is_private_as_well(tmp_path: Path) -> None:
    config = configured(tmp_path, output=str(tmp_path / "elsewhere.jsonl"))
    with instance_lock(config.state_dir):
        async with Following(config) as following, httpx.AsyncClient() as client:
            url = following._sources._receivers[0].url
            content = request_of(fixture("new_v2")).SerializeToString()
            assert (await client.post(url, content=content, headers=PROTOBUF)).status_code == 200
            await until(lambda: len(list(exported(config))) > 3, "tasks")
    assert stat.S_IMODE((tmp_path / "elsewhere.jsonl").stat().st_mode) == 0o600


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("_umask", [0o000], indirect=True)
async def test_what_a_round_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    directory = tmp_path / "state" / "rounds" / "r0001"
    unfit = round_spec().model_copy(update={"train": []})
    worker = await WorkerProcess.start(directory, unfit)
    await worker.wait()
    found = modes(tmp_path / "state")
    assert {SPEC_FILE, LOG_FILE, ERROR_FILE} <= {Path(path).name for path in found}
    assert set(found.values()) == {0}, found


@pytest.mark.training
@pytest.mark.slow
@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("_umask", [0o000], indirect=True)
async def test_what_libraries_write_for_a_round_is_for_its_user_alone(tmp_path: Path) -> None:
    code = (
        "import os, runpy, sys, flywheel.training.worker as worker\n"
        "worker.main = lambda: (os.makedirs('adapter'), open('adapter/weights', 'w').close()) and 0\n"
        "runpy.run_module('flywheel.training.worker.__main__', run_name='__main__')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=True)
    assert set(modes(tmp_path / "adapter").values()) == {0}


@pytest.mark.usefixtures("_umask")
async def test_the_aliases_of_a_server_are_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "aliases.json"
    await AliasTable(["agent"], "base", file, ["r0001"], {}).point("agent", AliasTarget("r0001"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
