"""The call log: an SQLite file of model requests and their responses, in the order of their ends.

The inference server writes one, and the daemon a copy of those of all servers. The parts of request bodies
(`stored_parts`) are stored once by hash, so that a growing conversation grows the file linearly. The server's
middleware imports it: the standard library and msgspec, which vLLM requires, are all that it uses.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

from msgspec import DecodeError, Meta, Struct
from msgspec.structs import asdict

from flywheel.conversations import forms_of
from flywheel.errors import CallLogError
from flywheel.serving.calls import erasure, stored_parts
from flywheel.system.files import file_identity, make_private_database
from flywheel.system.heartbeat import beat_within
from flywheel.system.purge import purge

FORMAT: Final = 2
"""Files of format 1 are converted when they are opened: `stored_parts.convert`."""
BUSY_SECONDS: Final = 5.0
CALLS_PER_STEP: Final = 20
"""Calls that one transaction of `prune` or `erase` removes. A write that waits is delayed by some milliseconds."""
PAGE_BYTES: Final = 4_000_000
"""Bodies that a page of several calls has at most."""
EXPANSION: Final = 16
"""A page may be this much longer when the repeated parts of its requests are joined."""
COMPACTED_AT_ONCE_BYTES: Final = 256_000_000
COMPACT_NS: Final = 3600 * 10**9
"""A larger file is written anew at most so often, because writers wait for seconds."""
MAX_ID_CHARACTERS: Final = 200
"""Of a request id; those of servers have fewer."""
COMPACTING_SECONDS: Final = 120.0
"""How long a connection waits for another one that writes the file anew."""
PURGE_SECONDS: Final = 5.0
MAX_PAGE_BYTES: Final = 32 << 20
"""The longest page, which has one call. Clients read no more."""

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS log (log_id TEXT NOT NULL, dropped INTEGER NOT NULL, "
    "only INTEGER PRIMARY KEY CHECK (only = 1), refused INTEGER NOT NULL DEFAULT 0, "
    # Calls that were erased since the file was last compacted, and when that was.
    "unpurged INTEGER NOT NULL DEFAULT 0, compacted_ns INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS calls (number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, "
    "path TEXT NOT NULL, version TEXT NOT NULL, credential TEXT NOT NULL, retry INTEGER NOT NULL, "
    "started_ns INTEGER NOT NULL, ended_ns INTEGER NOT NULL, status INTEGER NOT NULL, is_complete INTEGER NOT NULL, "
    "media_type TEXT NOT NULL, unit TEXT NOT NULL, arm TEXT NOT NULL, unit_kind TEXT NOT NULL, "
    "conversation TEXT NOT NULL, user TEXT NOT NULL, request BLOB NOT NULL, size INTEGER NOT NULL, "
    "response BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS calls_conversation ON calls (conversation) WHERE conversation <> ''",
    "CREATE INDEX IF NOT EXISTS calls_user ON calls (user) WHERE user <> ''",
    *erasure.TABLES,
    *stored_parts.TABLES,
)
_NEWEST: Final = "coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'calls'), 0)"

Number = Annotated[int, Meta(ge=0, le=1 << 40)]
"""More calls than a server answers. SQLite and sums of such numbers have room for it."""
Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(max_length=4096)]


class CallFacts(Struct, frozen=True):
    """A request and its response without their bodies. Times are nanoseconds since 1970.

    `version` is the adapter or "base". `credential` is a short hash of the Authorization header, the same on every
    server, "" without one. `retry` counts the client's earlier attempts, as it says. `status` is 0 if no response
    began; `is_complete` says whether the response's last byte was sent. `media_type` is the response's.

    During an A/B test, `unit` is what the request was assigned by, as 16 hexadecimal digits, and `unit_kind`
    says how it is known: `conversation` or `session` (a header), or `fallback`. `arm` is the version that it was
    assigned to, `new` or `old`, whatever answered; empty if it continues a response of one of them. All are empty
    without an A/B test.

    `conversation` is what the client named in the header `x-flywheel-conversation`, and `user` what its request
    named; both may be empty.
    """

    request_id: Name
    path: Name
    version: Name
    credential: Name = ""
    retry: Number = 0
    started_ns: Time = 0
    ended_ns: Time = 0
    status: Number = 0
    is_complete: bool = False
    media_type: Name = ""
    unit: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")] = ""
    arm: Annotated[str, Meta(pattern="^(new|old)?$")] = ""
    unit_kind: Annotated[str, Meta(pattern="^(conversation|session|fallback)?$")] = ""
    conversation: Name = ""
    user: Name = ""


class RecordedCall(CallFacts, frozen=True):
    """One request and its response. Once it is stored, the request has the same keys and values, each as the bytes
    that were sent, and the response is the same byte for byte."""

    request: bytes = b""
    response: bytes = b""


_FACTS: Final = ", ".join(CallFacts.__struct_fields__)


class StoredCall(NamedTuple):
    """A call with its number and the numbers of its request's parts; the request itself is empty."""

    number: int
    call: RecordedCall
    parts: list[int]


