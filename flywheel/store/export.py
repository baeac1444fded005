"""`tasks.jsonl`: the append-only export of the tasks. The database is the authority; the file follows.

The order is commit, append and fsync, mark as exported. A crash between the last two leaves a task that is in the
file but not marked; the next export looks at the end of the file before it appends. A crash in the middle of an
append leaves a torn line: it is cut, and its task written again. Nothing is cut or appended before it is known that
the file is of tasks and the torn line the beginning of one: whoever names the wrong file loses nothing.

A file that AgentJet began, or that was begun in an earlier format, is renamed to `tasks-1.jsonl`, or the next number
that is free, and a new one begun. Of an earlier format the end is still looked at: tasks that stand there and are not
marked are not written again.

Tasks are numbered in the order they are committed and written in the order of their numbers, so the mark is the
number of the last one: a mark at each task would write every page of the state a second time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, ParamSpec, TypeVar

import orjson
from sqlalchemy import Connection, CursorResult, LargeBinary, bindparam, cast, select

from flywheel.errors import StoreError
from flywheel.files import PRIVATE, append_lines, cut_torn_line, last_lines, sync_directory, torn_line
from flywheel.store import file_mark
from flywheel.store.agentjet_file import is_agentjets
from flywheel.store.bulk import CHUNK, chunks, spelled
from flywheel.store.database import Store
from flywheel.store.file_mark import FileMark
from flywheel.store.pipeline_counts import note, noted
from flywheel.store.schema import replies, tasks

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_TASKS: Final = select(tasks.c.id, tasks.c.key, cast(tasks.c.payload, LargeBinary)).order_by(tasks.c.id)
_UNMARKED: Final = spelled(_TASKS.where(tasks.c.id > bindparam("done")).limit(bindparam("most")))
_MARK: Final = "exported_to"
PAGE_BYTES: Final = 4 * 1024 * 1024
"""Of lines that are written at once; a longer one alone."""
_KEY: Final = b'{"task_id":"'
_BEGINNING: Final = re.compile(re.escape(_KEY) + rb'(?:[^"\\]|\\.|\\\Z)*+(?P<rest>.*)', re.DOTALL)
_REST: Final = b'","main_query":"'


class _Row(NamedTuple):
    id: int
    key: str
    line: bytes
    """The payload, which is the line without its end."""


class TaskFile:
    """The file that follows the tasks of one state."""

    def __init__(self, path: Path, *, mode: int = PRIVATE) -> None:
        """A new file has `mode` as far as the umask lets."""
        self.path = path
        self._mode = mode
        self._left: object = None
        self._seen: FileMark | None = None

    async def follow(self, store: Store) -> int:
        """Append every task that is not marked as exported; the number of lines written. Raises StoreError.

        What another program has cut is told, and remembered for `status`.
        """
        await self._look(store)
        page = await store.read(_unmarked)
        if not page:
            return 0
        there: set[str] = set()
        if self._left is None or self._left != _state(self.path):
            # Somebody else wrote, or nobody knows how the last append ended.
            there = await _to_its_end(_mended, self.path, _last)
        self._left = None
        written = 0
        while page:
            written += await _to_its_end(_append, self.path, page, there, self._mode)
            self._seen = await _to_its_end(FileMark.of, self.path)
            page = await store.write(_mark, page, self._seen)
        self._left = _state(self.path)
        return written

    async def _look(self, store: Store) -> None:
        found = await _to_its_end(FileMark.of, self.path)
        if found == self._seen:
            return
        before = await store.read(file_mark.kept)
        now = found.since(before) if found is not None else None
        if now != before:
            await store.write(file_mark.keep, now)
        if now is not None and now.lacking:
            log.warning("%s", now.warning)
        self._seen = found


async def export_sources(store: Store, path: Path, sources: Sequence[int]) -> int:
    """Append to a file of the user's choice the tasks of `sources` that it does not hold yet."""
    there = await _to_its_end(_mended, path, _every)
    ids = await store.read(_of_sources, sources)
    written = 0
    while ids:
        rows = await store.read(_rows, ids[:CHUNK])
        written += await _to_its_end(_append, path, rows, there)
        ids = ids[len(rows) :]
    return written


