"""Ingestion: reads every configured source, stores its replies in the ledger and appends new tasks to the task file.

`SourceIngestion` handles one source, `Ingestion` all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from flywheel.batch import Batch
from flywheel.config import Config, IngestSettings, JsonlSource, OtlpSource, SourceSettings, StudioSource
from flywheel.errors import FlywheelError, SourceError, StoreError
from flywheel.files import PRIVATE
from flywheel.filtering.chain import redactor_of
from flywheel.filtering.pii import Redactor
from flywheel.sources import jsonl_connector
from flywheel.sources.jsonl.file import files_of
from flywheel.sources.jsonl_connector import JsonlConnector
from flywheel.sources.otlp.inbox import inbox_path
from flywheel.sources.redaction import redacted
from flywheel.sources.studio_connector import Progress, SharedLimits, StudioConnector
from flywheel.store import ledger
from flywheel.store.agentjet_file import AgentJetTasks
from flywheel.store.database import Store
from flywheel.store.ledger import Recorded, SourceCounts
from flywheel.store.task_file import TaskFile
from flywheel.store.transitions import utcnow
from flywheel.trace import Cursor

AT_ONCE = 8
"""Sources that are read at the same time by a single pass over all of them, and files of lines at any time."""
FOLLOW_SECONDS = 1.0
"""How often the task file follows while a pass goes on: at the end of a long history little is left to write."""
FULL_SCAN_SHARE: Final = 0.2
"""The share of the time that a look back at a whole source takes while it goes on."""


class Connector(Protocol):
    """What brings one source's batches."""

    path: Path
    progress: Progress

    @property
    def type(self) -> str: ...
    @property
    def schema(self) -> str: ...
    @property
    def longest_read_ms(self) -> float: ...
    @property
    def due_at(self) -> float | None: ...
    def read(self, number: int, cursor: Cursor, *, final: bool) -> AsyncGenerator[Batch]: ...
    def forget(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What one pass over one source found: `counts` is all that the ledger holds, `new` the pass's tasks."""

    path: Path
    source_id: int
    schema: str
    counts: SourceCounts
    new: int
    warnings: tuple[str, ...] = ()
    error: FlywheelError | None = None

    def as_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {
            "path": str(self.path),
            "schema": self.schema,
            "replies": self.counts.replies,
            "tasks": self.counts.tasks,
            "skipped": dict(self.counts.skipped),
            "dead": self.counts.dead,
            "new": self.new,
            "warnings": list(self.warnings),
        }
        if self.error is not None:
            report["error"] = str(self.error)
        return report


class SourceIngestion:
    """One source. Passes and looks back take turns: what they store about a trace must come in order."""

    def __init__(
        self,
        store: Store,
        connector: Connector,
        settings: IngestSettings,
        *,
        redact: Redactor | None = None,
        agentjet_tasks: AgentJetTasks | None = None,
    ) -> None:
        self.connector = connector
        self._agentjet_tasks = agentjet_tasks
        self._redact = redact
        self._store = store
        self._settings = settings
        self._turn = asyncio.Lock()
        self._number: int | None = None
        self._noted: dict[str, Any] = {}
        self._warnings: tuple[str, ...] = ()
        self._recheck_at: float | None = None
        self._swept_at: datetime | None = None
        self._counts: SourceCounts | None = None
        self._has_looked = False

    @property
    def path(self) -> Path:
        return self.connector.path

    async def read(self, *, final: bool = False, stop: asyncio.Event | None = None) -> SourceReport:
        """One pass, to the end or to `stop`. What goes wrong is in the report.

        Nothing is lost then: the next pass begins before it.
        """
        done = Recorded()
        error: FlywheelError | None = None
        moved = False
        async with self._turn:
            try:
                number = await self._source()
                cursor = await self._store.read(ledger.cursor_of, number)
                async with aclosing(self.connector.read(number, cursor, final=final)) as batches:
                    while (batch := await _next(batches, stop)) is not None:
                        if _says_something(batch, cursor):
                            await self._record(batch, done)
                            moved = moved or (batch.cursor is not None and batch.cursor.rowid != cursor.rowid)
                            cursor = batch.cursor or cursor
            except (SourceError, StoreError) as failure:
                self.connector.forget()
                error = failure
            if moved or not self._has_looked:
                # What is new may come with changes in place; so may what happened while nobody looked.
                self._recheck_at = time.time() + (0 if final else self._settings.settle_seconds)
                self._has_looked = True
            return await self._report(done, cursor if error is None else None, error)

    async def rescan(self, *, whole: bool = False, throttled: bool = True) -> Recorded:
        """Look for what was changed in place: in the newest rows, or in all. Raises FlywheelError."""
        self._recheck_at = None
        done = Recorded()
        if not isinstance(self.connector, StudioConnector):
            return done
        look = self.connector.rescan(await self._source(), whole=whole)
        while True:
            began = time.monotonic()
            async with self._turn:
                try:
                    batch = await anext(look, None)
                    if batch is None:
                        break
                    if _says_something(batch, None):
                        await self._record(batch, done)
                except BaseException:
                    self.connector.forget()
                    await look.aclose()
                    raise
            if whole and throttled:
                await asyncio.sleep((time.monotonic() - began) * (1 / FULL_SCAN_SHARE - 1))
        if whole:
            self._swept_at = await self._swept()
        return done

    @property
    def due_at(self) -> float | None:
        """When this source should be looked at although nothing happens, seconds since 1970."""
        return min((at for at in (self.connector.due_at, self._recheck_at) if at is not None), default=None)

    @property
    def is_rescan_due(self) -> bool:
        return self._recheck_at is not None and self._recheck_at <= time.time()

    async def is_full_scan_due(self) -> bool:
        """Whether the whole source has not been compared with the ledger for long enough."""
        if not isinstance(self.connector, StudioConnector):
            return False
        if self._swept_at is None:
            last = await self._store.read(ledger.swept_at, await self._source())
            # What was just read for the first time needs no second look.
            self._swept_at = datetime.fromisoformat(last) if last else await self._swept()
        return (datetime.now(UTC) - self._swept_at).total_seconds() >= self._settings.sweep_seconds

    async def _swept(self) -> datetime:
        now = datetime.now(UTC)
        await self._store.write(ledger.note_source, await self._source(), swept_at=now.isoformat())
        return now

    async def close(self) -> None:
        await self.connector.close()

    async def _source(self) -> int:
        if self._number is None:
            self._number = await self._store.write(ledger.source_id, str(self.path), self.connector.type)
        return self._number

    async def _record(self, batch: Batch, done: Recorded) -> None:
        if self._agentjet_tasks is not None:
            # Before personal data leaves it: the file was written with what was there.
            batch = await asyncio.to_thread(self._agentjet_tasks.skipped, batch)
        if self._redact is not None:
            batch = await asyncio.to_thread(redacted, batch, self._redact)
        recorded = await self._store.write(
            jsonl_connector.record if self.connector.type == "jsonl" else ledger.record_batch,
            await self._source(),
            batch,
            train_ratio=self._settings.train_ratio,
            split_seed=self._settings.split_seed,
        )
        done.add(recorded)
        self._counts = None if recorded.retold or self._counts is None else recorded.onto(self._counts)

    async def _report(self, done: Recorded, cursor: Cursor | None, error: FlywheelError | None) -> SourceReport:
        if self._number is None:
            # The state itself cannot be used.
            return SourceReport(self.path, 0, "", SourceCounts(0, 0, {}, 0), 0, (), error)
        try:
            if self._counts is None:
                # Once: counting all replies takes the longer, the more there are.
                self._counts = await self._store.read(ledger.counts_of, self._number)
            counts = self._counts
            if cursor is not None:
                self._warnings = self._warned(counts, cursor, tuple(dict.fromkeys(done.warnings)))
            noted = {
                "schema": self.connector.schema,
                "longest_read_ms": round(self.connector.longest_read_ms, 1),
                "condition": _condition(error),
                "error": str(error or ""),
                "warning": "; ".join(self._warnings),
            }
            if noted != self._noted:
                await self._store.write(ledger.note_source, self._number, read_at=utcnow(), **noted)
                self._noted = noted
        except StoreError as failure:
            return SourceReport(self.path, self._number, "", SourceCounts(0, 0, {}, 0), 0, (), error or failure)
        return SourceReport(
            self.path, self._number, self.connector.schema, counts, done.new_tasks, self._warnings, error
        )

    def _warned(self, counts: SourceCounts, cursor: Cursor, told: tuple[str, ...]) -> tuple[str, ...]:
        """A database without agents is told about for as long as it has none, never passed over in silence."""
        if not isinstance(self.connector, StudioConnector) or counts.replies or not cursor.rowid:
            return told
        if not self.connector.kinds:
            return self._warnings
        found = ", ".join(f"{count} {kind}" for kind, count in self.connector.kinds.most_common())
        return (
            f"{self.path} holds {self.connector.kinds.total()} spans and not one of them is an agent's ({found}): "
            "only agents' replies become tasks. Trace the agent itself, with AgentScope's own tracing.",
        )


async def _next(batches: AsyncGenerator[Batch], stop: asyncio.Event | None) -> Batch | None:
    """The next batch; None at the end, or when `stop` comes first: many long histories wait for each other."""
    if stop is None:
        return await anext(batches, None)
    if stop.is_set():
        return None
    coming = asyncio.ensure_future(_of(batches))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((coming, stopped), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        for task in (coming, stopped):
            task.cancel()
        await asyncio.gather(coming, stopped, return_exceptions=True)


async def _of(batches: AsyncGenerator[Batch]) -> Batch | None:
    return await anext(batches, None)


def _condition(error: FlywheelError | None) -> str:
    """One or two words for what `error` tells in full."""
    match error:
        case None:
            return "ok"
        case SourceError():
            return error.condition
        case _:
            return "not stored"


def _says_something(batch: Batch, cursor: Cursor | None) -> bool:
    return bool(batch.entries or batch.dead or batch.checkpoints or batch.warnings or batch.cursor != cursor)


class Ingestion:
    """Reads all sources of a configuration into the store."""

    def __init__(self, store: Store, config: Config, *, export_tasks: bool = True) -> None:
        self._store = store
        self._config = config
        self._export = export_tasks
        # Another program, of another user perhaps, reads it where it was told to be.
        self._task_file = TaskFile(config.task_file, mode=PRIVATE if config.ingest.output is None else 0o666)
        self._agentjet_tasks = AgentJetTasks(config.task_file)
        self._redact = redactor_of(config.filter.chain) if config.filter.chain else None
        self._shares = SharedLimits()
        self._line_threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="lines")
        self._sources: dict[Path, SourceIngestion] = {}

    def sources(self) -> list[SourceIngestion]:
        """The sources there are now: the files of a directory come and go. The same one named twice is one."""
        for source in self._config.sources:
            match source:
                case StudioSource():
                    self._add(source.path.absolute(), "studio", source)
                case OtlpSource():
                    inbox = inbox_path(self._config.state_dir, source.listen)
                    if inbox.exists():  # the daemon makes it when it begins to receive
                        self._add(inbox, "otlp", source)
                case JsonlSource():
                    for file in _files(source.path.absolute()):
                        self._add(file, "jsonl", source)
        return list(self._sources.values())

    def _add(self, path: Path, kind: str, source: SourceSettings) -> None:
        if path not in self._sources:
            models = self._config.models_of(source)
            connector = (
                JsonlConnector(path, self._line_threads, models)
                if kind == "jsonl"
                else StudioConnector(path, self._config, self._store, kind=kind, shares=self._shares, models=models)
            )
            self._sources[path] = SourceIngestion(
                self._store, connector, self._config.ingest, redact=self._redact, agentjet_tasks=self._agentjet_tasks
            )

    async def run(
        self, *, final: bool = False, sweep: bool = False, stop: asyncio.Event | None = None
    ) -> list[SourceReport]:
        """One pass. A source that fails reports its error and leaves the others alone.

        `final` closes replies at once instead of waiting for their traces to settle; `sweep` compares whole sources
        with the ledger instead of their newest rows. After `stop` passes end at their next batch.
        """
        seats = asyncio.Semaphore(AT_ONCE)

        async def one(source: SourceIngestion) -> SourceReport:
            async with seats:
                report = await source.read(final=final, stop=stop)
                is_stopped = stop is not None and stop.is_set()
                if report.error is None and not is_stopped and (source.is_rescan_due or sweep):
                    found = await source.rescan(whole=sweep, throttled=False)
                    # Traces that were found to be open are waited for by a pass.
                    again = await source.read(final=final, stop=stop)
                    warnings = tuple(dict.fromkeys((*report.warnings, *again.warnings)))
                    new = report.new + found.new_tasks + again.new
                    report = replace(again, new=new, warnings=warnings)
                return report

        done = asyncio.Event()
        following = asyncio.create_task(self._follow(done))
        try:
            reports = await asyncio.gather(*(one(source) for source in self.sources()))
        finally:
            done.set()
            await following
        await self.export()
        return list(reports)

    async def export(self) -> None:
        """Append what is new to the task file."""
        if self._export:
            await self._task_file.follow(self._store)

    async def _follow(self, done: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), FOLLOW_SECONDS)
                return
            with contextlib.suppress(StoreError):
                # What goes wrong is told at the end, if it still does then.
                await self.export()

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()
        self._line_threads.shutdown()


def _files(path: Path) -> list[Path]:
    """The files of a source of lines; its own path if they cannot be listed, for reading it tells why."""
    try:
        return files_of(path)
    except SourceError:
        return [path]
