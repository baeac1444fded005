"""The connection to the state database: opening it, and running functions in its transactions.

A whole transaction is run in a thread: one for what is written, since SQLite has one writer, and a few for what is
read. So the loop is free meanwhile, and a statement costs no way to a thread and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from flywheel.errors import StoreError
from flywheel.files import make_private, private
from flywheel.store.migrations import migrate, version_of
from flywheel.store.schema import SCHEMA_VERSION

P = ParamSpec("P")
T = TypeVar("T")

BUSY_TIMEOUT_MS: Final = 30_000
READERS: Final = 4
"""Transactions that only read, at the same time."""
CACHE_KIB: Final = 8_000
CHECKPOINT_PAGES: Final = 16_000
"""A long history is stored in two thirds of the time when a transaction fits into the cache, and when what every one
of them changes, the indexes, is brought from the write-ahead log (64 MB) into the database a few times less."""


class _Line:
    """Connections of one kind, each with a thread: transactions that find none free wait for their turn."""

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], begin: str, settings: tuple[str, ...] = (), *, threads: int
    ) -> None:
        self._engine = _engine(connect, begin, settings, connections=threads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="state")

    async def run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        def transaction() -> T:
            with self._engine.begin() as connection:
                return function(connection, *args, **kwargs)

        future = self._threads.submit(transaction)
        running = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not future.cancel():
                # It has begun, so it is committed or undone before its caller goes on.
                await asyncio.wait([running])
            raise

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.dispose()


class Store:
    """Flywheel's state. `write` and `read` run one function in one transaction and return what it returns.

    A function that is given to `read` must only read.
    """

    def __init__(self, name: str, writing: _Line, reading: _Line) -> None:
        self._name = name
        self._writing = writing
        self._reading = reading

    @classmethod
    async def open(cls, state_dir: Path) -> Self:
        """Open `state.db` in `state_dir`, made and migrated if needed. Raises StoreError."""
        path = state_dir / "state.db"
        try:
            make_private(state_dir)
        except OSError as error:
            raise StoreError(
                f"create the state directory {state_dir}",
                error.strerror or str(error),
                "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write.",
            ) from error
        # The files that SQLite makes beside it have its permissions. Where it cannot be made, SQLite says why.
        with contextlib.suppress(OSError):
            os.close(private(path, os.O_RDWR | os.O_CREAT))

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(path, check_same_thread=False)

        settings = (
            "journal_mode = WAL",
            "synchronous = FULL",
            f"cache_size = -{CACHE_KIB}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        )
        writing = _Line(connect, "BEGIN IMMEDIATE", settings, threads=1)
        reading = _Line(connect, "BEGIN", ("query_only = ON",), threads=READERS)
        return await cls._ready(cls(str(path), writing, reading))

    @classmethod
    async def view(cls, state_dir: Path) -> Self:
        """The state to look at, beside whoever works on it. Nothing is written, not even SQLite's side files."""
        path = state_dir / "state.db"
        if not _is_there(path):
            return await cls.copy(state_dir)
        line = _Line(lambda: _read_only(path), "BEGIN", threads=1)
        store = cls(str(path), line, line)
        try:
            version = await store.read(version_of)
            if version == 0:
                # Somebody is just making it.
                await store.close()
                return await cls.copy(state_dir)
            if version != SCHEMA_VERSION:
                raise StoreError(
                    f"look at the state database {path}",
                    f"its schema is version {version}, not {SCHEMA_VERSION}",
                    "The daemon's next start, or one `flywheel ingest`, brings it up to date."
                    if version < SCHEMA_VERSION
                    else "A newer Flywheel made it: use that one.",
                )
        except BaseException:
            await store.close()
            raise
        return store

    @classmethod
    async def copy(cls, state_dir: Path) -> Self:
        """A copy of the state of one's own (empty if there is none): what is done to it leaves no trace.

        SQLite keeps a little of it in memory and the rest in a file without a name, which is gone with the process.
        """
        path = state_dir / "state.db"
        is_there = _is_there(path)

        def connect() -> sqlite3.Connection:
            private = sqlite3.connect("", check_same_thread=False)
            if is_there:
                with contextlib.closing(_read_only(path)) as source:
                    source.backup(private)
            return private

        line = _Line(connect, "BEGIN IMMEDIATE", threads=1)
        return await cls._ready(cls(f"{path} (a copy in $SQLITE_TMPDIR, $TMPDIR, /var/tmp or /tmp)", line, line))

    @classmethod
    async def _ready(cls, store: Self) -> Self:
        try:
            await store.write(migrate)
        except BaseException:
            await store.close()
            raise
        return store

    async def write(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._writing, function, args, kwargs)

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._reading, function, args, kwargs)

    async def trial(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns in a transaction that is undone: nothing of what it writes is kept."""

        def undone(connection: Connection) -> T:
            savepoint = connection.begin_nested()
            try:
                return function(connection, *args, **kwargs)
            finally:
                savepoint.rollback()

        return await self._run(self._writing, undone, (), {})

    async def _run(self, line: _Line, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        try:
            return await line.run(function, args, kwargs)
        except DBAPIError as error:
            raise _explain(self._name, error) from error

    async def close(self) -> None:
        """Wait for what is running, and close the connections; the last of them brings the write-ahead log home."""
        for line in (self._reading, self._writing):
            await asyncio.to_thread(line.close)


def found_version(state_dir: Path) -> int | None:
    """The schema version of the state as it is, 0 while it is made; None if there is none. Raises StoreError.

    Nothing is written.
    """
    path = state_dir / "state.db"
    if not _is_there(path):
        return None
    engine = _engine(lambda: _read_only(path), "BEGIN", (), connections=1)
    try:
        with engine.begin() as connection:
            return version_of(connection)
    except DBAPIError as error:
        raise _explain(str(path), error) from error
    finally:
        engine.dispose()


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(
            f"look at the state database {path}",
            error.strerror or str(error),
            "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may enter.",
        ) from error


def _read_only(path: Path) -> sqlite3.Connection:
    # Without a -wal file nobody has the database open, and "immutable" keeps even SQLite's own side files away.
    immutable = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro{immutable}", uri=True, check_same_thread=False)


def _engine(
    connect: Callable[[], sqlite3.Connection], begin: str, settings: tuple[str, ...], connections: int
) -> Engine:
    engine = create_engine(
        "sqlite+pysqlite://", creator=connect, poolclass=QueuePool, pool_size=connections, max_overflow=0
    )

    @event.listens_for(engine, "connect")
    def connected(connection: sqlite3.Connection, _record: object) -> None:
        # The driver's own idea of when a transaction begins is switched off: every one begins as written below.
        connection.isolation_level = None
        for pragma in (f"busy_timeout = {BUSY_TIMEOUT_MS}", "foreign_keys = ON", *settings):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _explain(name: str, error: DBAPIError) -> StoreError:
    why = str(error.orig or error)
    hints = {
        "full": ("Free some space on that disk: nothing that was stored before is lost.", True),
        "locked": ("Another program holds it; wait, or find it with `fuser`.", True),
        "readonly": ("Make the file and its directory writable for this user.", False),
        "unable to open": ("Make its directory readable and writable for this user.", False),
        "not a database": ("Restore it from a backup, or move it away to start over.", False),
        "malformed": ("Restore it from a backup, or move it away to start over.", False),
        "disk i/o": ("Check the disk and the system log.", True),
    }
    for part, (hint, retryable) in hints.items():
        if part in why.lower():
            return StoreError(f"use the state database {name}", why, hint, retryable=retryable)
    return StoreError(f"use the state database {name}", why, "This is a defect; please report it.")
