"""Connects a JSONL file to the ledger: reads it in threads, and stores its tasks under unique ids.

A row has an id of its own, a hash of what it says before anything is redacted, by which it is one reply however often
it is read. The id of its task is the `task_id` that the file gives it, or that hash where a task of another row has
the `task_id`, in any file. A row without a task (no answer yet, for example) adds nothing to an id that has one; a
later row with its `task_id` completes it.

Of a batch, a request without a response and a response without a request are replies that are pending. The reply of
a request becomes that of its response.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection

from flywheel.errors import SourceError
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.privacy import NOBODY, PrivateNames
from flywheel.records.task import Batch, Entry, line_bytes
from flywheel.records.trace import Cursor
from flywheel.sources.jsonl.batch_reader import BatchFiles, BatchReader
from flywheel.sources.jsonl.copied_lines import erase_lines
from flywheel.sources.jsonl.reader import JsonlReader, is_folder
from flywheel.sources.jsonl.record import BatchEntry
from flywheel.sources.studio_connector import Progress
from flywheel.store import ledger
from flywheel.store.ledger import Recorded

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_SECONDS: Final = 300.0
"""Without the Hub, an attempt to read one of its data sets takes half a minute."""


def record(conn: Connection, source: int, batch: Batch, *, train_ratio: float, split_seed: int) -> Recorded:
    """Store one batch in the caller's transaction, each task under an id of its own."""
    ids = RowIds()
    assigned = with_ids(conn, source, ids, batch.entries)
    # The texts are the same for every batch, so each is reported once.
    warnings = batch.warnings
    if any(entry and entry.line and entry.key != own.key for entry, own in zip(assigned, batch.entries, strict=True)):
        warnings += ("some lines have the task_id of a different task: those tasks get a hash as id",)
    if None in assigned:
        warnings += ("some lines without a task have the task_id of a task: they are ignored",)
    entries = tuple(entry for entry in assigned if entry and entry.span_id not in ids.completed)
    batch = replace(batch, entries=entries, warnings=warnings)
    if batch.cursor is not None and ledger.cursor_of(conn, source).generation > batch.cursor.generation:
        # A line was retried since this pass began: the next one reads from the beginning.
        batch = replace(batch, cursor=None)
    answered = {
        entry.request: entry.span_id
        for entry in reversed(batch.entries)
        if isinstance(entry, BatchEntry) and entry.request and not entry.waits
    }
    ledger.complete(conn, source, answered | ids.completed)
    return ledger.record_batch(conn, source, batch, train_ratio=train_ratio, split_seed=split_seed)


def with_ids(conn: Connection, source: int, ids: RowIds, entries: Sequence[Entry]) -> list[Entry | None]:
    """The entries with the ids that they have in the ledger or will get; None for one that adds nothing."""
    settled = _settled(conn, source, [entry for entry in entries if isinstance(entry, BatchEntry)])
    return [None if entry and entry.span_id in settled else entry for entry in ids.assign(conn, source, entries)]


def _settled(conn: Connection, source: int, entries: Sequence[BatchEntry]) -> set[str]:
    """The spans of lines of batches that add nothing: what they wait for came before and is gone now, or they were
    joined with another line then."""
    if not entries:
        return set()
    joined = {
        entry.span_id: "" if entry.waits else entry.request for entry in entries if entry.waits or not entry.skip
    }
    return ledger.joined_otherwise(conn, source, joined)


class RowIds:
    """Finds the ids of tasks for the rows of a file, which are given one after the other.

    A task has the id that the file gives its row, unless that is another row's: then it has the row's own, a hash.
    """

    def __init__(self) -> None:
        self.rows: dict[str, set[str]] = {}
        """The rows of tasks, by the ids of the tasks."""
        self.completed: dict[str, str] = {}
        """Rows that had no question or no answer, each with the later one that has both."""
        self._incomplete: dict[str, str] = {}
        """Such rows by the ids that the file gives them, as long as nothing completes them."""
        self._known: set[str] = set()

    def assign(self, conn: Connection, source: int, entries: Sequence[Entry]) -> list[Entry | None]:
        """The entries with the ids of their tasks; None for one without a task whose id a task has already."""
        own = sorted({entry.own_id for entry in entries} - {""})
        hashes = [entry.span_id for entry in entries if entry.own_id]
        for key, rows in ledger.rows_of_tasks(conn, [*own, *hashes]).items():
            self.rows.setdefault(key, set()).update(rows)
        self._incomplete = ledger.incomplete_rows(conn, source, own) | self._incomplete
        doubtful = [entry.span_id for entry in entries if not entry.line or entry.own_id in self._incomplete]
        self._known = ledger.known_spans(conn, source, doubtful)
        return [self._assigned(entry) if entry.own_id else entry for entry in entries]

    def _assigned(self, entry: Entry) -> Entry | None:
        if entry.line:
            return self._with_task(entry)
        if entry.span_id in self._known:
            return entry
        if entry.own_id in self.rows:
            return None
        first = self._incomplete.setdefault(entry.own_id, entry.span_id)
        return entry if first == entry.span_id else replace(entry, own_id="")

    def _with_task(self, entry: Entry) -> Entry:
        if entry.span_id not in self._known and (earlier := self._incomplete.pop(entry.own_id, "")):
            self.completed[earlier] = entry.span_id
        # A task keeps its hash, also where the task with the other id was erased.
        if entry.span_id not in self.rows and entry.span_id in self.rows.setdefault(entry.own_id, {entry.span_id}):
            return entry
        # Unlike orjson, it keeps integers beyond 64 bits exact.
        task = msgspec.json.decode(entry.line)
        task["task_id"] = task["metadata"]["span_id"] = entry.span_id
        return replace(entry, key=entry.span_id, line=line_bytes(task))


