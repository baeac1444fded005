"""Bad input gets a message with cause and remedy; a source is never written to, and its writer never waits long."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from flywheel.errors import StudioError
from flywheel.records.trace import Cursor
from flywheel.sources.studio import database
from flywheel.sources.studio import reader as reading
from flywheel.sources.studio.database import Database, RowPage
from flywheel.sources.studio.reader import StudioReader
from tests.sources.studio.reading import NOW, QUICK, Ledger, by_id, read_all
from tests.sources.studio.writer import DATA, Studio, agent, empty_like, insert, rows


def refusal(path: Path) -> StudioError:
    reader = StudioReader(path, QUICK, busy_seconds=0.1)
    try:
        with pytest.raises(StudioError) as caught:
            list(reader.read(Cursor(), Ledger(), now=NOW))
    finally:
        reader.close()
    error = caught.value
    assert str(path) in str(error) and error.why and error.hint
    assert "Traceback" not in str(error)
    return error


def test_missing(tmp_path: Path) -> None:
    error = refusal(tmp_path / "none.sqlite")
    assert "no such file" in error.why and not error.retryable
    assert list(tmp_path.iterdir()) == [], "nothing is created"


def test_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert refusal(tmp_path / "file" / "database.sqlite").why


def test_directory(tmp_path: Path) -> None:
    assert "directory" in refusal(tmp_path).why


def test_empty(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    path.touch()
    error = refusal(path)
    assert "Studio has not written yet" in error.why and error.retryable
    Studio(tmp_path / "made.sqlite").write(agent("a1"))
    (tmp_path / "made.sqlite").replace(path)
    assert list(by_id(read_all(path)[0])) == ["a1"]


def test_not_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    path.write_text("name,age\n" * 1000)
    error = refusal(path)
    assert "not a SQLite database" in error.why and not error.retryable


@pytest.mark.parametrize("tables", [(), ("users", "orders")])
def test_sqlite_but_not_studio(tables: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 1")
        for table in tables:
            database.execute(f"CREATE TABLE {table} (id)")
    database.close()
    error = refusal(path)
    assert "no span_table" in error.why and not error.retryable
    assert all(table in error.why for table in tables)


def test_a_span_table_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE span_table (id, width, height)")
    database.close()
    error = refusal(path)
    assert "run_id and spanKind or conversationId and spanId" in error.why and "id, width, height" in error.why


def test_a_span_table_that_lacks_columns(tmp_path: Path) -> None:
    path = empty_like("new_v1", tmp_path / "studio.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("DROP VIEW IF EXISTS model_invocation_view")
        database.execute("ALTER TABLE span_table DROP COLUMN events")
    database.close()
    error = refusal(path)
    assert "generation 2" in error.why and "events" in error.why


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("CREATE VIEW span_table AS SELECT * FROM real", "is a view"),
        ("CREATE TABLE span_table (id TEXT PRIMARY KEY, {others}) WITHOUT ROWID", "WITHOUT ROWID"),
        ("CREATE TABLE span_table (id TEXT PRIMARY KEY, {others}, ROWID TEXT)", "a column of the name rowid"),
        ("CREATE TABLE span_table AS SELECT * FROM real; UPDATE span_table SET rowid = 1 - rowid", "below 1"),
    ],
)
def test_rows_without_numbers_are_never_an_empty_source(studio: Studio, made: str, why: str) -> None:
    studio.write(agent("a"), agent("b", trace="other"))
    with contextlib.closing(sqlite3.connect(studio.path)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM pragma_table_info('span_table')")]
        for (view,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'view'").fetchall():
            database.execute(f"DROP VIEW {view}")
        database.execute("ALTER TABLE span_table RENAME TO real")
        database.executescript(made.format(others=", ".join(name for name in names if name != "id")))
        if "CREATE TABLE span_table (" in made:
            database.execute(f"INSERT INTO span_table ({', '.join(names)}) SELECT {', '.join(names)} FROM real")
        database.commit()
    error = refusal(studio.path)
    assert error.condition == "unknown schema" and why in str(error)


def test_damaged(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    content = bytearray((DATA / "old.sqlite").read_bytes())
    content[4096 * 3 :] = os.urandom(len(content) - 4096 * 3)
    path.write_bytes(content)
    error = refusal(path)
    assert "damaged" in error.why and not error.retryable


def exchanged(content: bytearray, first: int, second: int) -> bytes:
    pages = [content[start : start + 4096] for start in range(0, len(content), 4096)]
    pages[first], pages[second] = pages[second], pages[first]
    return b"".join(pages)


def leaves(content: bytes) -> list[int]:
    """The pages with the rows of the fixture `old`, in the order of the rows, as the root of the table names them."""
    with contextlib.closing(sqlite3.connect(DATA / "old.sqlite")) as connection:
        (number,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'span_table'").fetchone()
    root = content[(number - 1) * 4096 :][:4096]
    assert root[0] == 5, "the root has rows itself"
    count = int.from_bytes(root[3:5])
    places = [int.from_bytes(root[at : at + 2]) for at in range(12, 12 + 2 * count, 2)]
    return [int.from_bytes(root[place : place + 4]) - 1 for place in places]


def test_damage_that_sqlite_does_not_notice(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    content = bytearray((DATA / "old.sqlite").read_bytes())
    first, *_, last = leaves(content)
    path.write_bytes(exchanged(content, first, last))
    error = refusal(path)
    assert (error.condition, error.retryable) == ("damaged", False)


def test_a_large_value_of_a_row_that_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MAX_CELL", 3200)
    path = tmp_path / "studio.sqlite"
    content = bytearray((DATA / "old.sqlite").read_bytes())
    first, *others = leaves(content)

    def size_of_first_row() -> int:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return int(connection.execute("SELECT length(attributes) FROM span_table LIMIT 1").fetchone()[0])

    for other in others:
        path.write_bytes(exchanged(content, first, other))
        if size_of_first_row() > database.MAX_CELL:
            break
    else:
        pytest.fail("no page begins with a large row")
    assert refusal(path).condition == "damaged"


def test_a_table_that_repeats_a_page_is_not_read_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    content = bytearray((DATA / "old.sqlite").read_bytes())
    first, *_, last = leaves(content)
    content[last * 4096 : (last + 1) * 4096] = content[first * 4096 : (first + 1) * 4096]
    path.write_bytes(content)
    assert refusal(path).condition == "damaged"


@pytest.mark.parametrize(("word", "damaged"), [(b"CREATE TABLE", b"CREA\x9aE TABLE"), (b"traceId", b"tra\x9aeId")])
def test_damaged_names(tmp_path: Path, word: bytes, damaged: bytes) -> None:
    path = tmp_path / "studio.sqlite"
    path.write_bytes((DATA / "new_v2.sqlite").read_bytes().replace(word, damaged))
    assert refusal(path).condition in ("damaged", "unknown schema")


def test_whatever_is_damaged_is_a_condition_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    conditions = Counter[str]()
    for seed in range(60):
        random = Random(seed)
        content = bytearray((DATA / f"{random.choice(['old', 'new_v2', 'new_oldclient'])}.sqlite").read_bytes())
        for page in random.choices(range(len(content) // 4096), k=random.choice([1, 10])):
            # The first 100 bytes say that it is a SQLite database.
            at = page * 4096 + random.randrange(100 * (page == 0), 200)
            length = random.choice([1, 20, 1000])
            content[at : at + length] = random.randbytes(length)
        path.write_bytes(content)
        try:
            read_all(path)
            conditions["ok"] += 1
        except StudioError as error:
            conditions[error.condition] += 1
    assert conditions.keys() <= {"ok", "damaged", "unknown schema", "failing"}
    assert conditions["damaged"] > 10, conditions


def test_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    path.write_bytes((DATA / "old.sqlite").read_bytes()[:600_000])
    assert refusal(path).why


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "studio.sqlite"
    Studio(path).write(agent("a1"))
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    yield path
    writer.close()


def test_locked(locked: Path) -> None:
    error = refusal(locked)
    assert "locked" in error.why and error.retryable


def test_a_reader_survives_a_lock(studio: Studio) -> None:
    studio.write(agent("a1"))
    reader, ledger = StudioReader(studio.path, QUICK, busy_seconds=0.1), Ledger()
    ledger.pass_(reader)
    studio.write(agent("a2", trace="2"))
    writer = sqlite3.connect(studio.path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StudioError):
        ledger.pass_(reader)
    writer.close()
    ledger.pass_(reader)
    assert sorted(ledger.replies) == ["a1", "a2"]
    reader.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody who may not read")
def test_permission_denied(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    shutil.copy(DATA / "new_v2.sqlite", path)
    path.chmod(0o600)
    tmp_path.chmod(0o755)
    code = (
        "import os, sys; from pathlib import Path; from datetime import UTC, datetime\n"
        "from flywheel.config.ingest import IngestSettings; from flywheel.records.trace import Cursor\n"
        "from flywheel.sources.studio.reader import StudioReader\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "reader = StudioReader(Path(sys.argv[1]), IngestSettings())\n"
        "try: list(reader.read(Cursor(), None, now=datetime.now(UTC)))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    # Only the last folder needs to let the other user in: the ones above are opened for the length of the test.
    above = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    modes = {folder: folder.stat().st_mode for folder in above}
    try:
        for folder in above:
            folder.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=60
        )
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)
    assert done.stdout.startswith("StudioError")
    assert "permission denied" in done.stdout and "Let this user read" in done.stdout


def state(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("name", ["old", "new_v1", "migrated"])
def test_reading_leaves_folder_and_file_as_they_were(name: str, tmp_path: Path) -> None:
    # A name that has to be encoded in a URI.
    path = tmp_path / "my #1 50% studio?.sqlite"
    shutil.copy(DATA / f"{name}.sqlite", path)
    before, found = state(tmp_path), path.stat()
    reader, ledger = StudioReader(path, QUICK), Ledger()
    for step in reader.read(ledger.cursor, ledger, now=NOW):
        ledger.store(step, reader)
        assert state(tmp_path) == before, "not even while it is open"
    reader.close()
    assert state(tmp_path) == before
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (found.st_mtime_ns, found.st_ino)
    assert len(ledger.replies) > 100


def test_the_connection_cannot_write(studio: Studio) -> None:
    studio.write(agent("a1"))
    database = Database(studio.path)
    with pytest.raises(StudioError):
        database.ask("DELETE FROM span_table")
    assert database.ask("SELECT count(*) FROM span_table") == [(1,)]
    database.close()


def as_wal(path: Path) -> sqlite3.Connection:
    writer = sqlite3.connect(path, isolation_level=None)
    assert writer.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
    # It takes part in the log from its first question on.
    writer.execute("SELECT count(*) FROM span_table").fetchone()
    return writer


def test_wal_without_a_writer_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "studio.sqlite"
    shutil.copy(DATA / "new_v2.sqlite", path)
    as_wal(path).close()
    before = state(tmp_path)
    assert list(before) == ["studio.sqlite"]
    replies, _, _ = read_all(path)
    assert by_id(replies) == by_id(read_all(DATA / "new_v2.sqlite")[0])
    assert state(tmp_path) == before


def test_wal_with_a_writer_is_read_as_it_grows(
    studio: Studio, reader: StudioReader, ledger: Ledger, tmp_path: Path
) -> None:
    writer = as_wal(studio.path)
    writer.execute("PRAGMA wal_autocheckpoint = 0")
    studio.write(agent("a1"))
    listed = sorted(state(tmp_path))
    main = studio.path.read_bytes()
    ledger.pass_(reader)
    studio.write(agent("a2", trace="2"))
    ledger.pass_(reader)
    assert sorted(ledger.replies) == ["a1", "a2"]
    assert sorted(state(tmp_path)) == listed
    assert studio.path.read_bytes() == main, "nothing was checkpointed"
    writer.close()
    assert sorted(state(tmp_path)) == ["studio.sqlite"], "the last writer could fold its log in and leave"
    ledger.pass_(reader)
    studio.write(agent("a3", trace="3"))
    ledger.pass_(reader)
    assert sorted(ledger.replies) == ["a1", "a2", "a3"]


def test_a_log_left_by_a_dead_writer_is_read(tmp_path: Path) -> None:
    live, left = tmp_path / "live", tmp_path / "left"
    live.mkdir()
    left.mkdir()
    studio = Studio(live / "studio.sqlite")
    writer = as_wal(studio.path)
    studio.write(agent("a1"))
    for name in ("studio.sqlite", "studio.sqlite-wal"):
        shutil.copy(live / name, left / name)
    writer.close()
    before = state(left)
    assert list(by_id(read_all(left / "studio.sqlite")[0])) == ["a1"]
    assert state(left) == before


def test_a_read_that_holds_the_file_is_held_up_as_little_as_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No garbage is collected, and other threads give way sooner: the driver waits for them at every row."""
    path = Studio(tmp_path / "studio.sqlite").path
    usual = sys.getswitchinterval()
    seen: list[tuple[bool, float]] = []

    def held(*_: Any) -> RowPage:
        seen.append((gc.isenabled(), sys.getswitchinterval()))
        if len(seen) == 2:
            raise sqlite3.OperationalError("disk I/O error")
        return RowPage([], False, 0)

    monkeypatch.setattr(database, "read_page", held)
    with Database(path) as opened:
        opened.page(("id",), 0)
        with pytest.raises(StudioError):
            opened.page(("id",), 0)
    assert [collects for collects, _ in seen] == [False, False]
    assert [interval for _, interval in seen] == pytest.approx([database.SWITCH_SECONDS] * 2)
    assert gc.isenabled()
    assert database.SWITCH_SECONDS < usual == pytest.approx(sys.getswitchinterval())


