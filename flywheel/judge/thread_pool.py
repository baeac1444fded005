"""Threads that grade many exchanges at once, within the budget and with a bounded number of calls in flight."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from flywheel.config.judge import JudgeBudget
from flywheel.errors import FlywheelError, JudgeError
from flywheel.judge.usage import Budget, CallsInFlight
from flywheel.records.verdict import Outcome, Verdict
from flywheel.system.shortage import shortage_of

log = logging.getLogger(__name__)

K = TypeVar("K")
R = TypeVar("R")
E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
P = TypeVar("P")

POLL_SECONDS = 0.2
"""How often a wait for a verdict checks whether to stop."""
MAX_BATCH = 32
"""Verdicts that are stored together. In larger batches all threads would wait for one long transaction."""
FAILURES_IN_ROW = 8
"""Exchanges in a row on which the endpoint must fail before grading ends; more with more threads."""
MAX_BROKEN = 50
"""Unexpected errors in a row after which grading ends: they do not come from the exchanges."""


class Asks(Protocol[E_contra, P]):
    """What the threads ask by, such as a `Grader`: the free part of a verdict, and the part that asks the judge."""

    @property
    def unusable(self) -> JudgeError | None: ...

    def begin(self, exchange: E_contra, earlier: Sequence[Verdict], /) -> Verdict | P: ...

    def finish(self, pending: P, stop: threading.Event, /) -> Verdict: ...


def grade_all(
    grader: Asks[E, P],
    items: Iterable[tuple[K, E]],
    max_thread: int,
    stop: threading.Event | None = None,
    *,
    budget: Budget | None = None,
    earlier: Callable[[K], Sequence[Verdict]] | None = None,
) -> Iterator[tuple[K, Verdict]]:
    """The verdicts of `grade_batches`, one by one."""
    with closing(grade_batches(grader, items, max_thread, stop, budget=budget, earlier=earlier)) as batches:
        for batch in batches:
            yield from batch


def grade_batches(
    grader: Asks[E, P],
    items: Iterable[tuple[K, E]],
    max_thread: int,
    stop: threading.Event | None = None,
    *,
    budget: Budget | None = None,
    drain_seconds: float | None = None,
    earlier: Callable[[K], Sequence[Verdict]] | None = None,
    calls: CallsInFlight | None = None,
) -> Generator[list[tuple[K, Verdict]], None, None]:
    """Verdicts in batches of those that are ready, each with the key of its exchange.

    A batch counts as stored when the next one is requested. A thread grades its next exchange only after its last
    verdict is stored, so calls in flight and verdicts that are not stored are `max_thread` at most, together. Then
    `calls` forgets the calls of the verdict. `earlier` returns the judge's earlier verdicts on an exchange.

    The grading threads consume `items`, one at a time, until the budget is spent. When `stop` is set, calls in flight
    are finished and their verdicts yielded, except calls that the endpoint kept failing and calls that take longer
    than `drain_seconds`.

    Raises JudgeError at the end: when the judge refuses every call, when the endpoint failed FAILURES_IN_ROW and
    `max_thread` times in a row (or every time), when the grader says that the judge is unusable, and when the budget
    is spent (BudgetSpentError). While it is unusable from the beginning, one thread asks it. An exchange that raises
    an unexpected error gets an undecided verdict with `defect` set; MAX_BROKEN of them in a row end the grading with
    a FlywheelError.
    """
    pool = _Pool(
        grader,
        iter(items),
        stop or threading.Event(),
        budget or Budget(JudgeBudget()),
        earlier or (lambda _: ()),
        calls,
        [SimpleQueue() for _ in range(max_thread)],
    )
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run, args=(pool.work, stored), name=f"judge-{n}", daemon=True
        )
        for n, stored in enumerate(pool.stored)
    ]
    for thread in threads:
        thread.start()
    try:
        yield from pool.batches(drain_seconds)
    finally:
        pool.closed.set()
        for stored in pool.stored:
            stored.put(False)
        for thread in threads:
            # A call that is in flight after the drain ends later, and its verdict is dropped.
            thread.join(0 if pool.drained else None)
    if pool.error is not None:
        raise pool.error


Finished = tuple[K, Verdict, SimpleQueue[bool]]


@dataclass(slots=True)
class _Pool(Generic[K, E, P]):
    grader: Asks[E, P]
    items: Iterator[tuple[K, E]]
    stop: threading.Event
    budget: Budget
    earlier: Callable[[K], Sequence[Verdict]]
    calls: CallsInFlight | None
    stored: list[SimpleQueue[bool]]
    """One per thread: gets True when the thread's verdict is stored, False when nobody will store it."""
    closed: threading.Event = field(default_factory=threading.Event)
    drained: bool = False
    error: BaseException | None = None
    _taking: threading.Lock = field(default_factory=threading.Lock)
    _exhausted: bool = False
    _done: SimpleQueue[Finished[K] | None] = field(default_factory=SimpleQueue)
    _drain_until: float = float("inf")

    def work(self, stored: SimpleQueue[bool]) -> None:
        try:
            if stored is not self.stored[0]:
                self._await_readable()
            while (found := self._next()) is not None:
                self._done.put((*found, stored))
                if not stored.get():
                    break
                if self.calls is not None:
                    self.calls.forget()
        except BaseException as error:
            # The first error is reported; those of other threads follow from it.
            self.error = self.error or error
            self.closed.set()
            if self.calls is not None:
                self.calls.forget()  # the judge refused them
        finally:
            self._done.put(None)

    def _await_readable(self) -> None:
        """Wait while the judge is unusable, until another thread got an answer that can be read."""
        while self.grader.unusable is not None and not (
            self._exhausted or self.stop.is_set() or self.closed.is_set()
        ):
            self.closed.wait(POLL_SECONDS)

    def _next(self) -> tuple[K, Verdict] | None:
        """The next verdict. None at the end. Raises BudgetSpentError."""
        # First, so that nothing is taken when nothing is left to spend.
        self.budget.check()
        with self._taking:
            is_over = self._exhausted or self.stop.is_set() or self.closed.is_set()
            item = None if is_over else next(self.items, None)
            self._exhausted = item is None
        if item is None:
            return None
        key, exchange = item
        begun = self._guard(self.grader.begin, exchange, self.earlier(key))
        if isinstance(begun, Verdict):
            return key, begun
        # Others may have spent it meanwhile: then the exchange stays as it is.
        self.budget.check()
        if self.stop.is_set() or self.closed.is_set():
            return None
        verdict = self._guard(self.grader.finish, begun, self.stop)
        self.budget.book(verdict.tokens)
        return key, verdict

    def _guard(self, step: Callable[..., R | Verdict], *arguments: Any) -> R | Verdict:
        """The result of a step, or an undecided verdict for an unexpected error in it. What this process lacks, such
        as file descriptors, ends the grading."""
        try:
            return step(*arguments)
        except FlywheelError:
            raise
        except Exception as error:
            if (lack := shortage_of(error)) is not None:
                # All others would meet it too.
                failure = JudgeError("continue judging", *lack, retryable=True)
                self.error = self.error or failure
                self.closed.set()
                return Verdict(Outcome.UNDECIDED, None, error=str(failure), unreachable=True)
            log.exception("grading broke")
            message = f"grading broke on it: {type(error).__name__}: {error}. This is a defect; please report it."
            return Verdict(Outcome.UNDECIDED, None, error=message, broken=True, defect=True)

    def batches(self, drain_seconds: float | None) -> Iterator[list[tuple[K, Verdict]]]:
        running = len(self.stored)
        most = max(running, FAILURES_IN_ROW)
        # Exchanges that the judge was asked about; of the last ones in a row, how many were unreachable, or broken.
        asked = streak = broken = 0
        last_error = ""
        while running:
            ready = self._ready(drain_seconds)
            if not ready and self.drained:
                return
            running -= ready.count(None)
            finished = [item for item in ready if item is not None]
            batch = []
            for key, verdict, _ in finished:
                if verdict.unreachable and not verdict.calls and self.stop.is_set():
                    continue  # the stop ended its attempts
                batch.append((key, verdict))
                broken = broken + 1 if verdict.defect else 0
                if broken == MAX_BROKEN:
                    self.closed.set()
                    self.error = self.error or FlywheelError(
                        "continue judging", f"{broken} times in a row {verdict.error}"
                    )
                # A free verdict says nothing about the endpoint.
                if verdict.unreachable or verdict.calls:
                    asked += 1
                    streak = streak + 1 if verdict.unreachable else 0
                    last_error = verdict.error or last_error
                    unusable = self.grader.unusable
                    if streak >= most or (streak and unusable is not None):
                        self.closed.set()
                    if verdict.is_failed_attempt and unusable is not None:
                        self.closed.set()
                        self.error = self.error or unusable
            if batch:
                yield batch
            for _, _, stored in finished:
                stored.put(True)
        if self.error is None and streak and (streak >= most or streak == asked):
            self.error = JudgeError(
                "continue judging",
                f"the judge failed {streak} times in a row; the last error: {last_error}",
                "Tasks that were not judged stay due.",
                retryable=True,
            )

    def _ready(self, drain_seconds: float | None) -> list[Finished[K] | None]:
        """What is finished, after a wait for the first; empty after POLL_SECONDS without any.

        Sets `drained` when the time after a stop is over.
        """
        wait = POLL_SECONDS
        if drain_seconds is not None and self.stop.is_set():
            now = time.monotonic()
            self._drain_until = min(self._drain_until, now + drain_seconds)
            self.drained = now >= self._drain_until
            wait = max(0.0, min(wait, self._drain_until - now))
        ready = []
        with suppress(Empty):
            ready.append(self._done.get(timeout=wait))
            while len(ready) < MAX_BATCH:
                ready.append(self._done.get_nowait())
        return ready
