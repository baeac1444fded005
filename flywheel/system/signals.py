"""SIGINT and SIGTERM, and the end of work that they ask for: the daemon, a command or a round's worker ends in order,
commands and workers with the exit code of the signal."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

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


class StopReason(Enum):
    """Why work ends early."""

    SIGNAL = auto()
    FINISHED = auto()
    """Nobody needs more of it."""
    LOCK_LOST = auto()
    CANCELLED = auto()
    """This part of the work is of no use any more; the rest goes on."""


class Stop(threading.Event):
    """That work is to end: why, and until when it may finish what it has begun.

    Threads look at it as at any event. It is asked for in the event loop, where `asked` is awaited.
    """

    def __init__(self, drain_seconds: float = 0.0) -> None:
        super().__init__()
        self.reason: StopReason | None = None
        self.why = ""
        """The reason in words, where only this part of the work is cancelled."""
        self.deadline = math.inf
        """By the monotonic clock. What is not over by then is cancelled."""
        self.by: signal.Signals | None = None
        """The signal that asked for it."""
        self.detaches = False
        """Whether the worker of a round goes on."""
        self._drain_seconds = drain_seconds
        self._asked, self._hurried = asyncio.Event(), asyncio.Event()
        self._parts = WeakSet[Stop]()

    def ask(self, reason: StopReason, why: str = "") -> None:
        """Ask for the end of the work, and of all its parts. Only the first reason counts."""
        if self.reason is not None:
            return
        self.reason, self.why = reason, why
        self.deadline = time.monotonic() + self._drain_seconds + SLACK_SECONDS
        self.set()
        self._asked.set()
        for part in [*self._parts]:
            part.ask(reason, why)

    async def asked(self) -> None:
        """Wait until it is asked for."""
        await self._asked.wait()

    def part(self) -> Stop:
        """The stop of a part of the work, which is asked for with this one, or alone."""
        part = Stop(self._drain_seconds)
        self._parts.add(part)
        if self.reason is not None:
            part.ask(self.reason, self.why)
        return part

    def listen(self) -> None:
        """Let SIGINT and SIGTERM ask for it, and a second one hurry, until the loop is closed."""
        for number in SIGNALS:
            on_signal(asyncio.get_running_loop(), number, partial(self._hear, number))

    async def during(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, which looks at this stop; None when it had to be cancelled.

        Signals ask for the stop meanwhile. `work` may then go on until the deadline.
        """
        self.listen()
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self.asked())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if self.reason is not None:
                await self.drain(task)
            return None if task.cancelled() else await task
        finally:
            asked.cancel()
            task.cancel()
            for number in SIGNALS:
                use_default(number)

    async def drain(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait for the end of tasks, which are cancelled at the deadline."""
        ended = asyncio.gather(*tasks, return_exceptions=True)
        hurried = asyncio.create_task(self._hurried.wait())
        left = max(0.0, self.deadline - time.monotonic())
        await asyncio.wait((ended, hurried), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for task in tasks:
            task.cancel()
        await ended

    def error(self, attempted: str, hint: str) -> StoppedError:
        """The error of a command that a signal stopped, with its exit code."""
        assert self.by is not None
        error = StoppedError(attempted, f"{self.by.name} stopped it", hint)
        error.exit_code = 128 + self.by
        return error

    def _hear(self, number: signal.Signals) -> None:
        if self.reason is not None:
            log.warning("second signal: not waiting for calls in flight")
            self.deadline = time.monotonic()
            self._hurried.set()
            return
        self.by = number
        self.ask(StopReason.SIGNAL)
        log.info("stopping: waiting at most %g s for calls in flight; another signal ends that", self._drain_seconds)


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
    stop = Stop()
    if (outcome := await stop.during(work)) is None:
        raise stop.error(attempted, left)
    return outcome


async def unless_stopped(
    work: Callable[..., T | None], drain_seconds: float, attempted: str, left: str = "Nothing was stored."
) -> T:
    """The result of `work`, which runs in a thread and whose argument `stop` is set by a signal. After one, raises
    StoppedError, which says what is `left`."""
    stop = Stop(drain_seconds)
    outcome: T | None = None
    try:
        outcome = await stop.during(in_daemon_thread(partial(work, stop=stop)))
    except FlywheelError:
        # After a signal, errors of the stopped work do not matter.
        if stop.by is None:
            raise
    if stop.by is not None:
        raise stop.error(attempted, left)
    assert outcome is not None
    return outcome
