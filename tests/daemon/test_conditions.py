"""What can happen to a source while the daemon runs: each trouble has a name in the status, the other sources go on,
what was in the way goes away without a restart, and every reply comes once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.daemon.following import CANNOT, Following, becomes, configuration, exported, source, status
from tests.sources.studio.writer import Studio, agent, empty_like
from tests.waiting import until

ROOT = Path(__file__).parents[2]


class Sources:
    """One source that trouble comes to, and a neighbour that must not notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "studio").mkdir()
        (folder / "neighbour").mkdir()
        self.path = folder / "studio" / "database.sqlite"
        self.neighbour = Studio(folder / "neighbour" / "database.sqlite")
        self.config = configuration(folder, [self.path, self.neighbour.path])
        self.told: list[str] = []
        self._number = 0

    def made(self, path: Path | None = None) -> Studio:
        """A new database with a reply of its own, by default where the source is looked for."""
        studio = Studio(path or self.path)
        self.tell(studio)
        return studio

    def tell(self, studio: Studio) -> str:
        """One more reply."""
        self._number += 1
        span = f"reply{self._number}"
        studio.write(agent(span, f"question {span}", trace=span, conversation=span))
        self.told.append(span)
        return span

    async def trouble(self, condition: str) -> str:
        """Wait for a condition of the source; the error that comes with it. The neighbour goes on meanwhile."""
        found = await becomes(self.config, self.path, condition)
        told = self.tell(self.neighbour)
        await until(lambda: told in exported(self.config), "the neighbour's reply")
        assert (await source(self.config, self.neighbour.path))["condition"] == "ok"
        assert str(self.path) in found["error"]
        return str(found["error"])

    async def well(self, expected: list[str] | None = None) -> None:
        """Wait until the source is fine and everything that was told is there, once."""
        await becomes(self.config, self.path, "ok")
        wanted = Counter(self.told if expected is None else expected)
        await until(lambda: Counter(exported(self.config)).keys() >= wanted.keys(), "every reply")
        assert Counter(exported(self.config)) == wanted
        shown = await status(self.config)
        assert shown["balanced"]
        assert not (await source(self.config, self.path))["error"]


@pytest.fixture
async def sources(tmp_path: Path) -> AsyncIterator[Sources]:
    """Followed for as long as the test runs."""
    made = Sources(tmp_path)
    async with Following(made.config):
        yield made


async def test_missing_until_it_is_made(sources: Sources) -> None:
    assert "no such file" in await sources.trouble("missing")
    studio = sources.made()
    await sources.well()
    sources.tell(studio)
    await sources.well()


@pytest.mark.slow
async def test_its_folder_goes_away_and_comes_back(sources: Sources) -> None:
    sources.made()
    await sources.well()
    for _ in range(2):
        shutil.rmtree(sources.path.parent)
        await sources.trouble("missing")
        sources.path.parent.mkdir()
        await sources.trouble("missing")
        sources.tell(sources.made())
        await sources.well()


@pytest.mark.slow
async def test_locked_for_longer_than_it_waits(sources: Sources) -> None:
    studio = sources.made()
    await sources.well()
    with contextlib.closing(sqlite3.connect(sources.path, isolation_level=None)) as owner:
        owner.execute("BEGIN EXCLUSIVE")
        assert "locked" in await sources.trouble("locked")
        owner.execute("ROLLBACK")
    sources.tell(studio)
    await sources.well()


CRASH = """
import os, signal, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA cache_size = 5")
rest = ", ".join([row[1] for row in database.execute("PRAGMA table_info(span_table)")][1:])
database.execute("BEGIN IMMEDIATE")
database.execute("UPDATE span_table SET attributes = attributes || ' ', traceId = 'half'")
for number in range(300):
    database.execute(f"INSERT INTO span_table SELECT 'lost' || ?, {rest} FROM span_table LIMIT 1", (number,))
os.kill(os.getpid(), signal.SIGKILL)
"""
"""A writer that dies when part of its transaction is in the file already."""


@pytest.mark.slow
async def test_its_writer_died_in_the_middle_of_a_commit(sources: Sources) -> None:
    studio = sources.made()
    for _ in range(20):
        sources.tell(studio)
    await sources.well()
    before = sources.path.read_bytes()
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", CRASH, str(sources.path)], check=False)
    journal = sources.path.with_name("database.sqlite-journal")
    assert journal.stat().st_size > 0 and sources.path.read_bytes()[: len(before)] != before
    left = journal.read_bytes()
    error = await sources.trouble("needs repair")
    assert "rolled back" in error and "Start Studio" in error
    assert journal.read_bytes() == left, "the journal is its writer's"
    sources.tell(studio)
    assert not journal.exists()
    await sources.well()


