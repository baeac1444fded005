"""Ingestion: all sources of a configuration into the ledger, and on to the task file."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flywheel.config import Config, JsonlSource, OtlpSource, SourceSettings, StudioSource
from flywheel.errors import SourceError, StoreError
from flywheel.files import PRIVATE
from flywheel.filtering.chain import redactor_of
from flywheel.sources.connector import Intake, SourceReport
from flywheel.sources.inherited import Inherited
from flywheel.sources.jsonl.file import files_of
from flywheel.sources.jsonl_connector import LinesFeed
from flywheel.sources.otlp.inbox import inbox_path
from flywheel.sources.studio_connector import Shares, StudioFeed
from flywheel.store.database import Store
from flywheel.store.export import TaskFile

AT_ONCE = 8
"""Sources that are read at the same time by a single pass over all of them, and files of lines at any time."""
FOLLOW_SECONDS = 1.0
"""How often the task file follows while a pass goes on: at the end of a long history little is left to write."""


class Ingestion:
    """Reads all sources of a configuration into the store."""

    def __init__(self, store: Store, config: Config, *, export_tasks: bool = True) -> None:
        self._store = store
        self._config = config
        self._export = export_tasks
        # Another program, of another user perhaps, reads it where it was told to be.
        self._task_file = TaskFile(config.task_file, mode=PRIVATE if config.ingest.output is None else 0o666)
        self._inherited = Inherited(config.task_file)
        self._redact = redactor_of(config.filter.chain)
        self._shares = Shares()
        self._line_threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="lines")
        self._intakes: dict[Path, Intake] = {}

    def intakes(self) -> list[Intake]:
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
        return list(self._intakes.values())

    def _add(self, path: Path, kind: str, source: SourceSettings) -> None:
        if path not in self._intakes:
            models = self._config.models_of(source)
            feed = (
                LinesFeed(path, self._line_threads, models)
                if kind == "jsonl"
                else StudioFeed(path, self._config, self._store, kind=kind, shares=self._shares, models=models)
            )
            self._intakes[path] = Intake(
                self._store, feed, self._config.ingest, redact=self._redact, inherited=self._inherited
            )

    async def run(
        self, *, final: bool = False, sweep: bool = False, stop: asyncio.Event | None = None
    ) -> list[SourceReport]:
        """One pass. A source that fails reports its error and leaves the others alone.

        `final` closes replies at once instead of waiting for their traces to settle; `sweep` compares whole sources
        with the ledger instead of their newest rows. After `stop` passes end at their next batch.
        """
        seats = asyncio.Semaphore(AT_ONCE)

        async def one(intake: Intake) -> SourceReport:
            async with seats:
                report = await intake.read(final=final, stop=stop)
                is_stopped = stop is not None and stop.is_set()
                if report.error is None and not is_stopped and (intake.is_recheck_due or sweep):
                    found = await intake.look_back(whole=sweep, at_leisure=False)
                    # Traces that were found to be open are waited for by a pass.
                    again = await intake.read(final=final, stop=stop)
                    warnings = tuple(dict.fromkeys((*report.warnings, *again.warnings)))
                    new = report.new + found.new_tasks + again.new
                    report = replace(again, new=new, warnings=warnings)
                return report

        done = asyncio.Event()
        following = asyncio.create_task(self._follow(done))
        try:
            reports = await asyncio.gather(*(one(intake) for intake in self.intakes()))
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
        for intake in self._intakes.values():
            await intake.close()
        self._line_threads.shutdown()


def _files(path: Path) -> list[Path]:
    """The files of a source of lines; its own path if they cannot be listed, for reading it tells why."""
    try:
        return files_of(path)
    except SourceError:
        return [path]
