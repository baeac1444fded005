"""The connection to the state database: opening it, and running functions in its transactions."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import quote

import aiosqlite
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import StaticPool

from flywheel.errors import StoreError
from flywheel.store.migrations import migrate, version_of
from flywheel.store.schema import SCHEMA_VERSION

P = ParamSpec("P")
T = TypeVar("T")

BUSY_TIMEOUT_MS = 30_000


class Store:
    """Flywheel's state. `write` and `read` run one function in one transaction and return what it returns."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        # One writer at a time in this process: SQLite has one anyway, and waiting here is fair and cheap.
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, state_dir: Path) -> Self:
        """Open `state.db` in `state_dir`, made and migrated if needed. Raises StoreError."""
        path = state_dir / "state.db"
        try:
            state_dir.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - once, before anything runs
        except OSError as error:
            raise StoreError(
                f"create the state directory {state_dir}",
                error.strerror or str(error),
                "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write.",
            ) from error
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        _prepare(engine, begin="BEGIN IMMEDIATE", settings=("journal_mode = WAL", "synchronous = FULL"))
        return await cls._ready(engine, str(path))

    @classmethod
    async def view(cls, state_dir: Path) -> Self:
        """The state to look at, beside whoever works on it. Nothing is written, not even SQLite's side files."""
        path = state_dir / "state.db"
        if not path.exists():
            return await cls.copy(state_dir)
        engine = _engine(lambda: _read_only(path))
        _prepare(engine, begin="BEGIN")
        store = cls(engine, str(path))
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
                    "Start `flywheel run --once` with the newest Flywheel: it brings the schema up to date.",
                )
        except BaseException:
            await store.close()
            raise
        return store

    @classmethod
    async def copy(cls, state_dir: Path) -> Self:
        """A copy of the state in memory (empty if there is none): what is done to it leaves no trace on disk."""
        path = state_dir / "state.db"

        def connect() -> sqlite3.Connection:
            memory = sqlite3.connect(":memory:", check_same_thread=False)
            if path.exists():
                with contextlib.closing(_read_only(path)) as source:
                    source.backup(memory)
            return memory

        engine = _engine(connect)
        _prepare(engine, begin="BEGIN IMMEDIATE")
        return await cls._ready(engine, f"{path} (a copy)")

    @classmethod
    async def _ready(cls, engine: AsyncEngine, name: str) -> Self:
        store = cls(engine, name)
        try:
            await store.write(migrate)
        except BaseException:
            await store.close()
            raise
        return store

    async def write(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._writing:
            return await self._run(function, args, kwargs)

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(self._engine.pool, StaticPool):
            # One connection has one transaction at a time, whatever it is for.
            return await self.write(function, *args, **kwargs)
        return await self._run(function, args, kwargs)

    async def _run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        try:
            async with self._engine.begin() as connection:
                return await connection.run_sync(lambda conn: function(conn, *args, **kwargs))
        except DBAPIError as error:
            raise _explain(self._name, error) from error

    async def close(self) -> None:
        await self._engine.dispose()


def _read_only(path: Path) -> sqlite3.Connection:
    # Without a -wal file nobody has the database open, and "immutable" keeps even SQLite's own side files away.
    immutable = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro{immutable}", uri=True, check_same_thread=False)


def _engine(connect: Callable[[], sqlite3.Connection]) -> AsyncEngine:
    async def create() -> aiosqlite.Connection:
        return await aiosqlite.Connection(connect, iter_chunk_size=64)

    return create_async_engine("sqlite+aiosqlite://", async_creator=create, poolclass=StaticPool)


def _prepare(engine: AsyncEngine, *, begin: str, settings: tuple[str, ...] = ()) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _record: object) -> None:
        # The driver's own idea of when a transaction begins is switched off: every one begins as written below.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (f"busy_timeout = {BUSY_TIMEOUT_MS}", "foreign_keys = ON", *settings):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def began(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _explain(name: str, error: DBAPIError) -> StoreError:
    why = str(error.orig or error)
    hints = {
        "full": ("Free some space on that disk: nothing that was stored before is lost.", True),
        "locked": ("Another program holds it; wait, or find it with `fuser`.", True),
        "readonly": ("Make the file and its directory writable for this user.", False),
        "unable to open": ("Make its directory readable and writable for this user.", False),
        "not a database": ("Move that file away: it is not Flywheel's.", False),
        "malformed": ("Restore it from a backup, or move it away to start over.", False),
        "disk i/o": ("Check the disk and the system log.", True),
    }
    for part, (hint, retryable) in hints.items():
        if part in why.lower():
            return StoreError(f"use the state database {name}", why, hint, retryable=retryable)
    return StoreError(f"use the state database {name}", why, "This is a defect; please report it.")
