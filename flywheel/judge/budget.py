"""What judging may spend, in tokens, and whether there is any left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime

from flywheel.config import JudgeBudget
from flywheel.errors import JudgeError
from flywheel.verdict import Verdict

LOOK_SECONDS = 0.1


class BudgetSpentError(JudgeError):
    """Judging pauses: what it may use is used up. It goes on by itself, or with the next run."""


def _nothing() -> int:
    return 0


def _now() -> datetime:
    return datetime.now(UTC)


class Budget:
    """Tokens per day (UTC) and per run. Thread-safe.

    A verdict in flight is counted as what verdicts cost on average, so that many threads do not spend together what
    was left for one: the limit is passed by about one verdict. Before the first cost is known nobody can say what is
    in flight: then it is one, and one more for each that came back without telling.
    """

    def __init__(
        self,
        settings: JudgeBudget,
        spent_today: Callable[[], int] = _nothing,
        now: Callable[[], datetime] = _now,
    ) -> None:
        """`spent_today` tells what was used since midnight before this run; it is asked once."""
        self._settings = settings
        self._spent_today = spent_today
        self._now = now
        self._day: date | None = None
        self._today = self._run = 0
        self._verdicts = self._in_flight = self._untold = 0
        self._changed = threading.Condition()

    @property
    def limits(self) -> bool:
        return self._settings.tokens_per_day is not None or self._settings.tokens_per_run is not None

    @contextmanager
    def hold(self, stop: threading.Event) -> Iterator[Callable[[Verdict], None]]:
        """Room for one verdict, to be told what it cost. Raises BudgetSpentError.

        While only what is in flight stands in the way, waits until it is known what that cost.
        """
        if not self.limits:
            yield lambda _: None
            return
        with self._changed:
            while not self._fits() and self._in_flight and not stop.is_set():
                self._changed.wait(LOOK_SECONDS)
            self._raise_if_spent()
            self._in_flight += 1
        try:
            yield self._add
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def _add(self, verdict: Verdict) -> None:
        with self._changed:
            self._roll_over()
            tokens = verdict.prompt_tokens + verdict.completion_tokens
            self._today += tokens
            self._run += tokens
            self._verdicts += bool(tokens)
            # The judge was away, or does not tell; what the checks decided says nothing.
            self._untold += not tokens and (verdict.unreachable or verdict.calls > 0)

    def _fits(self) -> bool:
        self._roll_over()
        if not self._verdicts and self._in_flight > self._untold:
            return False
        each = self._run / self._verdicts if self._verdicts else 0.0
        return all(used + self._in_flight * each < limit for used, limit, _, _ in self._rows())

    def _raise_if_spent(self) -> None:
        for used, limit, of, again in self._rows():
            if used >= limit:
                raise BudgetSpentError(
                    "go on judging",
                    f"the budget of {limit:,} tokens a {of} is spent ({used:,} were used)",
                    f"It goes on {again}; what was not judged stays pending. judge.budget.tokens_per_{of} sets it.",
                    retryable=True,
                )

    def _rows(self) -> Iterator[tuple[int, int, str, str]]:
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
