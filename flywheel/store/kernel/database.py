"""The state database: opening it, running functions in its transactions, and its notes.

A whole transaction runs in a thread: one thread writes, since SQLite has one writer, and a few read. The event loop
stays free, and a statement does not pay for a way to a thread and back.

Notes are short texts under a key that outlive the process, such as what `status` says and how far an export got.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.util import greenlet_spawn

from flywheel.errors import StateBusyError, StoreError
from flywheel.store.kernel.bulk import sql_text
from flywheel.store.kernel.schema import SCHEMA_VERSION, meta, metadata
from flywheel.system.files import make_private, make_private_database
from flywheel.system.heartbeat import beat, beat_within

P = ParamSpec("P")
T = TypeVar("T")

STATE_FILE: Final = "state.db"
"""The database, in the state directory."""
BUSY_TIMEOUT_MS: Final = 30_000
READERS: Final = 4
"""Transactions that only read, at the same time."""
READ_ATTEMPTS: Final = 10
"""Of one read while other processes begin and end to write."""
PAGE_BYTES: Final = 16_384
"""Most of a new state are lines of several thousand bytes: with SQLite's own 4,096, storing them takes longer."""
CACHE_KIB: Final = 8_000
CHECKPOINT_PAGES: Final = 4_000
"""Storing a long history takes two thirds of the time if a transaction fits into the cache, and if the pages of
indexes, which every transaction changes, are copied from the write-ahead log (64 MB) to the database less often."""
VERSION_KEY: Final = "schema_version"
HASH_KEY: Final = "schema_hash"
"""Key of the note with the `schema_hash` of the state's creator: before the release, all schemas have one number."""
MIGRATIONS: Final[Mapping[int, Callable[[Connection], None]]] = {}
"""The step to each version from the one before; a new database is created in the present version."""
ERASURE_KEY: Final = "erasure_key"
"""Key of the note with the key of pseudonyms, as hexadecimal digits (`flywheel.store.erasures`)."""
ERROR_OF: Final = "error of stage "
"""With the name of a stage of the daemon: the key of the note that says why it fails (`flywheel.store.stages`)."""
JUDGE_NOTE: Final = f"{ERROR_OF}judge"
"""Key of the note that tells `status` why judging does not go on."""
CONFIGURATION_NOTE: Final = "configuration"
"""Key of the note on the configuration file that the state belongs to."""
ROUND_NOTE: Final = "round"
"""Key of the note that tells `status` why no round starts, or what the live one waits for."""


SAME_TIME_NS: Final = 1_000_000_000
"""Two writes within this time may leave a file with one and the same time."""


class _ChangedError(StoreError):
    """What was read may be wrong."""

    def __init__(self, path: Path) -> None:
        why = "another process began or ended to write it meanwhile"
        super().__init__(f"read the state database {path}", why, "Try again.", retryable=True)