class LogState(NamedTuple):
    """`log_id` is random, made with the file. Calls from `oldest` to `newest` are there; with none, `oldest` is
    `newest` + 1. `dropped` counts the calls that could not be stored, `refused` those that were not to be."""

    log_id: str
    oldest: int
    newest: int
    dropped: int
    refused: int = 0


def call_log_copy_path(state_dir: Path) -> Path:
    """Where the daemon keeps the calls of all servers."""
    return state_dir / "calls" / "calls.db"


def call_logs(state_dir: Path) -> list[Path]:
    """The logs of servers that have the same state directory, and the copy of all call logs."""
    paths = [*sorted((state_dir / "serving").glob("calls-*.db")), call_log_copy_path(state_dir)]
    return [path for path in paths if path.is_file()]


class CallLog:
    """One connection to the file, which is created when it is first used. Every method raises CallLogError.

    Threads may share an object: a lock serializes its transactions. Reading through a second object does not wait for
    a write.
    """

    extra_tables: ClassVar[Sequence[str]] = ()
    """Statements for the tables of a subclass."""

    def __init__(self, path: Path, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self._busy_seconds = busy_seconds
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                connection, self._connection = self._connection, None
                connection.close()

    def transaction(self, attempt: str = "write to") -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A write transaction. Methods called within it, in the same thread, join it."""
        return self._began("BEGIN IMMEDIATE", attempt)

    def reading(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """One state of the file for several queries and methods."""
        return self._began("BEGIN", "read")

    @contextlib.contextmanager
    def _began(self, begin: str, attempt: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection is not None and self._connection.in_transaction:
                yield self._connection
                return
            with self._explained(attempt):
                connection = self._connected()
                connection.execute(begin)
                with _ending(connection):
                    yield connection

    def append(self, calls: Iterable[RecordedCall], dropped: int = 0, refused: int = 0) -> int:
        """Store the calls and add to the counts of dropped and refused ones, in one transaction. Calls whose request
        id is there already, or was erased, are ignored. Returns the number of calls stored."""
        with self.transaction() as connection:
            if dropped or refused:
                changes = "SET dropped = dropped + ?, refused = refused + ?"
                connection.execute(f"UPDATE log {changes}", (dropped, refused))
            return sum(_insert(connection, call) for call in calls)

    def state(self) -> LogState:
        with self.reading() as connection:
            return _state(connection)

    def after(self, number: int, max_calls: int, max_bytes: int) -> tuple[list[StoredCall], dict[int, bytes]]:
        """The calls with numbers above `number`: at most `max_calls`, and at most `max_bytes` of bodies, where a part
        that several requests have counts once; but at least one, if there is any. And the contents of their parts,
        by number."""
        found: list[StoredCall] = []
        contents: dict[int, bytes] = {}
        with self.reading() as connection:
            query = f"SELECT number, {_FACTS}, request, response FROM calls WHERE number > ? ORDER BY number LIMIT ?"  # noqa: S608
            room, joined = max_bytes, EXPANSION * max_bytes
            for row in connection.execute(query, (number, max_calls)):
                call_number, *facts, request, response = row
                call = _call(facts, b"", response)
                parts, added = stored_parts.contents_of(connection, request, contents)
                room -= len(call.response) + sum(map(len, added.values()))
                joined -= len(call.response) + sum(len(added.get(part) or contents[part]) for part in parts)
                if found and min(room, joined) < 0:
                    break
                contents |= added
                found.append(StoredCall(call_number, call, parts))
        return found, contents

    def find(self, request_ids: Iterable[str]) -> dict[str, RecordedCall]:
        """Those of the calls that are there, by request id."""
        found = {}
        query = f"SELECT {_FACTS}, request, response FROM calls WHERE request_id = ?"  # noqa: S608 - constants
        with self.reading() as connection:
            for request_id in request_ids:
                if row := connection.execute(query, (request_id,)).fetchone():
                    *facts, request, response = row
                    found[request_id] = _call(facts, stored_parts.body_of(connection, request), response)
        return found

    def sizes(self, request_ids: Iterable[str]) -> dict[str, int]:
        """The bytes of request and response of those of the calls that are there. No body is read."""
        query = "SELECT size FROM calls WHERE request_id = ?"
        with self.reading() as connection:
            rows = {each: connection.execute(query, (each,)).fetchone() for each in request_ids}
        return {request_id: int(row[0]) for request_id, row in rows.items() if row}

    def live_bytes(self) -> int:
        """The bytes of the file that hold something. Freed pages are reused; the file does not shrink."""
        with self.reading() as connection:
            return _live_bytes(connection)

    def prune(self, before_ns: int, max_bytes: int, max_calls: int | None = None) -> int:
        """Remove the oldest calls: those that ended before `before_ns`, and as many as it takes to have `max_bytes`
        or less (`live_bytes`). Returns their number; it stops when `max_calls` or more are removed."""
        removed = 0
        while max_calls is None or removed < max_calls:
            with self.transaction("prune") as connection:
                excess = _live_bytes(connection) - max_bytes
                query = "SELECT number, ended_ns, size, request FROM calls ORDER BY number LIMIT ?"
                rows = connection.execute(query, (CALLS_PER_STEP,)).fetchall()
                going = list(itertools.takewhile(lambda row: row[1] < before_ns, rows))
                if not going:
                    # A call takes its size or less of the file: the size of the file is then looked at again.
                    before = itertools.accumulate((row[2] for row in rows), initial=0)
                    going = [row for row, removed_bytes in zip(rows, before, strict=False) if removed_bytes < excess]
                _remove(connection, [(number, request) for number, _, _, request in going])
            if not going:
                break
            removed += len(going)
        return removed

    def older(self, before_ns: int) -> int:
        """The number of calls that `prune` would remove because they ended before `before_ns`."""
        with self.reading() as connection:
            query = "SELECT number FROM calls WHERE ended_ns >= ? ORDER BY number LIMIT 1"
            row = connection.execute(query, (before_ns,)).fetchone()
            end = row[0] if row else _state(connection).newest + 1
            (count,) = connection.execute("SELECT count(*) FROM calls WHERE number < ?", (end,)).fetchone()
        return int(count)

    def erase(self, request_ids: Iterable[str]) -> int:
        """Remove these calls and what only they have of request bodies; returns their number. `append` ignores them
        from now on, also those that are not there. After a crash, to be called again.

        Their bytes are overwritten in the file, and are gone from the write-ahead log after `purge`.
        """
        ids = list(dict.fromkeys(request_ids))
        removed = 0
        for start in range(0, len(ids), CALLS_PER_STEP):
            with self.transaction("erase calls of") as connection:
                some = ids[start : start + CALLS_PER_STEP]
                going = _numbered(connection, some)
                erasure.mark(connection, some)
                _remove(connection, [(number, request) for number, _, request in going])
                connection.execute("UPDATE log SET unpurged = unpurged + ?", (len(going),))
            removed += len(going)
        return removed

    def purge(self, seconds: float = PURGE_SECONDS) -> bool:
        """Remove the last traces of erased calls from the file and its write-ahead log; False if some may be left, as
        others were reading an older state for so many seconds, or as the file is large and was compacted recently.

        `secure_delete` overwrites what is removed, but not the copies that SQLite leaves in unused parts of pages
        when it moves rows. Therefore the file is written anew if calls were erased since the last time. Meanwhile
        readers go on, and writers wait.
        """
        with self.reading() as connection:
            unpurged, compacted_ns = connection.execute("SELECT unpurged, compacted_ns FROM log").fetchone()
            is_small = _live_bytes(connection) < COMPACTED_AT_ONCE_BYTES
        is_due = is_small or time.time_ns() - compacted_ns > COMPACT_NS
        if unpurged and is_due:
            with self._lock, self._explained("compact"):
                self._connected().execute("VACUUM")
            with self.transaction() as connection:
                changes = "SET unpurged = unpurged - ?, compacted_ns = ?"
                connection.execute(f"UPDATE log {changes}", (unpurged, time.time_ns()))
        with self._explained("purge"):
            return purge(self.path, seconds) and (is_due or not unpurged)

    def erased_between(self, after: int, before: int) -> int:
        """The number of erased calls with numbers between these two."""
        with self.reading() as connection:
            return erasure.count_between(connection, after, before)

    def erased(self, request_ids: Iterable[str]) -> set[str]:
        """Those of the calls that were erased."""
        query = "SELECT 1 FROM erased WHERE request_id = ?"
        with self.reading() as connection:
            return {each for each in request_ids if connection.execute(query, (each,)).fetchone()}

    def ids_of(self, conversations: Collection[str], users: Collection[str]) -> list[str]:
        """The request ids of the calls that name one of these conversations or users, the oldest first."""
        named = {("conversation", form) for form in forms_of(conversations)}
        named |= {("user", each) for each in users}
        found: set[tuple[int, str]] = set()
        with self.reading() as connection:
            for column, value in named:
                query = f"SELECT number, request_id FROM calls WHERE {column} = ? AND {column} <> ''"  # noqa: S608
                found.update(connection.execute(query, (value,)))
        return [request_id for _, request_id in sorted(found)]

    def resending(self, request_ids: Iterable[str]) -> dict[str, list[str]]:
        """By request id, the later calls whose messages begin with all messages of a call. Of bodies without a list
        of messages there are none."""
        with self.reading() as connection:
            return erasure.resending(connection, _numbered(connection, request_ids))

    def _connected(self) -> sqlite3.Connection:
        if self._connection is not None and self._identity != file_identity(self.path):
            self.close()  # The file was removed or replaced; nothing reads the old one any more.
        if self._connection is None:
            make_private_database(self.path)
            connection = sqlite3.connect(
                self.path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
            )
            beat_within(connection)
            try:
                _prepare(connection, [*_TABLES, *self.extra_tables], self._busy_seconds)
            except BaseException:
                connection.close()
                raise
            self._connection, self._identity = connection, file_identity(self.path)
        return self._connection

    @contextlib.contextmanager
    def _explained(self, attempt: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, zlib.error, DecodeError) as error:
            self.close()
            hint = "Check the disk's free space and the permissions of the folder."
            if not isinstance(error, (OSError, sqlite3.OperationalError)):
                hint = "Move the file away; a new one is created."
            raise CallLogError(f"{attempt} the call log {self.path}", str(error), hint, retryable=True) from error


@contextlib.contextmanager
def _ending(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # After a full disk, SQLite has rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _prepare(connection: sqlite3.Connection, tables: Iterable[str], busy_seconds: float) -> None:
    # With WAL, readers and the writer do not block each other. NORMAL: kill -9 loses nothing, and a power failure at
    # most the last calls.
    _use_wal(connection, busy_seconds)
    for pragma in ("synchronous = NORMAL", "journal_size_limit = 16000000", "secure_delete = ON"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("BEGIN IMMEDIATE")
    with _ending(connection):
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found > FORMAT:
            raise sqlite3.DatabaseError(f"a newer version of Flywheel made it (format {found})")
        if found == 1:
            stored_parts.convert(connection)
        for table in tables:
            connection.execute(table)
        connection.execute(
            "INSERT OR IGNORE INTO log (log_id, dropped, only) VALUES (?, 0, 1)", (secrets.token_hex(8),)
        )
        if found != FORMAT:
            connection.execute(f"PRAGMA user_version = {FORMAT}")


def _use_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Switch the file to WAL. SQLite does not wait for others that do so with a new file at the same time."""
    end = time.monotonic() + busy_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _insert(connection: sqlite3.Connection, call: RecordedCall) -> bool:
    known_id = "SELECT 1 FROM calls WHERE request_id = ?1 UNION ALL SELECT 1 FROM erased WHERE request_id = ?1"
    if connection.execute(known_id, (call.request_id,)).fetchone():
        return False
    parts = stored_parts.split(call.request).parts
    row = {
        **asdict(call),
        "request": stored_parts.add(connection, parts),
        "size": sum(map(len, parts)) + len(call.response),
        "response": zlib.compress(call.response, 1),
    }
    into = f"INSERT INTO calls ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608 - constants
    connection.execute(into, list(row.values()))
    return True


def _numbered(connection: sqlite3.Connection, request_ids: Iterable[str]) -> list[tuple[int, str, bytes]]:
    """Number, request id and packed request of those of the calls that are there."""
    query = "SELECT number, request_id, request FROM calls WHERE request_id = ?"
    rows = (connection.execute(query, (each,)).fetchone() for each in request_ids)
    return [row for row in rows if row]


def _remove(connection: sqlite3.Connection, going: Sequence[tuple[int, bytes]]) -> None:
    """Remove calls, given by number and packed request."""
    connection.executemany("DELETE FROM calls WHERE number = ?", [(number,) for number, _ in going])
    stored_parts.remove(connection, [request for _, request in going])


def _state(connection: sqlite3.Connection) -> LogState:
    query = f"SELECT log_id, (SELECT min(number) FROM calls), {_NEWEST}, dropped, refused FROM log"  # noqa: S608 - constants
    log_id, oldest, newest, *counts = connection.execute(query).fetchone()
    return LogState(log_id, newest + 1 if oldest is None else oldest, newest, *counts)


def _live_bytes(connection: sqlite3.Connection) -> int:
    query = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, "
    (found,) = connection.execute(query + "pragma_page_size").fetchone()
    return int(found)


def _call(facts: Sequence[Any], request: bytes, response: bytes) -> RecordedCall:
    known = dict(zip(CallFacts.__struct_fields__, facts, strict=True))
    known["is_complete"] = bool(known["is_complete"])
    return RecordedCall(**known, request=request, response=zlib.decompress(response))
