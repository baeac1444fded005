"""Grades rollouts: within the allowance of the daemon, with every call's usage recorded, and paused while the judge
is unreachable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flywheel.config.file import Config
from flywheel.config.judge import JudgeBudget
from flywheel.config.training import AgentProgramSettings
from flywheel.judge.grader import Grader, Plan
from flywheel.judge.rubric.rubric import Rubric
from flywheel.judge.usage import Allowance, Budget, BudgetSpentError, Purpose, UsageFile, Used, today
from flywheel.records.round import RoundSpec
from flywheel.records.verdict import Exchange, Verdict

if TYPE_CHECKING:
    from flywheel.training.optim.collector import Grade

FIRST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 30.0
"""Wait in seconds before the judge is tried again, doubled each time."""
ROOM_SECONDS: Final = 1.0

log = logging.getLogger("flywheel.training.worker")

Pause = Callable[[str], None]
"""Called with the reason of a pause, and with "" when the round resumes."""


class PauseLimits:
    """Thread-safe: one thread polls, the others wait for it."""

    def __init__(
        self,
        wait_seconds: float,
        pause: Pause,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`wait_seconds` is the longest outage that is waited for."""
        self._wait_seconds = wait_seconds
        self._pause, self._clock, self._sleep = pause, clock, sleep
        self._waiting = threading.RLock()
        self.answers = 0
        """The number of the judge's answers so far."""
        self._away_since: float | None = None

    def answered(self) -> None:
        """The judge has answered."""
        self.answers += 1
        self._away_since = None

    def until_back(self, answers: int, why: str, is_back: Callable[[], bool]) -> bool:
        """Wait for the judge after a failed call that started after `answers` answers. Returns whether it has
        recovered."""
        with self._waiting:
            if self.answers > answers:
                return True
            if self._away_since is None:
                self._away_since = self._clock()
            end = self._away_since + self._wait_seconds
            if self._clock() >= end:
                return False
            log.warning("%s: the round waits, %g s at most", why, end - self._clock())
            self._pause(why)
            seconds = FIRST_SECONDS
            try:
                while True:
                    self._sleep(max(0.0, min(seconds, end - self._clock())))
                    if is_back():
                        self.answered()
                        log.warning("the judge answers again: the round continues")
                        return True
                    if self._clock() >= end:
                        return False
                    seconds = min(2 * seconds, LONGEST_SECONDS)
            finally:
                self._pause("")

    def until_room(self, refused: Callable[[], str]) -> None:
        """Wait until `refused` returns no reason."""
        with self._waiting:
            try:
                while why := refused():
                    self._pause(why)
                    self._sleep(ROOM_SECONDS)
            finally:
                self._pause("")


TRIES: Final = 3
"""Attempts for an exchange on which the judge fails while it answers about others."""


def rubric_of(spec: RoundSpec) -> Rubric:
    """The round's rubric. Raises ConfigError."""
    from flywheel.judge.rubric.file import parse_rubric

    return parse_rubric(spec.rubric, f"the rubric of {spec.round_id}")


def build_grade(spec: RoundSpec, round_dir: Path, purpose: Purpose, pause: Pause) -> Grade:
    """The grading function of the round's rubric. Raises ConfigError for an invalid rubric or judge."""
    settings = Config.model_validate(spec.settings)
    pause_limits = PauseLimits(settings.training.judge_wait_seconds, pause)
    return Grading(Grader(rubric_of(spec), settings.judge), settings.judge.budget, round_dir, purpose, pause_limits)


def has_judge(settings: Config) -> bool:
    """Whether rollouts are graded: not if the user's agent alone gives the rewards."""
    rollout = settings.rollout
    return rollout.weights.rubric > 0 or not isinstance(rollout.agent, AgentProgramSettings)


def without_judge(*_: object) -> Grade:
    """In place of `build_grade` where nothing is graded."""

    def grade(_: Exchange) -> Verdict:
        raise RuntimeError("the rubric has no weight")

    return grade


class Lent(Budget):
    """The daemon's allowance in `allowance.json`, less the usage in the round's `usage.jsonl`."""

    def __init__(self, limits: JudgeBudget, round_dir: Path) -> None:
        super().__init__(limits)
        self._dir = round_dir
        self._file = UsageFile(round_dir)
        self._read_to = self._used = 0

    def refused(self) -> str:
        """The reason why no call may be made; empty if one may."""
        with self._lock:
            return next((why for used, limit, why, _ in self._limits() if used >= limit), "")

    def _limits(self) -> Iterator[tuple[int, int, str, str]]:
        # Without an allowance, the worker was started by hand.
        if (allowance := Allowance.read(self._dir)) is not None:
            found, self._read_to = self._file.read(self._read_to)
            self._used += sum(used.tokens for used in found)
            yield self._used, allowance.tokens, allowance.why, ""


class Grading:
    """Grades exchanges. Thread-safe.

    Exchanges that an outage of the judge leaves undecided are retried when it has recovered. An exchange on which it
    fails while it answers about others stays undecided.
    """

    def __init__(
        self, grader: Grader, limits: JudgeBudget, round_dir: Path, purpose: Purpose, pause_limits: PauseLimits
    ) -> None:
        self._grader, self._purpose, self._pause_limits = grader, purpose, pause_limits
        self._budget = Lent(limits, round_dir)
        self._file = UsageFile(round_dir)
        self._answered: Plan | None = None

    def __call__(self, exchange: Exchange) -> Verdict:
        """Raises JudgeError for errors that concern all exchanges: a wrong key, unreadable answers."""
        begun = self._grader.begin(exchange)
        if isinstance(begun, Verdict):
            return begun
        for _ in range(TRIES):
            answers = self._pause_limits.answers
            verdict = self._paid(begun)
            if not verdict.unreachable:
                self._pause_limits.answered()
                self._answered = begun
                return verdict
            probe = self._answered or begun
            # Without the remedy, which differs between tasks and rounds.
            why = f"the judge is unreachable ({verdict.error.partition('. ')[0][:300]})"
            if not self._pause_limits.until_back(answers, why, partial(self._answers, probe)):
                break
        return verdict

    def _answers(self, probe: Plan) -> bool:
        return not self._paid(probe).unreachable

    def _paid(self, begun: Plan) -> Verdict:
        """One verdict of the judge; its usage is recorded before it is returned. Raises JudgeError."""
        if (unusable := self._grader.unusable) is not None:
            raise unusable
        while True:
            try:
                self._budget.check()
                break
            except BudgetSpentError:
                self._pause_limits.until_room(self._budget.refused)
        verdict = self._grader.finish(begun)
        if verdict.calls:
            counts = verdict.calls, verdict.prompt_tokens, verdict.completion_tokens
            self._file.append(Used(today(), self._purpose, *counts))
        return verdict
