"""One optimizer step on rollouts of several turns, against plain torch on each call of the model by itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from flywheel.training.data.rollout import Completion, Rollout, RolloutBatch
from flywheel.training.data.samples import CallTokens, Sample, timelines
from tests.factories.policy_training import SHIFTS, Trained, assert_equal, exact, gradients, logps_of, policy
from tests.training.data.rollouts import request, verdict

pytestmark = [pytest.mark.training, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def model_call(
    prompt: Sequence[int], generated: Sequence[int], before: CallTokens | None, missing: int = -1
) -> CallTokens:
    """A call with the logprobs of an engine that differs a little from the trainer."""
    ids = (*prompt, *generated)
    given = (0.0, *exact(Sample(ids, (False,) * len(ids), (None,) * len(ids))))
    logprobs = tuple(
        None if at == missing else given[len(prompt) + at] + SHIFTS[at % len(SHIFTS)] for at in range(len(generated))
    )
    identity = (*before.identity, before.reply, "tool") if before else ("tools", "user")
    return CallTokens(tuple(prompt), tuple(generated), logprobs, (None,) * len(generated), identity, "assistant")


def rollouts() -> list[list[CallTokens]]:
    """Of one group: three turns that follow each other, a fork, a logprob that the engine did not return, a reply."""
    first = model_call((1, 20, 21), (40, 41, 2), None)
    second = model_call((1, 20, 21, 40, 41, 2, 70, 71), (42, 2), first)
    third = model_call((*second.prompt_ids, 42, 2, 72), (43, 44, 45, 2), second)
    forked = model_call((1, 20, 21), (50, 51, 2), None)
    # The generated 50 is repeated here, as context.
    other = model_call((1, 20, 21, 50, 2, 73, 74), (52, 53, 2), forked)
    short = model_call((1, 20, 21), (60, 2), None, missing=0)
    longer = model_call((1, 20, 21, 60, 2, 75), (61, 62, 2), short, missing=1)
    return [[first, second, third], [forked, other], [short, longer], [model_call((1, 20, 21), (65, 66, 2), None)]]


REWARDS = (1.0, 0.0, 0.4, 0.2)


def batch() -> RolloutBatch:
    made = []
    for calls, reward in zip(rollouts(), REWARDS, strict=True):
        found = timelines(calls)
        completion = Completion("seven", found.samples, found.texts, turns=len(calls), forks=found.forks)
        made.append(Rollout(request(0), completion, verdict(reward)))
    return RolloutBatch(tuple(made))


def expected(loss_type: str) -> dict[str, Any]:
    """Call by call: each generated token with a logprob counts once, with its rollout's advantage."""
    model = policy()
    divisor = max(0.1, statistics.stdev(REWARDS))
    counts = [sum(value is not None for call in calls for value in call.logprobs) for calls in rollouts()]
    for calls, reward, count in zip(rollouts(), REWARDS, counts, strict=True):
        advantage = (reward - statistics.fmean(REWARDS)) / divisor
        share = 1 / sum(counts) if loss_type == "dapo" else 1 / count / len(counts)
        for call in calls:
            ids = (*call.prompt_ids, *call.token_ids)
            logps = logps_of(model, Sample(ids, (False,) * len(ids), (None,) * len(ids)))
            own = logps[len(call.prompt_ids) - 1 :]
            loss = 0.0 * own.sum()
            for logp, engine in zip(own, call.logprobs, strict=True):
                if engine is not None:
                    weight = min(math.exp(logp.item() - engine), 3.0)
                    loss = loss - weight * (logp - logp.detach()).exp() * advantage * share
            loss.backward()
    return gradients(model)


@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("grpo", marks=pytest.mark.extended)])
def test_a_step_on_merged_turns_has_the_gradient_of_its_calls_one_by_one(loss_type: str) -> None:
    made = batch()
    assert [len(rollout.completion.samples) for rollout in made.rollouts] == [1, 2, 1, 1]
    rows = made.rows()
    assert [row.rollout for row in rows] == [0, 1, 1, 2, 3]
    # A rollout has one advantage, for all its tokens.
    assert rows[1].advantage == rows[2].advantage
    wanted = expected(loss_type)
    for budget in (10_000, 20):
        trained = Trained(rows, loss_type=loss_type, micro_batch_tokens=budget)
        [found] = trained.gradients
        assert_equal(found, wanted)
        [(_, logs)] = trained.logs
        assert logs["trained_tokens"] == sum(
            value is not None for calls in rollouts() for call in calls for value in call.logprobs
        )
