"""The cost of judging in tokens and money, and its estimate from what earlier calls of the same judge used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from flywheel.config import JudgePrices
from flywheel.daemon.task_result import JudgingEstimate
from flywheel.store import verdicts
from flywheel.store.database import Store
from flywheel.store.verdicts import Usage

ANSWER_TOKENS: Final = 20
CRITERION_TOKENS: Final = 45
"""Tokens of a reply, and of each criterion in it, before any reply was seen: one or two sentences and a choice."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens and money.

    Attributes:
        money: In `currency`; None where `judge.prices` is not set.
        learned_from: How many earlier calls an estimate is based on.
        more: Further calls if scores are close. They are not in the tokens.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    money: float | None
    currency: str
    learned_from: int = 0
    more: int = 0

    @property
    def price(self) -> dict[str, Any] | None:
        """`money` with its currency, for JSON."""
        return None if self.money is None else {"amount": round(self.money, 6), "currency": self.currency}


def cost_of(calls: int, prompt_tokens: int, completion_tokens: int, prices: JudgePrices | None) -> Cost:
    """The cost of calls that were made."""
    if prices is None:
        return Cost(calls, prompt_tokens, completion_tokens, None, "")
    money = (prompt_tokens * prices.input_per_million + completion_tokens * prices.output_per_million) / 1_000_000
    return Cost(calls, prompt_tokens, completion_tokens, money, prices.currency)


@dataclass(frozen=True, slots=True)
class CostEstimator:
    """Estimates for one judge, from what its earlier calls used."""

    used: Usage
    prices: JudgePrices | None

    @classmethod
    async def of(cls, store: Store, judge_hash: str, prices: JudgePrices | None) -> CostEstimator:
        return cls(await store.read(verdicts.usage_of_judge, judge_hash), prices)

    def cost(self, preview: JudgingEstimate) -> Cost:
        """Corrects the preview's tokens by how far earlier estimates were off."""
        used = self.used
        sent: float = preview.prompt_tokens
        received: float = ANSWER_TOKENS * preview.calls + CRITERION_TOKENS * preview.criteria
        if used.estimated_tokens:
            sent *= used.prompt_tokens / used.estimated_tokens
            received = preview.calls * used.completion_tokens / used.calls
        cost = cost_of(preview.calls, round(sent), round(received), self.prices)
        return replace(cost, learned_from=used.calls, more=preview.more)
