"""One Studio database file, read-only, in short read transactions; what SQLite reports becomes a `StudioError`.

Studio loses spans when a reader delays its commits. Therefore no statement stays open: a page is read for a few
milliseconds and its statement is closed, however many rows there are. The file is never opened as immutable, never
checkpointed, and nothing is created beside it. A file in WAL mode that no process has open has no `-wal` and `-shm`
files, and SQLite would create them: such a file is copied to a private folder for as long as it is read, in the state
directory where there is one, and the copy is read.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import quote

from flywheel.errors import StudioError
from flywheel.system.heartbeat import beat_within
from flywheel.system.process_folder import ProcessFolder

T = TypeVar("T")
Row = Sequence[Any]
"""Values of one row: rowid, span id, trace id, parent id, end time, attributes, name, events and the other columns of
its schema. Texts are bytes. A value that is too large is a tuple of its size and its first bytes."""

TABLE: Final = "span_table"
MAX_CELL: Final = 32 * 1024 * 1024
"""The largest value in bytes that is loaded. A row with a larger one becomes a dead row."""
BUSY_SECONDS: Final = 2.0
HOLD_SECONDS: Final = 0.004
"""How long the statement of a page stays open. Studio waits for a lock much longer, also on a busy machine."""
PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 2 * 1024 * 1024
SWITCH_SECONDS: Final = 0.0005
"""Thread switch interval during a read. The driver releases the interpreter at every row, and would wait up to 5 ms
for another thread each time."""
_LOOKUP_ROWS: Final = 200
_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.02
_ID_COLUMNS: Final = 3
_EXCERPT_BYTES: Final = 500
_WAL_VERSION: Final = 2


class DamageError(Exception):
    """A file gives what no whole one can, and SQLite has not noticed it."""


class RowPage(NamedTuple):
    """Rows, whether more follow, and about how many bytes the rows have."""

    rows: list[Row]
    more: bool
    size: int


class _Undisturbed:
    """Turns garbage collection off and makes threads switch sooner while a file is read.

    A collection stops all threads for up to 100 ms, while the read holds its lock. Of several concurrent reads, the
    last one restores both settings.
    """

    _lock = threading.Lock()
    _reads = 0
    _gc_was_enabled = True
    _switch_interval = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._reads:
                self._gc_was_enabled, self._switch_interval = gc.isenabled(), sys.getswitchinterval()
                gc.disable()
                sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_interval))
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1
                if not self._reads:
                    sys.setswitchinterval(self._switch_interval)
                    if self._gc_was_enabled:
                        gc.enable()


undisturbed: Final = _Undisturbed()


class Database:
    """A connection to one file, opened when it is first needed. One thread at a time may use it."""

    def __init__(
        self,
        path: Path,
        *,
        copies: Path | None = None,
        busy_seconds: float = BUSY_SECONDS,
        file: Path | None = None,
    ) -> None:
        """`copies` is the folder of copies; by default that of temporary files. `file` is what another process reads
        of this database: the file itself or its copy."""
        self.path = path
        self._file = file
        self._copies = copies
        self.longest_read_ms = 0.0
        self._busy_seconds = busy_seconds
        self._connection: sqlite3.Connection | None = None
        self._identity = ""
        self._connected = 0
        self._written: tuple[int, int] = (0, 0)
        self._seen: tuple[object, ...] = ()
        self._copy: ProcessFolder | None = None
        self._copied: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def identity(self) -> str:
        """Device and inode of the file. A file that was replaced is opened again. Raises StudioError."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise unreachable(self.path, error) from error
        if stat.S_ISDIR(status.st_mode):
            hint = "Name the database file in it, usually database.sqlite."
            raise fault(self.path, "it is a directory", hint, "not Studio's")
        if status.st_size == 0:
            hint = "Start Studio, or point the source at its file."
            raise fault(self.path, "it is empty: Studio has not written yet", hint, "empty", retry=True)
        self._written = (status.st_size, status.st_mtime_ns)
        identity = f"{status.st_dev}:{status.st_ino}"
        if identity != self._identity or (self._copy is not None and self._copied != self._state()):
            self.close()
            self._identity = identity
        return identity

    def ask(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows of a small query, in one read transaction. Raises StudioError."""
        return self._run(lambda connection: connection.execute(sql, values).fetchall())

    def page(self, columns: Sequence[str], after: int, rowids: Sequence[int] = ()) -> RowPage:
        """The first rows behind number `after`, or those of `rowids`, as many as a few milliseconds allow.

        Each row is its number and `columns`. A row with a value that is too large has its number and ids, and the
        size and the first bytes of that value. Raises StudioError.
        """
        where = f"rowid IN ({','.join('?' * len(rowids))})" if rowids else "rowid > ?"
        values = rowids or (after,)
        rest = f"FROM {TABLE} WHERE {where} ORDER BY rowid"
        sql = f"SELECT rowid, {', '.join(columns)} {rest}"
        while True:
            page = self._run(lambda connection: _in_order(read_page(connection, sql, values), after))
            if page.rows or not page.more:
                return page
            if first := self._run(lambda connection: _first_row(connection, columns, rest, values)):
                return self._run(lambda _: _in_order(RowPage(first, True, 0), after))

    def rows(self, columns: Sequence[str], rowids: Iterable[int]) -> Iterator[Row]:
        """The rows of these numbers that exist, in short reads. Raises StudioError."""
        left = sorted(rowids)
        while left:
            some = left[:_LOOKUP_ROWS]
            page = self.page(columns, 0, some)
            yield from page.rows
            left = [rowid for rowid in left if rowid > page.rows[-1][0]] if page.more else left[_LOOKUP_ROWS:]

    def id_at(self, rowid: int) -> str | None:
        """The span id of the row of that number; None if there is no such row. Raises StudioError."""
        ids = self.ask(f"SELECT id FROM {TABLE} WHERE rowid = ?", (rowid,))  # noqa: S608 - a constant
        return shown(ids[0][0]) if ids else None

    def last_rowid(self) -> int:
        """The number of the last row; 0 for an empty table. Raises StudioError."""
        return int(self.ask(f"SELECT max(rowid) FROM {TABLE}")[0][0] or 0)  # noqa: S608 - a constant

    def change_token(self) -> object:
        """A value that differs after every commit of another process. Raises StudioError.

        On an open connection it is SQLite's `data_version`. A file in WAL mode is not kept open, because its last
        writer could not fold the log in; there it is the header of the log's index, which every commit changes.
        """
        identity = self.identity()
        try:
            if self._copy is not None or self._is_wal():
                return identity, self._state()
        except OSError as error:
            raise unreachable(self.path, error) from error
        version = self.ask("PRAGMA data_version")
        seen = (self._connected, version)
        if self._seen[:2] == seen and self._seen[2] != self._written:
            # The file was written without a commit that SQLite knows of: another file may have been copied over it.
            # Pages that the connection has cached of the old file would be mixed with the new one.
            self.close()
            seen = (self._connected + 1, self.ask("PRAGMA data_version"))
        self._seen = (*seen, self._written)
        return identity, *self._seen

    def rest(self) -> None:
        """Close a file in WAL mode between passes, so that its last writer can fold the log in when it ends. A copy
        is removed: it has texts."""
        try:
            if self._connection is not None and self._is_wal():
                self.close()
        except OSError:
            # The file is gone. The next read reports it.
            self.close()

    @property
    def file(self) -> Path:
        """What is read: the file, or its copy while there is one."""
        return self.path if self._copy is None else self._copy.path / "database.sqlite"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._copy is not None:
            self._copy.remove()
            self._copy = None

    def _run(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query and measure how long it holds the file. While the file is locked, wait outside of SQLite."""
        try:
            connection = self._connection or self._connect()
            deadline = time.monotonic() + self._busy_seconds
            pause = _FIRST_PAUSE_SECONDS
            while True:
                began = time.perf_counter()
                try:
                    with undisturbed():
                        return query(connection)
                except sqlite3.OperationalError as error:
                    # Waiting for a commit is done here, so that it does not count as holding a lock.
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    if code != sqlite3.SQLITE_BUSY or time.monotonic() + pause > deadline:
                        raise
                finally:
                    self.longest_read_ms = max(self.longest_read_ms, (time.perf_counter() - began) * 1000)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        except (sqlite3.Error, DamageError, UnicodeDecodeError) as error:
            # The driver fails to decode messages of SQLite that quote damaged names.
            self.close()
            raise explained(self.path, error, self._busy_seconds) from error
        except OSError as error:
            self.close()
            raise unreachable(self.path, error) from error

    def _connect(self) -> sqlite3.Connection:
        path = (self._file or self.path).absolute()
        is_alone = not all(self._beside(end).exists() for end in ("-wal", "-shm"))
        if self._file is None and is_alone and self._is_wal():
            path = self._private_copy()
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode=ro",
            uri=True,
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
        )
        # Texts are decoded row by row: one that is not UTF-8 would fail its whole page.
        connection.text_factory = bytes
        beat_within(connection)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL)
        self._connection = connection
        # `data_version` counts per connection.
        self._connected += 1
        return connection

    def _is_wal(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(19)[18:19] == bytes([_WAL_VERSION])

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def _private_copy(self) -> Path:
        self._copied = self._state()
        self._copy = ProcessFolder(self._copies)
        target = self.file
        shutil.copyfile(self.path, target)
        if self._beside("-wal").exists():
            shutil.copyfile(self._beside("-wal"), target.with_name("database.sqlite-wal"))
        if self._copied != self._state():
            self.close()
            raise fault(self.path, "it changed while it was copied", "Try again.", "busy", retry=True)
        return target

    def _state(self) -> object:
        """Changes when a process writes to the file or opens it for writing."""
        stamps: list[object] = []
        log_index = self._beside("-shm")
        for path in (self.path, self._beside("-wal"), log_index):
            with contextlib.suppress(OSError):
                now = path.stat()
                stamps.append((now.st_ino, now.st_size, now.st_mtime_ns))
        with contextlib.suppress(OSError), log_index.open("rb") as file:
            stamps.append(file.read(48))
        return stamps


def read_page(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> RowPage:
    """Rows until time, number or bytes are used up. No rows but `more` if one of the first two is too large."""
    rows: list[Row] = []
    now = time.perf_counter
    end = now() + HOLD_SECONDS
    size = 0
    cursor = connection.cursor()
    try:
        for row in cursor.execute(sql, values):
            rows.append(row)
            for value in row[5:8:2]:
                if type(value) is bytes:
                    size += len(value)
            if size >= PAGE_BYTES or len(rows) >= PAGE_ROWS or now() >= end:
                return RowPage(rows, True, size)
        return RowPage(rows, False, size)
    except sqlite3.DataError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_TOOBIG:
            raise
        return RowPage(rows, True, size)
    finally:
        cursor.close()


def _in_order(page: RowPage, after: int) -> RowPage:
    """The page. Raises DamageError if a number repeats or comes too late: reading on would never end."""
    numbers = [after, *(row[0] for row in page.rows)]
    if any(number >= following for number, following in pairwise(numbers)):
        raise DamageError("row numbers are out of order")
    return page


def _first_row(connection: sqlite3.Connection, columns: Sequence[str], rest: str, values: Sequence[Any]) -> list[Row]:
    """The first row, without loading the values in it that are too large.

    Loading 100 MB takes as long as old versions of Studio wait for a lock. Such a row is dead, so its other values
    are not needed.
    """
    connection.execute("BEGIN")
    try:
        first = connection.execute(f"SELECT rowid {rest} LIMIT 1", values).fetchone()
        if first is None:
            return []
        (rowid,) = first
        row: list[Any] = [rowid]
        for place, column in enumerate(columns, 1):
            if (size := _size(connection, column, rowid)) > MAX_CELL:
                with connection.blobopen(TABLE, column, rowid, readonly=True) as blob:
                    row.append((size, blob.read(_EXCERPT_BYTES)))
            elif place <= _ID_COLUMNS:
                sql = f"SELECT {column} FROM {TABLE} WHERE rowid = ?"  # noqa: S608 - constants
                if (found := connection.execute(sql, (rowid,)).fetchone()) is None:
                    raise DamageError("a row is not found by its number")
                row.append(found[0])
            else:
                row.append(None)
        if any(isinstance(value, tuple) for value in row):
            return [tuple(row)]
        # The large value is in the row after it: the driver reads one row ahead.
        sql = f"SELECT rowid, {', '.join(columns)} {rest} LIMIT 1"
        return connection.execute(sql, values).fetchall()
    finally:
        connection.execute("ROLLBACK")


def _size(connection: sqlite3.Connection, column: str, rowid: int) -> int:
    """The bytes of a text or blob; 0 for any other value."""
    try:
        with connection.blobopen(TABLE, column, rowid, readonly=True) as blob:
            return len(blob)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            raise
        return 0


def shown(value: Any) -> str:
    """A value of a row as text, for messages: at most 2,000 characters."""
    if isinstance(value, tuple):
        value = value[1]
    if isinstance(value, bytes):
        return value[:2000].decode(errors="replace")
    return "" if value is None else str(value)[:2000]


def fault(path: Path, why: str, hint: str, condition: str = "failing", *, retry: bool = False) -> StudioError:
    """An error about a database; `retry` if a later attempt can succeed."""
    error = StudioError(f"read Studio database {path}", why, hint, retryable=retry)
    error.condition = condition
    return error


def unreachable(path: Path, error: OSError) -> StudioError:
    """The error for a file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return fault(path, "there is no such file", "Start Studio once, or correct the source's path.", "missing")
    if isinstance(error, PermissionError):
        return fault(path, "permission denied", "Let this user read the file and enter its folder.", "denied")
    return fault(path, error.strerror or str(error), "Check the path and the disk.", retry=True)


def explained(
    path: Path, error: sqlite3.Error | DamageError | UnicodeDecodeError, busy_seconds: float
) -> StudioError:
    """An SQLite error in plain words with a remedy. `busy_seconds` is how long a lock was waited for."""
    is_of_sqlite = isinstance(error, sqlite3.Error)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF if is_of_sqlite else sqlite3.SQLITE_CORRUPT
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        try:
            path.open("rb").close()
        except OSError as cause:
            return unreachable(path, cause)
        return fault(path, f"SQLite cannot open it ({error})", "Check the file and its folder.", retry=True)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        why = f"another process has kept it locked for {busy_seconds:g} s"
        hint = "It is retried at the next pass. If it stays locked, stop the process that holds the lock."
        return fault(path, why, hint, "locked", retry=True)
    if code in _SQLITE_ERRORS:
        why, hint, condition, retry = _SQLITE_ERRORS[code]
        return fault(path, why, hint, condition, retry=retry)
    return fault(path, str(error), "Check the file and the disk.", retry=code == sqlite3.SQLITE_IOERR)


_SQLITE_ERRORS: Final = {
    sqlite3.SQLITE_NOTADB: (
        "it is not a SQLite database",
        "Point the source at Studio's database file.",
        "not Studio's",
        False,
    ),
    sqlite3.SQLITE_CORRUPT: (
        "the file is damaged (database disk image is malformed)",
        "Stop Studio and restore the file from a backup, or salvage it with `sqlite3 FILE .recover`.",
        "damaged",
        False,
    ),
    sqlite3.SQLITE_READONLY: (
        "its last writer died during a change that must be rolled back first",
        "Start Studio: it repairs the file when it opens it.",
        "needs repair",
        True,
    ),
}
"""Result codes with a fixed explanation: why, hint, condition, and whether a retry can succeed."""
