"""What a batch of rollouts amounts to: rewards, spread and missing verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flywheel.config.file import Config
from flywheel.config.training import RolloutSettings
from flywheel.errors import TrainError
from flywheel.records.program_run import LARGEST_REWARD, RunResult
from flywheel.records.verdict import Outcome, Verdict
from flywheel.training.data.rollout import (
    Completion,
    RewardWeights,
    Rollout,
    RolloutBatch,
    deviation,
    exchange,
    mean,
    system_prompts_of,
)
from flywheel.training.optim.collector import Collector
from flywheel.training.optim.round_steps import step_requests
from flywheel.training.optim.stage_checks import RoundRefusedError, refuse_without_spread
from tests.factories.round import round_spec
from tests.factories.task import round_task
from tests.training.data.rollouts import batch, failed, prompt, request, rollout


def test_an_undecided_rollout_has_no_reward_rather_than_zero() -> None:
    some = batch([1, None, 0, 0], [None, None, None, None])
    assert some.rewards == [1, 0, 0]
    assert some.undecided == 5
    assert some.summary()["reward_mean"] == pytest.approx(1 / 3)
    assert some.rollouts[1].failure == "the judge was away"


def test_one_failed_rollout_leaves_its_group_with_one_less() -> None:
    some = RolloutBatch((rollout(0, 1), failed(0), *(rollout(0, 0) for _ in range(3))))
    assert (some.undecided, some.groups_with_spread, some.rewards) == (1, 1, [1, 0, 0, 0])
    assert some.rollouts[1].failure == "the engine failed"
    assert some.summary()["completion_tokens_mean"] == 2


def test_too_many_undecided_end_the_step_and_can_be_tried_again() -> None:
    some = batch([1, None, 0, None])
    some.refuse_undecided(0.5)
    with pytest.raises(TrainError, match=r"2 of 4 are undecided.*2 times: the judge was away") as caught:
        some.refuse_undecided(0.49)
    assert caught.value.retryable
    # 0.29 * 100 is below 29 in floating point.
    batch([None] * 29 + [1] * 71).refuse_undecided(0.29)
    RolloutBatch(tuple([failed(0)] * 29 + [rollout(0, 1)] * 71)).refuse_failed(0.29)


def test_a_loop_has_reward_0_whatever_the_judge_said_and_is_counted() -> None:
    rollouts = [rollout(0, score) for score in (1, 0.5, None, 1)]
    looped = [replace(each.completion, loop="'so' is repeated 99 times") for each in rollouts[:3]]
    some = RolloutBatch(
        (*(replace(each, completion=one) for each, one in zip(rollouts, looped, strict=False)), rollouts[3])
    )
    assert (some.rewards, some.undecided, some.summary()["looped"]) == ([0, 0, 0, 1], 0, 3)
    kept = RolloutBatch(tuple(replace(each, weights=RewardWeights(loop=None)) for each in some.rollouts))
    assert (kept.rewards, kept.undecided, kept.summary()["looped"]) == ([1, 0.5, 1], 1, 3)


def test_nothing_decided_has_no_mean() -> None:
    summary = batch([None, None]).summary()
    assert summary["reward_mean"] is None
    assert summary["reward_std"] is None


def test_the_judge_sees_the_task_with_the_new_answer() -> None:
    shown = exchange(prompt(), Completion("\\boxed{8}"))
    assert (shown.query, shown.answer, shown.reference) == ("What is 3 plus 4?", "\\boxed{8}", "\\boxed{7}")
    assert shown.history == ({"role": "system", "content": "Be brief."},)


def test_system_prompts_are_those_of_the_tasks_or_of_the_calls_of_the_users_agent() -> None:
    asked = replace(prompt("t-9"), task=round_task("t-9").model_copy(update={"agent": "program"}))
    completions = [Completion(system_prompts=found) for found in (("Plan.", "Write.", "Plan."), ("Plan.",), ())]
    of_agent = [Rollout(request(9, of=asked), completion, None) for completion in completions]
    some = RolloutBatch((rollout(0, 1), failed(0), *of_agent))
    assert some.system_prompts == {"Be brief.": 2, "Plan.": 2, "Write.": 1, "": 1}
    assert list(system_prompts_of([{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}])) == [
        "Be brief."
    ]


def test_usage_counts_calls_of_undecided_verdicts_too() -> None:
    assert RolloutBatch((rollout(0, 1), rollout(0, None), failed(0))).usage() == {
        "rollouts": 3,
        "rollout_tokens": 4,
        "judge_calls": 2,
        "judge_prompt_tokens": 10,
        "judge_completion_tokens": 0,
    }


def test_a_round_without_spread_is_refused_with_the_figures() -> None:
    settings = RolloutSettings()
    with pytest.raises(
        RoundRefusedError, match=r"0 of 4 groups .* \(rewards from 0 to 1\); the rubric may be too easy or too hard"
    ):
        refuse_without_spread([batch([0] * 4, [1] * 4), batch([0, 1, 1, None], [None, None])], 0.0, settings)
    with pytest.raises(TrainError, match="no rollout has a reward") as caught:
        refuse_without_spread([batch([None, None])], 0.0, settings)
    assert caught.value.retryable
    some = [batch([0] * 4, [0] * 4), batch([0, 1, 0, 0], [0] * 4)]
    refuse_without_spread(some, 0.0, settings)
    with pytest.raises(RoundRefusedError):
        refuse_without_spread(some, 0.25, settings)


def of_program(settings: RolloutSettings, *groups: Sequence[float], score: float | None = None) -> RolloutBatch:
    """Rollouts of the user's agent with these rewards of its own, and a score of the rubric if it has a weight."""
    reward = settings.weights
    weights = RewardWeights(reward.rubric, reward.workflow, range=reward.range)
    made = [
        replace(each, completion=replace(each.completion, run=RunResult(reward=own)), weights=weights)
        for group, rewards in enumerate(groups)
        for own in rewards
        for each in [rollout(group, score)]
    ]
    return RolloutBatch(tuple(made))


