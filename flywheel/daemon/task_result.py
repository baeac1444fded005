"""Results of judging, as plain data: of one task, of a run, and the estimate of a run."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.errors import FlywheelError
from flywheel.judge.grader import CallEstimate
from flywheel.store.claims import Claimed
from flywheel.store.deduplication import Repeats
from flywheel.verdict import Verdict


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task and its verdict. Without a verdict the task is `held` for a person, or `error` says what failed.

    `repeats` is the task that it repeats, if it was rejected for that; `paid` is the judge's verdict, where a filter
    behind the judge decided otherwise. `reused` verdicts needed no judge call.
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
class JudgingReport:
    """Counts of one run. `reused` verdicts were paid for earlier; `dead` tasks made a filter or the grading fail;
    `held` tasks wait for a person; `changed` tasks had the opposite outcome before."""

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

    def add(self, result: TaskResult) -> None:
        verdict = result.verdict
        name = "held" if result.held else "dead" if verdict is None else verdict.outcome.value
        setattr(self, name, getattr(self, name) + 1)
        self.reused += verdict is not None and result.reused
        for paid in (verdict, None if result.reused else result.paid):
            if paid is not None:
                self.calls += paid.calls
                self.prompt_tokens += paid.prompt_tokens
                self.completion_tokens += paid.completion_tokens


@dataclass(slots=True)
class JudgingEstimate:
    """What judging would take. Of `tasks`, `free` need no call; close scores can take `more` calls."""

    tasks: int = 0
    free: int = 0
    calls: int = 0
    criteria: int = 0
    prompt_tokens: int = 0
    more: int = 0

    def add(self, *needed: CallEstimate) -> None:
        """Add one task and the calls that it needs."""
        self.tasks += 1
        self.free += not any(each.calls for each in needed)
        for name in ("calls", "criteria", "prompt_tokens", "more"):
            setattr(self, name, getattr(self, name) + sum(getattr(each, name) for each in needed))
