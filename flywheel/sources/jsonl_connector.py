"""One file of task lines on its way into the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace
from sqlalchemy import Connection

from flywheel.batch import Batch, Entry
from flywheel.exclusion import ANY_MODEL, TrainedModels
from flywheel.sources.jsonl.file import is_listed
from flywheel.sources.jsonl.reader import JsonlReader
from flywheel.sources.jsonl.record import JsonlEntry
from flywheel.sources.jsonl.task_ids import TaskIds
from flywheel.sources.studio_connector import Progress
from flywheel.store import ledger, reingestion
from flywheel.store.ledger import Recorded
from flywheel.trace import Cursor


def record(conn: Connection, source: int, batch: Batch, *, train_ratio: float, split_seed: int) -> Recorded:
    """Store one batch of lines by names that tell them apart, in the caller's transaction."""
    by_name = named(conn, source, TaskIds(), batch.entries)
    # The same words for every batch: they are told once.
    warnings = batch.warnings
    if any(entry and entry.line and entry.key != own.key for entry, own in zip(by_name, batch.entries, strict=True)):
        warnings += ("some lines have the task_id of another task: each is a task of its own, named by a hash",)
    if None in by_name:
        warnings += ("some lines that are no tasks have the task_id of a task: they add nothing",)
    apart = replace(batch, entries=tuple(entry for entry in by_name if entry), warnings=warnings)
    return ledger.record_batch(conn, source, apart, train_ratio=train_ratio, split_seed=split_seed)


def named(conn: Connection, source: int, names: TaskIds, entries: tuple[Entry, ...]) -> list[Entry | None]:
    """The entries by the names that they have in the ledger, or will have; None for one that adds nothing to it."""
    keys = {entry.key for entry in entries}
    keys |= {entry.otherwise for entry in entries if isinstance(entry, JsonlEntry) and not entry.line}
    known = reingestion.known_replies(conn, source, sorted(keys))
    return names.given(entries, known, partial(reingestion.line_of, conn))


T = TypeVar("T")


class JsonlConnector:
    """The reader of one file. It runs in a few `threads` for all files, since a directory may hold thousands; what is
    done with one file is done in order."""

    type = "jsonl"
    due_at: float | None = None

    def __init__(self, path: Path, threads: Executor, models: TrainedModels = ANY_MODEL) -> None:
        self.path = path
        self.progress = Progress()
        self._reader = JsonlReader(path, models)
        self._threads = threads
        self._last: asyncio.Future[Any] | None = None

    @property
    def schema(self) -> str:
        return self._reader.schema

    @property
    def longest_read_ms(self) -> float:
        return self._reader.longest_read_ms

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass, batch by batch; each must be stored before the next is asked for."""
        if await self._in_thread(partial(is_listed, self.path)):
            return
        self.progress = Progress()
        batches = self._reader.read(cursor, final=final)
        while (batch := await self._in_thread(lambda: next(batches, None))) is not None:
            self.progress.read += len(batch.entries) + len(batch.dead)
            yield batch
        if final:
            # Nobody waits for what comes, so it need not stay open.
            await self._in_thread(self._reader.close)

    def forget(self) -> None:
        """Nothing is remembered beside the cursor."""

    async def close(self) -> None:
        await self._in_thread(self._reader.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run something with the reader, after what was given up before it ended."""
        if self._last is not None:
            await asyncio.wait((self._last,))
        running = self._last = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # What went wrong in something that was given up is nobody's matter.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(running)