class KeptOpen:
    """The connectors that keep their file open between passes, first the one that has had nothing new for longest.
    They are at most half as many as the files that this process may open: the others are a reserve."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2
        self._open: dict[JsonlConnector, None] = {}
        self.reading: set[JsonlConnector] = set()
        """Those in a pass, whose files are not closed."""
        self._has_warned = False

    async def add(self, connector: JsonlConnector, *, has_news: bool) -> None:
        """Note the end of a pass, and close what is too much."""
        if has_news:
            self._open.pop(connector, None)
        self._open[connector] = None
        while len(self._open) > self._most:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "more than %d files of lines: those that were read longest ago are closed, and one that is moved "
                    "away then is not read to its end. Raise the limit of open files (`LimitNOFILE=` of a unit), or "
                    "move finished files elsewhere",
                    self._most,
                )
            idle = (each for each in self._open if each not in self.reading)
            closed = next(idle, connector) if has_news else connector
            del self._open[closed]
            await closed.close()


class JsonlConnector:
    """Reads one file in the shared `threads`: a directory may hold thousands of files. Calls run one after
    another."""

    type = "jsonl"
    schema = JsonlReader.schema
    due_at: float | None = None

    def __init__(
        self,
        path: Path,
        threads: Executor,
        models: TrainedModels = ANY_MODEL,
        make: Callable[[], None] | None = None,
        private: PrivateNames = NOBODY,
        batch_files: BatchFiles | None = None,
        is_in_folder: bool = False,
        kept_open: KeptOpen | None = None,
    ) -> None:
        """`make` writes the file if it is missing: it is a copy, which an erasure may change. If it `is_in_folder`,
        another connector reads it with the others of the folder when it is one of `batch_files`. Connectors with the
        same `kept_open` limit together how many files stay open."""
        self.path = path
        self.is_copy = make is not None
        self._make = make
        self._not_made: tuple[SourceError, float] | None = None
        self.progress = Progress()
        self._reader = JsonlReader(path, models, private)
        self._batch_files = BatchFiles() if batch_files is None else batch_files
        self._batch_reader = BatchReader(path, models, private, self._batch_files)
        self._is_in_folder = is_in_folder
        self._kept_open = KeptOpen() if kept_open is None else kept_open
        self._threads = threads
        self._last: asyncio.Future[Any] | None = None

    @property
    def longest_read_ms(self) -> float:
        return max(self._reader.longest_read_ms, self._batch_reader.longest_read_ms)

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass from the cursor on. Each batch must be stored before the next one is requested."""
        if self._make is not None and not self.path.exists():
            await self._in_thread(partial(self._made, self._make))
        if (reader := await self._in_thread(self._chosen)) is None:
            return
        self.progress = Progress()
        self._kept_open.reading.add(self)
        try:
            batches = reader.read(cursor, final=final)
            while (batch := await self._in_thread(lambda: next(batches, None))) is not None:
                self.progress.read += len(batch.entries) + len(batch.dead)
                yield batch
        finally:
            self._kept_open.reading.discard(self)
        if final:
            # No further pass is expected, so the file need not stay open.
            await self.close()
        else:
            await self._kept_open.add(self, has_news=bool(self.progress.read))

    async def rescan(self, number: int, *, whole: bool) -> AsyncGenerator[Batch]:
        """Read the file again from its beginning, always `whole`. The cursor stays."""
        self.forget()
        async with aclosing(self.read(number, Cursor(), final=whole)) as batches:
            async for batch in batches:
                yield replace(batch, cursor=None)

    def _chosen(self) -> JsonlReader | BatchReader | None:
        """The reader of what is at the path now; None if it is another source's."""
        if is_folder(self.path):
            return self._batch_reader  # other files of a folder are sources of their own
        if self.is_copy or self.path not in self._batch_files:
            return self._reader
        return None if self._is_in_folder else self._batch_reader

    def _made(self, make: Callable[[], None]) -> None:
        """Write the file. After a failure, the next attempt is made `RETRY_SECONDS` later. Raises SourceError."""
        if self._not_made is not None and time.monotonic() < self._not_made[1]:
            raise self._not_made[0]
        try:
            make()
        except SourceError as error:
            self._not_made = error, time.monotonic() + RETRY_SECONDS
            raise

    def forget(self) -> None:
        """Have what was read and not stored read again."""
        self._batch_reader.forget()

    async def erase(self, traces: Collection[str], conversations: Collection[str]) -> int:
        """Erase lines of these traces and conversations from the copy, see `erase_lines`."""
        erased = await self._in_thread(partial(erase_lines, self.path, traces, conversations))
        # The file before is closed: it has the texts for as long as it is open.
        await self.close()
        return erased

    async def close(self) -> None:
        await self._in_thread(self._reader.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, after the previous call has ended, even if that one was cancelled."""
        if self._last is not None:
            await asyncio.wait((self._last,))
        running = self._last = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # An error of a cancelled call is of no interest.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(running)
