"""Following a worker until it has ended: what it writes down becomes lines of the log."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from flywheel.daemon.round_account import RoundAccount
from flywheel.daemon.worker_process import WorkerProcess
from flywheel.errors import TrainError
from flywheel.round_progress import RoundProgress, progress_of

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""How often a running round is looked at."""
LOG_SECONDS: Final = 60.0
"""How often steps and rollouts are worth a line. A new phase, a pause and its end always are."""


class RoundWatch:
    """Follows one worker. `name` is how the log calls its round; its calls of the judge are booked on `account`."""

    def __init__(self, name: str, worker: WorkerProcess, account: RoundAccount | None = None) -> None:
        self._name, self._worker, self._account = name, worker, account
        self._told: RoundProgress | None = None
        self._told_at = float("-inf")
        self._looked_at = time.monotonic()
        self._worked_seconds = 0.0

    async def follow(self, most_seconds: float) -> int | None:
        """Until the worker has ended: its exit code, see `WorkerProcess.wait`.

        Raises TimeoutError when it has worked for longer (pauses do not count), and TrainError when it waits for
        tokens that this run does not have.
        """
        waiting = asyncio.create_task(self._worker.wait())
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=WATCH_SECONDS)
                progress = await self.look()
                if self._account is not None:
                    await self._account.settle()
                    if progress is not None and progress.paused and (why := self._account.used_up):
                        raise TrainError(f"finish {self._name}", why, "Raise it; the samples are free again.")
                if self._worked_seconds > most_seconds and not waiting.done():
                    raise TimeoutError
            return await waiting
        finally:
            waiting.cancel()

    async def look(self) -> RoundProgress | None:
        """What there is; it is logged if it is news."""
        now = time.monotonic()
        between, self._looked_at = now - self._looked_at, now
        progress = await asyncio.to_thread(progress_of, self._worker.dir)
        if progress is None or not progress.paused:
            self._worked_seconds += between
        if progress is None:
            return None
        before = self._told
        turned = before is None or (before.phase, before.paused) != (progress.phase, progress.paused)
        moved = before is None or (before.step, before.rollouts) != (progress.step, progress.rollouts)
        if turned or (moved and now - self._told_at >= LOG_SECONDS):
            log.info("%s: %s", self._name, progress.summary)
            self._told, self._told_at = progress, now
        return progress
