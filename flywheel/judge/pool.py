"""Many exchanges at once: threads that take the next one when they are free, and never more in flight than asked."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, ParamSpec, TypeVar

from flywheel.config import JudgeBudget
from flywheel.errors import FlywheelError, JudgeError
from flywheel.judge.budget import Budget
from flywheel.judge.grader import Grader, PendingJudgeCall
from flywheel.verdict import Exchange, Outcome, Verdict

log = logging.getLogger(__name__)

K = TypeVar("K")
R = TypeVar("R")
P = ParamSpec("P")

LOOK_SECONDS = 0.2
"""How often somebody who waits for a verdict looks whether to stop."""
MOST_ASIDE = 256
"""Exchanges that wait for room in the budget while others are decided for nothing."""
BROKEN_IN_A_ROW = 50
"""Exchanges on which grading breaks one after the other, before it is no matter of the exchanges."""


def grade_all(
    grader: Grader,
    items: Iterable[tuple[K, Exchange]],
    max_thread: int,
    stop: threading.Event | None = None,
    *,
    budget: Budget | None = None,
    drain_seconds: float | None = None,
    earlier: Callable[[K], Sequence[Verdict]] | None = None,
) -> Iterator[tuple[K, Verdict]]:
    """Verdicts as they come, with the key of each exchange; `earlier` tells what the judge said of it before.

    `items` is consumed one at a time, by the threads that grade, and no more than `2 * max_thread` ahead of whoever
    reads the verdicts, beside up to MOST_ASIDE that wait for room in the budget. When `stop` is set, what is in
    flight is still finished and yielded, except what the endpoint kept failing and what takes longer than
    `drain_seconds`: that was not judged. Raises JudgeError after that: when the judge refuses us altogether, when the
    endpoint failed `max_thread` times in a row (or every time), and when the budget is spent (BudgetSpentError) —
    what was not graded has cost nothing. An exchange on which grading breaks has a verdict that says so, and stops no
    other; BROKEN_IN_A_ROW of them end the batch.
    """
    pool = _Pool(grader, iter(items), stop or threading.Event(), max_thread, budget or Budget(JudgeBudget()), earlier)
    threads = [threading.Thread(target=pool.work, name=f"judge-{n}", daemon=True) for n in range(max_thread)]
    for thread in threads:
        thread.start()
    try:
        yield from pool.results(len(threads), drain_seconds)
    finally:
        pool.closed.set()
        pool.room.release(len(threads))
        for thread in threads:
            # One that is still in flight after the drain ends with its call; it is nobody's any more.
            thread.join(0 if pool.drained else None)
    if pool.error is not None:
        raise pool.error


class _Pool(Generic[K]):
    def __init__(
        self,
        grader: Grader,
        items: Iterator[tuple[K, Exchange]],
        stop: threading.Event,
        threads: int,
        budget: Budget,
        earlier: Callable[[K], Sequence[Verdict]] | None,
    ) -> None:
        self._grader = grader
        self._items = items
        self._stop = stop
        self._budget = budget
        self._earlier = earlier or (lambda _: ())
        self._taking = threading.Lock()
        self._exhausted = False
        self._aside: deque[tuple[K, PendingJudgeCall]] = deque()
        self._done: SimpleQueue[tuple[K, Verdict] | None] = SimpleQueue()
        # What is in flight or waits to be read: a slow reader must not pile up verdicts that a crash would lose.
        self.room = threading.Semaphore(2 * threads)
        self.closed = threading.Event()
        self.drained = False
        self._drain_until = float("inf")
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            while self._grade_next():
                pass
        except BaseException as error:
            # The first error is the one to tell: the others are its echoes.
            self.error = self.error or error
            self.closed.set()
        finally:
            self._done.put(None)

    def _grade_next(self) -> bool:
        """Whether there was one."""
        self.room.acquire()
        found = self._next()
        if found is None:
            return False
        key, begun = found
        self._done.put((key, self._paid(begun) if isinstance(begun, PendingJudgeCall) else begun))
        return True

    def _next(self) -> tuple[K, Verdict | PendingJudgeCall] | None:
        """One that is decided for nothing, or one to ask about with room in the budget for it.

        While there is no room, what has to be asked about is put aside, so that what costs nothing goes past it.
        """
        while not (self._stop.is_set() or self.closed.is_set()):
            may_take = not self._exhausted and len(self._aside) < MOST_ASIDE
            if (asking := self._affordable(None if may_take else self._stop)) is not None:
                return asking
            if may_take and (item := self._take()) is not None:
                key, exchange = item
                begun = self._unbroken(self._grader.begin, exchange, self._earlier(key))
                if not isinstance(begun, PendingJudgeCall):
                    return key, begun
                self._aside.append((key, begun))
            elif self._exhausted and not self._aside:
                break
        return None

    def _affordable(self, stop: threading.Event | None) -> tuple[K, PendingJudgeCall] | None:
        """The first that was put aside, if there is room for it in the budget; with `stop`, waits for that."""
        if not self._aside or not self._budget.enter(stop):
            return None
        try:
            return self._aside.popleft()
        except IndexError:  # another thread was faster
            self._budget.leave(None)
            return None

    def _take(self) -> tuple[K, Exchange] | None:
        # Before anything is taken: when nothing is left to spend, nothing is even looked at.
        self._budget.check()
        with self._taking:
            item = None if self._stop.is_set() or self.closed.is_set() else next(self._items, None)
            self._exhausted = item is None
            return item

    def _paid(self, asking: PendingJudgeCall) -> Verdict:
        """The judge's verdict; gives the room for it back."""
        verdict = None
        try:
            verdict = self._unbroken(self._grader.finish, asking, self._stop)
        finally:
            self._budget.leave(verdict)
        return verdict

    def _unbroken(self, step: Callable[P, R | Verdict], *given: P.args, **named: P.kwargs) -> R | Verdict:
        try:
            return step(*given, **named)
        except FlywheelError:
            raise
        except Exception as error:
            log.exception("grading broke")
            said = f"grading broke on it: {type(error).__name__}: {error}. This is a defect; please report it."
            return Verdict(Outcome.UNDECIDED, None, error=said, broken=True)

    def results(self, threads: int, drain_seconds: float | None) -> Iterator[tuple[K, Verdict]]:
        streak = total = broken = 0
        ended = 0
        last = ""
        while ended < threads:
            try:
                item = self._done.get(timeout=self._patience(drain_seconds))
            except Empty:
                if self.drained:
                    return
                continue
            if item is None:
                ended += 1
                continue
            verdict = item[1]
            if verdict.unreachable and not verdict.calls and self._stop.is_set():
                self.room.release()
                continue
            broken = broken + 1 if verdict.broken else 0
            if broken == BROKEN_IN_A_ROW:
                self.closed.set()
                self.error = self.error or JudgeError("go on judging", f"{broken} times in a row {verdict.error}")
            # What the checks decided says nothing about the endpoint.
            total += verdict.unreachable or verdict.calls > 0
            if verdict.unreachable:
                streak, last = streak + 1, verdict.error
                if streak >= threads:
                    self.closed.set()
            elif verdict.calls:
                streak = 0
            yield item
            self.room.release()
        if self.error is None and streak and (streak >= threads or streak == total):
            self.error = JudgeError(
                "go on judging",
                f"the judge failed {streak} times in a row, last so: {last}",
                "What was not judged stays pending and is asked when the judge is back.",
                retryable=True,
            )

    def _patience(self, drain_seconds: float | None) -> float:
        """How long to wait for a verdict before looking around; sets `drained` when it is over."""
        if drain_seconds is None or not self._stop.is_set():
            return LOOK_SECONDS
        now = time.monotonic()
        self._drain_until = min(self._drain_until, now + drain_seconds)
        self.drained = now >= self._drain_until
        return max(0.0, min(LOOK_SECONDS, self._drain_until - now))
