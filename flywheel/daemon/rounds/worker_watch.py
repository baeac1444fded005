"""Watches the worker of a round: its progress in the log, its judge usage, and for how long it may work."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from flywheel.daemon.rounds.round_usage import RoundUsage
from flywheel.daemon.rounds.worker_process import WorkerProcess
from flywheel.errors import TrainError
from flywheel.system.heartbeat import beat
from flywheel.system.signals import Stop
from flywheel.training.data.round_progress import RoundProgress, progress_of

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""How often the progress of a running round is read."""
LOG_SECONDS: Final = 60.0
"""How often steps and rollouts are logged. A new phase, a pause and its end are logged at once."""


class WorkerWatch:
    """Watches one worker: logs its progress under `name` and books its judge usage."""

    def __init__(self, name: str, worker: WorkerProcess, usage: RoundUsage | None = None) -> None:
        self._name, self._worker, self._usage = name, worker, usage
        self._paused: str | None = None
        self._logged: RoundProgress | None = None
        self._logged_at = float("-inf")
        self._read_at = time.monotonic()
        self._worked_seconds = 0.0

    async def follow(self, most_seconds: float, stop: Stop | None = None) -> int | None:
        """Wait for the worker's end; returns its exit code, see `WorkerProcess.wait`. None when `stop` is asked for
        earlier.

        Raises TimeoutError when it worked for longer than `most_seconds` without pauses, and TrainError when it waits
        for tokens that the budget of this run does not have.
        """
        stop = stop or Stop()
        waiting, asked = asyncio.create_task(self._worker.wait()), asyncio.create_task(stop.asked())
        try:
            while not waiting.done() and not stop.is_set():
                await asyncio.wait((waiting, asked), timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                beat()
                progress = await self._progress()
                if self._usage is not None:
                    await self._usage.settle()
                    paused = progress.paused if progress is not None else ""
                    if paused != self._paused:
                        await self._usage.note_pause(self._name, paused)
                        self._paused = paused
                    if progress is not None and progress.paused and (why := self._usage.used_up):
                        raise TrainError(f"finish {self._name}", why, "Raise the budget; the samples are free again.")
                if self._worked_seconds > most_seconds and not waiting.done():
                    raise TimeoutError
            return await waiting if waiting.done() else None
        finally:
            waiting.cancel()
            asked.cancel()

    async def _progress(self) -> RoundProgress | None:
        """Read the progress, and log it when it changed."""
        now = time.monotonic()
        elapsed, self._read_at = now - self._read_at, now
        progress = await asyncio.to_thread(progress_of, self._worker.dir)
        if progress is None or not progress.paused:
            self._worked_seconds += elapsed
        if progress is None:
            return None
        before = self._logged
        changed = before is None or (before.phase, before.paused) != (progress.phase, progress.paused)
        moved = before is None or (before.step, before.rollouts) != (progress.step, progress.rollouts)
        if changed or (moved and now - self._logged_at >= LOG_SECONDS):
            log.info("%s: %s", self._name, progress.summary)
            self._logged, self._logged_at = progress, now
        return progress
