"""A stage of the daemon: an action that runs whenever it is woken, and again after an error; and the intervals that
wake stages. A stage at rest has no task."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from enum import Enum
from time import monotonic
from typing import Final

from apscheduler.executors.debug import DebugExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.interval import IntervalTrigger

from flywheel.errors import FlywheelError, StoreError
from flywheel.store import stages
from flywheel.store.kernel.database import Store
from flywheel.store.stages import Pass
from flywheel.system.clock import moved_seconds
from flywheel.system.heartbeat import Heartbeat, current_heartbeat
from flywheel.system.shortage import shortage_of
from flywheel.system.signals import Stop

log = logging.getLogger(__name__)

NOTED_SECONDS: Final = 60.0
"""How often success is noted in the state."""
CLOCK_SECONDS: Final = 1.0
"""How often is looked whether the clock of the machine was set. Corrections by less change no interval noticeably."""


class Stage:
    """Runs `action` each time it is woken, from `begin` on: at once, or after the pass that runs. An error is logged;
    it does not end the stage.

    With `waits`, the first and the longest wait in seconds, a failure is followed by one attempt after that time,
    which doubles each time, or after what the error asks for, whatever wakes the stage meanwhile.

    `action` returns a `Pass`; anything else means that it has worked, or if it `is_quiet`, that there was nothing to
    do. With a `store`, its record is kept there. `every` says after how many seconds it is woken again and again
    (`Intervals`); without it, others wake it alone. `wakes` are the events for which its owner wakes it.
    """

    def __init__(
        self,
        name: str,
        action: Callable[[], Awaitable[object]],
        every: float | None = None,
        wakes: Iterable[Enum] = (),
        store: Store | None = None,
        *,
        is_quiet: bool = False,
        waits: tuple[float, float] | None = None,
    ) -> None:
        self.name = name
        self.every = every
        self.wakes = frozenset(wakes)
        self.is_due = False
        """Whether it was woken, and has not begun since."""
        self.task: asyncio.Task[None] | None = None
        """While it runs."""
        self.heartbeat = Heartbeat()
        self.error: FlywheelError | None = None
        """Why it fails, if it does."""
        self._action = action
        self._store = store
        self._default = Pass.IDLE if is_quiet else Pass.WORKED
        self._waits = waits
        self._stop: Stop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._not_before = -math.inf
        self._may_fail = True
        """Whether the record in the store may say that it fails: at first, that of an earlier process."""
        self._noted_at = -math.inf

    def begin(self, stop: Stop) -> None:
        """Run when it is woken, or was before, until `stop` is asked for. The pass that runs then ends by itself."""
        self._stop = stop
        if self.is_due:
            self.wake()

    def wake(self) -> None:
        self.is_due = True
        if self.task is None and self._may_begin():
            self.task = asyncio.create_task(self._run(), name=self.name)

    def wake_in(self, seconds: float) -> None:
        """Wake it after this time, instead of the one that was said last."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.wake) if seconds < math.inf else None

    def retry_now(self) -> None:
        """End a wait after a failure."""
        self._not_before = -math.inf
        self.wake()

    def _may_begin(self) -> bool:
        if self._stop is None or not self.is_due:
            return False
        self.is_due = monotonic() >= self._not_before
        return self.is_due and not self._stop.is_set()

    async def _run(self) -> None:
        try:
            while self._may_begin():
                self.is_due = False
                await self.attempt()
        finally:
            self.task = None

    async def attempt(self) -> None:
        """Run the action once, and note and log what came of it."""
        self.heartbeat.begin()
        try:
            result = await self._action()
            await self._succeeded(result if isinstance(result, Pass) else self._default)
        except Exception as error:
            lack = shortage_of(error)
            if isinstance(error, FlywheelError):
                await self._failed(error)
            elif lack is not None:
                await self._failed(FlywheelError(f"run {self.name}", *lack, retryable=True))
            else:
                log.exception("%s failed; this is a defect, please report it", self.name)
        finally:
            self.heartbeat.rest()

    async def _succeeded(self, result: Pass) -> None:
        if result is Pass.WAITING:
            return
        if self.error is not None:
            log.info("%s: recovered%s", self.name, "" if result is Pass.WORKED else ", as nothing is left to do")
        self.error, self._failures = None, 0
        is_news = result is Pass.WORKED and monotonic() - self._noted_at >= NOTED_SECONDS
        if self._may_fail or is_news:
            await self._note(result)
            self._may_fail, self._noted_at = False, monotonic()

    async def _failed(self, error: FlywheelError) -> None:
        # Each error is logged once, not at every attempt.
        if str(error) != str(self.error):
            log.error("%s: %s", self.name, error)
        self.error, self._may_fail = error, True
        self._failures += 1
        wait = error.retry_after
        if self._waits is not None:
            first, longest = self._waits
            # As an exponent, many failures would be too large a number.
            wait = max(wait, min(first * 2 ** min(self._failures - 1, 20), longest))
            self._not_before = monotonic() + wait
            self.wake_in(wait)
        await self._note(error, wait)

    async def _note(self, result: Pass | FlywheelError, wait: float = 0.0) -> None:
        if self._store is None:
            return
        try:
            await self._store.write(stages.note, self.name, result, wait)
        except StoreError as error:
            log.error("%s: %s", self.name, error)


