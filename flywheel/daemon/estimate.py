"""Estimates: what judging would take in tokens and money, learned from what the same judge's calls have taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from flywheel.config import JudgePrices
from flywheel.store import verdicts
from flywheel.store.database import Store
from flywheel.store.verdicts import Usage

ANSWER_TOKENS: Final = 20
CRITERION_TOKENS: Final = 45
"""Of an answer, and of each criterion in it, before one was seen: one or two sentences and a choice."""


class Asked(Protocol):
    """So many calls on so many criteria, with prompts of four bytes a token; `more` where scores are close."""

    @property
    def calls(self) -> int: ...
    @property
    def criteria(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def more(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """`money` is None where `judge.prices` is not set; `learned_from` is of how many calls an estimate knew.

    Close scores can take so many calls `more`, which are not in it.
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
        """`money` with its currency, for programs."""
        return None if self.money is None else {"amount": round(self.money, 6), "currency": self.currency}


def cost_of(calls: int, prompt_tokens: int, completion_tokens: int, prices: JudgePrices | None) -> Cost:
    """What so much costs."""
    if prices is None:
        return Cost(calls, prompt_tokens, completion_tokens, None, "")
    money = (prompt_tokens * prices.input_per_million + completion_tokens * prices.output_per_million) / 1_000_000
    return Cost(calls, prompt_tokens, completion_tokens, money, prices.currency)


class Estimator:
    """Estimates for one judge."""

    def __init__(self, known: Usage, prices: JudgePrices | None) -> None:
        self._known = known
        self._prices = prices

    @classmethod
    async def of(cls, store: Store, judge_hash: str, prices: JudgePrices | None) -> Estimator:
        """One that knows what this judge's calls have taken."""
        return cls(await store.read(verdicts.usage_of_judge, judge_hash), prices)

    def cost(self, asked: Asked) -> Cost:
        """Prompts are as much longer or shorter than thought as they were before, and answers as long as before."""
        known = self._known
        sent: float = asked.prompt_tokens
        received: float = ANSWER_TOKENS * asked.calls + CRITERION_TOKENS * asked.criteria
        if known.estimated_tokens:
            sent *= known.prompt_tokens / known.estimated_tokens
            received = asked.calls * known.completion_tokens / known.calls
        cost = cost_of(asked.calls, round(sent), round(received), self._prices)
        return replace(cost, learned_from=known.calls, more=asked.more)
