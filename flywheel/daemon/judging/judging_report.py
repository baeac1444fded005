"""Results of judging, as plain data: of one task, of a run, and the estimate of a run; and what they cost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from flywheel.config.judge import JudgePrices
from flywheel.errors import FlywheelError
from flywheel.records.verdict import Verdict
from flywheel.store import verdicts
from flywheel.store.claims import Claimed
from flywheel.store.deduplication import Repeats
from flywheel.store.kernel.database import Store
from flywheel.store.stages import Pass

if TYPE_CHECKING:
    from flywheel.judge.grader import CallEstimate

USAGE: Final = ("calls", "prompt_tokens", "completion_tokens")
"""What is counted of the judge's calls."""
COUNTS: Final = ("judged", "accepted", "rejected", "undecided", "dead", "held", "reused", "changed")
"""What is counted of the tasks."""
ANSWER_TOKENS: Final = 20
CRITERION_TOKENS: Final = 45
"""Tokens of a reply, and of each criterion in it, before any reply was seen: one or two sentences and a choice."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task and its verdict. Without a verdict the task is `held` for a person, `error` says what failed, or it is
    still open: the judge decides.

    `repeats` is the task that it repeats, if it was rejected for that; `paid` is the judge's verdict, where a filter
    behind the judge decided otherwise, or the task is a dead letter. `reused` verdicts needed no judge call.
    """

    task: Claimed
    """Its line is without personal data, where the chain removes it."""
    verdict: Verdict | None = None
    rubric_hash: str = ""
    reused: bool = False
    error: str = ""
    held: bool = False
    repeats: Repeats | None = None
    paid: Verdict | None = None

    @property
    def is_open(self) -> bool:
        return self.verdict is None and not self.error and not self.held

    @property
    def outcome(self) -> str:
        """That of the verdict; without one, `held` or `dead`."""
        if self.verdict is not None:
            return self.verdict.outcome.value
        return "held" if self.held else "dead"

    def json(self, asked: Collection[str], estimated_tokens: int) -> dict[str, Any]:
        """The task in `filter --json`. `asked` are the criteria of its rubric that the judge decides."""
        verdict, other = self.verdict, self.repeats
        return {
            "task_id": self.task.key,
            "span_id": self.task.line["metadata"]["span_id"],
            "outcome": self.outcome,
            "score": verdict.score if verdict else None,
            "failed": list(verdict.failed) if verdict else [],
            "reason": (verdict.reason or verdict.error) if verdict else self.error,
            "criteria": [
                {name: getattr(result, name) for name in ("criterion", "choice", "value", "passed", "reason")}
                | {"by_judge": result.criterion in asked}
                for result in (verdict.results if verdict else ())
            ],
            "estimated_tokens": estimated_tokens,
            "reused": self.reused,
            "repeats": other and {"task_id": other.key, "similarity": other.similarity, "method": other.method},
        }


@dataclass(slots=True)
class JudgingReport:
    """Counts of one run. `judged` tasks were accepted, rejected or left undecided; `reused` verdicts were paid for
    earlier; `dead` tasks made a filter or the grading fail; `held` tasks wait for a person; `changed` tasks had the
    opposite outcome before. `result` says what was done where there is no error."""

    judged: int = 0
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
    result: Pass = Pass.WAITING

    def add(self, result: TaskResult) -> None:
        verdict = result.verdict
        setattr(self, result.outcome, getattr(self, result.outcome) + 1)
        self.judged += verdict is not None
        self.reused += verdict is not None and result.reused
        for paid in (verdict, None if result.reused else result.paid):
            for name in USAGE if paid is not None else ():
                setattr(self, name, getattr(self, name) + getattr(paid, name))

    def join(self, other: JudgingReport) -> None:
        """Add the counts of another run, and its error."""
        for each in fields(self):
            if each.name not in ("error", "result"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.error = other.error

    @property
    def usage(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in USAGE}

    @property
    def tasks(self) -> int:
        return self.judged + self.dead + self.held


@dataclass(slots=True)
class JudgingEstimate:
    """What judging would take. Of `tasks`, `free` need no call; close scores can take `more` calls."""

    tasks: int = 0
    free: int = 0
    calls: int = 0
    criteria: int = 0
    prompt_tokens: int = 0
    more: int = 0

    def add(self, needed: CallEstimate) -> None:
        """Add one task and the calls that it needs."""
        self.tasks += 1
        self.free += not needed.calls
        for name in ("calls", "criteria", "prompt_tokens", "more"):
            setattr(self, name, getattr(self, name) + getattr(needed, name))


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens and money.

    Attributes:
        price: Amount and currency, for JSON; None where `judge.prices` is not set.
        learned_from: How many earlier calls an estimate is based on.
        more: Further calls if scores are close. They are not in the tokens.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    price: dict[str, Any] | None
    learned_from: int = 0
    more: int = 0

    def json(self) -> dict[str, Any]:
        """An estimate in the output of commands."""
        named = {"cost": self.price, "learned_from": self.learned_from, "more_calls_if_close": self.more}
        return {**{name: getattr(self, name) for name in USAGE}, **named}


def cost_of(calls: int, prompt_tokens: int, completion_tokens: int, prices: JudgePrices | None) -> Cost:
    """The cost of calls that were made."""
    price = None
    if prices is not None:
        amount = prompt_tokens * prices.input_per_million + completion_tokens * prices.output_per_million
        price = {"amount": round(amount / 1_000_000, 6), "currency": prices.currency}
    return Cost(calls, prompt_tokens, completion_tokens, price)


@dataclass(frozen=True, slots=True)
class CostEstimator:
    """Estimates for one judge, from what its earlier calls used."""

    used: dict[str, int]
    prices: JudgePrices | None

    @classmethod
    async def of(cls, store: Store, judge_hash: str, prices: JudgePrices | None) -> CostEstimator:
        return cls(await store.read(verdicts.usage_of_judge, judge_hash), prices)

    def cost(self, preview: JudgingEstimate) -> Cost:
        """Corrects the preview's tokens by how far earlier estimates were off."""
        used = self.used
        sent: float = preview.prompt_tokens
        received: float = ANSWER_TOKENS * preview.calls + CRITERION_TOKENS * preview.criteria
        if used["estimated_tokens"]:
            sent *= used["prompt_tokens"] / used["estimated_tokens"]
            received = preview.calls * used["completion_tokens"] / used["calls"]
        cost = cost_of(preview.calls, round(sent), round(received), self.prices)
        return replace(cost, learned_from=used["calls"], more=preview.more)
