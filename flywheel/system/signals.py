"""SIGINT and SIGTERM: a command or a round's worker ends in order, with the exit code of the signal.

The daemon handles its signals itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from flywheel.errors import FlywheelError, StoppedError

log = logging.getLogger(__name__)

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SLACK_SECONDS: Final = 2.0
"""Time to store what is finished when the drain time is over."""
POLL_SECONDS: Final = 0.5
"""Between two looks of a worker for signals."""


def on_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals, call: Callable[[], object]) -> None:
    """Call something in a loop of the main thread when a signal comes, until the loop is closed.

    `loop.add_signal_handler` loses a signal that comes while the pipe that wakes the loop is full, which happens on a
    busy machine.
    """

    def handle(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)
            return
        use_default(number)
        signal.raise_signal(number)

    signal.signal(number, handle)


def use_default(number: signal.Signals) -> None:
    """Let a signal interrupt or end the process, as it does where nobody handles it."""
    signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """The result of `work` in a thread that does not delay the end of the process.

    For judge calls: after a cancellation, a call in flight may take another minute.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    # Its steps beat for the stage that waits for it.
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="judging", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, also in a thread in which an event loop runs already, as it does in a notebook.

    What interrupts it, as a cell is interrupted, cancels `work` and waits for its end.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    loop, is_ready = asyncio.new_event_loop(), threading.Event()
    task = loop.create_task(work)

    async def outcome() -> T:
        return await task

    def run() -> T:
        # An interrupt while the thread is started would find nothing that it could cancel.
        is_ready.wait()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(outcome())

    with ThreadPoolExecutor(1, "flywheel-loop") as thread:
        try:
            ended = thread.submit(run)
            is_ready.set()
            return ended.result()
        except BaseException:
            if not is_ready.is_set():
                task.cancel()
                is_ready.set()
            elif not task.done():
                loop.call_soon_threadsafe(task.cancel)
            raise


@dataclass(eq=False, slots=True)
class StopSignals:
    """Handles SIGINT and SIGTERM while a coroutine runs. `by` is the signal that arrived, if one did."""

    drain_seconds: float
    by: signal.Signals | None = None
    _heard: asyncio.Event = field(default_factory=asyncio.Event)
    _again: asyncio.Event = field(default_factory=asyncio.Event)

    async def during(self, work: Coroutine[Any, Any, T], stop: Callable[[], Awaitable[object] | None]) -> T | None:
        """The result of `work`; None when it had to be cancelled.

        The first signal calls `stop`, which asks `work` to end, and waits for both: for `work` at most the drain
        time. A second signal cancels `work` at once. What `stop` returns is always awaited.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            on_signal(loop, number, partial(self._hear, number))
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
                use_default(number)

    def error(self, attempted: str, hint: str) -> StoppedError:
        """The error of a command that a signal stopped, with its exit code."""
        assert self.by is not None
        error = StoppedError(attempted, f"{self.by.name} stopped it", hint)
        error.exit_code = 128 + self.by
        return error

    def _hear(self, number: signal.Signals) -> None:
        if self._heard.is_set():
            log.warning("second signal: not waiting for calls in flight")
            self._again.set()
            return
        self.by = number
        self._heard.set()

    async def _end(self, task: asyncio.Task[T], stop: Callable[[], Awaitable[object] | None]) -> None:
        hurried = asyncio.create_task(self._again.wait())
        stopping = asyncio.ensure_future(stop() or asyncio.sleep(0))
        await asyncio.sleep(0)  # `stop` has begun before the log line
        log.info("stopping; send another signal to end without waiting for calls in flight")
        patience = self.drain_seconds + SLACK_SECONDS
        await asyncio.wait((task, hurried), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        await stopping
        task.cancel()
        await asyncio.wait((task,))


class Stopped(BaseException):
    """A signal asked the worker to stop. A BaseException, so that libraries do not handle it as an error."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name}")


_received: list[int] = []


def catch_signals() -> None:
    """Note SIGTERM and SIGINT for `check_stopped`. Called again after any library that installs handlers of its own.

    The handler does not raise: inside Ray's native code the exception would be replaced by another one.
    """
    for number in SIGNALS:
        signal.signal(number, lambda received, _: _received.append(received))


def check_stopped() -> None:
    """Raise Stopped after a signal. Waiting code waits in slices of POLL_SECONDS and calls this in between."""
    if _received:
        raise Stopped(_received[0])


async def unless_cancelled(work: Coroutine[Any, Any, T | None], attempted: str, left: str) -> T:
    """The result of `work`, which a signal cancels. After one, raises StoppedError, which says what is `left`."""
    interruption = StopSignals(drain_seconds=0)
    outcome = await interruption.during(work, lambda: None)
    if outcome is None:
        raise interruption.error(attempted, left)
    return outcome


async def unless_stopped(
    work: Callable[..., T | None], drain_seconds: float, attempted: str, left: str = "Nothing was stored."
) -> T:
    """The result of `work`, which runs in a thread and whose argument `stop` is set by a signal. After one, raises
    StoppedError, which says what is `left`."""
    stop = threading.Event()
    interruption = StopSignals(drain_seconds)
    outcome: T | None = None
    try:
        outcome = await interruption.during(in_daemon_thread(partial(work, stop=stop)), stop.set)
    except FlywheelError:
        # After a signal, errors of the stopped work do not matter.
        if interruption.by is None:
            raise
    if interruption.by is not None:
        raise interruption.error(attempted, left)
    assert outcome is not None
    return outcome
