"""Ingestion: reads every configured source, stores its replies in the ledger and appends new tasks to the task file.

`SourceIngestion` handles one source, `Ingestion` all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Collection, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson

from flywheel.config.file import DATA_SETS, Config
from flywheel.config.ingest import CallsSource, IngestSettings, JsonlSource, OtlpSource, SourceSettings
from flywheel.errors import CallLogError, FlywheelError, SourceError, StoreError
from flywheel.judge.filters.chain import redactor_of
from flywheel.judge.filters.pii import Redactor
from flywheel.records import skipping
from flywheel.records.similarity import beginning_of
from flywheel.records.task import Batch, Entry, line_bytes, opened
from flywheel.records.trace import Cursor, DeadRow
from flywheel.sources import calls_connector, jsonl_connector
from flywheel.sources.call_puller import CallPuller
from flywheel.sources.calls_connector import CallsConnector
from flywheel.sources.jsonl.batch_reader import BatchFiles
from flywheel.sources.jsonl.copied_lines import erase_lines
from flywheel.sources.jsonl.data_set import DataSet, trainer_python, write_lines
from flywheel.sources.jsonl.reader import files_of, unread_in
from flywheel.sources.jsonl_connector import JsonlConnector, KeptOpen
from flywheel.sources.otlp import inbox
from flywheel.sources.otlp.inbox import own_file
from flywheel.sources.studio.workers import Workers
from flywheel.sources.studio_connector import StudioConnector
from flywheel.store import erasures, ledger
from flywheel.store.kernel.database import Store
from flywheel.store.kernel.transitions import utcnow
from flywheel.store.ledger import Recorded, SourceCounts
from flywheel.store.reply_names import with_repeated_starts
from flywheel.store.task_file import AgentJetTasks, TaskFile
from flywheel.system.clock import steady
from flywheel.system.heartbeat import beat
from flywheel.system.process_folder import remove_left
from flywheel.system.shortage import shortage_of
from flywheel.system.signals import Stop
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

SOURCES_AT_ONCE: Final = 8
"""Sources that `Ingestion.run` reads concurrently, and threads that read JSONL files."""
EXPORT_SECONDS: Final = 1.0
"""How often new tasks are appended to the task file during `Ingestion.run`."""
FULL_SCAN_SHARE: Final = 0.2
"""Share of the time that a throttled full scan spends reading."""
DEFECT: Final = "defect"
"""Condition of a source that a defect of Flywheel keeps from being read."""
NO_COUNTS: Final = SourceCounts(0, 0, {}, 0)
_RECORDERS: Final = {"jsonl": jsonl_connector.record, ledger.CALLS: calls_connector.record}
"""What stores a batch, by the types of sources that note something besides."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """The result of one pass over one source.

    `counts` are all replies of the source in the ledger, `new` the tasks that this pass added. `source_id` is 0 when
    the ledger could not be read.
    """

    path: Path
    source_id: int = 0
    schema: str = ""
    counts: SourceCounts = NO_COUNTS
    new: int = 0
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
            "erased": self.counts.erased,
            "pending": self.counts.pending,
            "new": self.new,
            "warnings": list(self.warnings),
        }
        if self.error is not None:
            report["error"] = str(self.error)
        return report


class SourceIngestion:
    """Ingests one source. Passes and re-scans exclude each other: batches of one trace must be stored in order."""

    def __init__(
        self,
        store: Store,
        connector: StudioConnector | JsonlConnector | CallsConnector,
        settings: IngestSettings,
        *,
        redact: Redactor | None = None,
        agentjet_tasks: AgentJetTasks | None = None,
        calls: CallPuller | None = None,
    ) -> None:
        self.connector = connector
        self.path = connector.path
        self.rescan_at = math.inf
        """When `rescan` is due, by the steady clock."""
        self._store = store
        self._settings = settings
        self._redact = redact
        self._agentjet_tasks = agentjet_tasks
        self._calls = calls
        self._missing_calls: set[str] = set()
        self._erased_traces: set[str] = set()
        self._lock = asyncio.Lock()
        self._source = 0
        self.has_passed = False
        """Whether a pass has ended, well or not."""
        self.is_reopened = False
        """Whether traces were opened again in the ledger, which the next pass has to look for."""
        self._noted: dict[str, Any] = {}
        self._warnings: tuple[str, ...] = ()
        self._scanned_at: float | None = None
        """When the last full scan ended, by the steady clock; None: not known."""
        self._is_scan_asked_for = False
        self._scan_errors: dict[bool, FlywheelError] = {}
        """Why the last full scan failed (True), and the last recent re-scan. Passes do not read what these read."""
        self._counts: SourceCounts | None = None
        self._repeated: int | None = None
        """Replies with trace and span of an earlier one."""
        self._all_skipped: tuple[SourceCounts, str] | None = None
        """The counts for which was looked whether all replies are skipped for one reason, and the warning."""
        self._was_read = False

    async def read(self, *, final: bool = False, stop: Stop | None = None) -> SourceReport:
        """Make one pass, to the end of the source or until `stop`. Errors are in the report.

        After an error nothing is lost: the next pass resumes from the last stored batch.
        """
        total = Recorded()
        error: FlywheelError | None = None
        cursor: Cursor | None = None
        is_first = moved = False
        async with self._lock:
            if self.is_reopened:
                self.connector.forget()
                self.is_reopened = False
            try:
                self._source = self._source or await self._store.write(
                    ledger.source_id, str(self.path), self.connector.type
                )
                cursor = await self._store.read(ledger.cursor_of, self._source)
                is_first = not cursor.rowid
                batches = self.connector.read(self._source, cursor, final=final)
                async with aclosing(batches if stop is None else _until(stop, batches)) as coming:
                    async for batch in coming:
                        await self._record(batch, cursor, total)
                        moved = moved or (batch.cursor is not None and batch.cursor.rowid != cursor.rowid)
                        cursor = batch.cursor or cursor
                if self._missing_calls:
                    await self._look_for_missing_calls()
                await self._erase_copies()
            except Exception as failure:
                self.connector.forget()
                error, cursor = failure if isinstance(failure, FlywheelError) else self._defect(failure), None
            if (moved or not self._was_read) and not (is_first and final):
                # New rows may come together with in-place updates. Rows may also have changed before this process
                # started, but not where a source is read at once for the first time.
                self.rescan_at = steady() + (0 if final else self._settings.settle_seconds)
                self._was_read = True
            self.has_passed = True
            return await self._report(total, cursor, error)

    def _defect(self, failure: Exception) -> SourceError:
        """What is no error of ours as an error of the source. The traceback is logged once, not at every attempt."""
        if (lack := shortage_of(failure)) is not None:
            return SourceError(f"read {self.path}", *lack, retryable=True)
        why = f"a defect of Flywheel stopped it ({type(failure).__name__})"
        error = SourceError(f"read {self.path}", why, "Please report it, with the traceback from the log.")
        error.condition = DEFECT
        if str(error) != self._noted.get("error"):
            log.error("%s", error, exc_info=failure)
        return error

    async def rescan(self, *, whole: bool = False, throttled: bool = True) -> Recorded:
        """Store rows that were updated in place: a recent re-scan, or a full scan if `whole`. Call `read` before. Of
        files of lines there is only the full scan, which reads them again.

        A throttled full scan pauses between batches. An error is also noted as the condition of the source, until
        such a re-scan or a full scan succeeds. Raises FlywheelError.
        """
        self.rescan_at = math.inf
        total = Recorded()
        if not (whole or isinstance(self.connector, StudioConnector)):
            return total
        if whole:
            self._is_scan_asked_for = False
        try:
            await self._rescan(self.connector.rescan(self._source, whole=whole), total, throttled=whole and throttled)
        except Exception as failure:
            error = failure if isinstance(failure, FlywheelError) else self._defect(failure)
            self._scan_errors[whole] = error
            self.rescan_at = self.rescan_at if whole else steady()
            await self._report(total, None, None)
            raise error from failure
        if self._scan_errors:
            self._scan_errors = {each: why for each, why in self._scan_errors.items() if each and not whole}
            await self._report(total, None, None)
        if whole and not self._is_scan_asked_for:
            await self._note_full_scan()
        return total

    async def _rescan(self, scan: AsyncGenerator[Batch], total: Recorded, *, throttled: bool) -> None:
        while True:
            began = time.monotonic()
            async with self._lock:
                beat()
                try:
                    batch = await anext(scan, None)
                    if batch is None:
                        return
                    await self._record(batch, None, total)
                except BaseException:
                    self.connector.forget()
                    await scan.aclose()
                    raise
            if throttled:
                await asyncio.sleep((time.monotonic() - began) * (1 / FULL_SCAN_SHARE - 1))

    def count_again(self) -> None:
        """Note that replies were erased, so that the next pass counts them, and says its error and warning again."""
        self._counts = None
        self._noted = self._noted | {"warning": None}

    def read_again(self) -> None:
        """Have the next pass look in the ledger for traces and full scans that were asked for since this process
        began."""
        self.is_reopened = True
        self._scanned_at = None
        self._is_scan_asked_for = True

    async def _erase_copies(self) -> None:
        """Erase from a copy of a data set what this pass has found there that is erased: it was written again."""
        if self._erased_traces:
            await self._erase_lines(self._erased_traces, ())
            self._erased_traces.clear()

    async def erase_lines(self, traces: Collection[str], conversations: Collection[str]) -> int:
        """Erase these traces and conversations from the file, if it is a copy of a data set; returns how many lines
        that were. Raises SourceError and StoreError."""
        async with self._lock:
            return await self._erase_lines(traces, conversations)

    async def _erase_lines(self, traces: Collection[str], conversations: Collection[str]) -> int:
        if not isinstance(self.connector, JsonlConnector) or not self.connector.is_copy or not self.path.is_file():
            return 0
        return await self.connector.erase(traces, conversations)

    async def _look_for_missing_calls(self) -> None:
        """Have traces read again whose calls were pulled while they were extracted without them."""
        assert self._calls is not None
        missing, self._missing_calls = self._missing_calls, set()
        if await self._calls.reopen(await asyncio.to_thread(self._calls.call_log_copy.sizes, missing)):
            self.is_reopened = True

    @property
    def has_defect(self) -> bool:
        """Whether the last pass was stopped by a defect."""
        return self._noted.get("condition") == DEFECT

    @property
    def number(self) -> int:
        """Its number in the ledger; 0 before the first pass."""
        return self._source

    @property
    def awaits_calls(self) -> bool:
        """Whether a trace is complete, but for a call that has not been pulled."""
        return isinstance(self.connector, StudioConnector) and self.connector.reader.awaits_calls

    @property
    def due_at(self) -> float:
        """When to call `read` although nothing changed, by the steady clock."""
        if self.is_reopened:
            return 0
        return min(self.rescan_at, self.connector.due_at or math.inf)

    async def is_full_scan_due(self) -> bool:
        """Whether `ingest.sweep_seconds` have passed since the last full scan."""
        if not isinstance(self.connector, StudioConnector):
            return False
        if self._scanned_at is None:
            last = await self._store.read(ledger.swept_at, self._source)
            if last:
                age = (datetime.now(UTC) - datetime.fromisoformat(last)).total_seconds()
                # A time to come was noted under a clock that was wrong.
                self._scanned_at = steady() - age if age >= 0 else -math.inf
            else:
                # The first pass has just read everything.
                await self._note_full_scan()
        assert self._scanned_at is not None
        return steady() - self._scanned_at >= self._settings.sweep_seconds

    async def _note_full_scan(self) -> None:
        self._scanned_at = steady()
        await self._store.write(ledger.note_source, self._source, swept_at=datetime.now(UTC).isoformat())

    async def _record(self, batch: Batch, cursor: Cursor | None, total: Recorded) -> None:
        """Store a batch, unless it holds nothing beyond the stored `cursor`, and add the result to `done`."""
        if not (batch.entries or batch.dead or batch.checkpoints or batch.warnings or batch.cursor != cursor):
            return
        if self._agentjet_tasks is not None:
            # Before redaction: the AgentJet file holds the original texts.
            batch = await asyncio.to_thread(self._agentjet_tasks.skipped, batch)
        if self._calls is not None:
            self._missing_calls.update(call for entry in batch.entries for call in entry.missing)
        if self._redact is not None:
            batch = await asyncio.to_thread(redacted, batch, self._redact)
        recorded = await self._store.write(
            _RECORDERS.get(self.connector.type, ledger.record_batch),
            self._source,
            batch,
            train_ratio=self._settings.train_ratio,
            split_seed=self._settings.split_seed,
        )
        if self._calls is not None:
            self._calls.reopened |= recorded.reopened
            if recorded.erased_calls:
                await self._calls.erase_new(recorded.erased_calls)
        if recorded.erased_traces and self.connector.type == "otlp":
            await inbox.erase(self.path, recorded.erased_traces, rewrite=False)
        self._erased_traces |= recorded.erased_traces
        total.add(recorded)
        if self._repeated is not None:
            self._repeated += recorded.repeated
        self._counts = None if recorded.re_extracted or self._counts is None else recorded.onto(self._counts)

    async def _warn_of_skipped(self, counts: SourceCounts) -> str:
        """The warning that all replies are skipped for one reason, with what most of them lack; else empty."""
        if self._all_skipped is None or self._all_skipped[0] != counts:
            there = counts.replies - counts.erased - counts.pending
            said = skipping.warning(counts.skipped, there)
            if said:
                detail = await self._store.read(ledger.most_frequent_detail, self._source)
                said = f"{self.path}: {skipping.warning(counts.skipped, there, detail)}"
            self._all_skipped = counts, said
        return self._all_skipped[1]

    async def _report(self, total: Recorded, cursor: Cursor | None, error: FlywheelError | None) -> SourceReport:
        """Note the source's condition in the ledger and report the pass. `cursor` is None after an error."""
        if not self._source:
            return SourceReport(self.path, error=error)
        of = error or next(iter(self._scan_errors.values()), None)
        try:
            if self._counts is None:
                # Cached, because counting takes longer the more replies there are.
                counts = await self._store.read(ledger.counts_by_source, self._source)
                self._counts = counts.get(self._source, NO_COUNTS)
            if cursor is not None:
                if isinstance(self.connector, StudioConnector) and cursor.rowid and not self._counts.replies:
                    # Reported as long as the database has no agent's reply, also by a pass without new spans.
                    self._warnings = (_no_agent_spans(self.connector),) if self.connector.kinds else self._warnings
                else:
                    # A pass without new rows reports as well that all replies are skipped, and that ids repeat.
                    lasting = await self._warn_of_skipped(self._counts), await self._warn_of_repeated_ids()
                    self._warnings = tuple(dict.fromkeys(filter(None, (*total.warnings, *lasting))))
            noted = {
                "schema": self.connector.schema,
                "longest_read_ms": round(self.connector.longest_read_ms, 1),
                "condition": of.condition if isinstance(of, SourceError) else "not stored" if of else "ok",
                "error": str(of or ""),
                "warning": "; ".join(self._warnings),
            }
            if noted != self._noted:
                await self._store.write(ledger.note_source, self._source, read_at=utcnow(), **noted)
                self._noted = noted
        except StoreError as failure:
            return SourceReport(self.path, self._source, error=error or failure)
        schema = self.connector.schema
        return SourceReport(self.path, self._source, schema, self._counts, total.new_tasks, self._warnings, error)

    async def _warn_of_repeated_ids(self) -> str:
        """The warning that a client's ids repeat; else empty."""
        if not isinstance(self.connector, StudioConnector):
            return ""
        if self._repeated is None:
            self._repeated = await self._store.read(with_repeated_starts, self._source)
        left_out = sum(self.connector.left_out.values())
        what = []
        if self._repeated:
            what.append(f"{quantity(self._repeated, 'reply', 'replies')} with trace and span ids of earlier ones")
        if left_out:
            what.append(f"{quantity(left_out, 'span')} left out: several runs share their trace id")
        return f"{' and '.join(what)}: {_SEEDED}" if what else ""


