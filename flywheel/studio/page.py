"""One page of a long question: as many rows as a few milliseconds bring, with nothing left open behind it.

What is too large for memory is not loaded: of such a row come its ids, and the size and the beginning of the value.
"""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from flywheel.studio.row import MAX_CELL, TABLE, Row

HOLD_SECONDS: Final = 0.008
"""How long a page is read. Beside a writer, and on a busy machine, that must stay far below Studio's patience."""
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


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Without Python's garbage collection, which holds up all threads for as long as a hundred milliseconds."""
    if not gc.isenabled():
        # Another read has switched it off and switches it on again, perhaps in the middle of this one.
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
