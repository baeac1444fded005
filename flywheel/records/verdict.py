"""Exchanges, and the verdicts on them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from flywheel.records.trace import ChatMessage, ToolDefinition


def is_within_share(number: int, whole: int, share: float) -> bool:
    """Whether `number` of `whole` is at most this share, as it is written: 29 of 100 are within 0.29.

    The quotient is the float nearest to the share, as a number that was read is; the product 0.29 * 100 is below 29.
    """
    return whole == 0 or number / whole <= share


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question with its answer: a traced reply, or a rollout.

    Attributes:
        history: The conversation before the question.
        trajectory: The steps between question and answer.
        tools: The tools of the agent.
        reference: The traced answer when a rollout is judged, else empty.
        line: The task's line of `tasks.jsonl`, for checks that need more. When a rollout is judged, only the
            `reference` and the `ground_truth` of its metadata, if it has them.
    """

    query: str
    answer: str
    history: tuple[ChatMessage, ...] = ()
    trajectory: tuple[ChatMessage, ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    reference: str = ""
    line: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """The result of one criterion.

    Attributes:
        criterion: The id of the criterion.
        value: The value of the choice, 0 to 1.
        passed: Whether the choice is good enough for the criterion.
        hash: Hash of what the judge was told of the criterion: with the same hash, the result can be reused. Empty
            where no judge was asked.
    """

    criterion: str
    choice: str
    value: float
    passed: bool
    reason: str = ""
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One opinion of the judge. A verdict has one, or several that vote.

    Attributes:
        score: None when the reply could not be used; then `error` says why.
        judge: The model and endpoint that answered.
        stage: "first" for every task, "again" for a task with a close score.
        estimated_tokens: The estimate of `prompt_tokens`, which later estimates learn from; 0 without usage.
        answer: The beginning of the last reply, if it could not be read.
        attempt: Which attempt at an undecided task it belongs to; 0 where the judge was not reached.
    """

    outcome: Outcome
    score: float | None
    results: tuple[CriterionResult, ...] = ()
    error: str = ""
    judge: str = ""
    stage: str = "first"
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated_tokens: int = 0
    answer: str = ""
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one exchange.

    Attributes:
        score: 0 to 1; None exactly when the outcome is undecided. Then `error` says why.
        calls: Calls and tokens are those that were billed, including unreadable replies.
        unreachable: Undecided because the endpoint failed, not because of this exchange.
        judgements: Every opinion in order; empty where the judge was not asked. Those of earlier attempts come first
            while the verdict is undecided.
        broken: Undecided because grading itself failed on this exchange: it would fail again.
        defect: Broken by an unexpected error.
    """

    outcome: Outcome
    score: float | None
    results: tuple[CriterionResult, ...] = ()
    reason: str = ""
    error: str = ""
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_seconds: float = 0.0
    unreachable: bool = False
    judgements: tuple[Judgement, ...] = ()
    broken: bool = False
    defect: bool = False

    @property
    def tokens(self) -> int:
        """All that were billed, sent and received."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def is_failed_attempt(self) -> bool:
        """Undecided although the judge was asked and reached: to ask again costs as much, and may end alike."""
        return self.outcome is Outcome.UNDECIDED and bool(self.judgements) and not self.unreachable

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the criteria that failed."""
        return tuple(result.criterion for result in self.results if not result.passed)
