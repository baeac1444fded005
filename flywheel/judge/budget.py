"""What judging may spend, in tokens, and whether there is any left."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

from flywheel.config import JudgeBudget
from flywheel.errors import JudgeError
from flywheel.files import private
from flywheel.judge_usage import Purpose, Used
from flywheel.verdict import Verdict

LOOK_SECONDS = 0.1
IN_FLIGHT_FILE: Final = "calls-in-flight"
_SLOT: Final = struct.Struct("<3q8x")
"""Day (ordinal), calls and prompt tokens. The size divides that of a page: a slot is written whole or not at all."""


class BudgetSpentError(JudgeError):
    """Judging pauses: what it may use is used up. It goes on by itself, or with the next run."""


def _nothing() -> int:
    return 0


def _now() -> datetime:
    return datetime.now(UTC)


class CallsInFlight:
    """The judge calls whose verdicts are not stored yet, in a file of the state directory. Thread-safe.

    Each call is counted before it is sent, in a slot of the thread that sends it. After a kill -9 the next process
    books what the file holds. The file is not flushed to disk: after a power failure the count can be lost.
    """

    def __init__(self, state_dir: Path) -> None:
        """The caller holds the instance lock."""
        self._path = state_dir / IN_FLIGHT_FILE
        self._file: int | None = None
        self._slots = 0
        self._free: list[int] = []
        self._thread = threading.local()
        self._changing = threading.Lock()

    def add(self, prompt_tokens: int) -> None:
        """Count one call that this thread is about to send, with its estimated tokens."""
        slot, calls, tokens = getattr(self._thread, "calls", None) or (self._new_slot(), 0, 0)
        self._write(slot, calls + 1, tokens + prompt_tokens)

    def forget(self) -> None:
        """The verdict of this thread is stored, with what its calls have used."""
        if counted := getattr(self._thread, "calls", None):
            self._write(counted[0], 0, 0)
            self._thread.calls = None
            self._free.append(counted[0])

    def _new_slot(self) -> int:
        with self._changing:
            if self._file is None:
                self._file = private(self._path, os.O_RDWR | os.O_CREAT)
            if self._free:
                return self._free.pop()
            self._slots += 1
            return self._slots - 1

    def _write(self, slot: int, calls: int, tokens: int) -> None:
        assert self._file is not None
        self._thread.calls = slot, calls, tokens
        os.pwrite(self._file, _SLOT.pack(_now().toordinal(), calls, tokens), slot * _SLOT.size)

    def read(self) -> list[Used]:
        """What a process that died has left in the file."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: len(content) - len(content) % _SLOT.size]
        return [
            Used(date.fromordinal(day).isoformat(), Purpose.FILTER, calls, tokens, 0)
            for day, calls, tokens in _SLOT.iter_unpack(whole)
            if calls
        ]

    def reset(self) -> None:
        """What `read` returned is booked."""
        self._path.unlink(missing_ok=True)


class Budget:
    """Tokens per day (UTC) and per run. Thread-safe.

    Room is only for verdicts that the judge is asked for: those that cost nothing need none. One in flight is
    counted as what they cost on average, so that many threads do not spend together what was left for one: the limit
    is passed by about one verdict. Before the first cost is known nobody can say what is in flight: then it is one,
    and one more for each that came back without telling.
    """

    def __init__(
        self,
        settings: JudgeBudget,
        spent_today: Callable[[], int] = _nothing,
        now: Callable[[], datetime] = _now,
    ) -> None:
        """`spent_today` tells what was used since midnight before this run; it is asked once, unless told again."""
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

    def look_again(self) -> None:
        """What others have spent today counts as well: it is asked anew. For when nothing is in flight."""
        with self._changed:
            self._day = None

    def left(self) -> int | None:
        """Tokens that may still be used, None without a limit."""
        with self._changed:
            self._roll_over()
            return min((limit - used for used, limit, _, _ in self._rows()), default=None)

    def run_left(self) -> int | None:
        """Those of this run alone; None without a limit."""
        limit = self._settings.tokens_per_run
        return None if limit is None else limit - self._run

    def book(self, tokens: int) -> None:
        """So many were used by others, who have stored it."""
        with self._changed:
            self._run += tokens
            # What was stored before the first look is asked for then.
            if self._day is not None:
                self._roll_over()
                self._today += tokens

    def check(self) -> None:
        """Raises BudgetSpentError if nothing is left."""
        if self.limits:
            with self._changed:
                self._raise_if_spent()

    def enter(self, stop: threading.Event | None = None) -> bool:
        """Take room for one verdict that is paid for, until `leave`; whether there was any. Raises BudgetSpentError.

        With `stop`, waits until it is known what is in flight has cost, while only that stands in the way.
        """
        if not self.limits:
            return True
        with self._changed:
            while not self._fits():
                self._raise_if_spent()
                if stop is None or stop.is_set():
                    return False
                self._changed.wait(LOOK_SECONDS)
            self._in_flight += 1
            return True

    def leave(self, verdict: Verdict | None) -> None:
        """Give the room back, and tell what the verdict has cost, if there is one."""
        if not self.limits:
            return
        with self._changed:
            self._in_flight -= 1
            if verdict is not None:
                self._add(verdict)
            self._changed.notify_all()

    @contextmanager
    def hold(self, stop: threading.Event) -> Iterator[Callable[[Verdict], None]]:
        """Room for one verdict that is paid for, to be told which; waits for it. Raises BudgetSpentError."""
        paid: list[Verdict] = []
        entered = self.enter(stop)
        try:
            yield paid.append
        finally:
            if entered:
                self.leave(paid[0] if paid else None)

    def _add(self, verdict: Verdict) -> None:
        self._roll_over()
        tokens = verdict.prompt_tokens + verdict.completion_tokens
        self._today += tokens
        self._run += tokens
        self._verdicts += bool(tokens)
        self._untold += not tokens

    def _fits(self) -> bool:
        self._roll_over()
        if not self._verdicts and self._in_flight > self._untold:
            return False
        each = self._run / self._verdicts if self._verdicts else 0.0
        return all(used + self._in_flight * each < limit for used, limit, _, _ in self._rows())

    def _raise_if_spent(self) -> None:
        self._roll_over()
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