async def _to_its_end(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread: a scan or an fsync can take seconds.

    A caller that is cancelled waits for its end. Two that write the file at once would write lines twice.
    """
    running = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _append(path: Path, rows: Sequence[_Row], there: Set[str], mode: int = 0o666) -> int:
    """Append the rows whose tasks are not there yet."""
    try:
        return append_lines(path, [row.line + b"\n" for row in rows if row.key not in there], mode=mode)
    except OSError as error:
        raise _unwritable(path, error) from error


def _mended(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    """The tasks in a file, of which `lines_of` chooses the lines to look at; afterwards its last line has its end.

    So are those in files that were set aside, as this one is if its format is an earlier one. Raises StoreError, and
    leaves the file as it is, if it is none of Flywheel's.
    """
    try:
        if is_agentjets(path):
            _set_aside(path, "was written by AgentJet")
    except OSError as error:
        raise _unwritable(path, error) from error
    there = _tasks_in(path, lines_of)
    try:
        if _is_of_an_earlier_format(path):
            _set_aside(path, "is of an earlier format")
        for aside in set_aside(path):
            with aside.open("rb") as file:
                there.update(_id(aside, line) for line in lines_of(file))
    except OSError as error:
        raise _unwritable(path, error) from error
    return there


def _set_aside(path: Path, why: str) -> None:
    path.rename(free := _free_name(path))
    sync_directory(path.parent)
    log.info("%s %s: it is %s now, and a new one begins", path, why, free.name)


def set_aside(path: Path) -> list[Path]:
    """The files of an earlier format that were renamed to make room for a task file, by their numbers."""
    name = re.compile(rf"{re.escape(path.stem)}-([1-9][0-9]*){re.escape(path.suffix)}")
    try:
        found = [(int(number[1]), each) for each in path.parent.iterdir() if (number := name.fullmatch(each.name))]
    except FileNotFoundError:
        return []
    return [each for _, each in sorted(found) if _is_of_an_earlier_format(each)]


def _free_name(path: Path) -> Path:
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _is_of_an_earlier_format(path: Path) -> bool:
    """Whether the first line is of Flywheel's own and lacks the keys that lines have now."""
    try:
        with path.open("rb") as file:
            metadata = orjson.loads(file.readline())["metadata"]
        return "split" in metadata and "prompt_exact" not in metadata
    except (FileNotFoundError, IsADirectoryError, orjson.JSONDecodeError, KeyError, TypeError):
        return False


def _tasks_in(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise _foreign(path, "it is no regular file")
        with path.open("rb") as file:
            if file.read(1) not in (b"{", b""):
                raise _foreign(path, "it does not begin with a task")
            file.seek(0)
            there = {_id(path, line) for line in lines_of(file)}
            torn = torn_line(file)
        if torn and _is_json(torn):
            # Whole but for its end. Cutting it could lose a task that is marked.
            there.add(_id(path, torn))
            append_lines(path, [b"\n"])
        elif torn:
            if not _begins_a_task(torn):
                raise _foreign(path, f"its last line is unfinished and no task: {_shown(torn)}")
            cut_torn_line(path)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _unwritable(path, error) from error
    return there


def _last(file: BinaryIO) -> Iterable[bytes]:
    """Where tasks may stand that are not marked: those of the last page, which was not marked in time."""
    return last_lines(file, CHUNK)


def _every(file: BinaryIO) -> Iterable[bytes]:
    return (line for line in file if line.endswith(b"\n"))


def _id(path: Path, line: bytes) -> str:
    try:
        return str(orjson.loads(line)["task_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _foreign(path, f"it has a line that is not a task: {_shown(line)}") from error


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _begins_a_task(torn: bytes) -> bool:
    """Whether an unfinished line is the beginning of one that was written here, to the byte."""
    if len(torn) < len(_KEY):
        return _KEY.startswith(torn)
    beginning = _BEGINNING.match(torn)
    return beginning is not None and beginning["rest"][: len(_REST)] == _REST[: len(beginning["rest"])]


def _shown(line: bytes) -> str:
    return line[:60].decode(errors="replace").rstrip()


def _foreign(path: Path, why: str) -> StoreError:
    return StoreError(
        f"append to the task file {path}",
        why,
        "Move the file away, or name another with --out or ingest.output; Flywheel writes only to files of its own.",
    )


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


def exported_to(conn: Connection) -> int:
    """The number of the last task that stands in a task file; 0 if none does."""
    return int(noted(conn, _MARK) or 0)


def _unmarked(conn: Connection) -> list[_Row]:
    """The first tasks that are not marked; at most as many as the file's end is searched for."""
    return _page(conn.exec_driver_sql(_UNMARKED, (exported_to(conn), CHUNK, 0)))


def _page(rows: CursorResult[*tuple[Any, ...]]) -> list[_Row]:
    """The first rows, as far as they can be held in memory; one at least, if there is one."""
    page: list[_Row] = []
    size = 0
    with contextlib.closing(rows):
        for number, key, line in rows:
            page.append(_Row(number, key, line))
            size += len(line)
            if size > PAGE_BYTES:
                break
    return page


def _mark(conn: Connection, rows: Sequence[_Row], found: FileMark | None) -> list[_Row]:
    """Mark these as exported, and the file as it was `found` then; those to go on with."""
    note(conn, _MARK, str(rows[-1].id))
    file_mark.keep(conn, found.grown_from(file_mark.kept(conn)) if found is not None else None)
    is_full = len(rows) == CHUNK or sum(len(row.line) for row in rows) > PAGE_BYTES
    return _unmarked(conn) if is_full else []


def _of_sources(conn: Connection, sources: Sequence[int]) -> list[int]:
    found: set[int] = set()
    for some in chunks(sources):
        of_these = replies.c.source_id.in_(some), replies.c.task_id.is_not(None)
        found.update(conn.execute(select(replies.c.task_id).where(*of_these)).scalars())
    return sorted(found)


def _rows(conn: Connection, ids: Sequence[int]) -> list[_Row]:
    return _page(conn.execute(_TASKS.where(tasks.c.id.in_(ids))))
