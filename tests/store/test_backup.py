"""Backups of files and databases: what is copied, what is refused, and kill -9 at every renaming."""

from __future__ import annotations

import json
import shutil
import sqlite3
import stat
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flywheel.errors import LockedError, StoreError
from flywheel.records.states import Split
from flywheel.store.backup import CURRENT, ERASURES, MANIFEST, PREVIOUS, RESTORING, Backup, restore
from flywheel.store.kernel.database import STATE_FILE as STATE
from flywheel.system.lock import STATE_LOCKS, instance_lock
from tests import warm
from tests.factories.backup import back_up
from tests.factories.state import execute, write_state
from tests.factories.trace import put_replies, replies_on

FILES = {"rounds/r0001/adapter/weights": b"1" * 5000, "rounds/r0001/adapter/配置.json": b"{}", "tasks.jsonl": b""}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with a database and some files."""
    directory = tmp_path / "state"
    write_state(directory, put_replies, *replies_on(Split.TRAIN, 3))
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in STATE_LOCKS and not path.name.startswith(STATE)
    }


def dump(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())


def test_what_is_restored_is_what_was_there(state: Path, tmp_path: Path) -> None:
    before, rows = contents(state), dump(state / STATE)
    back_up(state, tmp_path / "backup")
    shutil.rmtree(state)
    found, manifest = restore(tmp_path / "backup", state)
    assert found == tmp_path / "backup" / CURRENT and set(manifest["files"]) == {*FILES, STATE}
    assert contents(state) == before == FILES
    assert dump(state / STATE) == rows
    assert {stat.S_IMODE(path.stat().st_mode) for path in state.rglob("*") if path.is_file()} == {0o600}
    assert not (state / RESTORING).exists()


def test_a_second_one_copies_only_what_is_new(state: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    assert back_up(state, folder).copied > 5000
    kept = (folder / CURRENT / "rounds/r0001/adapter/weights").stat().st_ino
    assert back_up(state, folder).copied == 0
    (state / "rounds/r0002").mkdir()
    (state / "rounds/r0002/weights").write_bytes(b"22")
    assert back_up(state, folder).copied == 2
    assert (folder / CURRENT / "rounds/r0001/adapter/weights").stat().st_ino == kept
    shutil.rmtree(state / "rounds")
    (state / "rounds").mkdir()
    back_up(state, folder)
    assert names(folder) == {CURRENT, "lock"}
    assert set(contents(folder / CURRENT)) == {MANIFEST, "tasks.jsonl"}


def test_a_file_that_is_removed_meanwhile_is_named(state: Path, tmp_path: Path) -> None:
    with Backup.into(tmp_path / "backup", state) as made:
        made.add_database(STATE, state / STATE)
        made.add("gone", state / "gone")
        made.add_database("gone.db", state / "gone.db")
    assert set(made.left_out) == {"gone", "gone.db"}
    shutil.rmtree(state)
    assert restore(tmp_path / "backup", state)[1]["left_out"] == made.left_out


def test_a_database_is_copied_as_it_is_at_one_moment(tmp_path: Path) -> None:
    """Each transaction of the writer moves something from one row to another: the sum is always the same."""
    path, stop = tmp_path / "moving.db", threading.Event()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE held (id INTEGER PRIMARY KEY, amount INTEGER, filler BLOB)")
        connection.executemany("INSERT INTO held VALUES (?, 100, zeroblob(2000))", [(n,) for n in range(200)])

    def move() -> None:
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            number = 0
            while not stop.is_set():
                with connection:
                    connection.execute("UPDATE held SET amount = amount - 1 WHERE id = ?", (number % 200,))
                    connection.execute("UPDATE held SET amount = amount + 1 WHERE id = ?", (199 - number % 200,))
                number += 1

    writer = threading.Thread(target=move)
    writer.start()
    try:
        for _ in range(20):
            with Backup.into(tmp_path / "backup", tmp_path / "state") as made:
                made.add_database("moving.db", path)
            copy = tmp_path / "backup" / CURRENT / "moving.db"
            assert execute(copy, "SELECT count(*), sum(amount) FROM held") == [(200, 20_000)]
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("harm", ["changed", "cut", "missing", "manifest", "outside"])
def test_a_damaged_backup_is_refused_by_name_and_nothing_is_put_in_place(
    state: Path, tmp_path: Path, harm: str
) -> None:
    current = tmp_path / "backup" / CURRENT
    back_up(state, tmp_path / "backup")
    weights, manifest = current / "rounds/r0001/adapter/weights", current / MANIFEST
    if harm == "changed":
        weights.write_bytes(b"1" * 4999 + b"2")
    elif harm == "cut":
        weights.write_bytes(b"1" * 4999)
    elif harm == "missing":
        weights.unlink()
    elif harm == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    else:
        read = json.loads(manifest.read_bytes())
        read["files"]["../../outside"] = read["files"]["tasks.jsonl"]
        manifest.write_text(json.dumps(read))
    shutil.rmtree(state)
    with pytest.raises(StoreError, match=MANIFEST if harm in ("manifest", "outside") else "weights") as refused:
        restore(tmp_path / "backup", state)
    assert refused.value.hint
    assert not state.exists() or names(state) <= STATE_LOCKS | {RESTORING}
    assert not (tmp_path / "outside").exists()
    # Another one can be restored then.
    shutil.rmtree(tmp_path / "backup")
    write_state(other := tmp_path / "other", put_replies, *replies_on(Split.TRAIN, 1))
    other.rename(tmp_path / "aside")
    other.symlink_to(state)
    with Backup.into(tmp_path / "backup", other) as made:
        made.add_database(STATE, tmp_path / "aside" / STATE)
    restore(tmp_path / "backup", state)
    assert execute(state / STATE, "SELECT count(*) FROM tasks") == [(1,)]


@pytest.mark.parametrize(
    "name",
    ["link/../../../planted", "rounds/../../planted", "/planted", "", ".", "./tasks.jsonl", "rounds//a", "lock",
     "erasures.json", ".restoring/x", "link/planted", 5],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(state: Path, tmp_path: Path, name: str | int) -> None:
    back_up(state, folder := tmp_path / "backup")
    manifest = folder / CURRENT / MANIFEST
    # Where the link leads, the file is in the backup, with the right hash.
    (folder / CURRENT / "rounds/r0001/deep/deeper").mkdir(parents=True)
    (folder / CURRENT / "link").symlink_to(tmp_path if name == "link/planted" else "rounds/r0001/deep/deeper")
    for place in (folder / CURRENT / "rounds/planted", tmp_path / "planted"):
        place.write_bytes(b"")
    read = json.loads(manifest.read_bytes())
    read["files"][name] = read["files"]["tasks.jsonl"]
    if name == 5:
        read["files"] = 5
    manifest.write_text(json.dumps(read))
    shutil.rmtree(state)
    (tmp_path / "planted").unlink()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=MANIFEST):
        restore(folder, state)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["lock", ".restoring", "rounds"])
def test_no_link_in_the_state_directory_is_followed(state: Path, tmp_path: Path, name: str) -> None:
    back_up(state, folder := tmp_path / "backup")
    shutil.rmtree(state)
    state.mkdir()
    (aside := tmp_path / "aside").mkdir()
    (aside / "kept").write_bytes(b"kept")
    (state / name).symlink_to(aside / "kept" if name == "lock" else aside)
    with pytest.raises(StoreError, match=f"{name} is a symbolic link"):
        restore(folder, state)
    assert contents(aside) == {"kept": b"kept"}
    # The directory itself may be one.
    state.rename(tmp_path / "old")
    state.symlink_to(aside)
    (aside / "kept").unlink()
    restore(folder, state)
    assert contents(state) == FILES


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([{"kind": "planet", "pseudonym": "a", "blocks": True}], "planet"),
        ([{"kind": "user", "pseudonym": {"a": 1}, "blocks": True}], r"\[0\]\.pseudonym"),
        ([{"kind": "user", "pseudonym": "a", "blocks": "yes"}], r"\[0\]\.blocks"),
        ([{"kind": "user", "pseudonym": "a"}], "blocks"),
        ({"kind": "user"}, "array"),
        ([7], r"\[0\]"),
    ],
    ids=str,
)
def test_what_is_no_erasure_is_refused_by_name_before_anything_is_restored(
    state: Path, tmp_path: Path, entries: Any, why: str
) -> None:
    back_up(state, folder := tmp_path / "backup")
    shutil.rmtree(state)
    (folder / ERASURES).write_text(json.dumps(entries))
    with pytest.raises(StoreError, match=f"{ERASURES}.*{why}"):
        restore(folder, state)
    assert not state.exists()


def test_nothing_is_restored_over_a_state_or_to_another_place(state: Path, tmp_path: Path) -> None:
    back_up(state, folder := tmp_path / "backup")
    with pytest.raises(StoreError, match=r"not empty: it has rounds"):
        restore(folder, state)
    (state / STATE).unlink()
    with pytest.raises(StoreError, match=r"not empty"):
        restore(folder, state)
    with pytest.raises(StoreError, match=r"Set state\.dir to that path"):
        restore(folder, tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="there is none"):
        restore(tmp_path / "nothing", state)
    shutil.rmtree(state)
    with instance_lock(state), pytest.raises(LockedError):
        restore(folder, state)
    restore(folder, state)


def test_a_folder_that_is_no_backup_is_not_touched(state: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").write_bytes(b"\xff")
    with pytest.raises(StoreError, match=r"holiday\.jpg"):
        back_up(state, tmp_path / "photos")
    assert names(tmp_path / "photos") == {"holiday.jpg"}
    with pytest.raises(StoreError, match="in the state directory"):
        back_up(state, state / "backup")


KILLED = """
import os, signal, sys
from pathlib import Path
from flywheel.store import backup
from tests.factories.backup import back_up

