"""One file of task lines on its way into the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flywheel.batch import Batch
from flywheel.daemon.studio_feed import Progress
from flywheel.lines.file import is_listed
from flywheel.lines.reader import LinesReader
from flywheel.trace import Cursor


class LinesFeed:
    """The reader of one file with its thread."""

    type = "jsonl"
    due_at: float | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = Progress()
        self._reader = LinesReader(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lines")

    @property
    def schema(self) -> str:
        return self._reader.schema

    @property
    def longest_read_ms(self) -> float:
        return self._reader.longest_read_ms

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass, batch by batch; each must be stored before the next is asked for."""
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._thread, is_listed, self.path):
            return
        self.progress = Progress()
        batches = self._reader.read(cursor, final=final)
        while (batch := await loop.run_in_executor(self._thread, next, batches, None)) is not None:
            self.progress.read += len(batch.entries) + len(batch.dead)
            yield batch

    def forget(self) -> None:
        """Nothing is remembered beside the cursor."""

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._reader.close)
        self._thread.shutdown()
