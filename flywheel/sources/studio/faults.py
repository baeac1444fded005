"""What can keep a Studio database from being read, in words: what it is, what to do, and whether to try again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from flywheel.errors import StudioError


def fault(path: Path, why: str, hint: str, condition: str = "failing", *, retry: bool = False) -> StudioError:
    """What kept a database from being read."""
    error = StudioError(f"read Studio database {path}", why, hint, retryable=retry)
    error.condition = condition
    return error


def unreachable(path: Path, error: OSError) -> StudioError:
    """Why a file cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return fault(path, "there is no such file", "Start Studio once, or correct the source's path.", "missing")
    if isinstance(error, PermissionError):
        return fault(path, "permission denied", "Let this user read the file and enter its folder.", "denied")
    return fault(path, error.strerror or str(error), "Check the path and the disk.", retry=True)


def explained(path: Path, error: sqlite3.Error, busy_seconds: float) -> StudioError:
    """What SQLite says, in words, with what to do about it; `busy_seconds` is how long it was waited for."""
    code = getattr(error, "sqlite_errorcode", 0)
    match code & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return fault(
                path,
                f"another process has kept it locked for {busy_seconds:g} s",
                "It is read again at the next pass; if it stays locked, end what holds it.",
                "locked",
                retry=True,
            )
        case sqlite3.SQLITE_NOTADB:
            return fault(
                path, "it is not a SQLite database", "Point the source at Studio's database file.", "not Studio's"
            )
        case sqlite3.SQLITE_CORRUPT:
            return fault(
                path,
                "the file is damaged (database disk image is malformed)",
                "Stop Studio and restore the file from a backup, or salvage it with `sqlite3 FILE .recover`.",
                "damaged",
            )
        case sqlite3.SQLITE_READONLY:
            return fault(
                path,
                "its last writer died in the middle of a change that has to be rolled back first",
                "Start Studio: it repairs the file when it opens it.",
                "needs repair",
                retry=True,
            )
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            try:
                path.open("rb").close()
            except OSError as cause:
                return unreachable(path, cause)
            return fault(path, f"SQLite cannot open it ({error})", "Check the file and its folder.", retry=True)
        case _:
            return fault(path, str(error), "Check the file and the disk.", retry=code & 0xFF == sqlite3.SQLITE_IOERR)
