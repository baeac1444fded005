"""The task file `tasks.jsonl`: tasks are appended to it in the order of their numbers, from the state database.

The order is commit, append and fsync, mark as exported. A crash between the last two leaves tasks in the file that
are not marked; the next export looks at the end of the file before it appends. A crash in the middle of an append
leaves a torn line: it is cut, and its task written again. A file of AgentJet at the same place is
renamed, and replies that it has are not judged again; a file of anybody else is refused.

Tasks are numbered in the order in which they are committed, so the mark is the number of the last exported task: a
mark at each task would write every page of the state a second time.

Another program may cut the file. A file that begins as before and is shorter has lost lines, which no later append
restores; a file that begins otherwise is a new one, and the earlier one was moved away.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, ParamSpec, Self, TypeVar

import orjson
from msgspec import structs
from sqlalchemy import Connection, CursorResult, LargeBinary, bindparam, case, cast, literal_column, select

from flywheel.errors import StoreError
from flywheel.records.states import SkipReason, TaskState
from flywheel.records.task import Batch, Entry
from flywheel.store.kernel.bulk import CHUNK, count_rows, rows_in, sql_text
from flywheel.store.kernel.database import Store, note, noted
from flywheel.store.kernel.schema import replies, tasks
from flywheel.system.files import (
    PRIVATE,
    append_lines,
    cut_torn_line,
    last_lines,
    remove_temporary,
    rewrite_lines,
    sync,
    torn_line,
)

_KEY: Final = b'{"task_id":"'
_BEGINNING_OF_A_TASK: Final = re.compile(re.escape(_KEY) + rb'(?:[^"\\]|\\.|\\\Z)*+(?P<rest>.*)', re.DOTALL)
_REST: Final = b'","main_query":"'
log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
PAGE_BYTES: Final = 4 * 1024 * 1024
"""Lines that are written at once; a longer line is written alone."""
_WRITTEN: Final = case(
    (tasks.c.state != literal_column(f"'{TaskState.ERASED.value}'"), cast(tasks.c.payload, LargeBinary))
)
_TASKS: Final = select(tasks.c.id, tasks.c.key, _WRITTEN).order_by(tasks.c.id)
_UNMARKED: Final = sql_text(_TASKS.where(tasks.c.id > bindparam("done")).limit(bindparam("most")))
_EXPORTED_TO: Final = "exported_to"
_FILE: Final = "task_file"
_BEGINNING: Final = 40
"""First bytes by which files are distinguished: they contain the id of the first task."""


def prepare(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    """Make a file ready to be appended to: set it aside if AgentJet wrote it, and complete its last line.

    Returns the ids of the tasks in it; `lines_of` chooses the lines to look at. Raises StoreError, and leaves the
    file as it is, if it is not a task file.
    """
    try:
        if is_of_agentjet(path):
            _set_aside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _mended(path, lines_of) if path.exists() else set()
    except OSError as error:
        raise unwritable(path, error) from error


def _mended(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    """The ids of the tasks in a file, whose last line is whole afterwards."""
    if not path.is_file():
        raise _foreign(path, "it is no regular file")
    with path.open("rb") as file:
        if file.read(1) not in (b"{", b""):
            raise _foreign(path, "it does not begin with a task")
        file.seek(0)
        found = {_id(path, line) for line in lines_of(file)}
        torn = torn_line(file)
    if torn and _is_json(torn):
        # Whole except for its end. Cutting it could lose a task that is marked as exported.
        found.add(_id(path, torn))
        append_lines(path, [b"\n"])
    elif torn:
        if not _begins_a_task(torn):
            raise _foreign(path, f"its last line is unfinished and no task: {_excerpt(torn)}")
        cut_torn_line(path)
    return found


def _set_aside(path: Path) -> None:
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    path.rename(free := next(name for name in names if not os.path.lexists(name)))
    sync(path.parent)
    log.info("%s was written by AgentJet: it is %s now, and a new one begins", path, free.name)


def numbered(path: Path) -> Iterator[Path]:
    """The files `tasks-1.jsonl`, `tasks-2.jsonl`, … beside a task file, by their numbers."""
    name = _numbered_name(path)
    try:
        found = [(int(number[1]), each) for each in path.parent.iterdir() if (number := name.fullmatch(each.name))]
    except FileNotFoundError:
        return
    yield from (each for _, each in sorted(found))


def _numbered_name(path: Path) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(path.stem)}-([1-9][0-9]*){re.escape(path.suffix)}")


def is_of_agentjet(path: Path) -> bool:
    """Whether AgentJet wrote a file, by its first line. Raises OSError."""
    try:
        with path.open("rb") as file:
            metadata = metadata_of(file.readline())
    except (FileNotFoundError, IsADirectoryError):
        return False
    return "qa_hash" in metadata and "split" not in metadata


def metadata_of(line: bytes) -> dict[str, Any]:
    """The metadata of a task line; empty if it is none."""
    try:
        metadata = orjson.loads(line)["metadata"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _id(path: Path, line: bytes) -> str:
    try:
        return str(orjson.loads(line)["task_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _foreign(path, f"it has a line that is not a task: {_excerpt(line)}") from error


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _begins_a_task(torn: bytes) -> bool:
    """Whether an unfinished line is, byte for byte, the beginning of a line that Flywheel writes."""
    if len(torn) < len(_KEY):
        return _KEY.startswith(torn)
    beginning = _BEGINNING_OF_A_TASK.match(torn)
    return beginning is not None and beginning["rest"][: len(_REST)] == _REST[: len(beginning["rest"])]


def _excerpt(line: bytes) -> str:
    return line[:60].decode(errors="replace").rstrip()


def _foreign(path: Path, why: str) -> StoreError:
    return StoreError(
        f"append to the task file {path}",
        why,
        "Move the file away, or name another with --out or ingest.output; Flywheel writes only to files of its own.",
    )


def unwritable(path: Path, error: OSError) -> StoreError:
    """The error of a task file that cannot be written."""
    return StoreError(
        f"append to the task file {path}",
        error.strerror or str(error),
        "Nothing is lost: the tasks are in the state database and follow when the file can be written.",
        retryable=True,
    )


@dataclass(slots=True)
class AgentJetTasks:
    """The tasks of AgentJet at the place of the task file, read once, when the first replies come. Thread-safe."""

    _path: Path
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _hashes: set[int] | None = None

    def skipped(self, batch: Batch) -> Batch:
        """The batch, in which replies that AgentJet has judged are skipped. Their content hashes stay."""
        with self._reading:
            if self._hashes is None:
                self._hashes = self._read()
        if not self._hashes:
            return batch
        return structs.replace(batch, entries=tuple(self._entry(entry, self._hashes) for entry in batch.entries))

    def _entry(self, entry: Entry, hashes: set[int]) -> Entry:
        if not entry.line or _short(orjson.loads(entry.line)["metadata"]["qa_hash"]) not in hashes:
            return entry
        return structs.replace(
            entry,
            line=b"",
            excluded="",
            own_id="",
            skip=SkipReason.IN_TASK_FILE,
            detail=f"its question and answer stand in the file that AgentJet wrote at {self._path}",
        )

    def _read(self) -> set[int]:
        """The hashes in the file of AgentJet at this place, and in those that were set aside from there.

        Raises StoreError (retryable) when one cannot be read.
        """
        found: set[int | None] = set()
        try:
            # The numbered files are listed after the first one was read: it may be set aside meanwhile.
            for path in itertools.chain([self._path], numbered(self._path)):
                if not is_of_agentjet(path):
                    continue
                with path.open("rb") as file:
                    found.update(_short(metadata_of(line).get("qa_hash")) for line in file)
        except OSError as error:
            raise StoreError(
                f"read {error.filename or self._path}, which AgentJet wrote",
                error.strerror or str(error),
                "Check its permissions: what is in it is not judged again.",
                retryable=True,
            ) from error
        return {each for each in found if each is not None}


def _short(qa_hash: object) -> int | None:
    """64 bits of the SHA-256 of question, newline and answer: a file can have a million. None if it is no hash."""
    try:
        return int(qa_hash[:16], 16) if isinstance(qa_hash, str) else None
    except ValueError:
        return None


class _TaskRow(NamedTuple):
    """A task; `line` is its line in the file without the line end, empty if it is erased."""

    id: int
    key: str
    line: bytes


@dataclass(frozen=True, slots=True)
class FileState:
    """A task file at one time: its path, first bytes, size in bytes and permissions. `lacking` is how many bytes it
    has lost. One that was moved away has no byte."""

    path: str
    begins: str
    size: int
    lacking: int = 0
    mode: int = PRIVATE

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """The file as it is now; None if there is none that can be read."""
        try:
            if not path.is_file():
                return None
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                return cls(str(path), file.read(_BEGINNING).decode("latin-1"), file.seek(0, 2), mode=mode)
        except OSError:
            return None

    def since(self, before: FileState | None) -> FileState:
        """This file, with what it has lost since `before`."""
        if before is None or before.path != self.path or not before.begins.startswith(self.begins):
            return self
        lacking = before.size + before.lacking - self.size
        # One byte is the end of the last line, which is restored.
        return replace(self, lacking=lacking if lacking > 1 else 0)

    @property
    def warning(self) -> str:
        """What `status` says about the file; empty if nothing is wrong."""
        if not self.lacking:
            return ""
        return (
            f"{self.path} was cut by another program: it lacks {self.lacking:,} bytes that were written to it. "
            "`flywheel audit --deep` names the tasks. Put it back from a backup, or move it away; `flywheel export` "
            "writes all tasks anew"
        )


@dataclass(slots=True)
class TaskFile:
    """The task file of a state. A new file is private, or has the permissions of the one that was moved away."""

    path: Path
    _seen: FileState | None = None
    _written: FileState | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def erase(self, store: Store, keys: Set[str], qa_hashes: Set[str]) -> int:
        """Remove the lines of tasks by their ids, and by the `qa_hash` of lines that AgentJet wrote, from this file
        and those that were set aside; returns their number. Raises StoreError."""
        async with self._lock:
            removed = await in_thread(_erase, self.path, keys, qa_hashes)
            self._written, self._seen = None, await in_thread(FileState.of, self.path)
            if await store.read(noted_state) is not None:
                await store.write(note_state, self._seen)
            return removed

    async def follow(self, store: Store) -> int:
        """Append every task that is not marked as exported; returns the number of lines. Raises StoreError.

        If another program has cut the file, this is logged and noted for `status`.
        """
        async with self._lock:
            return await self._follow(store)

    async def _follow(self, store: Store) -> int:
        found = await in_thread(FileState.of, self.path)
        if found != self._seen:
            before = await store.read(noted_state)
            now = found.since(before) if found is not None else None
            if now is None and before is not None and before.path == str(self.path):
                now = replace(before, begins="", size=0, lacking=0)
            if now != before:
                await store.write(note_state, now)
            if now is not None and now.lacking:
                log.warning("%s", now.warning)
            self._seen = found
        page = await store.read(_unmarked)
        if not page:
            return 0
        there: set[str] = set()
        if found is None or found != self._written:
            # Another program wrote to the file, or it is unknown how the last append ended.
            there = await in_thread(prepare, self.path, _last)
        before = found or await store.read(noted_state)
        mode = before.mode if before is not None and before.path == str(self.path) else PRIVATE
        self._written = None
        count = 0
        while page:
            count += await in_thread(_append, self.path, page, there, mode)
            self._seen = await in_thread(FileState.of, self.path)
            page = await store.write(_mark, page, self._seen)
        self._written = self._seen
        return count


def _erase(task_file: Path, keys: Set[str], qa_hashes: Set[str]) -> int:
    removed = 0
    for path in (task_file, *numbered(task_file)):
        try:
            removed += rewrite_lines(path, lambda line: b"" if _is_of(line, keys, qa_hashes) else line)
        except FileNotFoundError:
            continue
        except OSError as error:
            hint = "Make it and its folder writable, and run the command again."
            raise StoreError(f"erase tasks from {path}", error.strerror or str(error), hint) from error
    with contextlib.suppress(FileNotFoundError):
        number = _numbered_name(task_file)
        remove_temporary(task_file.parent, lambda name: name == task_file.name or number.fullmatch(name))
    return removed


def _is_of(line: bytes, keys: Set[str], qa_hashes: Set[str]) -> bool:
    """Whether a line is one of these tasks."""
    try:
        task = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(task, dict):
        return False
    return task.get("task_id") in keys or metadata_of(line).get("qa_hash") in qa_hashes


async def export_sources(store: Store, path: Path, sources: Sequence[int]) -> int:
    """Append the tasks of `sources` that a file of the user's choice does not hold yet; returns their number."""
    there = await in_thread(prepare, path, _every)
    ids = await store.read(_of_sources, sources)
    written = 0
    while ids:
        rows = await store.read(_rows, ids[:CHUNK])
        written += await in_thread(_append, path, rows, there)
        ids = ids[len(rows) :]
    return written


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in a thread, since a scan or an fsync can take seconds, and wait for it even when cancelled.

    Two that write the file at once would write lines twice.
    """
    running = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _last(file: BinaryIO) -> Iterable[bytes]:
    """Where unmarked tasks can be: the lines of the last page, which was not marked in time."""
    return last_lines(file, CHUNK)


def _every(file: BinaryIO) -> Iterable[bytes]:
    return (line for line in file if line.endswith(b"\n"))


def _append(path: Path, rows: Sequence[_TaskRow], there: Set[str], mode: int = PRIVATE) -> int:
    """Append the rows whose tasks are not there yet. A new file gets `mode`."""
    try:
        return append_lines(path, [row.line + b"\n" for row in rows if row.line and row.key not in there], mode=mode)
    except OSError as error:
        raise unwritable(path, error) from error


def exported_to(conn: Connection) -> int:
    """The number of the last task in the task file; 0 if there is none."""
    return int(noted(conn, _EXPORTED_TO) or 0)


def _unmarked(conn: Connection) -> list[_TaskRow]:
    """The first tasks that are not marked; at most as many as the end of the file is searched for."""
    return _page(conn.exec_driver_sql(_UNMARKED, (exported_to(conn), CHUNK, 0)))


def _page(rows: CursorResult[*tuple[Any, ...]]) -> list[_TaskRow]:
    """The first rows, `PAGE_BYTES` of them; at least one, if there is one."""
    page: list[_TaskRow] = []
    size = 0
    with contextlib.closing(rows):
        for number, key, line in rows:
            page.append(_TaskRow(number, key, line or b""))
            size += len(page[-1].line)
            if size > PAGE_BYTES:
                break
    return page


def _mark(conn: Connection, rows: Sequence[_TaskRow], found: FileState | None) -> list[_TaskRow]:
    """Mark these rows as exported, note the state of the file, and return the next rows."""
    note(conn, _EXPORTED_TO, str(rows[-1].id))
    before = noted_state(conn)
    if found is not None and before is not None and (before.path, before.begins) == (found.path, found.begins):
        # Only lines were appended: it lacks what it lacked.
        found = replace(found, lacking=before.lacking)
    note_state(conn, found)
    is_full = len(rows) == CHUNK or sum(len(row.line) for row in rows) > PAGE_BYTES
    return _unmarked(conn) if is_full else []


def noted_state(conn: Connection) -> FileState | None:
    """The state of the task file as it was noted last."""
    found = noted(conn, _FILE)
    return FileState(**json.loads(found)) if found else None


def note_state(conn: Connection, state: FileState | None) -> None:
    note(conn, _FILE, json.dumps(asdict(state)) if state is not None else "")


def warning(conn: Connection) -> str:
    """What `status` says about the task file."""
    state = noted_state(conn)
    return state.warning if state is not None else ""


def _of_sources(conn: Connection, sources: Sequence[int]) -> list[int]:
    wanted = select(replies.c.task_id).where(replies.c.task_id.is_not(None))
    return sorted({row.task_id for row in rows_in(conn, wanted, replies.c.source_id, sources)})


def _rows(conn: Connection, ids: Sequence[int]) -> list[_TaskRow]:
    return _page(conn.execute(_TASKS.where(tasks.c.id.in_(ids))))


def exported_keys(conn: Connection) -> dict[str, int]:
    """The number of every task in the task file by key, without erased ones. Tasks are written in the order of their
    numbers."""
    there = tasks.c.id <= exported_to(conn), tasks.c.state != TaskState.ERASED.value
    rows = conn.execute(select(tasks.c.key, tasks.c.id).where(*there))
    return {str(row.key): int(row.id) for row in rows}


def count_unexported(conn: Connection) -> int:
    """Tasks that are not written to the task file yet."""
    return count_rows(conn, tasks, tasks.c.id > exported_to(conn))


def unknown_keys(conn: Connection, keys: Sequence[str]) -> list[str]:
    """Those of these task keys that no task has."""
    known = {row.key for row in rows_in(conn, select(tasks.c.key), tasks.c.key, keys)}
    return [key for key in keys if key not in known]
