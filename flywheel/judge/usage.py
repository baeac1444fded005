"""Use of the judge: calls and tokens, the budgets that limit them, and files for what is not in the store yet.

The worker appends a line to `usage.jsonl` for every verdict that it paid for, before anything else sees the verdict.
The daemon books each line once, and writes to `allowance.json` how much the worker may use. `calls-in-flight` holds
the calls of tasks whose verdicts are not stored yet: a kill -9 must not lose what they used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Final

from flywheel.config.judge import JudgeBudget
from flywheel.errors import EXIT_FAILED, JudgeError
from flywheel.system.files import PRIVATE, append_jsonl, cut_torn_line, private, write_json

log = logging.getLogger(__name__)

USAGE_FILE: Final = "usage.jsonl"
ALLOWANCE_FILE: Final = "allowance.json"
IN_FLIGHT_FILE: Final = "calls-in-flight"
_SLOT: Final = struct.Struct("<3q8x")
"""Day (ordinal), calls and prompt tokens. The size divides that of a page: a slot is written whole or not at all."""
MOST_STEP: Final = timedelta(hours=24)
"""A clock that steps back by less than this stays in the later day."""


class Purpose(StrEnum):
    FILTER = "filter"
    ROUNDS = "rounds"
    GATES = "gates"
    CALIBRATION = "calibration"
    DOCUMENTS = "documents"


@dataclass(frozen=True, slots=True)
class Used:
    """Calls and tokens, with the day (UTC) of the calls."""

    day: str
    purpose: Purpose
    calls: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class BudgetClock:
    """The day (UTC) whose budget counts. Thread-safe.

    A clock that is set back over midnight, as by NTP, does not give the budget of a day twice. One that steps back
    by 24 hours or more was wrong before: it starts its own day, with a warning.
    """

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._latest: datetime | None = None
        self._warned_of: date | None = None
        self._lock = threading.Lock()

    def today(self, booked: str | None = None) -> str:
        """`booked` is the last day with stored usage, perhaps of a process that ended before the clock was set."""
        with self._lock:
            now = latest = self._now()
            of_store = datetime.fromisoformat(booked).replace(tzinfo=UTC) if booked else None
            for seen in filter(None, (self._latest, of_store)):
                if seen - now < MOST_STEP:
                    latest = max(latest, seen)
                elif seen.date() != self._warned_of:
                    self._warned_of = seen.date()
                    log.warning(
                        "the clock stepped back from %s to %s: the judge's budget is that of the earlier day",
                        *(seen.date(), now.date()),
                    )
            self._latest = latest
            return latest.date().isoformat()

    def seconds_left(self) -> float:
        """Until the next day begins."""
        day = datetime.fromisoformat(self.today()).replace(tzinfo=UTC)
        return (day + timedelta(days=1) - self._now()).total_seconds()

    def day_of(self, day: str) -> str:
        """The day in which usage counts that another process dated by its own clock."""
        return self.today() if day == self._now().date().isoformat() else day


CLOCK: Final = BudgetClock()


def today() -> str:
    return CLOCK.today()


class UsageFile:
    """The usage file of one round. All attempts of the round append to it."""

    def __init__(self, round_dir: Path) -> None:
        self.path = round_dir / USAGE_FILE

    def append(self, used: Used) -> None:
        append_jsonl(self.path, [asdict(used)])

    def mend(self) -> None:
        """Remove the incomplete last line of a worker that was killed while it wrote."""
        cut_torn_line(self.path)

    def size(self) -> int:
        """In bytes."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read(self, begin: int, end: int = -1) -> tuple[list[Used], int]:
        """The complete lines from byte `begin` to `end` (by default, to the end of the file), and where they end."""
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                lines, newline, _ = file.read(end - begin if end >= 0 else -1).rpartition(b"\n")
        except FileNotFoundError:
            return [], begin
        found = []
        for line in lines.splitlines():
            # Other lines are not by a worker.
            with contextlib.suppress(ValueError, TypeError):
                stored = json.loads(line)
                found.append(Used(**{**stored, "purpose": Purpose(stored["purpose"])}))
        return found, begin + len(lines) + len(newline)


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many tokens the round's `usage.jsonl` may hold before its worker has to wait, and why no more."""

    tokens: int
    why: str

    def write(self, round_dir: Path) -> None:
        write_json(round_dir / ALLOWANCE_FILE, asdict(self), mode=PRIVATE)

    @classmethod
    def read(cls, round_dir: Path) -> Allowance | None:
        """None without a readable file."""
        try:
            stored = json.loads((round_dir / ALLOWANCE_FILE).read_bytes())
            return cls(int(stored["tokens"]), str(stored["why"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass(eq=False, slots=True)
class CallsInFlight:
    """The judge calls whose verdicts are not stored yet, in a file of the state directory. Thread-safe.

    Each call is counted before it is sent, in a slot of the thread that sends it. After a kill -9 the next process
    books what the file holds. The file is not flushed to disk: after a power failure the count can be lost.
    """

    state_dir: Path
    """The caller holds its instance lock."""
    _file: int | None = None
    _counted: dict[threading.Thread, tuple[int, int, int]] = field(default_factory=dict)
    """By thread: slot, calls, prompt tokens."""
    _free_slots: list[int] = field(default_factory=list)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def add(self, prompt_tokens: int) -> None:
        """Count one call that this thread is about to send, with its estimated tokens."""
        thread = threading.current_thread()
        with self._changing:
            if self._file is None:
                self._file = private(self.state_dir / IN_FLIGHT_FILE, os.O_RDWR | os.O_CREAT)
            if thread not in self._counted:
                self._counted[thread] = self._free_slots.pop() if self._free_slots else len(self._counted), 0, 0
            slot, calls, tokens = self._counted[thread]
            self._counted[thread] = slot, calls + 1, tokens + prompt_tokens
            content = _SLOT.pack(datetime.now(UTC).toordinal(), calls + 1, tokens + prompt_tokens)
            os.pwrite(self._file, content, slot * _SLOT.size)

    def forget(self) -> None:
        """Take back what this thread has counted: its verdict is stored, with the usage of its calls."""
        with self._changing:
            counted = self._counted.pop(threading.current_thread(), None)
            if counted is not None and self._file is not None:
                os.pwrite(self._file, bytes(_SLOT.size), counted[0] * _SLOT.size)
                self._free_slots.append(counted[0])

    def read(self) -> list[Used]:
        """The calls that a process which died left in the file."""
        try:
            content = (self.state_dir / IN_FLIGHT_FILE).read_bytes()
        except FileNotFoundError:
            return []
        whole = content[: len(content) - len(content) % _SLOT.size]
        return [
            Used(date.fromordinal(day).isoformat(), Purpose.FILTER, calls, tokens, 0)
            for day, calls, tokens in _SLOT.iter_unpack(whole)
            if calls
        ]

    def reset(self) -> None:
        """Remove the file, after what `read` returned is booked."""
        (self.state_dir / IN_FLIGHT_FILE).unlink(missing_ok=True)


class BudgetSpentError(JudgeError):
    """The budget is spent. Judging resumes automatically, or with the next run."""

    exit_code = EXIT_FAILED


class Budget:
    """Tokens per day (UTC) and per run. Thread-safe.

    Who pays for a verdict calls `check` before its first call and `book` after its last. Verdicts that have begun are
    finished: a limit can be exceeded by one verdict of each thread. `limits` tells whether there is any limit.
    """

    def __init__(
        self,
        settings: JudgeBudget,
        spent_today: Callable[[], int] = lambda: 0,
        clock: BudgetClock = CLOCK,
    ) -> None:
        """`spent_today` returns the tokens used since midnight before this run. It is read at the first use."""
        self.limits = settings.tokens_per_day is not None or settings.tokens_per_run is not None
        self._settings = settings
        self._spent_today = spent_today
        self._clock = clock
        self._day: str | None = None
        self._today = self._run = 0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read `spent_today` again, for what other processes used. To be called while nothing is in flight."""
        with self._lock:
            self._day = None

    def left(self) -> int | None:
        """The tokens that are left; None without a limit."""
        with self._lock:
            return min((limit - used for used, limit, _, _ in self._limits()), default=None)

    def run_left(self) -> int | None:
        """The tokens that are left of the run's limit; None without one."""
        limit = self._settings.tokens_per_run
        return None if limit is None else limit - self._run

    def book(self, tokens: int) -> None:
        """Add tokens of a verdict, or that others used and stored."""
        if not self.limits:
            return
        with self._lock:
            self._run += tokens
            if self._day is not None:  # else `spent_today` will include them
                self._roll_over()
                self._today += tokens

    def check(self) -> None:
        """Raises BudgetSpentError if nothing is left."""
        if not self.limits:
            return
        with self._lock:
            for used, limit, period, resumption in self._limits():
                if used >= limit:
                    error = BudgetSpentError(
                        "continue judging",
                        f"the budget of {limit:,} tokens a {period} is spent ({used:,} were used)",
                        f"Judging resumes {resumption}; unjudged tasks stay pending. "
                        f"judge.budget.tokens_per_{period} sets the limit.",
                        retryable=True,
                    )
                    error.retry_after = self._clock.seconds_left() if period == "day" else math.inf
                    raise error

    def _limits(self) -> Iterator[tuple[int, int, str, str]]:
        """For each limit: tokens used, limit, period, and when judging resumes after it is reached."""
        self._roll_over()
        if self._settings.tokens_per_day is not None:
            yield self._today, self._settings.tokens_per_day, "day", "at midnight UTC"
        if self._settings.tokens_per_run is not None:
            yield self._run, self._settings.tokens_per_run, "run", "with the next run"

    def _roll_over(self) -> None:
        today = self._clock.today()
        if self._day is None or today < self._day:
            self._today = self._spent_today()
            today = self._clock.today()  # what is stored may be of a later day
        elif today != self._day:
            self._today = 0
        self._day = today
