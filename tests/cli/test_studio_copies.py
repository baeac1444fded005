"""Private copies of a Studio database: in the state where there is one, and nothing is left of them."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from flywheel.config.file import parse
from flywheel.records.trace import Cursor
from flywheel.sources import studio_connector
from flywheel.sources.studio import database
from flywheel.sources.studio.reader import StudioReader
from flywheel.sources.studio_connector import StudioConnector
from flywheel.store.kernel.database import Store
from flywheel.system.process_folder import PREFIX, ProcessFolder, copies_in
from tests import warm
from tests.cli.conftest import Run
from tests.factories.config import write_config
from tests.sources.studio.reading import NOW, QUICK, Ledger
from tests.sources.studio.writer import DATA


def closed_wal(folder: Path) -> Path:
    """A database in WAL mode that nobody has open."""
    path = folder / "studio.sqlite"
    shutil.copy(DATA / "new_v2.sqlite", path)
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
    return path


def left_in(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.glob(f"{PREFIX}*/*.sqlite")]


@pytest.mark.slow
def test_copies_are_in_the_state_and_not_longer_than_they_are_read(
    flywheel: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, made = tmp_path / "state", list[Path]()

    def noted(parent: Path | None) -> ProcessFolder:
        made.append(parent or Path(tempfile.gettempdir()))
        return ProcessFolder(parent)

    monkeypatch.setattr(database, "ProcessFolder", noted)
    config = write_config(tmp_path, sources=[{"type": "studio", "path": str(closed_wal(tmp_path))}])
    for command in (("ingest",), ("ingest", "--sweep"), ("audit", "--deep")):
        before = len(made)
        flywheel(*command, "-c", config)
        assert len(made) > before, command
    assert set(made) == {state}
    made.clear()
    flywheel("doctor", "-c", config)
    assert set(made) == {Path(tempfile.gettempdir())}, "doctor changes nothing in the state"
    assert left_in(state, Path(tempfile.gettempdir())) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [("ingest",), ("run", "--once"), ("forget", "--conversation", "c")])
def test_what_a_killed_process_left_is_removed_and_what_another_one_reads_is_not(
    flywheel: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path, state = closed_wal(tmp_path), tmp_path / "state"
    config = write_config(tmp_path, sources=[], judge={"base_url": "http://127.0.0.1:9/v1", "model": "judge"})
    assert flywheel("ingest", "-c", config).code == 0
    code = (
        "import sys; from pathlib import Path; from flywheel.sources.studio.database import Database\n"
        "for copies in (Path(sys.argv[2]), None):\n"
        "    made = Database(Path(sys.argv[1]), copies=copies); made.last_rowid(); globals()[str(copies)] = made\n"
        "print('read', flush=True); sys.stdin.read()"
    )
    start = [sys.executable, "-c", code, str(path), str(state)]
    with warm.Popen(start, stdin=warm.subprocess.PIPE, stdout=warm.subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline() == "read\n"
            held = left_in(state, Path(tempfile.gettempdir()))
            assert len(held) == 2
            flywheel(*command, "-c", config)
            assert left_in(state, Path(tempfile.gettempdir())) == held
        finally:
            reader.kill()
    assert left_in(state, Path(tempfile.gettempdir())) == held, "it left them"
    flywheel(*command, "-c", config)
    assert left_in(state, Path(tempfile.gettempdir())) == []


def test_a_daemon_keeps_no_copy_between_passes(tmp_path: Path) -> None:
    reader, ledger = StudioReader(closed_wal(tmp_path), QUICK, copies=tmp_path), Ledger()
    seen = 0
    for batch in reader.read(ledger.cursor, ledger, now=NOW):
        ledger.store(batch, reader)
        seen += len(left_in(tmp_path))
    assert seen, "it was read from a copy"
    assert left_in(tmp_path) == []
    ledger.rescan(reader)
    assert left_in(tmp_path) == []
    ledger.pass_(reader)
    assert left_in(tmp_path) == []
    reader.close()


async def test_workers_read_the_one_copy_that_was_made(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio_connector, "LONG_ROWS", 1)
    monkeypatch.setattr(studio_connector, "JOINED_BATCHES", 1)
    monkeypatch.setattr("flywheel.sources.studio.reader.BATCH_ROWS", 20)
    monkeypatch.setattr(database, "PAGE_ROWS", 20)
    path = closed_wal(tmp_path)
    before = {each.name for each in tmp_path.iterdir()}
    config = parse({"state": {"dir": "home"}, "sources": [{"path": str(path)}]}, "the test's", tmp_path)
    config.state_dir.mkdir()
    connector, replies = StudioConnector(path, config, store), 0
    elsewhere = left_in(Path(tempfile.gettempdir()))
    async for batch in connector.read(1, Cursor(), final=True):
        replies += len(batch.entries)
        assert len(left_in(config.state_dir)) == 1
        assert left_in(Path(tempfile.gettempdir())) == elsewhere
    assert (replies, left_in(config.state_dir)) == (105, [])
    assert {each.name for each in tmp_path.iterdir()} - {"home"} == before, "nothing is created beside the file"
    await connector.close()


def test_who_may_not_write_the_state_copies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copies_in(tmp_path) == tmp_path
    assert copies_in(tmp_path / "none") is None
    monkeypatch.setattr("os.access", lambda *_: False)
    assert copies_in(tmp_path) is None
