"""One page of a long question: as many rows as a few milliseconds bring, with nothing left open behind it.

What is too large for memory is not loaded: of such a row come its ids, and the size and the beginning of the value.
"""

from __future__ import annotations

import gc
import sqlite3
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

from flywheel.sources.studio.row import MAX_CELL, TABLE, Row

HOLD_SECONDS: Final = 0.004
"""How long a page is read. Beside a writer, and on a busy machine, that must stay far below Studio's patience."""
SWITCH_SECONDS: Final = 0.0005
"""How long another thread may keep the interpreter from one that reads, unless it is in the middle of something."""
PAGE_ROWS: Final = 500
PAGE_BYTES: Final = 2 * 1024 * 1024
_IDS: Final = 3
"""A row begins with the ids of its span, trace and parent."""
_BEGINNING: Final = 500


class Page(NamedTuple):
    """Rows, whether there are more, and about how many bytes these have."""

    rows: list[Row]
    more: bool
    size: int


class _Undisturbed:
    """While a file is read, Python holds up the thread that reads as little as it can.

    Garbage collection is off: it stops all threads for a hundred milliseconds. And other threads give way sooner: the
    driver lets go of the interpreter for every row, and would wait for it up to 5 ms each time. Of several reads at
    once, the last one puts both back.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._reads = 0
        self._was_on = True
        self._interval = 0.0

    def __enter__(self) -> None:
        with self._turn:
            if not self._reads:
                self._was_on, self._interval = gc.isenabled(), sys.getswitchinterval()
                gc.disable()
                sys.setswitchinterval(min(SWITCH_SECONDS, self._interval))
            self._reads += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn:
            self._reads -= 1
            if not self._reads:
                sys.setswitchinterval(self._interval)
                if self._was_on:
                    gc.enable()


undisturbed: Final = _Undisturbed()


def first_rows(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> Page:
    """No row, and that there are more, if one of the first two has a value that is too large."""
    rows: list[Row] = []
    now = time.perf_counter
    end = now() + HOLD_SECONDS
    size = 0
    cursor = connection.cursor()
    try:
        for row in cursor.execute(sql, values):
            rows.append(row)
            for value in (row[5], row[7]):
                if type(value) is bytes:
                    size += len(value)
            if size >= PAGE_BYTES or len(rows) >= PAGE_ROWS or now() >= end:
                return Page(rows, True, size)
        return Page(rows, False, size)
    except sqlite3.DataError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_TOOBIG:
            raise
        return Page(rows, True, size)
    finally:
        cursor.close()


def first_row(connection: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[Row]:
    """The first row of a question, without loading what is too large in it.

    Loading 100 MB takes as long as the old Studio waits for a lock. Such a row is dead: its other values do not
    matter.
    """
    listed, _, rest = sql.removeprefix("SELECT ").partition(" FROM ")
    columns = listed.split(", ")[1:]
    connection.execute("BEGIN")
    try:
        found = connection.execute(f"SELECT rowid FROM {rest} LIMIT 1", values).fetchone()  # noqa: S608 - constants
        if found is None:
            return []
        (rowid,) = found
        row: list[Any] = [rowid]
        for place, column in enumerate(columns, 1):
            if (size := _size(connection, column, rowid)) > MAX_CELL:
                with connection.blobopen(TABLE, column, rowid, readonly=True) as blob:
                    row.append((size, blob.read(_BEGINNING)))
            elif place <= _IDS:
                (value,) = connection.execute(
                    f"SELECT {column} FROM {TABLE} WHERE rowid = ?",  # noqa: S608 - constants
                    (rowid,),
                ).fetchone()
                row.append(value)
            else:
                row.append(None)
        if any(isinstance(value, tuple) for value in row):
            return [tuple(row)]
        # It is the one after it: the driver looks one row ahead.
        return connection.execute(f"{sql} LIMIT 1", values).fetchall()
    finally:
        connection.execute("ROLLBACK")


def _size(connection: sqlite3.Connection, column: str, rowid: int) -> int:
    """The bytes of a text or blob; 0 of a value that is neither."""
    try:
        with connection.blobopen(TABLE, column, rowid, readonly=True) as blob:
            return len(blob)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
            raise
        return 0
