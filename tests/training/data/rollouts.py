"""Rollouts made by hand, for tests that need no engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flywheel.records.verdict import Outcome, Verdict
from flywheel.training.data.prompts import Prompt
from flywheel.training.data.rollout import (
    AnsweredCall,
    CallOutcome,
    Completion,
    LoadedAdapter,
    RewardWeights,
    Rollout,
    RolloutBatch,
    RolloutRequest,
)
from flywheel.training.data.samples import Sample
from tests.factories.task import round_task


def prompt(name: str = "t-1", token_ids: Sequence[int] = (5, 6, 7), query: str = "What is 3 plus 4?") -> Prompt:
    return Prompt(round_task(name, query), tuple(token_ids))


def request(
    group: int = 0, seed: int = 0, *, of: Prompt | None = None, adapter: LoadedAdapter | None = None
) -> RolloutRequest:
    return RolloutRequest(of or prompt(f"t-{group}"), group, seed, 1.0, 8, adapter)


def verdict(score: float | None) -> Verdict:
    if score is None:
        return Verdict(Outcome.UNDECIDED, None, error="the judge was away", calls=1)
    return Verdict(Outcome.ACCEPTED if score > 0.5 else Outcome.REJECTED, score, calls=1, prompt_tokens=10)


def reply(
    asked: Prompt,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    text: str,
    *,
    prompt_texts: Sequence[str | None] = (),
    texts: Sequence[str | None] = (),
    truncated: bool = False,
) -> Completion:
    """A completion of one message, given its tokens with the one that ends the turn, and their texts if known."""
    before = asked.token_ids
    sample = Sample(
        (*before, *token_ids),
        (*(False for _ in before), *(True for _ in token_ids)),
        (*(None for _ in before), *logprobs),
    )
    of_prompt, own = prompt_texts or [None] * len(before), texts or [None] * len(token_ids)
    return Completion(text, (sample,), ((*of_prompt, *own),), truncated=truncated)


def rollout(group: int, score: float | None, token_ids: Sequence[int] = (8, 9)) -> Rollout:
    asked = request(group)
    completion = reply(asked.prompt, token_ids, [-0.5 for _ in token_ids], "seven")
    return Rollout(asked, completion, verdict(score))


def failed(group: int, error: str = "the engine failed") -> Rollout:
    return Rollout(request(group), Completion(error=error), None)


def missed(group: int, *, of: Prompt | None = None) -> Rollout:
    """A rollout that ended by a miss."""
    error = 'no recorded result for add({"a": 1})'
    calls = (AnsweredCall("c-1", "add", CallOutcome.MISS),)
    return Rollout(request(group, of=of), Completion(calls=calls, missed=True, error=error), None)


def recorded(name: str = "t-1") -> Prompt:
    """A prompt whose rollouts call recorded tools."""
    return Prompt(round_task(name, agent="recorded"), (5, 6, 7))


def batch(*groups: Sequence[float | None]) -> RolloutBatch:
    """A batch with these rewards, one list per group; None is undecided."""
    return RolloutBatch(tuple(rollout(group, score) for group, scores in enumerate(groups) for score in scores))


class StandIn:
    """Takes the place of engines and judge: `rollouts` of a subclass are those of some requests of a step."""

    weights = RewardWeights()
    judge_seconds = 0.0

    def rollouts(self, requests: Sequence[RolloutRequest], step: int) -> RolloutBatch:
        raise NotImplementedError

    def generate(self, requests: Sequence[RolloutRequest], *, order: int) -> Callable[[], RolloutBatch]:
        batch = self.rollouts(requests, order)
        return lambda: batch

    def forget(self, step: RolloutBatch) -> None:
        """Nothing of a step is kept."""

    def close(self) -> None:
        """There is nothing to stop."""
