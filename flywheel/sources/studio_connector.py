"""Connects one Studio database with the ledger: rows are read, replies extracted and batches stored concurrently.

Reading has a thread of its own, so a slow disk delays no other source. Of a long history, replies are extracted in a
child process while the next rows are read and the last batches stored. Batches are stored in the order in which they
were read, so a crash leaves a whole prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import BoundedSemaphore
from typing import Final, Generic, TypeVar

from msgspec.structs import replace

from flywheel.config import Config
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.task import Batch, joined
from flywheel.records.trace import Cursor, ReplySelection
from flywheel.sources.call_puller import CallPuller
from flywheel.sources.otlp.inbox import private_calls
from flywheel.sources.spans.extraction_process import ExtractionProcess
from flywheel.sources.spans.replies import extract
from flywheel.sources.studio.reader import Checkpoints, StudioReader
from flywheel.sources.studio.trace_completion import FOREVER_NS
from flywheel.store.checkpoints import checkpoints_of
from flywheel.store.kernel.database import Store
from flywheel.system.clock import steady
from flywheel.system.process_folder import copies_in

T = TypeVar("T")

LONG_ROWS: Final = 4_000
"""A pass with this many rows ahead of it uses a child process for extraction."""
QUEUED_BATCHES: Final = 6
"""Batches read ahead of the one being stored."""
QUEUED_BYTES: Final = 12 * 1024 * 1024
"""Bytes of their rows, or of their lines if these are extracted already. Usual ones have two thirds of that."""
JOINED_BATCHES: Final = 6
"""Batches stored in one transaction. A transaction rewrites most index pages once, whatever its length."""
JOINED_BYTES: Final = 8 * 1024 * 1024
"""Bytes of the lines in one transaction, which are held in memory together."""
JOIN_SECONDS: Final = 1.0
"""How long to wait for another batch for the same transaction."""
SENT_BATCHES: Final = 4
"""Batches at the child process or on their way. While they are so many, the reader's thread extracts the next one
itself. That holds the interpreter, and what is on its way waits: with two, the child ran out of work."""
TURN_BATCHES: Final = 8
RECENT_ROWS = 5_000
"""How many of the newest rows a recent re-scan reads after the source has changed."""


@dataclass(slots=True)
class Progress:
    """Rows read in this pass, and about how many it has to read in all (0: unknown, or not many)."""

    read: int = 0
    in_all: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Rows per second since the pass began."""
        return self.read / max(time.monotonic() - self.began, 1e-3)

    @property
    def left(self) -> float | None:
        """Seconds that the rest takes at this rate; None if unknown."""
        return max(self.in_all - self.read, 0) / self.rate if self.in_all and self.read else None


@dataclass(slots=True)
class ByteBudget:
    """Bytes that several queues share."""

    max_bytes: int
    used: int = 0


class BoundedQueue(Generic[T]):
    """A queue of one producer and one consumer: at most `max_items`, `max_bytes` and the rest of the `shared` budget.

    One item always fits, whatever its size and however little of the budget the other queues have left.
    """

    def __init__(self, max_items: int, max_bytes: int, shared: ByteBudget) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._shared = shared
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._has_ended = False
        # Producer and consumer never wait at the same time: one needs a full queue, the other an empty one.
        self._changed = asyncio.Event()

    async def put(self, item: T, size: int) -> None:
        """Add an item of `size` bytes; waits while it does not fit."""
        while self._items and (
            len(self._items) >= self._max_items
            or self._bytes + size > self._max_bytes
            or self._shared.used + size > self._shared.max_bytes
        ):
            self._changed.clear()
            await self._changed.wait()
        self._items.append((item, size))
        self._bytes += size
        self._shared.used += size
        self._changed.set()

    def end(self) -> None:
        """No more items will follow."""
        self._has_ended = True
        self._changed.set()

    async def take(self, seconds: float | None = None) -> T | None:
        """The next item; None at the end. Raises TimeoutError if there is none within `seconds`."""
        async with asyncio.timeout(seconds):
            while not self._items:
                if self._has_ended:
                    return None
                self._changed.clear()
                await self._changed.wait()
        item, size = self._items.popleft()
        self._bytes -= size
        self._shared.used -= size
        self._changed.set()
        return item

    def clear(self) -> None:
        """Discard all items."""
        self._items.clear()
        self._shared.used -= self._bytes
        self._bytes = 0
        self._changed.set()


