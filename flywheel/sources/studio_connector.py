"""One Studio database on its way into the ledger: pages are read, traces converted, batches stored, all at once.

Reading has a thread of its own, so a slow disk holds up no other source. Of a long history the traces are converted
in a process of its own while the next pages are read and the last ones stored; what that has no time for, while
nothing is stored, the reader's thread converts. Batches are stored in the order they were read, so a crash leaves a
whole prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import BoundedSemaphore
from typing import Final, TypeVar

from msgspec.structs import replace

from flywheel.batch import Batch, joined
from flywheel.config import Config
from flywheel.exclusion import ANY_MODEL, TrainedModels
from flywheel.sources.checkpoint_cache import LedgerMemory
from flywheel.sources.queue import Ahead, Room
from flywheel.sources.studio.conversion import Told, convert
from flywheel.sources.studio.conversion_process import ConversionProcess
from flywheel.sources.studio.reader import StudioReader
from flywheel.sources.studio.scan import FOREVER_NS
from flywheel.sources.studio.step import Step
from flywheel.store.database import Store
from flywheel.trace import Cursor, Selection

T = TypeVar("T")

LONG_ROWS: Final = 4_000
"""A pass that has so many rows ahead of it goes on with a process that converts."""
AHEAD: Final = 6
"""Steps that are read ahead of what is stored."""
AHEAD_BYTES: Final = 12 * 1024 * 1024
"""Of their rows, or of their lines where these are made already: usual ones have two thirds of that."""
GATHER_SECONDS: Final = 1.0
"""How long another step is waited for that is to be stored together with those before it."""
TURN_STEPS: Final = 8
TOGETHER: Final = 6
"""Steps that are stored in one transaction: it changes most pages of the indexes once, however long it is."""
TOGETHER_BYTES: Final = 8 * 1024 * 1024
"""Of their lines: what is held in memory at once."""
ENOUGH: Final = 2
"""With so many steps to convert, the process is busy for as long as converting another one takes."""
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


class Shares:
    """What long histories have in common: a daemon may begin with fifty of them. They take turns, TURN_STEPS long,
    so that each gets on, and few have much in memory."""

    def __init__(self) -> None:
        self.room = Room(4 * AHEAD_BYTES)
        self.converters = BoundedSemaphore(2)
        """Processes: two keep up with the one thread that stores."""
        self.turns = asyncio.Semaphore(4)


@dataclass(slots=True)
class _Portion:
    """A step without its traces, what they are told as by and by, and how many bytes that are about."""

    step: Step
    told: Future[Told]
    size: int


class StudioConnector:
    """The reader of one database with its thread and, while it is needed, its converting process."""

    def __init__(
        self,
        path: Path,
        config: Config,
        store: Store,
        *,
        kind: str = "studio",
        shares: Shares | None = None,
        models: TrainedModels = ANY_MODEL,
    ) -> None:
        self.type = kind
        self.path = path
        self.progress = Progress()
        self.kinds: Counter[str] = Counter()
        self._store = store
        self._shares = shares or Shares()
        self.reader = StudioReader(path, config.ingest)
        agents = config.ingest.agents
        self.selection = Selection(frozenset(agents.include), frozenset(agents.exclude), models)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="studio")
        self._process: ConversionProcess | None = None
        self._is_long = False
        self._is_storing = False

    @property
    def schema(self) -> str:
        return self.reader.schema

    @property
    def longest_read_ms(self) -> float:
        return self.reader.longest_read_ms

    @property
    def converter(self) -> int | None:
        """The process that converts, while there is one."""
        return self._process.pid if self._process is not None else None

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass, batch by batch; each must be stored before the next is asked for."""
        memory = LedgerMemory(self._store, number, first=not cursor.rowid)
        self.progress = Progress()
        self._is_long = False
        steps = self.reader.read(cursor, memory, now=datetime.now(UTC), final=final)
        # Whoever leaves early leaves both: the inner one ends the process.
        async with contextlib.aclosing(self._batches(steps)) as batches:
            async for batch in batches:
                yield batch

    @property
    def due_at(self) -> float | None:
        """When a trace that is waited for is done if nothing more comes, seconds since 1970; None if none is."""
        return self.reader.due_ns / 1e9 if self.reader.due_ns < FOREVER_NS else None

    def rescan(self, number: int, *, whole: bool) -> Rescan:
        """Look for what was changed in place, in the newest rows or in all of them."""
        memory = LedgerMemory(self._store, number)
        steps = self.reader.sweep(memory, now=datetime.now(UTC), last=None if whole else RECENT_ROWS)
        return Rescan(self, steps, whole=whole)

    def forget(self) -> None:
        """What was handed out last was not stored."""
        self.reader.forget()

    async def close(self) -> None:
        """End the threads and the child; to be called once."""
        await self.in_thread(self._end_process)
        await self.in_thread(self.reader.close)
        self._thread.shutdown()

    async def _batches(self, steps: Generator[Step]) -> AsyncGenerator[Batch]:
        """Steps are read and converted ahead while batches are stored: a short queue between the three."""
        ahead: Ahead[_Portion] = Ahead(AHEAD, AHEAD_BYTES, self._shares.room)

        async def produce() -> None:
            try:
                # What is soon done waits for no long history.
                while (portion := await self.in_thread(lambda: self._next(steps))) is not None:
                    await ahead.put(portion, portion.size)
                    if self._is_long:
                        break
                while portion is not None:
                    async with self._shares.turns:
                        for _ in range(TURN_STEPS):
                            portion = await self.in_thread(lambda: self._next(steps))
                            if portion is None:
                                break
                            await ahead.put(portion, portion.size)
            finally:
                ahead.end()

        producer = asyncio.create_task(produce())
        try:
            more = True
            while more:
                some: list[Batch] = []
                size = 0
                while more and len(some) < TOGETHER and size < TOGETHER_BYTES:
                    try:
                        portion = await ahead.take(GATHER_SECONDS if some else None)
                    except TimeoutError:
                        break
                    if more := portion is not None:
                        some.append(self._batch(portion.step, await asyncio.wrap_future(portion.told)))
                        size += sum(len(entry.line) for entry in some[-1].entries)
                if some:
                    self._is_storing = True
                    yield joined(some)
                    self._is_storing = False
            await producer
        except BaseException:
            producer.cancel()
            if self._process is not None:
                # The reader's thread may be waiting for it.
                self._process.kill()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await producer
            ahead.clear()
            await self.in_thread(steps.close)
            await self.in_thread(self.reader.forget)
            raise
        finally:
            self._is_storing = False
            await self.in_thread(self._end_process)

    def _next(self, steps: Generator[Step]) -> _Portion | None:
        """The next step, converted or about to be; None at the end."""
        step = next(steps, None)
        if step is None:
            return None
        self.progress.read += step.rows
        if step.more and not self.progress.in_all:
            left = max(0, self.reader.rows_in_all() - step.cursor.rowid)
            self.progress.in_all = self.progress.read + left
            self._is_long = left >= LONG_ROWS
        if self._is_long and step.more and self._process is None and self._shares.converters.acquire(blocking=False):
            try:
                self._process = ConversionProcess()
            except BaseException:
                self._shares.converters.release()
                raise
        traces = [(trace.rows, trace.is_open) for trace in step.traces]
        if not traces or self._process is None or (self._process.waiting >= ENOUGH and not self._is_storing):
            done = convert(self.schema, traces, self.selection, str(self.path))
            told: Future[Told] = Future()
            told.set_result(done)
            size = sum(len(entry.line) for entry in done.entries)
        else:
            told = self._process.convert(self.schema, traces, self.selection, str(self.path))
            size = sum(len(row) for rows, _ in traces for row in rows.values())
        return _Portion(replace(step, traces=()), told, size)

    def _batch(self, step: Step, told: Told) -> Batch:
        self.kinds += told.kinds
        return Batch(
            cursor=step.cursor,
            entries=tuple(told.entries),
            dead=(*step.dead, *told.dead),
            marks=step.marks,
            open_traces=step.open_traces,
        )

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                process.close()
            finally:
                self._shares.converters.release()

    def convert(self, step: Step) -> Batch:
        """A step in the ledger's form."""
        traces = [(trace.rows, trace.is_open) for trace in step.traces]
        return self._batch(step, convert(self.schema, traces, self.selection, str(self.path)))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run something with the reader, which belongs to one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Rescan:
    """A look at rows that were read before, page by page, so that passes can go on in between."""

    def __init__(self, connector: StudioConnector, steps: Generator[Step], *, whole: bool) -> None:
        self._connector = connector
        self._steps = steps
        self._whole = whole
        self._progress = Progress()

    async def next(self) -> Batch | None:
        """What the next page brought; None at the end. It has no cursor: a pass may have moved that since."""
        return await self._connector.in_thread(self._next)

    async def close(self) -> None:
        await self._connector.in_thread(self._steps.close)

    def _next(self) -> Batch | None:
        step = next(self._steps, None)
        if step is None:
            return None
        if self._whole:
            if step.more and not self._progress.in_all:
                self._progress.in_all = self._connector.reader.rows_in_all()
            self._progress.read += step.rows
            self._connector.progress = self._progress
        return replace(self._connector.convert(step), cursor=None)
