"""Interruption: a command that a signal asks to stop ends in order, and says so with its exit code.

Only for commands that end by themselves; the daemon has an end of its own.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from flywheel.errors import StoppedError

log = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SLACK_SECONDS: Final = 2.0
"""What is ready when the time to drain is over is still stored."""


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns, in a thread that nobody waits for once this is cancelled, not even the end of the program.

    For calls of the judge: one that was given up may take a minute.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if outcome.done():
            return  # it was given up
        if error is None:
            outcome.set_result(result)  # type: ignore[arg-type]
        else:
            outcome.set_exception(error)

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await outcome


class StopSignals:
    """Listens for SIGINT and SIGTERM while something is done. `by` is the signal that came, if one did."""

    def __init__(self, drain_seconds: float) -> None:
        self.by: signal.Signals | None = None
        self._patience = drain_seconds + SLACK_SECONDS
        self._heard = asyncio.Event()
        self._again = asyncio.Event()

    async def during(self, work: Coroutine[Any, Any, T], stop: Callable[[], Awaitable[object]]) -> T | None:
        """What `work` returns; None when it had to be cancelled.

        The first signal calls `stop`, which asks `work` to end, and waits for both: for `work` no longer than to
        drain. A second signal does not wait for `work`. What `stop` ends itself is always waited for.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._hear, number)
        task = asyncio.create_task(work)
        listening = asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
            if self._heard.is_set():
                await self._end(task, stop)
            return None if task.cancelled() else await task
        finally:
            listening.cancel()
            task.cancel()
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def error(self, attempted: str, hint: str) -> StoppedError:
        """How a command ends that was stopped."""
        assert self.by is not None
        error = StoppedError(attempted, f"{self.by.name} stopped it", hint)
        error.exit_code = 128 + self.by
        return error

    def _hear(self, number: signal.Signals) -> None:
        if self._heard.is_set():
            log.warning("second signal: not waiting for what is in flight")
            self._again.set()
            return
        self.by = number
        self._heard.set()

    async def _end(self, task: asyncio.Task[T], stop: Callable[[], Awaitable[object]]) -> None:
        hurried = asyncio.create_task(self._again.wait())
        stopping = asyncio.ensure_future(stop())
        await asyncio.sleep(0)  # it has begun when it is told
        log.info("stopping; another signal does not wait for what is in flight")
        await asyncio.wait((task, hurried), timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        await stopping
        task.cancel()
        await asyncio.wait((task,))


LOOK_SECONDS = 0.1
"""How soon a wait notices the other event."""


class LinkedEvent(threading.Event):
    """Set by this run for itself, or by the caller for all runs: the caller's event is only looked at."""

    def __init__(self, outer: threading.Event | None) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or (self._outer is not None and self._outer.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Event.wait`; the caller's event ends it too, within LOOK_SECONDS."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            super().wait(min(left, LOOK_SECONDS))
        return self.is_set()