class _AtRest:
    """A context that raises _ChangedError if a database that no process had open was changed since this was made.

    Such a database is read without locks (see `_read_only_uri`).
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = self._mark()

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        now = self._mark()
        was_open = self._before[0] and now[0]
        if not was_open and now != self._before and (error is None or isinstance(error, Exception)):
            raise _ChangedError(self._path) from error

    def _mark(self) -> tuple[bool, Sequence[int]]:
        """Whether a process has the database open, and what changes when it is written."""
        try:
            found = self._path.stat()
        except OSError:
            return False, ()
        return _has_wal(self._path), (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _StateConnections:
    """Connections of one kind, each used by one thread: a transaction that finds none free waits for its turn."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        begin: str,
        *pragmas: str,
        threads: int = 1,
        busy_ms: int = BUSY_TIMEOUT_MS,
        around: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """`begin` is the statement that begins a transaction; `pragmas` are set in each connection; each transaction
        runs in the context `around`."""
        self._name = name
        self._begin = begin
        self._around = around or contextlib.nullcontext()

        def connected() -> sqlite3.Connection:
            connection = connect()
            # The driver begins no transactions of its own: each begins with a statement of ours.
            connection.isolation_level = None
            beat_within(connection)
            # What is deleted or overwritten is not left in the file.
            for pragma in (f"busy_timeout = {busy_ms}", "foreign_keys = ON", "secure_delete = ON", *pragmas):
                connection.execute(f"PRAGMA {pragma}").close()
            return connection

        pool = {"poolclass": QueuePool, "pool_size": threads, "max_overflow": 0}
        self._engine = create_engine("sqlite+pysqlite://", creator=connected, **pool)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="state")

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `function(connection, …)` in a transaction. Raises StoreError."""

        def transaction() -> T:
            beat()
            with self._around, self._engine.begin() as connection:
                connection.exec_driver_sql(self._begin)
                return function(connection, *args, **kwargs)

        future = self._threads.submit(contextvars.copy_context().run, transaction)
        running = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not future.cancel():
                # It has begun: it is committed or undone before its caller goes on.
                await asyncio.wait([running])
            raise
        except DBAPIError as error:
            raise _explain(self._name, error) from error

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.dispose()


@dataclass(eq=False)
class Store:
    """Flywheel's state. `write` and `read` run one function in one transaction and return its result.

    A function that is given to `read` must only read.
    """

    _writing: _StateConnections
    _reading: _StateConnections
    _path: Path | None = None

    @classmethod
    async def open(cls, state_dir: Path, *, busy_ms: int = BUSY_TIMEOUT_MS) -> Self:
        """Open `state.db` in `state_dir`, made and migrated if needed. Raises StoreError, also where another process
        writes it for longer than `busy_ms`."""
        path = state_dir / STATE_FILE
        try:
            make_private(state_dir)
        except OSError as error:
            raise StoreError(
                f"create the state directory {state_dir}",
                error.strerror or str(error),
                "Set state.dir (or $FLYWHEEL_HOME) to a directory that you may write.",
            ) from error
        # If it cannot be made, SQLite says why.
        with contextlib.suppress(OSError):
            make_private_database(path)
        connect = partial(sqlite3.connect, path, check_same_thread=False)
        pragmas = (
            f"page_size = {PAGE_BYTES}",
            "journal_mode = WAL",
            "synchronous = FULL",
            f"cache_size = -{CACHE_KIB}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        )
        return await cls._migrated(
            _StateConnections(str(path), connect, "BEGIN IMMEDIATE", *pragmas, busy_ms=busy_ms),
            _StateConnections(str(path), connect, "BEGIN", "query_only = ON", threads=READERS, busy_ms=busy_ms),
            path,
        )

    @classmethod
    async def view(cls, state_dir: Path) -> Self:
        """The state, read-only, beside a process that writes it. Nothing is written, not even SQLite's side files.

        Reading from it raises StoreError if no process had the state open, and one has written it since.
        """
        path = state_dir / STATE_FILE
        if not _is_there(path):
            return await cls.copy(state_dir)
        connections = _StateConnections(str(path), partial(_read_only, path), "BEGIN", around=_AtRest(path))
        store = cls(connections, connections)
        try:
            if await store.read(_is_ready, path):
                return store
        except BaseException:
            await store.close()
            raise
        await store.close()
        return await cls.copy(state_dir)

    @classmethod
    async def copy(cls, state_dir: Path) -> Self:
        """A private copy of the state, empty if there is none: changes to it leave no trace.

        SQLite keeps a little of it in memory and the rest in an unlinked file.
        """
        path = state_dir / STATE_FILE
        is_there = _is_there(path)

        def connect() -> sqlite3.Connection:
            private = sqlite3.connect("", check_same_thread=False)
            if is_there:
                copy_database(path, private)
            return private

        name = f"{path} (a copy in $SQLITE_TMPDIR, $TMPDIR, /var/tmp or /tmp)"
        connections = _StateConnections(name, connect, "BEGIN IMMEDIATE")
        return await cls._migrated(connections, connections)

    @classmethod
    async def empty(cls) -> Self:
        """A state of its own without any task, which leaves no trace."""
        connect = partial(sqlite3.connect, "", check_same_thread=False)
        connections = _StateConnections("in memory", connect, "BEGIN IMMEDIATE")
        return await cls._migrated(connections, connections)

    @classmethod
    async def _migrated(
        cls, writing: _StateConnections, reading: _StateConnections, path: Path | None = None
    ) -> Self:
        store = cls(writing, reading, path)
        try:
            await store.write(migrate)
        except BaseException:
            await store.close()
            raise
        return store

    async def write(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writing.run(function, *args, **kwargs)

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._reading.run(function, *args, **kwargs)

    def version(self) -> object:
        """A value that is another one after each commit, by whichever process; None where that cannot be told: just
        after one, and for copies. Take it before a read: while it stays the same, that read finds the same, except
        for a commit that the disk takes long to sync: its files are written before, and a read finds it afterwards.

        It looks at the files' times, which costs far less than a read.
        """
        if self._path is None:
            return None
        files = []
        for path in (self._path, self._path.with_name(f"{self._path.name}-wal")):
            try:
                found = path.stat()
            except OSError:
                return None
            # Times of files are those of the last tick of the kernel: a second write may have the same.
            if time.time_ns() - found.st_mtime_ns < SAME_TIME_NS:
                return None
            files.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(files)

    async def trial(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function whose writes are undone."""

        def undone(connection: Connection) -> T:
            savepoint = connection.begin_nested()
            try:
                return function(connection, *args, **kwargs)
            finally:
                savepoint.rollback()

        return await self._writing.run(undone)

    async def release_memory(self) -> None:
        """Free the page caches of all connections; later transactions read their pages again."""
        await self.write(_shrink)
        for _ in range(READERS):
            # The pool hands out the connection that has been idle longest, so each one is reached.
            await self.read(_shrink)

    async def close(self) -> None:
        """Wait for running transactions and close the connections; the last one checkpoints the write-ahead log."""
        for connections in (self._reading, self._writing):
            await asyncio.to_thread(connections.close)


