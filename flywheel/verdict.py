"""What is judged, and the judge's whole answer on it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from flywheel.trace import ChatMessage


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and an answer with what came before and between: a traced reply, or a fresh rollout.

    `reference` is the traced answer when a rollout is judged, and empty when the traced answer itself is.
    """

    query: str
    answer: str
    history: tuple[ChatMessage, ...] = ()
    trajectory: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    reference: str = ""
    line: dict[str, Any] = field(default_factory=dict)
    """The task's own line of `tasks.jsonl`, for checks that look at more; empty when a rollout is judged."""


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """One criterion's choice and its value in 0…1; `passed` is whether the choice is good enough for it.

    `hash` says what the judge was told of the criterion: as long as that is the same, so is what it said. It is empty
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
    """One opinion of the judge: a verdict is made of one, or of several that vote.

    `stage` is "first" for what is asked of every task and "again" for what was asked because the score was close.
    `score` is None when the reply could not be used; `error` then says why. `judge` is the model that gave it.
    `estimated_tokens` is what `prompt_tokens` was thought to be, for estimates to learn from; 0 where it is not told.
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's answer on one exchange.

    `score` is in 0…1, and None exactly when the outcome is undecided; `error` then says why.
    Tokens and calls are what was billed, for unreadable answers too.
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
    """Undecided because the endpoint could not be reached or kept failing, not because of this exchange."""
    judgements: tuple[Judgement, ...] = ()
    """Every opinion that was asked for, in turn; empty where the judge was not asked."""
    broken: bool = False
    """Undecided because grading itself broke on this exchange: it would again."""

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the criteria that were not met."""
        return tuple(result.criterion for result in self.results if not result.passed)
