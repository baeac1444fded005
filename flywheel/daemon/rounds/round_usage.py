"""What a round uses of the judge: booked while its worker runs, and bounded by what the budgets still allow."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import Connection

from flywheel.config.judge import JudgeBudget, JudgeSettings
from flywheel.judge.usage import Allowance, Budget, UsageFile
from flywheel.store import judge_usage, notices
from flywheel.store.kernel.database import Store


def left(conn: Connection, limits: JudgeBudget, budget: Budget) -> Allowance | None:
    """The tokens that may still be used, and the reason once there are none; None without a limit.

    The usage of this run comes from `budget`, that of the day from the state.
    """
    rows: list[Allowance] = []
    if limits.tokens_per_day is not None:
        tokens = limits.tokens_per_day - judge_usage.tokens_today(conn)
        name = f"judge.budget.tokens_per_day ({limits.tokens_per_day:,})"
        rows.append(Allowance(tokens, f"{name} is spent; judging resumes at midnight UTC"))
    if (tokens_of_run := budget.run_left()) is not None:
        name = f"judge.budget.tokens_per_run ({limits.tokens_per_run:,})"
        rows.append(Allowance(tokens_of_run, f"{name} is spent; judging resumes with the next run"))
    return min(rows, key=lambda row: row.tokens, default=None)


class RoundUsage:
    """Books the judge usage of one round. Call `settle` repeatedly while the worker runs, and once after it."""

    def __init__(self, store: Store, budget: Budget, judge: JudgeSettings, round_id: int, round_dir: Path) -> None:
        self._store, self._budget, self._judge = store, budget, judge
        self._round_id, self._dir = round_id, round_dir
        self._size = -1
        self._booked: int | None = None
        self._allowance: Allowance | None = None

    async def settle(self) -> None:
        """Book new usage and write the new allowance."""
        if self._booked is None:
            self._booked = await self._store.read(judge_usage.booked_of_round, self._round_id, self._dir)
        if (size := await asyncio.to_thread(UsageFile(self._dir).size)) != self._size:
            found = await self._store.write(judge_usage.book_round, self._round_id, self._dir, self._judge.prices)
            tokens = sum(used.tokens for used in found)
            self._budget.book(tokens)
            self._booked += tokens
            self._size = size
        if (remaining := await self._store.read(left, self._judge.budget, self._budget)) is None:
            return
        allowance = Allowance(self._booked + max(0, remaining.tokens), remaining.why)
        if allowance != self._allowance:
            await asyncio.to_thread(allowance.write, self._dir)
        self._allowance = allowance

    async def note_pause(self, name: str, why: str) -> None:
        """Note why the round of this name waits for its judge, empty while it does not."""
        spent = self._allowance is not None and self._booked is not None and self._booked >= self._allowance.tokens
        await self._store.write(notices.note_pause, name, why, spent=spent)

    @property
    def used_up(self) -> str:
        """Why the budget of this run allows no further verdict; empty while it does."""
        if (tokens := self._budget.run_left()) is None or tokens > 0:
            return ""
        return f"judge.budget.tokens_per_run ({self._judge.budget.tokens_per_run:,}) is spent"