left = int(sys.argv[1])
renamed = Path.rename

def rename(self, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return renamed(self, target)

Path.rename = rename
folder, state = Path(sys.argv[3]), Path(sys.argv[4])
back_up(state, folder) if sys.argv[2] == "backup" else backup.restore(folder, state)
"""


def killed(renamings: int, what: str, folder: Path, state: Path) -> bool:
    """Whether the process was killed before so many renamings were done."""
    command = [sys.executable, "-c", KILLED, str(renamings), what, str(folder), str(state)]
    ran = warm.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, -9), ran.stderr
    return ran.returncode == -9


@pytest.mark.slow
def test_kill_9_during_a_backup_leaves_the_one_before_or_the_new_one(state: Path, tmp_path: Path) -> None:
    back_up(state, folder := tmp_path / "backup")
    place = 0
    while True:
        (state / "tasks.jsonl").write_bytes(new := b"%d\n" % (place + 1))
        before = contents(folder / CURRENT)["tasks.jsonl"]
        if not killed(place, "backup", folder, state):
            break
        found = next(folder / name for name in (CURRENT, PREVIOUS) if (folder / name).is_dir())
        assert contents(found)["tasks.jsonl"] in (before, new)
        shutil.copytree(folder, tmp_path / f"copy-{place}")
        kept = contents(state)
        shutil.move(state, tmp_path / "aside")
        restore(tmp_path / f"copy-{place}", state)
        assert {**contents(state), "tasks.jsonl": b""} == {**kept, "tasks.jsonl": b""}
        shutil.rmtree(state)
        shutil.move(tmp_path / "aside", state)
        back_up(state, folder)
        place += 1
    assert place >= 2, "it was killed nowhere"


@pytest.mark.slow
def test_kill_9_during_a_restore_is_mended_by_another(state: Path, tmp_path: Path) -> None:
    before, rows = contents(state), dump(state / STATE)
    back_up(state, folder := tmp_path / "backup")
    place = 0
    while True:
        shutil.rmtree(state)
        if not killed(place, "restore", folder, state):
            break
        assert not (state / STATE).exists(), "a state that is not whole looks like one"
        restore(folder, state)
        assert (contents(state), dump(state / STATE)) == (before, rows)
        place += 1
    assert place >= 3, "it was killed nowhere"
    assert (contents(state), dump(state / STATE)) == (before, rows)
