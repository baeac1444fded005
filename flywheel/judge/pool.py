"""Many exchanges at once: threads that take the next one when they are free, and never more in flight than asked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

from flywheel.errors import JudgeError
from flywheel.judge.grader import Grader
from flywheel.verdict import Exchange, Verdict

K = TypeVar("K")


def grade_all(
    grader: Grader, items: Iterable[tuple[K, Exchange]], max_thread: int, stop: threading.Event | None = None
) -> Iterator[tuple[K, Verdict]]:
    """Verdicts as they come, with the key of each exchange.

    `items` is consumed one at a time, by the thread that will grade it, and no more than `2 * max_thread` ahead of
    whoever reads the verdicts. When `stop` is set, what is in flight is still finished and yielded, except what the
    endpoint kept failing: that was not judged. Raises JudgeError after that: when the judge refuses us altogether,
    and when the endpoint failed `max_thread` times in a row (or every time) — what was not graded has cost nothing.
    """
    pool = _Pool(grader, iter(items), stop or threading.Event(), max_thread)
    threads = [threading.Thread(target=pool.work, name=f"judge-{n}", daemon=True) for n in range(max_thread)]
    for thread in threads:
        thread.start()
    try:
        yield from pool.results(len(threads))
    finally:
        pool.closed.set()
        pool.room.release(len(threads))
        for thread in threads:
            thread.join()
    if pool.error is not None:
        raise pool.error


class _Pool(Generic[K]):
    def __init__(
        self, grader: Grader, items: Iterator[tuple[K, Exchange]], stop: threading.Event, threads: int
    ) -> None:
        self._grader = grader
        self._items = items
        self._stop = stop
        self._taking = threading.Lock()
        self._done: SimpleQueue[tuple[K, Verdict] | None] = SimpleQueue()
        # What is in flight or waits to be read: a slow reader must not pile up verdicts that a crash would lose.
        self.room = threading.Semaphore(2 * threads)
        self.closed = threading.Event()
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            while (item := self._next()) is not None:
                key, exchange = item
                self._done.put((key, self._grader.grade(exchange, self._stop)))
        except BaseException as error:
            # The first error is the one to tell: the others are its echoes.
            self.error = self.error or error
            self.closed.set()
        finally:
            self._done.put(None)

    def _next(self) -> tuple[K, Exchange] | None:
        self.room.acquire()
        with self._taking:
            if self._stop.is_set() or self.closed.is_set():
                return None
            return next(self._items, None)

    def results(self, threads: int) -> Iterator[tuple[K, Verdict]]:
        streak = total = 0
        ended = 0
        last = ""
        while ended < threads:
            item = self._done.get()
            if item is None:
                ended += 1
                continue
            verdict = item[1]
            if verdict.unreachable and not verdict.calls and self._stop.is_set():
                self.room.release()
                continue
            total += 1
            if verdict.unreachable:
                streak, last = streak + 1, verdict.error
                if streak >= threads:
                    self.closed.set()
            else:
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
