"""One Studio database file: opened read-only, asked in short transactions.

Studio loses spans when a reader makes its commits wait, so no statement is left open here: a page is read for a few
milliseconds and its statement closed, whatever the number of rows. The file is never opened as immutable, never
checkpointed, and nothing is created beside it. A file in WAL mode that no process has open has no `-wal` and `-shm`
beside it, and SQLite would make them: such a file is copied to a temporary folder and the copy is read.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

from flywheel.sources.studio.faults import explained, fault, unreachable
from flywheel.sources.studio.page import Page, first_row, first_rows, undisturbed
from flywheel.sources.studio.row import MAX_CELL, TABLE, Row, shown
from flywheel.sources.studio.schema import Schema

T = TypeVar("T")

BUSY_SECONDS: Final = 2.0
_LOOKUP: Final = 200
_WAL_VERSION: Final = 2
_FIRST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.02


class Database:
    """A connection to one file, made when it is first needed. One thread at a time may use it."""

    def __init__(self, path: Path, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self.path = path
        self.longest_read_ms = 0.0
        self.last_read_ms = 0.0
        self._busy_seconds = busy_seconds
        self._connection: sqlite3.Connection | None = None
        self._identity = ""
        self._connected = 0
        self._written: tuple[int, int] = (0, 0)
        self._seen: tuple[object, ...] = ()
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def identity(self) -> str:
        """Device and inode of the file; a file that was replaced is opened anew. Raises StudioError."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise unreachable(self.path, error) from error
        if stat.S_ISDIR(found.st_mode):
            raise fault(
                self.path,
                "it is a directory",
                "Name the database file in it, usually database.sqlite.",
                "not Studio's",
            )
        if found.st_size == 0:
            raise fault(
                self.path,
                "it is empty: Studio has not written yet",
                "Start Studio, or point the source at its file.",
                "empty",
                retry=True,
            )
        self._written = (found.st_size, found.st_mtime_ns)
        identity = f"{found.st_dev}:{found.st_ino}"
        if identity != self._identity or (self._copy is not None and self._copied != self._state()):
            self.close()
            self._identity = identity
        return identity

    def ask(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """All rows of one small question in one read transaction; texts come as bytes. Raises StudioError."""
        return self._held(lambda connection: connection.execute(sql, values).fetchall())

    def page(self, sql: str, values: Sequence[Any]) -> Page:
        """The first rows of a long question, as many as a few milliseconds bring, and whether there are more.

        Of a row with a value that is too large come its number and ids, and the size and the beginning of the value.
        """
        while True:
            page = self._held(lambda connection: first_rows(connection, sql, values))
            if page.rows or not page.more:
                return page
            if first := self._held(lambda connection: first_row(connection, sql, values)):
                return Page(first, True, 0)

    def rows(self, schema: Schema, rowids: Iterable[int]) -> Iterator[Row]:
        """Rows by number, as far as they are there, in short reads however many. Raises StudioError."""
        wanted = sorted(rowids)
        while wanted:
            some = wanted[:_LOOKUP]
            rows, cut, _ = self.page(schema.rows_sql(len(some)), some)
            yield from rows
            wanted = [rowid for rowid in wanted if rowid > rows[-1][0]] if cut else wanted[_LOOKUP:]

    def id_at(self, rowid: int) -> str | None:
        """The id of the row of that number; None if there is none. Raises StudioError."""
        found = self.ask(f"SELECT id FROM {TABLE} WHERE rowid = ?", (rowid,))  # noqa: S608 - a constant
        return shown(found[0][0]) if found else None

    def first_rowid(self) -> int | None:
        """The number of the first row; None if there is none. Raises StudioError."""
        (found,) = self.ask(f"SELECT min(rowid) FROM {TABLE}")  # noqa: S608 - a constant
        return None if found[0] is None else int(found[0])

    def last_rowid(self) -> int:
        """The number of the last row; 0 if there is none. Raises StudioError."""
        (found,) = self.ask(f"SELECT max(rowid) FROM {TABLE}")  # noqa: S608 - a constant
        return int(found[0] or 0)

    def _held(self, question: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = self._connection or self._connect()
            patience = time.monotonic() + self._busy_seconds
            pause = _FIRST_PAUSE_SECONDS
            while True:
                try:
                    with undisturbed:
                        return self._timed(question, connection)
                except sqlite3.OperationalError as error:
                    # Waiting for a commit is done here, so that it does not count as holding a lock.
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    if code != sqlite3.SQLITE_BUSY or time.monotonic() + pause > patience:
                        raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        except sqlite3.Error as error:
            self.close()
            raise explained(self.path, error, self._busy_seconds) from error
        except OSError as error:
            self.close()
            raise unreachable(self.path, error) from error

    def _timed(self, question: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection) -> T:
        began = time.perf_counter()
        try:
            return question(connection)
        finally:
            self.last_read_ms = (time.perf_counter() - began) * 1000
            self.longest_read_ms = max(self.longest_read_ms, self.last_read_ms)

    def change_token(self) -> object:
        """What differs after every commit of anybody else: compare it with the one from before. Raises StudioError.

        On a held connection that is SQLite's own `data_version`. A file in WAL mode is not held open (its last writer
        could not fold the log in); there it is the header of the log's index, which every commit changes.
        """
        identity = self.identity()
        try:
            if self._copy is not None or self._is_wal():
                return identity, self._state(), self._log_index()
        except OSError as error:
            raise unreachable(self.path, error) from error
        version = self.ask("PRAGMA data_version")
        seen = (self._connected, version)
        if self._seen[:2] == seen and self._seen[2] != self._written:
            # Written to without a commit that SQLite can tell: another file may have been copied over this one, and
            # what the connection holds of the old one would be mixed with the new.
            self._disconnect()
            seen = (self._connected + 1, self.ask("PRAGMA data_version"))
        self._seen = (*seen, self._written)
        return identity, *self._seen

    def _log_index(self) -> bytes:
        try:
            with self._beside("-shm").open("rb") as file:
                return file.read(48)
        except OSError:
            return b""

    def rest(self) -> None:
        """Between passes: let go of a file in WAL mode, so that its last writer can fold the log in when it ends."""
        try:
            if self._connection is not None and self._copy is None and self._is_wal():
                self._disconnect()
        except OSError:
            # It has gone meanwhile; whoever asks next is told.
            self._disconnect()

    def close(self) -> None:
        self._disconnect()
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        path = self.path.absolute()
        if self._is_wal() and not all(self._beside(end).exists() for end in ("-wal", "-shm")):
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
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL)
        self._connection = connection
        # Versions are numbered per connection.
        self._connected += 1
        return connection

    def _is_wal(self) -> bool:
        with self.path.open("rb") as file:
            return file.read(19)[18:19] == bytes([_WAL_VERSION])

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def _private_copy(self) -> Path:
        self._copied = self._state()
        self._copy = tempfile.TemporaryDirectory(prefix="flywheel-studio-")
        target = Path(self._copy.name) / "database.sqlite"
        shutil.copyfile(self.path, target)
        if self._beside("-wal").exists():
            shutil.copyfile(self._beside("-wal"), target.with_name("database.sqlite-wal"))
        if self._copied != self._state():
            self.close()
            raise fault(self.path, "it changed while it was copied", "Try again.", "busy", retry=True)
        return target

    def _state(self) -> object:
        """What changes when somebody writes to the file or opens it for writing."""
        found: list[tuple[int, int, int]] = []
        for path in (self.path, self._beside("-wal"), self._beside("-shm")):
            with contextlib.suppress(OSError):
                now = path.stat()
                found.append((now.st_ino, now.st_size, now.st_mtime_ns))
        return found