@pytest.mark.slow
async def test_damaged_until_it_is_restored(sources: Sources) -> None:
    studio = sources.made()
    for _ in range(20):
        sources.tell(studio)
    await sources.well()
    good = sources.path.read_bytes()
    bad = bytearray(good)
    for page in range(1, len(bad) // 4096):
        bad[page * 4096 : page * 4096 + 64] = random.Random(page).randbytes(64)
    sources.path.write_bytes(bad)
    assert "damaged" in await sources.trouble("damaged")
    sources.path.write_bytes(good)
    sources.tell(studio)
    await sources.well()


async def test_of_no_known_schema_until_it_is_another(sources: Sources) -> None:
    with contextlib.closing(sqlite3.connect(sources.path)) as database:
        database.execute("CREATE TABLE span_table (id, width, height)")
        database.commit()
    error = await sources.trouble("unknown schema")
    assert "fingerprint" in error and "run_id and spanKind or conversationId and spanId" in error
    assert "id, width, height" in error
    sources.path.unlink()
    sources.made()
    await sources.well()


@pytest.mark.slow
async def test_not_studios_and_not_a_database(sources: Sources) -> None:
    sources.path.write_bytes(b"name,age\n" * 1000)
    await sources.trouble("not Studio's")
    sources.path.write_bytes(b"")
    await sources.trouble("empty")
    with contextlib.closing(sqlite3.connect(sources.path)) as database:
        database.execute("CREATE TABLE users (id)")
        database.commit()
    assert "users" in await sources.trouble("not Studio's")
    sources.path.unlink()
    sources.made()
    await sources.well()


@pytest.mark.slow
async def test_replaced_by_another_file(sources: Sources) -> None:
    sources.tell(sources.made())
    await sources.well()
    other = sources.made(sources.folder / "other.sqlite")
    sources.tell(other)
    other.path.replace(sources.path)
    await sources.well()
    assert (await source(sources.config, sources.path))["restarts"] == 1
    sources.tell(Studio(sources.path))
    await sources.well()


@pytest.mark.slow
async def test_another_database_is_copied_over_it(sources: Sources) -> None:
    """The file stays the same one, and SQLite's own count of changes is the same: only its content tells."""
    studio = sources.made()
    await sources.well()
    other = sources.made(sources.folder / "other.sqlite")
    counts = {path.read_bytes()[24:40] for path in (studio.path, other.path)}
    assert len(counts) == 1
    # In one write, as a small file is copied.
    descriptor = os.open(sources.path, os.O_WRONLY)
    os.pwrite(descriptor, other.path.read_bytes(), 0)
    os.close(descriptor)
    await sources.well()
    shutil.copyfile(sources.made(sources.folder / "third.sqlite").path, sources.path)
    await sources.well()
    sources.tell(Studio(sources.path))
    await sources.well()


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
async def test_an_older_copy_is_put_back(sources: Sources, in_place: bool) -> None:
    studio = sources.made()
    sources.tell(studio)
    await sources.well()
    backup = sources.folder / "backup.sqlite"
    shutil.copyfile(sources.path, backup)
    sources.tell(studio)
    sources.tell(studio)
    await sources.well()
    if in_place:
        shutil.copyfile(backup, sources.path)
    else:
        backup.replace(sources.path)
    # Its numbers are given to other rows now.
    for _ in range(4):
        sources.tell(Studio(sources.path))
    await sources.well()


@pytest.mark.slow
async def test_a_link_is_led_elsewhere(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    sources = Sources(tmp_path)
    first = sources.made(real / "first.sqlite")
    sources.path.symlink_to(first.path)
    async with Following(sources.config):
        await sources.well()
        sources.tell(first)
        await sources.well()
        (tmp_path / "elsewhere").mkdir()
        second = sources.made(tmp_path / "elsewhere" / "second.sqlite")
        link = tmp_path / "link"
        link.symlink_to(second.path)
        link.replace(sources.path)
        await sources.well()
        sources.tell(second)
        await sources.well()
        second.path.unlink()
        await sources.trouble("missing")
        sources.made(second.path)
        await sources.well()


def switched(owner: sqlite3.Connection, mode: str) -> bool:
    """Change the journal mode, waiting for whoever reads as SQLite does."""
    return owner.execute(f"PRAGMA journal_mode = {mode}").fetchall() == [(mode,)]


@pytest.mark.slow
async def test_it_changes_to_a_write_ahead_log_and_back(sources: Sources) -> None:
    studio = sources.made()
    await sources.well()
    for _ in range(3):
        with contextlib.closing(sqlite3.connect(sources.path, timeout=30, check_same_thread=False)) as owner:
            assert await asyncio.to_thread(switched, owner, "wal")
            sources.tell(studio)
            await sources.well()
            sources.tell(studio)
            await sources.well()
            assert await asyncio.to_thread(switched, owner, "delete")
        sources.tell(studio)
        await sources.well()
        assert [path.name for path in sources.path.parent.iterdir()] == ["database.sqlite"]


@pytest.mark.slow
async def test_fifty_sources_of_which_some_are_broken(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    paths = [folder / f"{number}.sqlite" for number in range(50)]
    broken = {
        paths[3]: "missing", paths[11]: "not Studio's", paths[19]: "empty", paths[23]: "damaged",
        paths[31]: "unknown schema", paths[42]: "locked", paths[47]: "not Studio's",
    }  # fmt: skip
    sound = [Studio(path) for path in paths if path not in broken]
    for number, studio in enumerate(sound):
        studio.write(agent(f"first{number}", f"question {number}", trace=f"t{number}"))
    paths[11].write_bytes(b"text " * 1000)
    paths[19].touch()
    content = bytearray(sound[0].path.read_bytes())
    content[4096:] = random.Random(0).randbytes(len(content) - 4096)
    paths[23].write_bytes(content)
    with contextlib.closing(sqlite3.connect(paths[31])) as database:
        database.execute("CREATE TABLE span_table (id)")
        database.commit()
    paths[47].mkdir()
    locked = sqlite3.connect(empty_like("new_v2", paths[42]), isolation_level=None)
    locked.execute("BEGIN EXCLUSIVE")
    config = configuration(tmp_path, paths)
    expected = {f"first{number}" for number in range(len(sound))}
    with contextlib.closing(locked):
        async with Following(config, poll_seconds=1):

            async def are_told() -> bool:
                shown = {row["path"]: row["condition"] for row in (await status(config))["sources"]}
                return shown == {str(path): broken.get(path, "ok") for path in paths}

            await until(are_told, "every condition")
            await until(lambda: set(exported(config)) == expected, "every first reply")
            for number, studio in enumerate(sound):
                studio.write(agent(f"second{number}", f"more {number}", trace=f"u{number}"))
            expected |= {f"second{number}" for number in range(len(sound))}
            await until(lambda: set(exported(config)) == expected, "every second reply")
            locked.execute("ROLLBACK")
            for path in broken.keys() - {paths[42]}:
                if path.is_dir():
                    path.rmdir()
                path.unlink(missing_ok=True)
            for number, path in enumerate(broken):
                Studio(path).write(agent(f"late{number}", f"late {number}", trace=f"v{number}"))
                await becomes(config, path, "ok")
            expected |= {f"late{number}" for number in range(len(broken))}
            await until(lambda: set(exported(config)) == expected, "every late reply")
    assert set(Counter(exported(config)).values()) == {1}
    assert (await status(config))["balanced"]


@contextlib.contextmanager
def process(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What follows the sources, in a process that can be limited."""
    command = [sys.executable, "-m", "tests.daemon.following", str(folder)]
    with (
        (folder / "log").open("wb") as log,
        warm.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=log) as running,
    ):
        try:
            yield running
        finally:
            running.kill()


@pytest.mark.slow
async def test_the_disk_of_the_state_fills_up_and_is_freed(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    studio = sources.made()
    with process(tmp_path) as running:
        await sources.well()
        unlimited = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)
        used = max(path.stat().st_size for path in sources.config.state_dir.iterdir())
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (used + 200_000, unlimited[1]))
        big = [f"big{number}" for number in range(300)]
        # At once: in small portions they could leave no room for the note that says what is wrong.
        studio.write(*(agent(name, f"question {name} " + "x" * 10_000, trace=name) for name in big))
        found = await becomes(sources.config, sources.path, "not stored")
        assert "state database" in found["error"]
        assert (await status(sources.config))["balanced"]
        assert running.poll() is None
        resource.prlimit(running.pid, resource.RLIMIT_FSIZE, unlimited)
        await sources.well([*sources.told, *big])
        assert running.poll() is None
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
async def test_the_task_file_cannot_be_written_for_a_while(sources: Sources) -> None:
    """What is in the ledger follows by itself, without a new reply."""
    sources.config.task_file.mkdir(parents=True)
    sources.made()
    await becomes(sources.config, sources.path, "ok")

    async def is_stored() -> bool:
        return bool((await status(sources.config))["tasks"]["pending"])

    await until(is_stored, "the task in the state")
    sources.config.task_file.rmdir()
    await sources.well()


@pytest.mark.slow
async def test_not_allowed_until_it_is(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    studio = sources.made()
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    (inbox / "more.jsonl").write_text(json.dumps({"main_query": "1 + 1?", "answer": "2"}) + "\n")
    config = configuration(tmp_path, [sources.path, sources.neighbour.path, inbox])
    sources.path.chmod(0)
    inbox.chmod(0)
    with process(tmp_path) as running:
        await until(lambda: config.state_dir.exists() or running.poll() is not None, "the start")
        if running.poll() == CANNOT:
            pytest.skip("this root cannot give up its privileges")
        assert "permission denied" in await sources.trouble("denied")
        assert "Permission denied" in (await becomes(config, inbox, "denied"))["error"]
        sources.path.chmod(0o644)
        sources.path.parent.chmod(0)
        await sources.trouble("denied")
        sources.path.parent.chmod(0o755)
        inbox.chmod(0o755)
        await becomes(config, inbox, "ok")
        await until(lambda: len(exported(config)) == len(sources.told) + 1, "the line")
        sources.tell(studio)
        await until(lambda: len(exported(config)) == len(sources.told) + 1, "the reply")
        await becomes(config, sources.path, "ok")
        assert running.poll() is None
    assert set(Counter(exported(config)).values()) == {1}
    assert "Traceback" not in (tmp_path / "log").read_text()
