"""The inbox: an SQLite file with the columns that are read of Studio's span table, written by the receiver and pruned
by the daemon.

Spans are on disk when `store` returns. A span that is sent again updates its row in place and keeps its row number.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiosqlite

from flywheel.config.ingest import CallsSource, OtlpSource
from flywheel.errors import ReceiverError
from flywheel.records.repeated_ids import SAME_START_NS, runs_of
from flywheel.records.request_id import recorded_in
from flywheel.records.trace import LATEST_NS
from flywheel.serving.calls.call_log import call_log_copy_path
from flywheel.system.files import file_identity, looked_up, make_private_database, sync
from flywheel.system.heartbeat import INSTRUCTIONS, current_heartbeat

Row = Sequence[Any]
"""The values of one span, in the order of COLUMNS."""
Refusal = tuple[str, int]
"""Trace id and start (nanoseconds since 1970) of a span that refuses recording."""

BUSY_SECONDS: Final = 5.0
PURGE_MS: Final = 20
"""How long the write-ahead log's emptying waits for readers, in milliseconds."""
PRUNED_AT_ONCE: Final = 500
"""Rows that one transaction of `prune` deletes. A concurrent write waits for a few milliseconds."""

COLUMN_TYPES: Final = {
    "id": "varchar PRIMARY KEY NOT NULL",
    "traceId": "varchar NOT NULL",
    "spanId": "varchar NOT NULL",
    "parentSpanId": "varchar",
    "name": "varchar NOT NULL",
    "startTimeUnixNano": "varchar NOT NULL",
    "endTimeUnixNano": "varchar NOT NULL",
    "attributes": "json NOT NULL",
    "events": "json",
    "status": "json NOT NULL",
    "resource": "json NOT NULL",
    "serviceName": "varchar",
    "operationName": "varchar",
    "conversationId": "varchar",
}
COLUMNS: Final = tuple(COLUMN_TYPES)

_DEFINITION: Final = ", ".join(" ".join(column) for column in COLUMN_TYPES.items())
_SCHEMA: Final = (
    f"CREATE TABLE IF NOT EXISTS span_table ({_DEFINITION})",
    "CREATE INDEX IF NOT EXISTS span_trace ON span_table (traceId)",
    # Runs that refuse recording, by the hash of their trace's id with their first and last start, and traces of which
    # nothing is stored any more, from 0 on: spans may arrive in any order, and are sent again.
    "CREATE TABLE IF NOT EXISTS private_runs (number INTEGER PRIMARY KEY AUTOINCREMENT, hash BLOB NOT NULL, "
    "first_ns INTEGER NOT NULL, last_ns INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS private_run ON private_runs (hash)",
    "CREATE TABLE IF NOT EXISTS private_calls (number INTEGER PRIMARY KEY AUTOINCREMENT, "
    "request_id TEXT NOT NULL UNIQUE)",
)
_PRAGMAS: Final = tuple(
    f"PRAGMA {pragma}" for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON")
)
MAX_REMEMBERED: Final = 100_000
"""Private traces, and calls of such, that are remembered, the newest. A span that arrives later is stored as that of
any trace."""
_ID: Final = (
    # A span whose id another one has gets a row of its own, with trace and start in its id. The primary key is looked
    # up once.
    "CASE WHEN EXISTS (SELECT 1 FROM span_table WHERE id = ?1 AND (traceId <> ?2 OR "  # noqa: S608 - constants
    f"abs(CAST(startTimeUnixNano AS INTEGER) - CAST(?{COLUMNS.index('startTimeUnixNano') + 1} AS INTEGER)) "
    f">= {SAME_START_NS})) THEN ?1 || '@' || ?2 || '@' || ?{COLUMNS.index('startTimeUnixNano') + 1} ELSE ?1 END"
)
_STORE: Final = (
    f"INSERT INTO span_table ({', '.join(COLUMNS)}) "  # noqa: S608 - constants
    f"VALUES ({_ID}, {', '.join(f'?{place}' for place in range(2, len(COLUMNS) + 1))}) "
    f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in COLUMNS[1:])}"
)
# Rows of a private trace stay, without content: a reader finds its place by them.
_KEPT: Final = {"id", "traceId", "spanId", "startTimeUnixNano", "endTimeUnixNano"}
_EMPTY: Final = {"varchar": "''", "json": "'{}'"}
_BLANK: Final = (
    "UPDATE span_table SET "  # noqa: S608 - constants
    + ", ".join(
        f"{name} = {_EMPTY[kind.split()[0]] if 'NOT NULL' in kind else 'NULL'}"
        for name, kind in COLUMN_TYPES.items()
        if name not in _KEPT
    )
    + " WHERE traceId = ?"
)
_STARTED: Final = "CAST(startTimeUnixNano AS INTEGER)"
_WHOLE: Final = (0, LATEST_NS)
"""The run of a trace of which nothing is stored any more."""
# The last row is never deleted: SQLite would reuse its number for another span, which a reader beyond that number
# would never read.
_PRUNE: Final = (
    "DELETE FROM span_table WHERE rowid BETWEEN ? AND ? AND CAST(endTimeUnixNano AS INTEGER) < ? "
    "AND rowid < (SELECT max(rowid) FROM span_table)"
)


