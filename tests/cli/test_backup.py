"""`flywheel backup` and `restore` at a terminal: what they say, and a drill."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
import threading
from pathlib import Path

import pytest

from flywheel.daemon.backup import back_up
from flywheel.store.backup import CURRENT, FOLDERS_NOTE
from flywheel.store.kernel.database import Store, noted
from flywheel.system.lock import instance_lock
from tests import warm
from tests.cli.conftest import Run
from tests.daemon.conftest import server
from tests.factories.config import make_config, write_config, write_rubric
from tests.factories.documented_json import compare, documented
from tests.factories.round import PROBE, put_trained
from tests.factories.state import execute, write_state
from tests.serving.fake_vllm import BASE, FakeVllm, replica
from tests.sources.studio.writer import empty_like, insert, renamed
from tests.waiting import wait_for

__all__ = ["server"]


@pytest.fixture
def config(tmp_path: Path, server: tuple[FakeVllm, str]) -> Path:
    """Of a state whose alias stands for r0001, with a database, a server and a rubric."""
    empty_like("new_v2", tmp_path / "studio.sqlite")
    rubric = write_rubric(tmp_path)
    adapter = tmp_path / "state" / "rounds" / "r0001" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "weights").write_text("one")
    (adapter.parent / "rollouts").mkdir()
    for name in ("result.json", "rollouts/0001.jsonl"):
        (adapter.parent / name).write_text("{}")
    write_state(tmp_path / "state", put_trained, 1, adapter, server[0])
    return write_config(
        tmp_path,
        sources=[{"path": "studio.sqlite"}],
        filter={"rubric": rubric.name},
        ingest={"settle_seconds": 0.1, "poll_seconds": 0.2},
        model={"base": BASE, "alias": "agent"},
        serving={"urls": [server[1]], "drain_seconds": 0},
    )


@pytest.mark.slow
def test_what_is_in_it_and_what_is_said(flywheel: Run, config: Path, tmp_path: Path) -> None:
    made = flywheel("backup", tmp_path / "backup", "-c", config)
    assert made.code == 0, made.err
    assert made.out.startswith("5 files, ") and f"in {tmp_path}/backup/current" in made.out
    current = tmp_path / "backup" / CURRENT
    assert {path.relative_to(current).as_posix() for path in current.rglob("*") if path.is_file()} == {
        "manifest.json",
        "state.db",
        "rounds/r0001/adapter/weights",
        "rounds/r0001/result.json",
        "configuration/flywheel.yaml",
        "configuration/rubric.yaml",
    }
    again = flywheel("backup", tmp_path / "backup", "-c", config, "--json").json
    assert again["copied_bytes"] == 0 and again["bytes"] > 0 and again["left_out"] == {}
    refused = flywheel("restore", tmp_path / "backup", "-c", config)
    assert (refused.code, refused.out) == (1, "") and "is not empty" in refused.err
    shutil.rmtree(tmp_path / "state")
    restored = flywheel("restore", tmp_path / "backup", "-c", config)
    assert restored.code == 0, restored.err
    first, source, kept = restored.out.splitlines()
    assert first.startswith(f"{tmp_path}/state is as it was at ")
    assert source == f"{tmp_path}/studio.sqlite: 0 replies that are not in the restored state"
    assert kept.startswith(f"the configuration of the backup is in {tmp_path}/backup/current/configuration")


async def test_backups_that_are_made_at_the_same_time_are_all_told_of_erasures(tmp_path: Path, store: Store) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    await asyncio.gather(*(back_up(make_config(tmp_path), folder) for folder in folders))
    assert json.loads(await store.read(noted, FOLDERS_NOTE)) == [str(folder) for folder in folders]


def test_without_a_state_there_is_nothing_to_back_up(flywheel: Run, config: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "state")
    flywheel("backup", tmp_path / "backup", "-c", config).fails(1, "no state at")
    assert not (tmp_path / "backup").exists() and not (tmp_path / "state").exists()


def test_nothing_is_restored_beside_a_daemon(flywheel: Run, config: Path, tmp_path: Path) -> None:
    flywheel("backup", tmp_path / "backup", "-c", config)
    shutil.rmtree(tmp_path / "state")
    with instance_lock(tmp_path / "state"):
        assert flywheel("restore", tmp_path / "backup", "-c", config).code == 75


def test_an_adapter_whose_files_are_elsewhere_is_named(flywheel: Run, config: Path, tmp_path: Path) -> None:
    write_state(tmp_path / "state", put_trained, 2, tmp_path / "elsewhere")
    made = flywheel("backup", tmp_path / "backup", "-c", config)
    assert f"left out r0002: its files are outside of the state directory, in {tmp_path}/elsewhere" in made.out


@pytest.mark.slow
def test_a_drill(flywheel: Run, config: Path, tmp_path: Path) -> None:
    """Backup under load, loss of everything, restore: the ledger balances, and the same adapter passes its proof."""
    assert flywheel("deploy", "r0001", "-c", config).code == 0
    state, stop = tmp_path / "state" / "state.db", threading.Event()

    def load() -> None:
        for cycle in itertools.count():
            if stop.wait(0.05):
                return
            insert(tmp_path / "studio.sqlite", renamed("new_v2", cycle))

    def replies() -> int:
        return int(execute(state, "SELECT count(*) FROM replies")[0][0])

    run = [sys.executable, "-m", "flywheel"]
    with (tmp_path / "daemon.log").open("wb") as log:
        daemon = warm.Popen([*run, "run", "-c", str(config)], stderr=log, stdout=log)
    writer = threading.Thread(target=load)
    writer.start()
    try:
        wait_for(lambda: replies() > 50, "the first replies")
        command = [*run, "backup", str(tmp_path / "backup"), "-c", str(config)]
        warm.run(command, check=True, timeout=300)
        at_backup = execute(tmp_path / "backup" / CURRENT / "state.db", "SELECT count(*) FROM replies")[0][0]
        wait_for(lambda: replies() > at_backup, "replies after the backup")
    finally:
        stop.set()
        writer.join()
        daemon.terminate()
        daemon.wait(timeout=300)
    shutil.rmtree(tmp_path / "state")

    restored = flywheel("restore", tmp_path / "backup", "-c", config, "--json").json
    compare(restored, documented("restore"), "restore")
    (source,) = restored["sources"]
    assert source["in_ledger"] == at_backup > 0 and source["not_read_yet"] + source["missing"] > 0
    assert flywheel("ingest", "-c", config).code == 0
    audit = flywheel("audit", "--deep", "--json", "-c", config)
    assert audit.code == 0, audit.out
    (compared,) = audit.json["sources"]
    assert compared["in_ledger"] == compared["agent_spans"] == source["agent_spans"]

    # Another server, which has nothing yet.
    app = FakeVllm({BASE: PROBE.second.base})
    adapter = tmp_path / "state" / "rounds" / "r0001" / "adapter"
    app.weights[str(adapter)] = PROBE.second.adapter
    with replica(app) as url:
        ran = flywheel("run", "--once", "-c", config, "--set", f"serving.urls=[{url}]")
        assert "agent is agent@r0001 there now" in ran.err, "it was not proven on the server"
        assert app.loaded == {"agent@r0001": str(adapter)}
        found = flywheel("status", "--json", "-c", config, "--set", f"serving.urls=[{url}]").json
    assert (found["replicas"][0]["condition"], found["replicas"][0]["serves"]) == ("ok", "agent@r0001")
    assert (adapter / "weights").read_text() == "one"
