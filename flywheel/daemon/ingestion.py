"""Ingestion: from sources to the ledger, batch by batch, and on to the task file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flywheel.config import Config, IngestSettings, StudioSource
from flywheel.errors import StoreError, StudioError
from flywheel.store import ledger
from flywheel.store.database import Store
from flywheel.store.export import export
from flywheel.store.ledger import SourceCounts
from flywheel.store.transitions import utcnow
from flywheel.studio.reader import StudioReader
from flywheel.trace import Batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What one pass over one source found: `counts` is all that the ledger holds, `new` the pass's tasks."""

    path: Path
    source_id: int
    schema: str
    counts: SourceCounts
    new: int
    warnings: tuple[str, ...] = ()
    error: StudioError | None = None

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


class _Source:
    """One database with its reader, which lives in a thread of its own: a slow disk holds up nobody else."""

    def __init__(self, path: Path, settings: IngestSettings) -> None:
        self.path = path
        self.reader = StudioReader(path, settings)
        self.noted: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="studio")

    async def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, next, batches, None)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.reader.close)
        self._thread.shutdown()


class Ingestion:
    """Reads all sources of a configuration into the store."""

    def __init__(self, store: Store, config: Config, *, export_tasks: bool = True) -> None:
        self._store = store
        self._config = config
        self._export = export_tasks
        # The same file named twice is one source.
        paths = dict.fromkeys(
            source.path.absolute() for source in config.sources if isinstance(source, StudioSource)
        )
        self._sources = [_Source(path, config.ingest) for path in paths]

    async def run(self, *, final: bool = False) -> list[SourceReport]:
        """One pass. A source that fails reports its error and leaves the others alone.

        `final` closes replies at once instead of waiting for their traces to settle.
        """
        reports = await asyncio.gather(*(self._read(source, final) for source in self._sources))
        if self._export:
            await export(self._store, self._config.task_file)
        return list(reports)

    async def _read(self, source: _Source, final: bool) -> SourceReport:
        number = await self._store.write(ledger.source_id, str(source.path))
        new = 0
        warnings: list[str] = []
        error: StudioError | None = None
        try:
            cursor = await self._store.read(ledger.cursor_of, number)
            batches = source.reader.read(cursor, now=datetime.now(UTC), final=final)
            while (batch := await source.next_batch(batches)) is not None:
                if not batch.replies and not batch.dead and not batch.warnings and batch.cursor == cursor:
                    continue
                cursor = batch.cursor
                recorded = await self._store.write(
                    ledger.record_batch,
                    number,
                    str(source.path),
                    batch,
                    train_ratio=self._config.ingest.train_ratio,
                    split_seed=self._config.ingest.split_seed,
                )
                new += recorded.new_tasks
                warnings += recorded.warnings
        except StudioError as failure:
            error = failure
        except StoreError as failure:
            log.error("%s", failure)
            raise
        noted = {
            "schema": source.reader.schema,
            "longest_read_ms": round(source.reader.longest_read_ms, 1),
            "error": str(error or ""),
            "warning": "; ".join(dict.fromkeys(warnings)),
        }
        if noted != source.noted:
            await self._store.write(ledger.note_source, number, read_at=utcnow(), **noted)
            source.noted = noted
        counts = await self._store.read(ledger.counts_of, number)
        return SourceReport(
            source.path, number, source.reader.schema, counts, new, tuple(dict.fromkeys(warnings)), error
        )

    async def close(self) -> None:
        for source in self._sources:
            await source.close()
