"""One Studio database on its way into the ledger: pages are read, traces converted, batches stored, all at once.

Reading has a thread of its own, so a slow disk holds up no other source. Of a long history the traces are converted
in a process of its own while the next pages are read and the last ones stored; batches are stored in the order they
were read, so a crash leaves a whole prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

from msgspec.structs import replace

from flywheel.batch import Batch
from flywheel.config import Config
from flywheel.store import marks
from flywheel.store.database import Store
from flywheel.studio.conversion import Told, convert
from flywheel.studio.conversion_process import ConversionProcess
from flywheel.studio.reader import StudioReader
from flywheel.studio.scan import FOREVER_NS
from flywheel.studio.step import Step
from flywheel.trace import Cursor, Mark, Selection

T = TypeVar("T")

LONG_ROWS: Final = 4_000
"""A pass that has read so many rows goes on with a process that converts."""
AHEAD: Final = 3
"""Pages that are read ahead of what is stored."""
RECENT_ROWS = 5_000
"""How far back a look at what was changed in place goes, whenever the source has changed."""


@dataclass(slots=True)
class Progress:
    """How far a pass is: rows read, and about how many it has to read in all (0: not known, or not many)."""

    read: int = 0
    in_all: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Rows a second since the pass began."""
        return self.read / max(time.monotonic() - self.began, 1e-3)

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes at this rate, if that can be told."""
        return max(self.in_all - self.read, 0) / self.rate if self.in_all and self.read else None


class _Memory:
    """The ledger's memory of a source, asked from the reader's thread."""

    def __init__(self, store: Store, source: int) -> None:
        self._store = store
        self._source = source
        self._loop = asyncio.get_running_loop()

    def open_marks(self) -> Sequence[Mark]:
        return asyncio.run_coroutine_threadsafe(self._store.read(marks.open_marks, self._source), self._loop).result()

    def marks(self, trace_ids: Sequence[str]) -> Mapping[str, Mark]:
        return asyncio.run_coroutine_threadsafe(
            self._store.read(marks.marks_of, self._source, trace_ids), self._loop
        ).result()


class StudioFeed:
    """The reader of one database with its thread and, while it is needed, its converting process."""

    def __init__(self, path: Path, config: Config, store: Store, *, kind: str = "studio") -> None:
        self.type = kind
        self.path = path
        self.progress = Progress()
        self.kinds: Counter[str] = Counter()
        self._store = store
        self._reader = StudioReader(path, config.ingest)
        agents = config.ingest.agents
        self._selection = Selection(frozenset(agents.include), frozenset(agents.exclude))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="studio")
        self._converting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="convert")
        self._process: ConversionProcess | None = None

    @property
    def schema(self) -> str:
        return self._reader.schema

    @property
    def longest_read_ms(self) -> float:
        return self._reader.longest_read_ms

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass, batch by batch; each must be stored before the next is asked for."""
        memory = _Memory(self._store, number)
        self.progress = Progress()
        steps = self._reader.read(cursor, memory, now=datetime.now(UTC), final=final)
        async for batch in self._batches(steps):
            yield batch

    @property
    def due_at(self) -> float | None:
        """When a trace that is waited for is done if nothing more comes, seconds since 1970; None if none is."""
        return self._reader.due_ns / 1e9 if self._reader.due_ns < FOREVER_NS else None

    def look_back(self, number: int, *, whole: bool) -> LookBack:
        """Look for what was changed in place, in the newest rows or in all of them."""
        memory = _Memory(self._store, number)
        steps = self._reader.sweep(memory, now=datetime.now(UTC), last=None if whole else RECENT_ROWS)
        return LookBack(self, steps, whole=whole)

    async def rows_in_all(self) -> int:
        """About how many rows the source has."""
        return await self.in_thread(self._reader.rows_in_all)

    def forget(self) -> None:
        """What was handed out last was not stored."""
        self._reader.forget()

    async def close(self) -> None:
        """End the threads and the child; to be called once."""
        await self.in_thread(self._reader.close)
        self._end_process()
        self._thread.shutdown()
        self._converting.shutdown()

    async def _batches(self, steps: Generator[Step]) -> AsyncGenerator[Batch]:
        """Steps are read and converted ahead while batches are stored: a short queue between the three."""
        queue: asyncio.Queue[asyncio.Task[Batch] | None] = asyncio.Queue(AHEAD)

        async def produce() -> None:
            try:
                while (step := await self.in_thread(lambda: next(steps, None))) is not None:
                    await self._notice(step)
                    await queue.put(asyncio.create_task(self.convert(step)))
            finally:
                await queue.put(None)

        producer = asyncio.create_task(produce())
        try:
            while (task := await queue.get()) is not None:
                yield await task
            await producer
        except BaseException:
            producer.cancel()
            while not queue.empty():
                if (task := queue.get_nowait()) is not None:
                    task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await producer
            await self.in_thread(steps.close)
            await self.in_thread(self._reader.forget)
            raise
        finally:
            self._end_process()

    async def _notice(self, step: Step) -> None:
        self.progress.read += step.rows
        if step.more and not self.progress.in_all:
            last = await self.rows_in_all()
            self.progress.in_all = self.progress.read + max(0, last - step.cursor.rowid)
        if step.more and self.progress.read >= LONG_ROWS and self._process is None:
            self._process = ConversionProcess()

    async def convert(self, step: Step) -> Batch:
        """A step in the ledger's form."""
        traces = [(trace.rows, trace.is_open) for trace in step.traces]
        told = Told()
        if traces:
            work = self._process.convert if self._process is not None else convert
            told = await asyncio.get_running_loop().run_in_executor(
                self._converting, work, self._reader.schema, traces, self._selection, str(self.path)
            )
        self.kinds += told.kinds
        return Batch(
            cursor=step.cursor,
            entries=tuple(told.entries),
            dead=(*step.dead, *told.dead),
            marks=step.marks,
            open_traces=step.open_traces,
        )

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run something with the reader, which belongs to one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class LookBack:
    """A look at rows that were read before, page by page, so that passes can go on in between."""

    def __init__(self, feed: StudioFeed, steps: Generator[Step], *, whole: bool) -> None:
        self._feed = feed
        self._steps = steps
        self._whole = whole
        self._progress = Progress()

    async def next(self) -> Batch | None:
        """What the next page brought; None at the end. It has no cursor: a pass may have moved that since."""
        step = await self._feed.in_thread(lambda: next(self._steps, None))
        if step is None:
            return None
        if self._whole:
            await self._notice(step)
        return replace(await self._feed.convert(step), cursor=None)

    async def close(self) -> None:
        await self._feed.in_thread(self._steps.close)

    async def _notice(self, step: Step) -> None:
        if step.more and not self._progress.in_all:
            self._progress.in_all = await self._feed.rows_in_all()
        self._progress.read += step.rows
        self._feed.progress = self._progress