@dataclass(slots=True)
class SharedLimits:
    """Limits for all long histories together, as a daemon may begin with fifty of them. They take turns of
    TURN_BATCHES batches, so that each makes progress and few hold much memory."""

    budget: ByteBudget = field(default_factory=lambda: ByteBudget(4 * QUEUED_BYTES))
    processes: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(2))
    """Child processes. Two keep up with the one thread that stores."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))


class StudioConnector:
    """Reads one database in a thread of its own and, while that is needed, extracts in a child process."""

    def __init__(
        self,
        path: Path,
        config: Config,
        store: Store,
        *,
        kind: str = "studio",
        shares: SharedLimits | None = None,
        models: TrainedModels = ANY_MODEL,
        calls: CallPuller | None = None,
    ) -> None:
        self.type = kind
        self.path = path
        self.progress = Progress()
        self.kinds: Counter[str] = Counter()
        """Spans by kind of the traces without an agent."""
        self.left_out: dict[str, int] = {}
        """How many spans fit several runs with the id of their trace, by trace."""
        copies, sizes = copies_in(config.state_dir), calls.sizes if calls is not None else None
        self.reader = StudioReader(path, config.ingest, copies=copies, call_sizes=sizes)
        self._calls = calls
        agents = config.ingest.agents
        self.selection = ReplySelection(
            frozenset(agents.include), frozenset(agents.exclude), models, config.privacy.exclude.names
        )
        self._store = store
        self._shares = shares or SharedLimits()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="studio")
        self.process: ExtractionProcess | None = None
        """The child process, while there is one."""
        self._sent: list[Future[Batch]] = []
        self._is_long = False
        self._erased_to = 0

    @property
    def schema(self) -> str:
        """The name of the generation that was last read; empty before."""
        return self.reader.schema.name if self.reader.schema else ""

    @property
    def longest_read_ms(self) -> float:
        return self.reader.database.longest_read_ms

    @property
    def due_at(self) -> float | None:
        """When an open trace can be closed if nothing more arrives, by the steady clock; None if none is open."""
        return self.reader.due_ns / 1e9 if self.reader.due_ns < FOREVER_NS else None

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass; each batch must be stored before the next is asked for."""
        self.progress = Progress()
        self._is_long = False
        if self._calls is not None:
            self._calls.begin()
            await self._erase_private_calls(self._calls)
        batches = self.reader.read(
            cursor, self._checkpoints(number), now=datetime.fromtimestamp(steady(), UTC), final=final
        )
        queue: BoundedQueue[Future[Batch]] = BoundedQueue(QUEUED_BATCHES, QUEUED_BYTES, self._shares.budget)
        producer = asyncio.create_task(self._produce(batches, queue))
        try:
            while group := await self._next_group(queue):
                yield await self._without_private_calls(joined(group) if len(group) > 1 else group[0])
            await producer
        except BaseException:
            producer.cancel()
            if self.process is not None:
                # The reader's thread may be waiting for it.
                self.process.kill()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await producer
            queue.clear()
            await self.in_thread(batches.close)
            await self.in_thread(self.reader.forget)
            raise
        finally:
            if self.process is not None:
                await self.in_thread(self._end_process)

    async def rescan(self, number: int, *, whole: bool) -> AsyncGenerator[Batch]:
        """Find what changed in place in the newest rows or in all of them. Passes may run between two batches."""
        last = None if whole else RECENT_ROWS
        batches = self.reader.rescan(self._checkpoints(number), now=datetime.fromtimestamp(steady(), UTC), last=last)
        progress = Progress()

        def next_batch() -> Batch | None:
            batch = self._joined(next(batches, None))
            if batch is None:
                return None
            if whole:
                if batch.more and not progress.in_all:
                    progress.in_all = self.reader.database.last_rowid()
                progress.read += batch.rows
                self.progress = progress
            return extract(batch, self.schema, self.selection, str(self.path)) if batch.traces else batch

        try:
            while (batch := await self.in_thread(next_batch)) is not None:
                yield await self._without_private_calls(batch)
        finally:
            await self.in_thread(batches.close)

    def _checkpoints(self, source: int) -> Checkpoints:
        """The checkpoints of a source in the ledger, for the reader's thread."""
        loop = asyncio.get_running_loop()
        return lambda trace_ids: asyncio.run_coroutine_threadsafe(
            self._store.read(checkpoints_of, source, trace_ids), loop
        ).result()

    def forget(self) -> None:
        """Discard uncommitted state; the next read resumes from the stored cursor."""
        self.reader.forget()

    async def close(self) -> None:
        """End the thread and the child process. To be called once."""
        await self.in_thread(self.reader.close)
        if self.process is not None:
            await self.in_thread(self._end_process)
        self._thread.shutdown()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run something in the reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _produce(self, batches: Generator[Batch], queue: BoundedQueue[Future[Batch]]) -> None:
        """Fill the queue. Short passes do not wait for a turn of the long histories."""
        try:
            turn = 0
            async with contextlib.AsyncExitStack() as turns:
                while (item := await self.in_thread(lambda: self._next(batches))) is not None:
                    await queue.put(*item)
                    if self._is_long:
                        if turn % TURN_BATCHES == 0:
                            await turns.aclose()
                            await turns.enter_async_context(self._shares.turns)
                        turn += 1
        finally:
            queue.end()

    def _next(self, batches: Generator[Batch]) -> tuple[Future[Batch], int] | None:
        """The next batch, extracted or about to be, and its bytes; None at the end."""
        batch = self._joined(next(batches, None))
        if batch is None:
            return None
        self.progress.read += batch.rows
        if batch.more and not self.progress.in_all and batch.cursor is not None:
            left = max(0, self.reader.database.last_rowid() - batch.cursor.rowid)
            self.progress.in_all = self.progress.read + left
            self._is_long = left >= LONG_ROWS
        if self._is_long and batch.more and self.process is None and self._shares.processes.acquire(blocking=False):
            try:
                self.process = ExtractionProcess()
            except BaseException:
                self._shares.processes.release()
                raise
        self._sent = [sent for sent in self._sent if not sent.done()]
        if batch.traces and self.process is not None and len(self._sent) < SENT_BATCHES:
            self._sent.append(self.process.extract(batch, self.schema, self.selection, str(self.path)))
            return self._sent[-1], sum(len(row) for rows, _ in batch.traces for row in rows.values())
        done: Future[Batch] = Future()
        if batch.traces:
            batch = extract(batch, self.schema, self.selection, str(self.path))
        done.set_result(batch)
        return done, sum(len(entry.line) for entry in batch.entries)

    def _joined(self, batch: Batch | None) -> Batch | None:
        """A batch with the recorded calls that its traces name."""
        if batch is None or not batch.call_references or self._calls is None:
            return batch
        return replace(batch, calls=self._calls.calls_of(batch.call_references))

    async def _erase_private_calls(self, calls: CallPuller) -> None:
        """Erase the recorded calls that private traces name which the receiver did not store."""
        if self.type == "otlp" and (found := await self.in_thread(lambda: private_calls(self.path, self._erased_to))):
            await calls.erase_new([request_id for _, request_id in found])
            self._erased_to = found[-1][0]

    async def _without_private_calls(self, batch: Batch) -> Batch:
        """The batch, when the recorded calls that private traces name are erased: after a crash, it is read again."""
        if batch.private_calls and self._calls is not None:
            await self._calls.erase_new(batch.private_calls)
        return replace(batch, private_calls=())

    async def _next_group(self, queue: BoundedQueue[Future[Batch]]) -> list[Batch]:
        """The next batches, to be stored in one transaction; none at the end."""
        group: list[Batch] = []
        size = 0
        while len(group) < JOINED_BATCHES and size < JOINED_BYTES:
            try:
                item = await queue.take(JOIN_SECONDS if group else None)
            except TimeoutError:
                break
            if item is None:
                break
            batch = await asyncio.wrap_future(item)
            self.kinds.update(batch.kinds)
            self.left_out |= batch.left_out
            group.append(batch)
            size += sum(len(entry.line) for entry in batch.entries)
        return group

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            try:
                process.close()
            finally:
                self._shares.processes.release()
