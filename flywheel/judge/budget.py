"""Token budgets of judging: what may be used per day and per run, and how much is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime

from flywheel.config import JudgeBudget
from flywheel.errors import EXIT_FAILED, JudgeError
from flywheel.records.verdict import Verdict

POLL_SECONDS = 0.1


class BudgetSpentError(JudgeError):
    """The budget is spent. Judging resumes automatically, or with the next run."""

    exit_code = EXIT_FAILED


class Budget:
    """Tokens per day (UTC) and per run. Thread-safe.

    Each verdict that needs a judge call reserves its share first; free verdicts reserve nothing. A verdict in flight
    counts as the average cost, so many threads do not spend together what was left for one: the limit is exceeded by
    about one verdict. While no cost is known, one verdict may be in flight, and one more for each that finished
    without reported usage. `limits` tells whether there is any limit.
    """

    def __init__(
        self,
        settings: JudgeBudget,
        spent_today: Callable[[], int] = lambda: 0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`spent_today` returns the tokens used since midnight before this run. It is read at the first use."""
        self.limits = settings.tokens_per_day is not None or settings.tokens_per_run is not None
        self._settings = settings
        self._spent_today = spent_today
        self._now = now
        self._day: date | None = None
        self._today = self._run = 0
        self._costly = self._free = self._in_flight = 0
        self._changed = threading.Condition()

    def refresh(self) -> None:
        """Read `spent_today` again, for what other processes used. To be called while nothing is in flight."""
        with self._changed:
            self._day = None

    def left(self) -> int | None:
        """The tokens that are left; None without a limit."""
        with self._changed:
            return min((limit - used for used, limit, _, _ in self._limits()), default=None)

    def run_left(self) -> int | None:
        """The tokens that are left of the run's limit; None without one."""
        limit = self._settings.tokens_per_run
        return None if limit is None else limit - self._run

    def book(self, tokens: int) -> None:
        """Add tokens that others used and stored."""
        with self._changed:
            self._run += tokens
            if self._day is not None:  # else `spent_today` will include them
                self._roll_over()
                self._today += tokens

    def check(self) -> None:
        """Raises BudgetSpentError if nothing is left."""
        if not self.limits:
            return
        with self._changed:
            for used, limit, period, resumption in self._limits():
                if used >= limit:
                    raise BudgetSpentError(
                        "continue judging",
                        f"the budget of {limit:,} tokens a {period} is spent ({used:,} were used)",
                        f"Judging resumes {resumption}; unjudged tasks stay pending. "
                        f"judge.budget.tokens_per_{period} sets the limit.",
                        retryable=True,
                    )

    def reserve(self, stop: threading.Event | None = None) -> bool:
        """Reserve the average cost for one verdict until `release`. Returns whether the budget has room for it.

        With `stop`, waits for verdicts in flight while their costs are all that prevents it. Raises BudgetSpentError.
        """
        if not self.limits:
            return True
        with self._changed:
            while not self._has_room():
                self.check()
                if stop is None or stop.is_set():
                    return False
                self._changed.wait(POLL_SECONDS)
            self._in_flight += 1
            return True

    def release(self, verdict: Verdict | None) -> None:
        """End a reservation, with the verdict's cost if there is one."""
        if not self.limits:
            return
        with self._changed:
            self._in_flight -= 1
            if verdict is not None:
                self._roll_over()
                tokens = verdict.prompt_tokens + verdict.completion_tokens
                self._today += tokens
                self._run += tokens
                self._costly += bool(tokens)
                self._free += not tokens
            self._changed.notify_all()

    @contextmanager
    def hold(self, stop: threading.Event) -> Iterator[Callable[[Verdict], None]]:
        """Reserve for one verdict, which is passed to the yielded function. Waits; raises BudgetSpentError."""
        paid: list[Verdict] = []
        reserved = self.reserve(stop)
        try:
            yield paid.append
        finally:
            if reserved:
                self.release(paid[0] if paid else None)

    def _has_room(self) -> bool:
        limits = list(self._limits())
        if not self._costly and self._in_flight > self._free:
            return False
        average = self._run / self._costly if self._costly else 0.0
        return all(used + self._in_flight * average < limit for used, limit, _, _ in limits)

    def _limits(self) -> Iterator[tuple[int, int, str, str]]:
        """For each limit: tokens used, limit, period, and when judging resumes after it is reached."""
        self._roll_over()
        if self._settings.tokens_per_day is not None:
            yield self._today, self._settings.tokens_per_day, "day", "at midnight UTC"
        if self._settings.tokens_per_run is not None:
            yield self._run, self._settings.tokens_per_run, "run", "with the next run"

    def _roll_over(self) -> None:
        today = self._now().date()
        if self._day is None:
            self._today = self._spent_today()
        elif today != self._day:
            self._today = 0
        self._day = today
