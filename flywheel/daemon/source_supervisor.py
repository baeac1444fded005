"""Supervises the sources of a running daemon: reads each one when it changes, when it is due, and at every poll.

Each source is a stage of its own, so a locked, damaged or long database delays no other source. Full scans run beside
the passes. OTLP receivers are started and stopped here as well.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.config.file import Config
from flywheel.config.ingest import JsonlSource, OtlpSource
from flywheel.daemon.stage import Stage
from flywheel.sources.call_puller import PAUSE_SECONDS
from flywheel.sources.ingestion import Ingestion, SourceIngestion
from flywheel.sources.jsonl.reader import is_folder
from flywheel.sources.otlp.inbox import own_file, prune
from flywheel.sources.watcher import Watcher
from flywheel.store.kernel.database import Store
from flywheel.store.ledger import Recorded
from flywheel.system.clock import steady
from flywheel.system.signals import Stop

if TYPE_CHECKING:
    from flywheel.sources.otlp.receiver import Receiver

log = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.01
"""Delay between a change and its pass: a burst of commits needs one pass."""
POLL_SLACK_SECONDS: Final = 60.0
"""A poll that is late by more is overdue: a busy machine delays it by less."""


class SourceSupervisor:
    """Starts and stops all reading. `on_tasks` is called with the number of new tasks."""

    def __init__(
        self,
        store: Store,
        config: Config,
        ingestion: Ingestion,
        stop: Stop,
        on_tasks: Callable[[int], object],
    ) -> None:
        self._store = store
        self._config = config
        self._ingestion = ingestion
        self._stop = stop
        self._on_tasks = on_tasks
        self._export = Stage("task file", ingestion.export)
        self._pull = Stage("calls", self._do_pull)
        self._stages: dict[Path, Stage] = {}
        self._full_scans: dict[Path, Stage] = {}
        self._receivers: list[Receiver] = []
        self._watcher: Watcher | None = None
        self._warned: set[Path] = set()
        self._polled_at = math.inf

    async def start(self) -> None:
        """Start receivers, watches and passes. Raises FlywheelError if a receiver cannot listen at its address."""
        self._watcher = Watcher()
        for source in self._config.sources:
            if isinstance(source, OtlpSource):
                # A daemon without a receiver does not load protobuf.
                from flywheel.sources.otlp.receiver import Receiver

                inbox = own_file(source, self._config.state_dir)
                receiver = Receiver(
                    source.listen, inbox, token_env=source.token_env, private=self._config.privacy.exclude.names
                )
                self._receivers.append(receiver)
                await receiver.start()
            elif isinstance(source, JsonlSource):
                self._watcher.watch_directory(source.path.absolute(), self.refresh)
        self._start(self._export)
        self._start(self._pull)
        self.refresh()
        self._polled_at = time.monotonic()

    def refresh(self) -> None:
        """Start reading sources that have appeared, and watch directories that have appeared."""
        if self._stop.is_set() or self._watcher is None:
            return
        for source in self._ingestion.sources():
            if source.path not in self._stages:
                stage = Stage(f"source {source.path}", functools.partial(self._read, source))
                self._stages[source.path] = stage
                self._start(stage)
                scan = Stage(f"full scan of {source.path}", functools.partial(self._scan, source))
                self._full_scans[source.path] = scan
                scan.begin(self._stop)
                self._watcher.watch(source.path, stage.wake)
            elif is_folder(source.path):
                # It has the files of batches, which cause no event of their own.
                self._stages[source.path].wake()
        self._watcher.refresh()

    def _start(self, stage: Stage) -> None:
        stage.begin(self._stop)
        stage.wake()

    def concern(self) -> str:
        """Which sources a defect keeps from being read, without their names; empty for none."""
        number = sum(source.has_defect for source in self._ingestion.sources())
        return f"{number} of the sources cannot be read because of a defect: see `flywheel status`" if number else ""

    def poll(self) -> None:
        """Read every source and retry the export, whether or not a change was noticed."""
        self._polled_at = time.monotonic()
        for stage in self.stages:
            stage.wake()

    @property
    def stages(self) -> list[Stage]:
        return [*self._stages.values(), self._export, self._pull]

    @property
    def overdue(self) -> str:
        """That a poll is overdue; empty while it is not."""
        late = time.monotonic() - self._polled_at - self._config.ingest.poll_seconds
        return f"a poll is overdue by {late:.0f} s" if late > POLL_SLACK_SECONDS else ""

    def read_again(self) -> None:
        """Read every source after what the ledger says of them was changed from outside."""
        for source in self._ingestion.sources():
            source.read_again()
        self.poll()

    async def stop(self) -> None:
        """End passes at their next batch and finish requests in flight. Everything stored is complete."""
        if self._watcher is not None:
            self._watcher.stop()
        receivers = [asyncio.create_task(receiver.stop()) for receiver in self._receivers]
        scans = [scan.task for scan in self._full_scans.values() if scan.task is not None]
        for scan in scans:
            scan.cancel()
        if self._ingestion.calls is not None:
            self._ingestion.calls.stop()
        passes = [stage.task for stage in self.stages if stage.task is not None]
        await asyncio.gather(*receivers, *passes, *scans, return_exceptions=True)

    async def prune(self) -> None:
        """Delete received spans that are older than `ingest.keep_received_days`."""
        before_ns = time.time_ns() - int(self._config.ingest.keep_received_days * 86_400e9)
        for source in self._config.sources:
            if isinstance(source, OtlpSource):
                await prune(own_file(source, self._config.state_dir), before_ns)

    async def _do_pull(self) -> None:
        """Pull recorded calls, more often while a trace waits for some, and read the sources that they are for."""
        waiting = await self._ingestion.pull_calls()
        self.refresh()
        for source in waiting:
            if source.path in self._stages:
                self._stages[source.path].wake()

    async def _read(self, source: SourceIngestion) -> None:
        await asyncio.sleep(DEBOUNCE_SECONDS)
        report = await source.read(stop=self._stop)
        if report.new:
            self._announce(report.new)
        if report.error is not None:
            raise report.error
        if report.warnings and source.path not in self._warned:
            # The status shows the latest ones. Their counts change while spans arrive.
            self._warned.add(source.path)
            log.warning("%s", "; ".join(report.warnings))
        if source.rescan_at <= steady():
            self._report_found(source, await source.rescan())
        if self._full_scans[source.path].task is None and await source.is_full_scan_due():
            self._full_scans[source.path].wake()
        if source.awaits_calls:
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._pull.wake)
        # Each pass determines the next due time.
        self._stages[source.path].wake_in(max(0.0, source.due_at - steady()) + 0.001)

    async def _scan(self, source: SourceIngestion) -> None:
        self._report_found(source, await source.rescan(whole=True))

    def _report_found(self, source: SourceIngestion, found: Recorded) -> None:
        if found.new_replies or found.re_extracted:
            log.info(
                "%s: a re-scan found %d missed replies and %d updated in place",
                source.path,
                found.new_replies,
                found.re_extracted,
            )
            self._announce(found.new_tasks)

    def _announce(self, new_tasks: int) -> None:
        self._export.wake()
        self._on_tasks(new_tasks)
