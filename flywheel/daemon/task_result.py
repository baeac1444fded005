"""What a run of filtering says: of one task, and of all. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.errors import FlywheelError
from flywheel.judge.grader import CallEstimate
from flywheel.store.claims import Claimed
from flywheel.store.deduplication import Repeats
from flywheel.verdict import Verdict


@dataclass(slots=True)
class JudgingReport:
    """What one run did. `reused` verdicts were paid for before; `dead` tasks broke a filter or the grading, `held`
    ones wait for a person; `changed` ones had been decided the other way."""

    accepted: int = 0
    rejected: int = 0
    undecided: int = 0
    dead: int = 0
    held: int = 0
    reused: int = 0
    changed: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: FlywheelError | None = None

    @property
    def judged(self) -> int:
        return self.accepted + self.rejected + self.undecided

    def count(self, verdict: Verdict, *, reused: bool) -> None:
        name = verdict.outcome.value
        setattr(self, name, getattr(self, name) + 1)
        self.reused += reused
        self.bill(verdict)

    def bill(self, verdict: Verdict) -> None:
        self.calls += verdict.calls
        self.prompt_tokens += verdict.prompt_tokens
        self.completion_tokens += verdict.completion_tokens


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task with its verdict, for whoever watches. Without one, it is `held`, or `error` says what broke on it.

    `repeats` is the task that it was rejected for repeating; `paid` the judge's verdict, when a filter behind the
    judge had another.
    """

    task: Claimed
    verdict: Verdict | None
    rubric_hash: str
    reused: bool = False
    error: str = ""
    held: bool = False
    repeats: Repeats | None = None
    paid: Verdict | None = None


@dataclass(slots=True)
class JudgingEstimate:
    """What judging would take: of `tasks`, so many `free` ones need no call. Close scores can take `more`."""

    tasks: int = 0
    free: int = 0
    calls: int = 0
    criteria: int = 0
    prompt_tokens: int = 0
    more: int = 0

    def add(self, *needed: CallEstimate) -> None:
        """One more task, and what it needs."""
        self.tasks += 1
        self.free += not any(each.calls for each in needed)
        self.calls += sum(each.calls for each in needed)
        self.criteria += sum(each.criteria for each in needed)
        self.prompt_tokens += sum(each.prompt_tokens for each in needed)
        self.more += sum(each.more for each in needed)