async def in_turn(*steps: Callable[[], Awaitable[object]]) -> None:
    """The action of a stage of several steps: each is done, whatever the others raise. Raises the error of the step
    that failed, or a FlywheelError that has those of all. Where that is not possible, it logs the others."""
    failed: list[Exception] = []
    for step in steps:
        try:
            await step()
        except Exception as error:
            failed.append(error)
    # A defect first: it is logged with its traceback.
    failed.sort(key=lambda error: isinstance(error, FlywheelError))
    if len(failed) > 1 and isinstance(failed[0], FlywheelError):
        raise FlywheelError("do every step", " ".join(map(str, failed)))
    for other in failed[1:]:
        is_expected = isinstance(other, FlywheelError) or shortage_of(other) is not None
        log.error("%s", other, exc_info=None if is_expected else other)
    if failed:
        raise failed[0]


@asynccontextmanager
async def waiting_for(lock: asyncio.Lock) -> AsyncIterator[None]:
    """Hold a lock. The wait for another stage is no step of this one."""
    own = current_heartbeat()
    own.rest()
    async with lock:
        own.begin()
        yield


class Intervals(AsyncIOScheduler):  # type: ignore[misc]  # the package has no types
    """Wakes stages after times that have elapsed, and by the wall's clock only where a crontab says so.

    APScheduler knows the wall's clock alone: when that is set, the next times are moved with it, and `on_clock_set`
    is called.
    """

    def __init__(self, on_clock_set: Callable[[], object]) -> None:
        # A job that a busy loop delayed, such as a cron window, still runs, once. The usual executor runs it in a
        # thread, where a stage must not be woken; this one runs it in the loop.
        late = {"coalesce": True, "misfire_grace_time": None}
        super().__init__(timezone="UTC", job_defaults=late, executors={"default": DebugExecutor()})
        self._on_clock_set = on_clock_set
        self._moved = moved_seconds()

    def every(self, seconds: float, name: str, call: Callable[[], object]) -> None:
        self.add_job(call, "interval", seconds=seconds, id=name)

    def wake(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            if stage.every is not None:
                self.every(stage.every, stage.name, stage.wake)

    def at(self, trigger: BaseTrigger, name: str, call: Callable[[], object]) -> None:
        self.add_job(call, trigger, id=name)

    def _process_jobs(self) -> float | None:
        """Run what is due; the seconds until the next look, None after the end. The timers that call this are the
        loop's, which goes by the monotonic clock."""
        if not self.running:
            return None
        # Here, and not in `wakeup`, which has this called later: the clock could be set in between.
        by = moved_seconds() - self._moved
        if abs(by) > CLOCK_SECONDS:
            self._moved += by
            log.warning("the clock of this machine was set by %+.0f s", by)
            for job in self.get_jobs():
                if isinstance(job.trigger, IntervalTrigger):
                    job.modify(next_run_time=job.next_run_time + timedelta(seconds=by))
                elif by < 0:
                    job.reschedule(job.trigger)
            self._on_clock_set()
        wait = super()._process_jobs()
        return CLOCK_SECONDS if wait is None else min(wait, CLOCK_SECONDS)