_SEEDED: Final = (
    "the client's random numbers are probably seeded (`random.seed`), so that each run gives its spans the same ids. "
    "Seed a generator of its own (`random.Random(seed)`), or give the tracer an IdGenerator."
)


def redacted(batch: Batch, redact: Redactor) -> Batch:
    """The batch without personal data. Content hashes stay those of the original: they only detect changes.

    An entry that cannot be redacted becomes a dead row, without its texts. Raises ConfigError.
    """

    def text(text: str) -> str:
        line = {"main_query": text, "answer": "", "init_messages": [], "metadata": {}}
        return str(redact(line)["main_query"]) if text else text

    def entry(entry: Entry) -> Entry:
        detail = text(entry.detail)
        if not entry.line:
            return msgspec.structs.replace(entry, detail=detail)
        line = redact(orjson.loads(entry.line))
        words, numbers = opened(line["main_query"]) if entry.words else (b"", 0)
        told = {"line": line_bytes(line), "beginning": beginning_of(line), "words": words, "numbers": numbers}
        return msgspec.structs.replace(entry, detail=detail, **told)

    entries: list[Entry] = []
    dead: list[DeadRow] = []
    rows: tuple[Entry | DeadRow, ...] = (*batch.entries, *batch.dead)
    for row in rows:
        try:
            if isinstance(row, Entry):
                entries.append(entry(row))
            else:
                dead.append(msgspec.structs.replace(row, error=text(row.error), excerpt=text(row.excerpt)))
        except FlywheelError:
            raise
        except Exception as error:
            # The error's message may quote the text.
            why = f"the filter pii cannot redact it ({type(error).__name__}): nothing of its text is stored"
            rowid = 0 if isinstance(row, Entry) else row.rowid
            whose = row.conversation_id, row.user
            dead.append(DeadRow(rowid, row.span_id, row.trace_id, why, "", *whose))
    return msgspec.structs.replace(batch, entries=tuple(entries), dead=tuple(dead))


