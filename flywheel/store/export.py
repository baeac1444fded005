"""`tasks.jsonl`: the append-only export of the tasks. The database is the authority; the file follows.

The order is commit, append and fsync, mark as exported. A crash between the last two leaves a task that is in the
file but not marked; the next export looks at the end of the file before it appends.

Tasks are numbered in the order they are committed and written in the order of their numbers, so the mark is the
number of the last one: a mark at each task would write every page of the state a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import orjson
from sqlalchemy import Connection, LargeBinary, bindparam, cast, select

from flywheel.errors import StoreError
from flywheel.files import append_lines, cut_torn_line, last_lines
from flywheel.store.bulk import CHUNK, chunks, spelled
from flywheel.store.database import Store
from flywheel.store.funnel import note, noted
from flywheel.store.schema import replies, tasks

_TASKS: Final = select(tasks.c.id, tasks.c.key, cast(tasks.c.payload, LargeBinary)).order_by(tasks.c.id)
_UNMARKED: Final = spelled(_TASKS.where(tasks.c.id > bindparam("done")).limit(bindparam("most")))
_MARK: Final = "exported_to"


class _Row(NamedTuple):
    id: int
    key: str
    line: bytes
    """The payload, which is the line without its end."""


class TaskFile:
    """The file that follows the tasks of one state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._left: object = None

    async def follow(self, store: Store) -> int:
        """Append every task that is not marked as exported; the number of lines written. Raises StoreError."""
        page = await store.read(_unmarked)
        if not page:
            return 0
        there: set[str] = set()
        if self._left is None or self._left != _state(self.path):
            # Somebody else wrote, or nobody knows how the last append ended.
            _whole(self.path)
            there = _last_ids(self.path)
        self._left = None
        written = 0
        while page:
            written += _append(self.path, [row.line + b"\n" for row in page if row.key not in there])
            page = await store.write(_mark, page)
        self._left = _state(self.path)
        return written


async def export_sources(store: Store, path: Path, sources: Sequence[int]) -> int:
    """Append to a file of the user's choice the tasks of `sources` that it does not hold yet."""
    _whole(path)
    there = _ids_in(path)
    ids = await store.read(_of_sources, sources)
    written = 0
    for page in chunks(ids):
        rows = await store.read(_rows, page)
        written += _append(path, [row.line + b"\n" for row in rows if row.key not in there])
    return written


def _append(path: Path, lines: list[bytes]) -> int:
    try:
        return append_lines(path, lines)
    except OSError as error:
        raise _unwritable(path, error) from error


def _whole(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"append to the task file {path}",
        error.strerror or str(error),
        "Nothing is lost: the tasks are in the state database and follow when the file can be written.",
        retryable=True,
    )


def _state(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size


def _last_ids(path: Path) -> set[str]:
    """The tasks that may be in the file without being marked: of the last page, which was not marked in time."""
    return _ids(path, lambda file: last_lines(file, CHUNK))


def _ids_in(path: Path) -> set[str]:
    return _ids(path, lambda file: file)


def _ids(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    found = set()
    try:
        with path.open("rb") as file:
            for line in lines_of(file):
                found.add(str(orjson.loads(line)["task_id"]))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _unwritable(path, error) from error
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise StoreError(
            f"append to the task file {path}",
            f"it has a line that is not a task: {line[:60].decode(errors='replace').rstrip()}",
            "Move the file away, or name another with --out; Flywheel writes only to files of its own.",
        ) from error
    return found


def exported_to(conn: Connection) -> int:
    """The number of the last task that stands in a task file; 0 if none does."""
    return int(noted(conn, _MARK) or 0)


def _unmarked(conn: Connection) -> list[_Row]:
    """The first tasks that are not marked; at most as many as the file's end is searched for."""
    return [_Row(*row) for row in conn.exec_driver_sql(_UNMARKED, (exported_to(conn), CHUNK, 0))]


def _mark(conn: Connection, rows: Sequence[_Row]) -> list[_Row]:
    """Mark these as exported; those to go on with."""
    note(conn, _MARK, str(rows[-1].id))
    return _unmarked(conn) if len(rows) == CHUNK else []


def _of_sources(conn: Connection, sources: Sequence[int]) -> list[int]:
    wanted = select(replies.c.task_id).where(replies.c.source_id.in_(sources), replies.c.task_id.is_not(None))
    return list(conn.execute(select(tasks.c.id).where(tasks.c.id.in_(wanted)).order_by(tasks.c.id)).scalars())


def _rows(conn: Connection, ids: Sequence[int]) -> list[_Row]:
    return [_Row(*row) for row in conn.execute(_TASKS.where(tasks.c.id.in_(ids)))]