@pytest.mark.parametrize(
    ("settings", "by"),
    [
        ({"agent": {"workflow": "shop.buy:run"}}, "shop.buy:run"),
        ({"agent": {"command": ["node", "agent.mjs"]}}, "node agent.mjs"),
        ({"agent": {"workflow": "shop.buy:run"}, "reward_function": "shop.judge:price"}, "shop.judge:price"),
    ],
)
def test_a_workflow_whose_rewards_hardly_differ_is_named_with_their_range(settings: dict[str, Any], by: str) -> None:
    """No rubric is asked, so none is blamed."""
    given = RolloutSettings.model_validate({**settings, "reward": {"rubric": 0, "workflow": 1}})
    some = of_program(given, [0, 0.001, 0.002, 0], [0.004, 0.005, 0.004, 0.019])
    assert some.dropped == {0: "spread", 1: "spread"}
    with pytest.raises(RoundRefusedError) as refused:
        refuse_without_spread([some], 0.0, given)
    assert str(refused.value) == (
        "nothing can be learned in the first steps: 0 of 2 groups have rewards that differ (rewards from 0 to 0.019);"
        " of the others, the largest range in a group is 0.015, where less than 0.02 counts as none: set"
        f" rollout.reward.range (1) to that of the rewards of {by}"
    )
    some = of_program(given, [1, 1, 1, 1], [0, 0, 0, 0])
    with pytest.raises(RoundRefusedError) as refused:
        refuse_without_spread([some], 0.0, given)
    assert str(refused.value).endswith(
        f"; {by} rewards all runs of each other task alike: the tasks may be too easy or too hard"
    )
    given = RolloutSettings.model_validate({**settings, "reward": {"rubric": 0, "workflow": 1, "range": 0.02}})
    some = of_program(given, [0, 0.001, 0.002, 0], [0.004, 0.005, 0.004, 0.019])
    refuse_without_spread([some], 0.0, given)
    assert (some.dropped, len(some.rows())) == ({}, 8)


def test_with_the_rubric_the_range_is_the_mean_of_both() -> None:
    given = {"agent": {"workflow": "shop.buy:run"}, "reward": {"rubric": 1, "workflow": 3, "range": 9}}
    settings = RolloutSettings.model_validate(given)
    some = of_program(settings, [0, 0.1, 0.1, 0.1], [0, 0.2, 0.2, 0.2], score=0.5)
    assert some.reward_range == 7
    assert some.dropped == {0: "spread"}, "0.075 is within 0.14, and 0.15 is not"
    with pytest.raises(RoundRefusedError, match=r"rewards of shop\.buy:run; the rubric may be too easy"):
        refuse_without_spread([some], 0.5, settings)


@pytest.mark.training
@pytest.mark.slow
def test_a_collector_makes_rollouts_with_the_range_of_the_settings() -> None:
    given = {"agent": {"workflow": "shop.buy:run"}, "reward": {"rubric": 0, "workflow": 1, "range": 40}}
    with Collector.of(
        Config.model_validate({"rollout": given}), [], lambda _: Verdict(Outcome.UNDECIDED, None)
    ) as made:
        assert RolloutBatch((replace(rollout(0, 1), weights=made.weights),)).reward_range == 40
    assert batch([1]).reward_range == RolloutBatch(()).reward_range == 1


def test_the_largest_rewards_have_a_mean_a_deviation_and_advantages() -> None:
    some = batch([LARGEST_REWARD, -LARGEST_REWARD] * 128, [LARGEST_REWARD, -LARGEST_REWARD] * 2)
    assert (some.summary()["reward_mean"], some.summary()["reward_std"]) == (0, LARGEST_REWARD)
    assert {round(abs(each), 1) for each in some.advantages() if each is not None} == {0.9, 1.0}


def test_mean_and_deviation_by_hand() -> None:
    assert mean([]) is None
    assert deviation([]) is None
    assert (mean([1, 0, 0, 1]), deviation([1, 0, 0, 1])) == (0.5, 0.5)


def test_each_rollout_of_a_step_has_its_prompts_own_limit() -> None:
    settings = Config.model_validate({"training": {"group_size": 4, "prompts_per_step": 2}})
    spec = round_spec(seed=7)
    prompts = [replace(prompt("t-1"), max_tokens=700), replace(prompt("t-2"), max_tokens=40)]
    asked = step_requests(prompts, 0, spec, settings, None)
    assert [(each.max_tokens, each.as_served, each.seconds) for each in asked] == [
        *[(700, False, None)] * 4, *[(40, False, None)] * 4
    ]  # fmt: skip
    settings = Config.model_validate({"rollout": {"max_turn_tokens": 100}})
    assert {each.max_turn_tokens for each in step_requests(prompts, 0, spec, settings, None)} == {100}