def inbox_path(state_dir: Path, listen: str) -> Path:
    """The inbox of the spans received at HOST:PORT."""
    host, _, port = listen.rpartition(":")
    # Each colon is replaced in place: [::1] and [1::] are different addresses.
    name = re.sub(r"[^\w.-]", "_", host.removeprefix("[").removesuffix("]"))
    return state_dir / "otlp" / f"{name}-{port}.sqlite"


def own_file(source: OtlpSource | CallsSource, state_dir: Path) -> Path:
    """The file of a source that Flywheel writes itself: the inbox of received spans, or the copy of the call logs."""
    if isinstance(source, CallsSource):
        return call_log_copy_path(state_dir)
    return inbox_path(state_dir, source.listen)


class Inbox:
    """One connection to the file. Transactions run one after another.

    It stays open while spans are received: a file in WAL mode that no process has open is copied to be read.
    """

    def __init__(self, path: Path, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self._busy_seconds = busy_seconds
        self._connection: aiosqlite.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Create the file and its table if they do not exist. Raises ReceiverError."""
        async with self._lock, self._explained("open"):
            await self._connected()

    async def store(self, rows: Sequence[Row], private: Collection[Refusal] = ()) -> None:
        """Insert or update the rows in one transaction, which is on disk on return. Raises ReceiverError.

        Rows of the runs that `private` spans belong to (`runs_of`) are not stored, nor those that arrive later; what
        was stored of them before is overwritten.
        """
        transaction = asyncio.create_task(self._store(rows, private))
        try:
            await asyncio.shield(transaction)
        except asyncio.CancelledError:
            # Wait for the transaction, so that it is not left open.
            await asyncio.wait([transaction])
            raise

    async def close(self) -> None:
        async with self._lock:
            await self._disconnect()

    async def _store(self, rows: Sequence[Row], private: Collection[Refusal]) -> None:
        async with self._lock, self._explained("write to"):
            connection = await self._connected()
            await connection.execute("BEGIN IMMEDIATE")
            try:
                await connection.executemany(_STORE, await _without_private(connection, rows, private))
                await connection.commit()
            except BaseException:
                await connection.rollback()
                raise
            if private:
                # Without waiting for readers: a later checkpoint overwrites the rest.
                await connection.execute(f"PRAGMA busy_timeout = {PURGE_MS}")
                await connection.execute_fetchall("PRAGMA wal_checkpoint(TRUNCATE)")
                await connection.execute(f"PRAGMA busy_timeout = {int(self._busy_seconds * 1000)}")

    async def _connected(self) -> aiosqlite.Connection:
        if self._connection is not None and self._identity != file_identity(self.path):
            # The file was removed or replaced; nothing reads the old one any more.
            await self._disconnect()
        if self._connection is None:
            await asyncio.to_thread(make_private_database, self.path)
            connection = await aiosqlite.connect(self.path, timeout=self._busy_seconds, isolation_level=None)
            try:
                # With WAL, readers and the receiver do not block each other, and a commit syncs one file.
                for statement in (*_PRAGMAS, *_SCHEMA):
                    await connection.execute(statement)
            except BaseException:
                await connection.close()
                raise
            sync(self.path.parent)
            self._connection, self._identity = connection, file_identity(self.path)
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    @asynccontextmanager
    async def _explained(self, attempt: str) -> AsyncIterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            await self._disconnect()
            hint = "Senders keep their spans and retry for a while. Free disk space, or move the state directory."
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                hint = "Move the file away; a new one is created for the next spans."
            raise ReceiverError(f"{attempt} the inbox {self.path}", str(error), hint, retryable=True) from error


_COPY: Final = (
    f"CREATE TABLE copied ({_DEFINITION})",
    "INSERT INTO copied (rowid, {0}) SELECT rowid, {0} FROM span_table ORDER BY rowid".format(", ".join(COLUMNS)),  # noqa: S608
    "DROP TABLE span_table",
    "ALTER TABLE copied RENAME TO span_table",
    _SCHEMA[1],
)
"""Rows that SQLite has moved leave parts of themselves in unused places of the table's pages, which go with the
table. Readers rely on the rows' numbers, which VACUUM may change."""
_NAMED: Final = (
    "SELECT DISTINCT traceId FROM span_table WHERE conversationId IN (SELECT value FROM json_each(:conversations)) "
    "OR (json_valid(attributes) AND (json_extract(attributes, '$.user.id') = :user "
    "OR json_extract(attributes, '$.enduser.id') = :user))"
)


async def traces_of(inbox: Path, conversations: Collection[str], user: str, request_ids: Collection[str]) -> set[str]:
    """The traces in an inbox that name a conversation, a user (empty: none) or a recorded call. Raises
    ReceiverError."""
    wanted = set(request_ids)
    async with _using(inbox, "read") as connection:
        given = {"conversations": json.dumps(sorted(conversations)), "user": user or None}
        found = {str(trace) for (trace,) in await connection.execute_fetchall(_NAMED, given)}
        if wanted:
            query = "SELECT traceId, CAST(attributes AS BLOB) FROM span_table"
            async with connection.execute(query) as rows:
                found |= {str(trace) async for trace, text in rows if not wanted.isdisjoint(recorded_in(text))}
    return found


async def services_of(inbox: Path, conversation: str) -> list[tuple[str, str, Collection[str]]]:
    """Of each span of the traces in an inbox that name a conversation: the trace, the service (empty: not known) and
    the recorded calls that it names. Raises ReceiverError."""
    traces = json.dumps(sorted(await traces_of(inbox, [conversation], "", ())))
    query = (
        "SELECT traceId, coalesce(serviceName, ''), CAST(attributes AS BLOB) FROM span_table "
        "WHERE traceId IN (SELECT value FROM json_each(?))"
    )
    async with _using(inbox, "read") as connection:
        rows = await connection.execute_fetchall(query, (traces,))
    return [(str(trace), str(service), recorded_in(attributes)) for trace, service, attributes in rows]


async def erase(inbox: Path, traces: Collection[str], *, rewrite: bool = True) -> int:
    """Erase what the spans of these traces hold; returns how many had something. Raises ReceiverError.

    Their rows stay until they are pruned, with the ids and times of the spans. Spans that arrive later are not
    stored. Only if all spans are written anew (`rewrite`), no copies are left in unused places of the file.
    """
    async with _using(inbox, "erase spans from") as connection:
        for statement in (*_SCHEMA, "BEGIN IMMEDIATE"):
            await connection.execute(statement)
        is_there = "SELECT 1 FROM span_table WHERE traceId = ? LIMIT 1"
        there = [trace for trace in traces if await connection.execute_fetchall(is_there, (trace,))]
        erased = 0
        for trace in there:
            if _WHOLE not in (await _private_runs(connection, trace)).values():
                await _remember(connection, trace, _WHOLE)
            erased += (await connection.execute(f"{_BLANK} AND attributes <> '{{}}'", (trace,))).rowcount
        for statement in (*(_COPY if erased and rewrite else ()), "COMMIT"):
            await connection.execute(statement)
    return erased


@asynccontextmanager
async def _using(inbox: Path, attempt: str) -> AsyncIterator[aiosqlite.Connection]:
    """A connection that beats while a statement runs. Raises ReceiverError."""
    try:
        async with aiosqlite.connect(inbox, timeout=BUSY_SECONDS, isolation_level=None) as connection:
            # The statements run in a thread of the connection, which knows no stage.
            await connection.set_progress_handler(partial(current_heartbeat().beat, 0.0), INSTRUCTIONS)
            await connection.execute("PRAGMA secure_delete = ON")
            yield connection
    except sqlite3.Error as error:
        hint = "Run the command again when the cause is removed. Receiving continues."
        raise ReceiverError(f"{attempt} the inbox {inbox}", str(error), hint, retryable=True) from error


async def _without_private(
    connection: aiosqlite.Connection, rows: Sequence[Row], private: Collection[Refusal]
) -> list[Row]:
    """Those of the rows whose runs are not private. What is stored of the runs of `private` spans is overwritten;
    they are remembered, as are the recorded calls that private spans name."""
    trace, start, attributes = map(COLUMNS.index, ("traceId", "startTimeUnixNano", "attributes"))
    refusing = defaultdict[str, list[int]](list)
    for trace_id, started_ns in private:
        refusing[trace_id].append(started_ns)
    by_trace = defaultdict[str, list[Row]](list)
    for row in rows:
        by_trace[row[trace]].append(row)
    named: dict[str, None] = {}
    covered: dict[str, list[tuple[int, int]]] = {}
    for trace_id in by_trace.keys() | refusing.keys():
        known = await _private_runs(connection, trace_id)
        if known or refusing[trace_id]:
            query = f"SELECT {_STARTED} FROM span_table WHERE traceId = ?"  # noqa: S608 - a constant
            there = [int(each) for (each,) in await connection.execute_fetchall(query, (trace_id,))]
            coming = [int(row[start]) for row in by_trace[trace_id]]
            runs = runs_of([*there, *coming, *refusing[trace_id]], known.values())
            given = [(each, each) for each in refusing[trace_id]]
            own = [run for run in runs if any(run[0] <= first <= run[1] for first, _ in (*known.values(), *given))]
            covered[trace_id] = own
            for run in own:
                named |= await _erase_run(connection, trace_id, run, known)
    left = []
    for row in rows:
        runs = covered.get(row[trace]) or []
        if any(first <= int(row[start]) <= last for first, last in runs):
            named |= dict.fromkeys(recorded_in(row[attributes].encode()))
        else:
            left.append(row)
    for request_id in named:
        # An insert that is ignored would count as well.
        is_new = "NOT EXISTS (SELECT 1 FROM private_calls WHERE request_id = ?1)"
        await connection.execute(f"INSERT INTO private_calls (request_id) SELECT ?1 WHERE {is_new}", (request_id,))
    if named:
        await _forget_oldest(connection, "private_calls")
    return left


async def _erase_run(
    connection: aiosqlite.Connection, trace_id: str, run: tuple[int, int], known: Mapping[int, tuple[int, int]]
) -> dict[str, None]:
    """Overwrite what is stored of a private run and remember it, in place of those `known` that it joins; the
    recorded calls that its spans named."""
    joined = [number for number, (first, _) in known.items() if run[0] <= first <= run[1]]
    if _WHOLE in known.values():
        return {}  # Of the whole trace nothing is stored.
    where = f"traceId = ? AND {_STARTED} BETWEEN ? AND ?"
    query = f"SELECT attributes FROM span_table WHERE {where}"  # noqa: S608 - constants
    stored = await connection.execute_fetchall(query, (trace_id, *run))
    await connection.execute(f"{_BLANK} AND {_STARTED} BETWEEN ? AND ?", (trace_id, *run))
    if not joined:
        await _remember(connection, trace_id, run)
    else:
        await connection.execute(
            "UPDATE private_runs SET first_ns = ?, last_ns = ? WHERE number = ?", (*run, joined[0])
        )
    await connection.executemany("DELETE FROM private_runs WHERE number = ?", [(each,) for each in joined[1:]])
    return dict.fromkeys(call for (text,) in stored for call in recorded_in(text.encode()))


async def _private_runs(connection: aiosqlite.Connection, trace_id: str) -> dict[int, tuple[int, int]]:
    """First and last start of the private runs of a trace, by number."""
    query = "SELECT number, first_ns, last_ns FROM private_runs WHERE hash = ?"
    rows = await connection.execute_fetchall(query, (_hash(trace_id),))
    return {int(number): (int(first), int(last)) for number, first, last in rows}


async def _remember(connection: aiosqlite.Connection, trace_id: str, run: tuple[int, int]) -> None:
    added = "INSERT INTO private_runs (hash, first_ns, last_ns) VALUES (?, ?, ?)"
    # Beyond its integers, SQLite keeps numbers that are no integers.
    times = (ns if ns < 2**63 else float(ns) for ns in run)
    await connection.execute(added, (_hash(trace_id), *times))
    await _forget_oldest(connection, "private_runs")


async def _forget_oldest(connection: aiosqlite.Connection, table: str) -> None:
    oldest = f"(SELECT max(number) FROM {table}) - {MAX_REMEMBERED}"  # noqa: S608 - constants
    await connection.execute(f"DELETE FROM {table} WHERE number <= {oldest}")  # noqa: S608 - constants


def _hash(trace_id: str) -> bytes:
    return hashlib.blake2b(trace_id.encode(), digest_size=16).digest()


def private_calls(inbox: Path, after: int) -> list[tuple[int, str]]:
    """Numbers above `after` and request ids of the recorded calls that private traces name, for a look at the file
    beside the process that writes it."""
    query = "SELECT number, request_id FROM private_calls WHERE number > ? ORDER BY number"
    return [(int(number), str(request_id)) for number, request_id in looked_up(inbox, query, after)]


def private_traces(inbox: Path) -> int:
    """How many traces of an inbox, or runs with the same trace id, were private, for a look at the file beside the
    process that writes it. 0, if there is no such file or it cannot be read."""
    query = "SELECT seq FROM sqlite_sequence WHERE name = 'private_runs'"
    return sum(int(seq) for (seq,) in looked_up(inbox, query))


async def prune(inbox: Path, before_ns: int) -> int:
    """Delete the spans that ended before `before_ns` (nanoseconds since 1970); returns their number. Raises
    ReceiverError.

    The last row is kept. Freed pages are reused; the file does not shrink.
    """
    if not await asyncio.to_thread(inbox.exists):
        return 0
    deleted = 0
    async with _using(inbox, "prune") as connection:
        ((first, last),) = await connection.execute_fetchall("SELECT min(rowid), max(rowid) FROM span_table")
        for at in range(first or 0, last or 0, PRUNED_AT_ONCE):
            deletion = await connection.execute(_PRUNE, (at, at + PRUNED_AT_ONCE - 1, before_ns))
            deleted += deletion.rowcount
    return deleted
