"""Removes what was deleted in an SQLite database from its write-ahead log."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Final

from flywheel.system.heartbeat import beat, beat_within

_PAUSE_SECONDS: Final = 0.05
_ATTEMPT_MS: Final = 20
"""How long one attempt to empty the log may keep writers waiting for readers."""


def purge(path: Path, seconds: float, *, rewrite: bool = False) -> bool:
    """Copy the write-ahead log of a database to the file and cut it to nothing, which waits for all reading
    transactions; whether that was possible within some seconds. Raises sqlite3.Error.

    With `secure_delete` in each connection that writes, no file has what was deleted before, but for parts of short
    rows and of keys of indexes: SQLite leaves copies of them in unused parts of pages when it moves rows. To
    `rewrite` the file (VACUUM) removes these, too; that needs as much space as the file has, and other writers wait.
    """
    until = time.monotonic() + seconds
    with contextlib.closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as connection:
        beat_within(connection)
        while True:
            beat()
            try:
                if rewrite:
                    connection.execute("VACUUM")
                    rewrite = False
                connection.execute(f"PRAGMA busy_timeout = {_ATTEMPT_MS}")
                (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                is_busy = True
            if not is_busy:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_SECONDS)