def test_the_last_of_several_reads_lets_garbage_be_collected_again() -> None:
    with database.undisturbed():
        with database.undisturbed():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with database.undisturbed():
            pass
        assert not gc.isenabled(), "whoever switched it off wants it so"
    finally:
        gc.enable()


def test_whoever_has_threads_switch_oftener_keeps_that() -> None:
    usual = sys.getswitchinterval()
    oftener = database.SWITCH_SECONDS / 2
    sys.setswitchinterval(oftener)
    try:
        with database.undisturbed():
            assert sys.getswitchinterval() == pytest.approx(oftener)
        assert sys.getswitchinterval() == pytest.approx(oftener)
    finally:
        sys.setswitchinterval(usual)


def test_a_writer_is_never_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer without any patience commits all through the reading, and between the pages of a slow consumer."""
    path = empty_like("new_v1", tmp_path / "studio.sqlite")
    spans = rows("new_v1")
    insert(path, spans[:200])
    monkeypatch.setattr(database, "PAGE_ROWS", 10)
    monkeypatch.setattr(reading, "BATCH_ROWS", 10)
    reader, ledger = StudioReader(path, QUICK), Ledger()
    at = 200
    for step in reader.read(ledger.cursor, ledger, now=NOW):
        ledger.store(step, reader)
        if at < len(spans):
            writer = sqlite3.connect(path, timeout=0)
            writer.execute(f"INSERT INTO span_table VALUES ({','.join('?' * len(spans[at]))})", spans[at])
            writer.commit()
            writer.close()
            at += 1
    assert at > 200

    stop = threading.Event()
    failures: list[StudioError] = []

    def keep_reading() -> None:
        own = StudioReader(path, QUICK)
        while not stop.is_set():
            try:
                Ledger().pass_(own)
                own.forget()
            except StudioError as error:
                failures.append(error)
        own.close()

    thread = threading.Thread(target=keep_reading)
    thread.start()
    try:
        waits = []
        for row in spans[at:]:
            began = time.perf_counter()
            writer = sqlite3.connect(path, timeout=5)
            writer.execute(f"INSERT INTO span_table VALUES ({','.join('?' * len(row))})", row)
            writer.commit()
            writer.close()
            waits.append(time.perf_counter() - began)
    finally:
        stop.set()
        thread.join()
    # The reader may have to wait; then it says so and comes back.
    assert all(error.retryable for error in failures)
    assert len(waits) == len(spans) - at
    ledger.pass_(reader, final=True)
    assert ledger.replies == by_id(read_all(DATA / "new_v1.sqlite")[0])
    reader.close()
