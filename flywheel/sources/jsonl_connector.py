"""Connects a JSONL file to the ledger: reads it in threads, and stores its tasks under unique ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection

from flywheel.records.batch import Batch, Entry
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.trace import Cursor
from flywheel.sources.jsonl.file import is_listed
from flywheel.sources.jsonl.reader import JsonlReader
from flywheel.sources.jsonl.record import JsonlEntry
from flywheel.sources.jsonl.task_ids import TaskIds
from flywheel.sources.studio_connector import Progress
from flywheel.store import ledger
from flywheel.store.ledger import Recorded

T = TypeVar("T")


def record(conn: Connection, source: int, batch: Batch, *, train_ratio: float, split_seed: int) -> Recorded:
    """Store one batch in the caller's transaction, each task under an id of its own."""
    assigned = with_ids(conn, source, TaskIds(), batch.entries)
    # The texts are the same for every batch, so each is reported once.
    warnings = batch.warnings
    if any(entry and entry.line and entry.key != own.key for entry, own in zip(assigned, batch.entries, strict=True)):
        warnings += ("some lines have the task_id of a different task: these tasks get a hash as their id",)
    if None in assigned:
        warnings += ("some lines without a task have the task_id of a task: they are ignored",)
    batch = replace(batch, entries=tuple(entry for entry in assigned if entry), warnings=warnings)
    if batch.cursor is not None and ledger.cursor_of(conn, source).generation > batch.cursor.generation:
        # A line was retried since this pass began: the next one reads from the beginning.
        batch = replace(batch, cursor=None)
    return ledger.record_batch(conn, source, batch, train_ratio=train_ratio, split_seed=split_seed)


def with_ids(conn: Connection, source: int, ids: TaskIds, entries: tuple[Entry, ...]) -> list[Entry | None]:
    """The entries with the ids that they have in the ledger or will get; None for one that adds nothing."""
    keys = {entry.key for entry in entries}
    keys |= {entry.otherwise for entry in entries if isinstance(entry, JsonlEntry) and not entry.line}
    known = ledger.known_replies(conn, source, sorted(keys))
    return ids.assign(entries, known, partial(ledger.line_of, conn))


class JsonlConnector:
    """Reads one file in the shared `threads`: a directory may hold thousands of files. Calls run one after
    another."""

    type = "jsonl"
    schema = JsonlReader.schema
    due_at: float | None = None

    def __init__(self, path: Path, threads: Executor, models: TrainedModels = ANY_MODEL) -> None:
        self.path = path
        self.progress = Progress()
        self._reader = JsonlReader(path, models)
        self._threads = threads
        self._last: asyncio.Future[Any] | None = None

    @property
    def longest_read_ms(self) -> float:
        return self._reader.longest_read_ms

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass from the cursor on. Each batch must be stored before the next one is requested."""
        if await self._in_thread(partial(is_listed, self.path)):
            return
        self.progress = Progress()
        batches = self._reader.read(cursor, final=final)
        while (batch := await self._in_thread(lambda: next(batches, None))) is not None:
            self.progress.read += len(batch.entries) + len(batch.dead)
            yield batch
        if final:
            # No further pass is expected, so the file need not stay open.
            await self.close()

    def forget(self) -> None:
        """The reader holds no uncommitted state."""

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