def _shrink(connection: Connection) -> None:
    connection.exec_driver_sql("PRAGMA shrink_memory").close()


class Reader:
    """Reads the state beside a running daemon, on an asynchronous engine. Nothing is written.

    Each function has a connection of its own, and all its statements see the same state. Without a state, it gets an
    empty one. Statements stay compiled for the next function; each takes about five times as long as in a `Store`:
    use it for a few dozen statements.
    """

    def __init__(self, state_dir: Path) -> None:
        # Imported here: a daemon at rest needs no second driver.
        import aiosqlite

        self._state_dir = state_dir
        self._path = path = state_dir / STATE_FILE

        async def connect() -> aiosqlite.Connection:
            connection = aiosqlite.connect(
                _read_only_uri(path), uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000
            )
            try:
                return await connection
            except sqlite3.Error:
                # Its thread reports its end to the event loop, which a command may have closed by then.
                await asyncio.to_thread(connection._thread.join)
                raise

        def adapted() -> Any:
            return self._engine.dialect.loaded_dbapi.connect(async_creator_fn=connect)

        # An engine of `sqlalchemy.ext.asyncio` would do the same, and load the ORM: seven megabytes.
        self._engine = create_engine("sqlite+aiosqlite://", creator=adapted, poolclass=NullPool)

    async def read(self, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function. Raises StoreError."""
        if _is_there(self._path):
            for attempt in range(1, READ_ATTEMPTS + 1):
                try:
                    found = await self._look(lambda conn: function(conn, *args, **kwargs))
                except _ChangedError:
                    if attempt == READ_ATTEMPTS:
                        raise
                    continue
                if found is not None:
                    return found[0]
                break
        store = await Store.copy(self._state_dir)
        try:
            return await store.read(function, *args, **kwargs)
        finally:
            await store.close()

    async def _look(self, function: Callable[[Connection], T]) -> tuple[T] | None:
        """The result of a function; None while another process is creating the state."""

        def look() -> tuple[T] | None:
            with self._engine.connect() as connection:
                connection.exec_driver_sql("BEGIN")
                return (function(connection),) if _is_ready(connection, self._path) else None

        try:
            with _AtRest(self._path):
                return await greenlet_spawn(look)
        except DBAPIError as error:
            raise _explain(str(self._path), error) from error

    async def close(self) -> None:
        await greenlet_spawn(self._engine.dispose)


async def read_once(
    state_dir: Path, function: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The result of one short function on the state, as by a `Reader`. Raises StoreError."""
    reader = Reader(state_dir)
    try:
        return await reader.read(function, *args, **kwargs)
    finally:
        await reader.close()


def _is_ready(connection: Connection, path: Path) -> bool:
    """Whether the state has this version's schema; false while another process is creating it. Raises StoreError."""
    if (version := known_version(connection)) and version < SCHEMA_VERSION:
        raise StoreError(
            f"look at the state database {path}",
            f"its schema is version {version}, not {SCHEMA_VERSION}",
            "The daemon's next start, or one `flywheel ingest`, brings it up to date.",
        )
    return bool(version)


def found_version(state_dir: Path) -> int | None:
    """The schema version of the state, 0 while it is made; None if there is none. Raises StoreError, also for the
    state of another Flywheel.

    Nothing is written.
    """
    path = state_dir / STATE_FILE
    if not _is_there(path):
        return None
    engine = create_engine("sqlite+pysqlite://", creator=partial(_read_only, path), poolclass=NullPool)
    try:
        with _AtRest(path), engine.connect() as connection:
            return known_version(connection)
    except DBAPIError as error:
        raise _explain(str(path), error) from error
    finally:
        engine.dispose()


def copy_database(path: Path, target: sqlite3.Connection) -> None:
    """Copy a database as it is at one moment, beside a process that writes it. Nothing is written beside it.

    Raises StoreError if no process had it open, and one has written it since, and sqlite3.Error.
    """
    with _AtRest(path), contextlib.closing(_read_only(path)) as source:
        source.backup(target)


def is_missing(state_dir: Path) -> bool:
    """Whether there is no state. An interrupted copy, or a full disk at the first start, leaves an empty file."""
    try:
        return not (state_dir / STATE_FILE).stat().st_size
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # of any other, opening it will report why


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
    return sqlite3.connect(_read_only_uri(path), uri=True, check_same_thread=False)


def _read_only_uri(path: Path) -> str:
    # Without a -wal file no process has the database open, and "immutable" keeps SQLite from making its side files.
    return f"file:{quote(str(path))}?mode=ro{'' if _has_wal(path) else '&immutable=1'}"


def _has_wal(path: Path) -> bool:
    return path.with_name(path.name + "-wal").exists()


def _explain(name: str, error: DBAPIError) -> StoreError:
    why = str(error.orig or error)
    if "locked" in why.lower():
        hint = "Another program holds it; wait, or find it with `fuser`."
        return StateBusyError(f"use the state database {name}", why, hint, retryable=True)
    hints = {
        "full": ("Free some space on that disk: nothing that was stored before is lost.", True),
        "readonly": ("Make the file and its directory writable for this user.", False),
        "unable to open": (
            "Make its directory readable and writable for this user, or raise `LimitNOFILE=`.",
            False,
        ),
        "not a database": ("Restore it from a backup, or move it away to start over.", False),
        "malformed": ("Restore it from a backup, or move it away to start over.", False),
        "disk i/o": ("Check the disk and the system log.", True),
    }
    for part, (hint, retryable) in hints.items():
        if part in why.lower():
            return StoreError(f"use the state database {name}", why, hint, retryable=retryable)
    return StoreError(f"use the state database {name}", why, "This is a defect; please report it.")


def version_of(conn: Connection) -> int:
    """The schema version; 0 of an empty database."""
    return int(noted(conn, VERSION_KEY) or 0) if inspect(conn).has_table(meta.name) else 0


@cache
def schema_hash() -> str:
    """A hash of the DDL of all tables and indexes."""
    statements = [sql_text(CreateTable(table)) for table in metadata.sorted_tables]
    statements += sorted(sql_text(CreateIndex(each)) for table in metadata.sorted_tables for each in table.indexes)
    return hashlib.sha256("\n".join(statements).encode()).hexdigest()


def known_version(conn: Connection) -> int:
    """The schema version; 0 of an empty database. Raises StoreError for a schema that this Flywheel does not know."""
    version = version_of(conn)
    made_by = noted(conn, HASH_KEY) if version else ""
    if version > SCHEMA_VERSION and made_by:
        raise StoreError(
            "open the state database",
            f"its schema is version {version}, this Flywheel knows versions up to {SCHEMA_VERSION}: a newer Flywheel"
            " made it",
            "Upgrade Flywheel, or point state.dir at another directory.",
        )
    if version and (not made_by or (version == SCHEMA_VERSION and made_by != schema_hash())):
        raise StoreError(
            "open the state database",
            "another pre-release of Flywheel made it, and its tables differ from this one's",
            "Use that one, or move the state directory away (or point state.dir at another one):"
            " `flywheel ingest` reads the sources again.",
        )
    return version


def migrate(conn: Connection) -> None:
    """Migrate the database to the present schema, in one transaction. Raises StoreError as `known_version`."""
    version = known_version(conn)
    if version == SCHEMA_VERSION:
        return
    if not version:
        metadata.create_all(conn)
        note(conn, ERASURE_KEY, secrets.token_hex(32))
    for step in range(version + 1, SCHEMA_VERSION + 1) if version else ():
        MIGRATIONS[step](conn)
    note(conn, VERSION_KEY, str(SCHEMA_VERSION))
    note(conn, HASH_KEY, schema_hash())


def note(conn: Connection, key: str, value: str) -> None:
    """Store a note; an empty value deletes it."""
    conn.execute(meta.delete().where(meta.c.key == key))
    if value:
        conn.execute(meta.insert().values(key=key, value=value))


def noted(conn: Connection, key: str) -> str:
    """A stored note, or an empty text."""
    value = conn.execute(select(meta.c.value).where(meta.c.key == key)).scalar_one_or_none()
    return str(value) if value is not None else ""