def _no_agent_spans(connector: StudioConnector) -> str:
    """The warning about a database with spans, but without a reply."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in connector.kinds.most_common())
    why, remedy = "none of them is an agent's or a model call", "Trace the agent itself, and its model calls."
    if connector.kinds["llm"]:
        why = "the model calls have no parent span, so it is unknown which of them belong to one reply"
        remedy = "Put one span, best an agent's, around each reply; or read recorded calls (`type: calls`)."
    return f"{connector.path} holds {connector.kinds.total()} spans ({kinds}) and no reply: {why}. {remedy}"


async def _until(stop: Stop, batches: AsyncGenerator[Batch]) -> AsyncGenerator[Batch]:
    """The batches until `stop` is set, also while the next one is awaited: sources with long histories take turns."""
    stopped = asyncio.create_task(stop.asked())
    async with aclosing(batches):
        try:
            while not stop.is_set():
                coming = asyncio.ensure_future(anext(batches, None))
                await asyncio.wait((coming, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                    return
                if (batch := coming.result()) is None:
                    return
                yield batch
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)


class Ingestion:
    """Ingests all sources of a configuration. Without `export_tasks`, the task file is not written."""

    def __init__(self, store: Store, config: Config, *, export_tasks: bool = True) -> None:
        self._store = store
        self._config = config
        self._export = export_tasks
        # With ingest.output, another user's program may read the file.
        self._task_file = TaskFile(config.task_file)
        self._agentjet_tasks = AgentJetTasks(config.task_file)
        self._redact = redactor_of(config)
        self._workers = Workers()
        self._jsonl_threads = ThreadPoolExecutor(SOURCES_AT_ONCE, thread_name_prefix="jsonl")
        self.calls = CallPuller(store, config) if config.serving.call_log is not None else None
        """Pulls recorded calls; None where none are recorded."""
        self._sources: dict[Path, SourceIngestion] = {}
        self._batch_files = BatchFiles()
        self._kept_open = KeptOpen()
        self._unread: set[str] = set()
        """What was logged about files that are not read."""

    def sources(self) -> list[SourceIngestion]:
        """The sources that exist now, including each file of a JSONL directory. A path named twice is one source. The
        files of batches in a directory are one source, which has its path."""
        for source in self._config.sources:
            if isinstance(source, OtlpSource | CallsSource):
                paths = [own] if (own := own_file(source, self._config.state_dir)).exists() else []
            elif isinstance(source, JsonlSource):
                try:
                    paths = self._read_by_themselves(source.path.absolute())
                    self._warn_of_unread(source.path.absolute())
                except SourceError:
                    paths = [source.path.absolute()]  # reading it reports the error
            else:
                paths = [source.path.absolute()]
            for path in paths:
                if path in self._sources:
                    continue
                self._sources[path] = SourceIngestion(
                    self._store,
                    self._connector_of(source, path),
                    _settings_of(source, self._config.ingest),
                    redact=self._redact,
                    agentjet_tasks=self._agentjet_tasks,
                    calls=self.calls,
                )
        return list(self._sources.values())

    def _connector_of(self, source: SourceSettings, path: Path) -> StudioConnector | JsonlConnector | CallsConnector:
        """The connector of a source, or of one file in its directory."""
        models = self._config.models_of(source)
        if isinstance(source, JsonlSource):
            return JsonlConnector(
                path,
                self._jsonl_threads,
                models,
                _maker_of(source, path),
                self._config.privacy.exclude.names,
                self._batch_files,
                is_in_folder=path != source.path.absolute(),
                kept_open=self._kept_open,
            )
        if isinstance(source, CallsSource):
            assert self.calls is not None
            return CallsConnector(path, self._config, source, self._store, self.calls, self._has_passed_traces)
        return StudioConnector(
            path,
            self._config,
            self._store,
            kind=source.type,
            workers=self._workers,
            models=models,
            calls=self.calls,
        )

    def _has_passed_traces(self) -> bool:
        """Whether every source but that of calls was read: where there is a trace of a call, it comes first."""
        return all(source.has_passed for source in self._sources.values() if source not in self._of_calls)

    @property
    def _of_calls(self) -> list[SourceIngestion]:
        return [source for source in self._sources.values() if isinstance(source.connector, CallsConnector)]

    def _warn_of_unread(self, path: Path) -> None:
        if (unread := unread_in(path)) and unread not in self._unread:
            self._unread.add(unread)
            log.warning("%s: %s", path, unread)

    def _read_by_themselves(self, path: Path) -> list[Path]:
        """The paths of the sources at the path of one. Raises SourceError."""
        files = files_of(path)
        alone = [file for file in files if file == path or file not in self._batch_files]
        return alone if path in alone or len(alone) == len(files) else [*alone, path]

    async def run(self, *, final: bool = False, sweep: bool = False, stop: Stop | None = None) -> list[SourceReport]:
        """Read every source once. An error of one source is in its report and does not affect the others.

        `final` closes replies at once instead of waiting until their traces are quiet. `sweep` makes a full scan of
        each source instead of a recent re-scan. After `stop`, passes end at their next batch.
        """
        end = stop or Stop()
        await asyncio.to_thread(self.remove_left)
        free = asyncio.Semaphore(SOURCES_AT_ONCE)

        async def read(source: SourceIngestion) -> SourceReport:
            async with free:
                report = await source.read(final=final, stop=end)
                if report.error is None and not end.is_set() and (sweep or source.rescan_at <= steady()):
                    try:
                        scanned = await source.rescan(whole=sweep, throttled=False)
                    except FlywheelError as error:
                        return replace(report, error=error)
                    # This pass waits for the traces that the re-scan opened again.
                    again = await source.read(final=final, stop=end)
                    warnings = tuple(dict.fromkeys((*report.warnings, *again.warnings)))
                    report = replace(again, new=report.new + scanned.new_tasks + again.new, warnings=warnings)
                while report.error is None and not end.is_set() and source.awaits_calls:
                    report = await self._read_with_calls(source, report, final=final, stop=end)
                return report

        async def read_all() -> list[SourceReport]:
            sources = [source for source in self.sources() if source.connector.type != ledger.CALLS]
            reports = dict(zip(sources, await asyncio.gather(*map(read, sources)), strict=True))
            error: SourceReport | None = None
            if self.calls is not None and (path := self._calls_path()) is not None:
                # After the traces: where there is a trace of a call, the reply is read from there.
                try:
                    await self.calls.pull(at_once=True, seconds=math.inf)
                    await self._erase_blocked(self.calls)
                except (CallLogError, StoreError) as failure:
                    error = SourceReport(path, error=failure)
            reports |= {
                source: await read(source) for source in self.sources() if source not in reports and error is None
            }
            if self.calls is not None and self.calls.has_pulled:
                for source in await self._reopened():
                    if source in reports:
                        reports[source] = await self._again(source, reports[source], final=final, stop=end)
            if error is None and self.calls is not None and self.calls.call_log_copy.path.exists():
                try:
                    if await asyncio.to_thread(self.calls.pending):
                        await self.calls.finish_erasing()
                except CallLogError as failure:
                    error = SourceReport(self.calls.call_log_copy.path, error=failure)
            return [*reports.values(), error] if error is not None else list(reports.values())

        reading = asyncio.create_task(read_all())
        try:
            while not (await asyncio.wait((reading,), timeout=EXPORT_SECONDS))[0]:
                with contextlib.suppress(StoreError):
                    # It is exported again at the end, which reports an error that persists.
                    await self.export()
        except BaseException:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            raise
        reports = await reading
        await self.export()
        return reports

    async def _read_with_calls(
        self, source: SourceIngestion, report: SourceReport, *, final: bool, stop: Stop
    ) -> SourceReport:
        """The report of one more pass after another pull, for traces that wait for their calls."""
        assert self.calls is not None
        try:
            await self.calls.pull_soon()
        except CallLogError as error:
            return replace(report, error=error)
        return await self._again(source, report, final=final, stop=stop)

    async def _again(self, source: SourceIngestion, report: SourceReport, *, final: bool, stop: Stop) -> SourceReport:
        """The report of one more pass, with the new tasks of both."""
        again = await source.read(final=final, stop=stop)
        return replace(again, new=report.new + again.new)

    async def pull_calls(self) -> list[SourceIngestion]:
        """Pull recorded calls; the sources to be read for them. Raises CallLogError and StoreError."""
        if self.calls is None:
            return []
        awaiting = [source for source in self._sources.values() if source.awaits_calls]
        if not await self.calls.pull(at_once=bool(awaiting)) and not self.calls.reopened:
            return []
        await self._erase_blocked(self.calls)
        return [*awaiting, *self._of_calls, *await self._reopened()]

    def _calls_path(self) -> Path | None:
        """The file of the source of calls, if one is configured."""
        found = (source for source in self._config.sources if isinstance(source, CallsSource))
        return next((own_file(source, self._config.state_dir) for source in found), None)

    async def _reopened(self) -> list[SourceIngestion]:
        """The sources with traces that lacked calls when they were extracted and are opened again for them."""
        assert self.calls is not None
        numbers = await self.calls.reopen_late()
        for source in self._sources.values():
            source.is_reopened = source.is_reopened or source.number in numbers
        return [source for source in self._sources.values() if source.is_reopened]

    async def erase(self, keys: Set[str], qa_hashes: Set[str]) -> int:
        """Remove the lines of tasks from the task file and those beside it, see `TaskFile.erase`."""
        return await self._task_file.erase(self._store, keys, qa_hashes)

    async def erase_data_sets(self, traces: Collection[str], conversations: Collection[str]) -> int:
        """Erase traces and conversations from the copies of data sets, also of those that are no sources any more;
        returns how many lines that were. Raises SourceError and StoreError."""
        read = {source.path: source for source in self.sources()}
        erased = [await source.erase_lines(traces, conversations) for source in read.values()]
        others = sorted((self._config.state_dir / DATA_SETS).glob("*.jsonl"))
        for path in (path for path in others if path not in read):
            erased.append(await asyncio.to_thread(erase_lines, path, traces, conversations))
        return sum(erased)

    def remove_left(self) -> None:
        """Remove the copies of databases and data sets that killed processes left."""
        # Where the directory of temporary files has a long name, the files of a round are in /tmp.
        temporary = Path(tempfile.gettempdir()), Path("/tmp")
        for folder in {self._config.state_dir, *temporary, *self._folders_of_copies()}:
            remove_left(folder)

    def _folders_of_copies(self) -> set[Path]:
        """The folders with copies of data sets."""
        sources = (source for source in self._config.sources if isinstance(source, JsonlSource) and source.dataset)
        return {self._config.state_dir / DATA_SETS, *(source.path.absolute().parent for source in sources)}

    async def _erase_blocked(self, calls: CallPuller) -> None:
        """Erase calls that name a conversation that was erased, or a user who is blocked. Raises CallLogError."""
        if not await self._store.read(erasures.are_there):
            return
        conversations, users = await asyncio.to_thread(calls.call_log_copy.named)
        blocked = await self._store.read(erasures.blocked, conversations, users)
        ids = await asyncio.to_thread(calls.call_log_copy.ids_of, *blocked)
        if ids:
            await self.erase_conversations(ids)
            await calls.erase(ids)

    async def erase_conversations(self, request_ids: Collection[str]) -> set[str]:
        """Have nothing stored any more that goes on from one of these calls, which are about to be erased; the ids of
        the conversations that were made of them. Raises CallLogError and StoreError."""
        found: set[str] = set()
        for source in self.sources() if request_ids else ():
            if isinstance(source.connector, CallsConnector):
                found |= await source.connector.refuse(request_ids)
        return found

    async def export(self) -> None:
        """Append new tasks to the task file."""
        if self._export:
            await self._task_file.follow(self._store)

    async def close(self) -> None:
        """Close all connectors and end their threads."""
        for source in self._sources.values():
            await source.connector.close()
        if self.calls is not None:
            await self.calls.close()
        self._jsonl_threads.shutdown()


def _maker_of(source: JsonlSource, path: Path) -> Callable[[], None] | None:
    """What writes this file of a source with a data set. Files of a directory are the user's."""
    if source.dataset is None or path != source.path.absolute():
        return None
    given = source.dataset
    return partial(write_lines, DataSet(given.path, given.name, given.split), source.path, trainer_python(None))


def _settings_of(source: SourceSettings, settings: IngestSettings) -> IngestSettings:
    """The settings for a source, whose tasks may all be of one split."""
    split = source.split if isinstance(source, JsonlSource) else None
    return settings if split is None else settings.model_copy(update={"train_ratio": float(split == "train")})
