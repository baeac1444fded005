"""The sources of a running daemon: each is read when it changes, when it is due and at every poll, by itself.

One that is locked, damaged or long holds up no other. Sweeps go on beside the passes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from flywheel.config import Config, JsonlSource, OtlpSource
from flywheel.daemon.stage import Stage
from flywheel.errors import FlywheelError
from flywheel.sources.ingestion import Ingestion, SourceIngestion
from flywheel.sources.otlp.inbox import inbox_path, prune
from flywheel.sources.otlp.receiver import Receiver
from flywheel.sources.watcher import Watcher
from flywheel.store.database import Store
from flywheel.store.ledger import Recorded

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.01
"""How long a change is waited on before it is read: a burst of commits is one pass."""


class SourceSupervisor:
    """Starts and stops what reads the sources; `on_tasks` is called with the number of new tasks."""

    def __init__(
        self,
        store: Store,
        config: Config,
        ingestion: Ingestion,
        stopping: asyncio.Event,
        on_tasks: Callable[[int], object],
    ) -> None:
        self._store = store
        self._config = config
        self._ingestion = ingestion
        self._stopping = stopping
        self._on_tasks = on_tasks
        self._export = Stage("task file", ingestion.export)
        self._stages: dict[Path, Stage] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._sweeps: dict[Path, asyncio.Task[None]] = {}
        self._due: dict[Path, asyncio.TimerHandle] = {}
        self._receivers: list[Receiver] = []
        self._watcher: Watcher | None = None

    async def start(self) -> None:
        """Begin. Raises FlywheelError when an address to receive at cannot be had."""
        self._watcher = Watcher()
        for source in self._config.sources:
            if isinstance(source, OtlpSource):
                inbox = inbox_path(self._config.state_dir, source.listen)
                receiver = Receiver(source.listen, inbox, token_env=source.token_env)
                self._receivers.append(receiver)
                await receiver.start()
            elif isinstance(source, JsonlSource):
                self._watcher.watch_directory(source.path.absolute(), self.refresh)
        self._run(self._export)
        self._export.wake.set()
        self.refresh()

    def refresh(self) -> None:
        """Notice sources and directories that have appeared since."""
        if self._stopping.is_set() or self._watcher is None:
            return
        for source in self._ingestion.sources():
            if source.path not in self._stages:
                stage = Stage(f"source {source.path}", functools.partial(self._read, source))
                self._run(stage)
                self._stages[source.path] = stage
                self._watcher.watch(source.path, stage.wake.set)
                stage.wake.set()
        self._watcher.refresh()

    def poll(self) -> None:
        """Look at every source, whether or not an event came, and for tasks that could not be written before."""
        for stage in (*self._stages.values(), self._export):
            stage.wake.set()

    async def stop(self) -> None:
        """End passes at their next batch; what is stored is whole."""
        if self._watcher is not None:
            self._watcher.stop()
        receivers = [asyncio.create_task(receiver.stop()) for receiver in self._receivers]
        for timer in self._due.values():
            timer.cancel()
        for sweep in self._sweeps.values():
            sweep.cancel()
        for stage in (self._export, *self._stages.values()):
            stage.wake.set()
        await asyncio.gather(*receivers, *self._running, *self._sweeps.values(), return_exceptions=True)

    def _run(self, stage: Stage) -> None:
        self._running.add(asyncio.create_task(stage.run(self._stopping), name=stage.name))

    async def _read(self, source: SourceIngestion) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        report = await source.read(stop=self._stopping)
        if report.new:
            log.debug("%s: %d new tasks", report.path, report.new)
            self._tell(report.new)
        if report.error is not None:
            raise report.error
        if source.is_rescan_due:
            self._tell_of(source, await source.rescan())
        if source.path not in self._sweeps and await source.is_full_scan_due():
            self._sweeps[source.path] = asyncio.create_task(self._sweep(source))
        self._wake_when_due(source)

    def _wake_when_due(self, source: SourceIngestion) -> None:
        """Each pass says anew when the next one is due; what the one before it said no longer holds."""
        if (earlier := self._due.pop(source.path, None)) is not None:
            earlier.cancel()
        if (due := source.due_at) is not None:
            wake = self._stages[source.path].wake
            self._due[source.path] = asyncio.get_running_loop().call_later(
                max(0.0, due - time.time()) + 0.001, wake.set
            )

    async def _sweep(self, source: SourceIngestion) -> None:
        try:
            self._tell_of(source, await source.rescan(whole=True))
        except FlywheelError as error:
            log.error("look through %s: %s", source.path, error)
        finally:
            del self._sweeps[source.path]

    def _tell_of(self, source: SourceIngestion, found: Recorded) -> None:
        if found.new_replies or found.retold:
            log.info(
                "%s: %d replies had been missed, %d were changed in place",
                source.path,
                found.new_replies,
                found.retold,
            )
            self._tell(found.new_tasks)

    def _tell(self, new: int) -> None:
        self._export.wake.set()
        self._on_tasks(new)

    async def prune(self) -> None:
        """Delete received spans that are older than they have to be kept."""
        before = time.time_ns() - int(self._config.ingest.keep_received_days * 86_400e9)
        for source in self._config.sources:
            if isinstance(source, OtlpSource):
                inbox = inbox_path(self._config.state_dir, source.listen)
                await prune(inbox, before)
