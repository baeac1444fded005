"""Connects one Studio database with the ledger: complete traces are found, extracted and handed on to be stored.

Scanning has a thread of its own, so a slow disk delays no other source. Of a long history, worker processes extract
the traces while the next rows are scanned and the last replies stored. Results are stored in the order of the scan,
each with the cursor behind its rows, so a crash leaves a whole prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from flywheel.config.file import Config
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.task import Batch, joined
from flywheel.records.trace import Checkpoint, Cursor, ReplySelection
from flywheel.serving.calls.call_log import CallLog
from flywheel.sources.call_puller import CallPuller
from flywheel.sources.otlp.inbox import private_calls
from flywheel.sources.studio.database import fault
from flywheel.sources.studio.extraction import Extraction, TraceExtractor
from flywheel.sources.studio.reader import Checkpoints, Step, StudioReader
from flywheel.sources.studio.trace_completion import FOREVER_NS, CompleteTrace
from flywheel.sources.studio.workers import ExtractionRequest, Workers
from flywheel.store.checkpoints import checkpoints_of
from flywheel.store.kernel.database import Store
from flywheel.system.clock import steady
from flywheel.system.process_folder import copies_in

T = TypeVar("T")

LONG_ROWS: Final = 4_000
"""A pass with this many rows ahead of it uses worker processes."""
STEPS_AHEAD: Final = 16
"""Steps of a long history that are being extracted or stored. While eight are stored, eight are being extracted."""
JOINED_BATCHES: Final = 8
"""Batches stored in one transaction. A transaction rewrites most index pages once, whatever its length."""
JOINED_BYTES: Final = 8 * 1024 * 1024
"""Bytes of the lines in one transaction, which are held in memory together."""
JOIN_SECONDS: Final = 1.0
"""How long to wait for another batch for the same transaction."""
RECENT_ROWS = 5_000
"""How many of the newest rows a recent re-scan reads after the source has changed."""
_scans: Final = itertools.count()


@dataclass(slots=True)
class Progress:
    """Rows read in this pass, and about how many it has to read in all (0: unknown, or not many)."""

    read: int = 0
    in_all: int = 0


class _RowsMovedError(Exception):
    """A row is not where the scan found it: rows were deleted or renumbered meanwhile."""


class _Extracted(NamedTuple):
    """What a step, or its first traces, brought. `checkpoints` are those of the traces, `missing` the calls of those
    that have to wait; `rest` are the traces that did not fit."""

    batch: Batch
    checkpoints: tuple[Checkpoint, ...]
    missing: Mapping[str, Sequence[str]]
    rest: Step | None


class _UnderWay:
    """What a pass is extracting, in the order of the scan."""

    def __init__(self) -> None:
        self.tasks: deque[asyncio.Task[_Extracted]] = deque()
        self.is_long = False
        self.scan = next(_scans)
        self.sent: list[Future[Extraction]] = []
        self.is_left = threading.Event()


class StudioConnector:
    """Reads one database in a thread of its own and, while that is needed, extracts in worker processes."""

    def __init__(
        self,
        path: Path,
        config: Config,
        store: Store,
        *,
        kind: str = "studio",
        workers: Workers | None = None,
        models: TrainedModels = ANY_MODEL,
        calls: CallPuller | None = None,
        call_log: CallLog | None = None,
    ) -> None:
        """Recorded calls are read from the copy of `calls`, which is pulled for them; or from `call_log` as it is."""
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
        self._call_log = calls.call_log_copy if calls is not None else call_log
        agents = config.ingest.agents
        self.selection = ReplySelection(
            frozenset(agents.include), frozenset(agents.exclude), models, config.privacy.exclude.names
        )
        self._store = store
        self._workers = workers or Workers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="studio")
        self._extractor: TraceExtractor | None = None
        self._longest_read_ms = 0.0
        self._erased_to = 0

    @property
    def schema(self) -> str:
        """The name of the generation that was last read; empty before."""
        return self.reader.schema.name if self.reader.schema else ""

    @property
    def longest_read_ms(self) -> float:
        return max(self._longest_read_ms, self.reader.database.longest_read_ms)

    @property
    def due_at(self) -> float | None:
        """When an open trace can be closed if nothing more arrives, by the steady clock; None if none is open."""
        return self.reader.due_ns / 1e9 if self.reader.due_ns < FOREVER_NS else None

    async def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """One pass; each batch must be stored before the next is asked for."""
        if self._calls is not None:
            self._calls.begin()
            await self._erase_private_calls(self._calls)
        moved_at: Cursor | None = None
        while True:
            try:
                async with aclosing(self._pass(number, cursor, final=final)) as batches:
                    async for batch in batches:
                        yield batch
                        cursor = batch.cursor or cursor
                return
            except _RowsMovedError as error:
                if cursor == moved_at:
                    hint = (
                        "It is read again at the next pass. If it repeats, run `PRAGMA integrity_check` on the file."
                    )
                    raise fault(self.path, "its rows move while they are read", hint, retry=True) from error
                moved_at = cursor

    async def _pass(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]:
        """Find and extract what is behind the cursor. Raises FlywheelError, and _RowsMovedError."""
        self.progress = Progress()
        now = datetime.fromtimestamp(steady(), UTC)
        steps = self.reader.read(cursor, self._checkpoints(number), now=now, final=final)
        under_way = _UnderWay()
        failure: Exception | None = None
        more = True
        async with contextlib.AsyncExitStack() as turn:
            try:
                while more or under_way.tasks:
                    while more and len(under_way.tasks) < (STEPS_AHEAD if under_way.is_long else JOINED_BATCHES):
                        step = None
                        try:
                            step = await self.in_thread(lambda: next(steps, None))
                        except Exception as error:
                            failure = error  # raised once what was read before is stored
                        if step is not None:
                            if await self.in_thread(partial(self._begins_long, step)):
                                under_way.is_long = True
                                await turn.enter_async_context(self._workers.in_use())
                            under_way.tasks.append(asyncio.create_task(self._extracted(step, under_way)))
                        more = step is not None and step.more
                    if group := await self._next_group(under_way):
                        yield await self._without_private_calls(joined(group) if len(group) > 1 else group[0])
                if failure is not None:
                    raise failure
                await self.in_thread(lambda: next(steps, None))
            except BaseException:
                under_way.is_left.set()
                for task in under_way.tasks:
                    task.cancel()
                await asyncio.gather(*under_way.tasks, return_exceptions=True)
                await self.in_thread(lambda: futures.wait([sent for sent in under_way.sent if sent.running()]))
                await self.in_thread(steps.close)
                await self.in_thread(self.reader.forget)
                raise

    async def rescan(self, number: int, *, whole: bool) -> AsyncGenerator[Batch]:
        """Find what changed in place in the newest rows or in all of them. Passes may run between two batches."""
        last = None if whole else RECENT_ROWS
        steps = self.reader.rescan(self._checkpoints(number), now=datetime.fromtimestamp(steady(), UTC), last=last)
        progress = Progress()
        under_way = _UnderWay()
        try:
            while (step := await self.in_thread(lambda: next(steps, None))) is not None:
                if whole:
                    if step.more and not progress.in_all:
                        progress.in_all = await self.in_thread(self.reader.database.last_rowid)
                    progress.read += step.rows
                    self.progress = progress
                rest: Step | None = step
                while rest is not None:
                    try:
                        batch, *_, rest = await self._extracted(rest, under_way)
                    except _RowsMovedError:
                        break  # the rows are gone, or the next pass starts over
                    yield await self._without_private_calls(batch)
        finally:
            await self.in_thread(steps.close)

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
        """End the thread. To be called once."""
        await self.in_thread(self.reader.close)
        self._thread.shutdown()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run something in the reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _begins_long(self, step: Step) -> bool:
        """Note the progress; whether this is the first step, and many rows follow."""
        self.progress.read += step.rows
        if step.more and step.cursor is not None and not self.progress.in_all:
            left = max(0, self.reader.database.last_rowid() - step.cursor.rowid)
            self.progress.in_all = self.progress.read + left
            return left >= LONG_ROWS
        return False

    async def _extracted(self, step: Step, under_way: _UnderWay) -> _Extracted:
        """What the traces of a step bring, or as many of them as fit. Raises FlywheelError, and _RowsMovedError."""
        done, traces = Extraction(Batch(None)), step.traces
        if self._calls is not None and not self._calls.has_pulled:
            traces = tuple(replace(trace, may_wait=True) for trace in traces)
        if traces and under_way.is_long:
            done = await self._extracted_by_worker(traces, under_way)
        elif traces:
            done = await self.in_thread(partial(self._extract, traces))
        if traces and not done.count:
            raise _RowsMovedError
        self._longest_read_ms = max(self._longest_read_ms, done.longest_read_ms)
        traces = step.traces[done.count :]
        missing = done.missing
        if missing and self._calls is not None:
            # The first question for a call pulls all servers.
            calls = {call for calls in missing.values() for call in calls}
            there = await self.in_thread(partial(self._calls.sizes, calls))
            again = [
                replace(trace, may_wait=False)
                for trace in step.traces[: done.count]
                if (own := missing.get(trace.trace_id)) and (not trace.may_wait or there.keys() >= set(own))
            ]
            traces = (*again, *traces)
            found = {trace.trace_id for trace in again}
            missing = {trace: calls for trace, calls in missing.items() if trace not in found}
        batch = replace(
            done.batch,
            dead=(*step.dead, *done.batch.dead),
            checkpoints=(*step.checkpoints, *done.batch.checkpoints),
            more=True,
        )
        if traces:
            rest = replace(step, traces=traces, dead=(), checkpoints=())
            return _Extracted(batch, done.batch.checkpoints, missing, rest)
        open_traces = step.open_traces + len(missing)
        batch = replace(batch, cursor=step.cursor, open_traces=open_traces, rows=step.rows, more=step.more)
        return _Extracted(batch, done.batch.checkpoints, missing, None)

    def _extract(self, traces: Sequence[CompleteTrace]) -> Extraction:
        """Extract traces in the reader's thread."""
        schema = self.reader.schema
        assert schema is not None
        if self._extractor is None or self._extractor.schema is not schema:
            self._extractor = TraceExtractor(
                self.reader.database, schema, self.selection, str(self.path), self._call_log
            )
        return self._extractor.extract(traces)

    async def _extracted_by_worker(self, traces: tuple[CompleteTrace, ...], under_way: _UnderWay) -> Extraction:
        calls = str(self._call_log.path) if self._call_log is not None else ""
        request = ExtractionRequest(
            str(self.path), str(self.reader.database.file), under_way.scan, self.schema, self.selection, calls, traces
        )
        sent = self._workers.extract(request, under_way.is_left)
        under_way.sent = [*(each for each in under_way.sent if not each.done()), sent]
        return await asyncio.wrap_future(sent)

    async def _next_group(self, under_way: _UnderWay) -> list[Batch]:
        """The next batches, to be stored in one transaction; none at the end."""
        group: list[Batch] = []
        size = 0
        while under_way.tasks and len(group) < JOINED_BATCHES and size < JOINED_BYTES:
            task = under_way.tasks[0]
            await asyncio.wait((task,), timeout=JOIN_SECONDS if group else None)
            if not task.done() or (group and task.exception() is not None):
                break
            under_way.tasks.popleft()
            batch, checkpoints, missing, rest = task.result()
            await self.in_thread(partial(self.reader.note, checkpoints, missing))
            if rest is not None:
                under_way.tasks.appendleft(asyncio.create_task(self._extracted(rest, under_way)))
            self.kinds.update(batch.kinds)
            self.left_out |= batch.left_out
            group.append(batch)
            size += sum(len(entry.line) for entry in batch.entries)
        return group

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
