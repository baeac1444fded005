"""`tasks.jsonl`: the append-only export of the tasks. The database is the authority; the file follows.

The order is commit, append and fsync, mark as exported. A crash between the last two leaves a task that is in the
file but not marked; the next export looks before it appends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import orjson
from sqlalchemy import Connection, select, update

from flywheel.errors import StoreError
from flywheel.files import append_jsonl, cut_torn_line
from flywheel.store.database import Store
from flywheel.store.schema import replies, tasks

PAGE = 500


async def export(store: Store, path: Path) -> int:
    """Append every task that is not marked as exported; the number of lines written."""
    pending = await store.read(_unmarked)
    if not pending:
        return 0
    _whole(path)
    written = 0
    there = _ids_in(path)
    for page in _pages(pending):
        lines = await store.read(_lines, page)
        written += _append(path, [line for line in lines if line["task_id"] not in there])
        await store.write(_mark, page)
    return written


async def export_sources(store: Store, path: Path, sources: Sequence[int]) -> int:
    """Append to a file of the user's choice the tasks of `sources` that it does not hold yet."""
    _whole(path)
    there = _ids_in(path)
    ids = await store.read(_of_sources, sources)
    written = 0
    for page in _pages(ids):
        lines = await store.read(_lines, page)
        written += _append(path, [line for line in lines if line["task_id"] not in there])
    return written


def _append(path: Path, lines: list[dict[str, object]]) -> int:
    try:
        return append_jsonl(path, lines)
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


def _ids_in(path: Path) -> set[str]:
    try:
        with path.open("rb") as file:
            return _ids_of(path, file)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _unwritable(path, error) from error


def _ids_of(path: Path, file: BinaryIO) -> set[str]:
    found = set()
    for number, line in enumerate(file, 1):
        try:
            found.add(str(orjson.loads(line)["task_id"]))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise StoreError(
                f"append to the task file {path}",
                f"line {number} is not a task",
                "Move the file away, or name another with --out; Flywheel writes only to files of its own.",
            ) from error
    return found


def _pages(ids: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), PAGE):
        yield list(ids[start : start + PAGE])


def _unmarked(conn: Connection) -> list[int]:
    return list(conn.execute(select(tasks.c.id).where(tasks.c.exported.is_(False)).order_by(tasks.c.id)).scalars())


def _of_sources(conn: Connection, sources: Sequence[int]) -> list[int]:
    wanted = select(replies.c.task_id).where(replies.c.source_id.in_(sources), replies.c.task_id.is_not(None))
    return list(conn.execute(select(tasks.c.id).where(tasks.c.id.in_(wanted)).order_by(tasks.c.id)).scalars())


def _lines(conn: Connection, ids: Sequence[int]) -> list[dict[str, object]]:
    rows = conn.execute(select(tasks.c.payload).where(tasks.c.id.in_(ids)).order_by(tasks.c.id)).scalars()
    return [dict(row) for row in rows]


def _mark(conn: Connection, ids: Sequence[int]) -> None:
    conn.execute(update(tasks).where(tasks.c.id.in_(ids)).values(exported=True))
