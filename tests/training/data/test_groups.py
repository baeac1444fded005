"""Which groups of a step are trained on, what a batch says of the others, and when misses end a round."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import TrainError
from flywheel.training.data.groups import dropped_groups, gate_rewards, growing_misses, is_complete
from flywheel.training.data.rollout import Rollout, RolloutBatch
from tests.cases import for_each
from tests.training.data.rollouts import failed, missed, recorded, rollout


def group(number: int, *rewards: float | None, misses: int = 0, failures: int = 0) -> list[Rollout]:
    done = [rollout(number, reward) for reward in rewards]
    return [*done, *(missed(number) for _ in range(misses)), *(failed(number) for _ in range(failures))]


def joined(*groups: list[Rollout], most: int | None = None) -> RolloutBatch:
    return RolloutBatch(tuple(each for rollouts in groups for each in rollouts), most_groups=most)


@for_each(
    ("rollouts", "expected"),
    [
        (group(0, 0, 1, 0, 1, 0, 1, misses=2), None),
        (group(0, 0, 1, 0, 1, 0, misses=3), "misses"),
        (group(0, 0, 1, 0, misses=1), "misses"),
        (group(0, misses=4), "misses"),
        (group(0, 0, 1, 0, 1, failures=4), None),
        (group(0, 0, 1, 0, 1, misses=1, failures=3), None),
        (group(0, 0, 1, 0, 1, 0, misses=2, failures=1), "misses"),
        (group(0, 0, 1, 0, failures=5), "rewards"),
        # An undecided rollout had no miss.
        (group(0, 0, 1, None, None, None, None, misses=2), "rewards"),
        (group(0, 1, 1, 1, 1), "spread"),
        (group(0, 0.5, 0.51, 0.5, 0.51), "spread"),
        (group(0, 0.5, 0.52, 0.5, 0.51), None),
        (group(0, 1, 1, 1, 1, 1, 1, misses=2), "spread"),
    ],
)
def test_a_group_is_dropped_for_its_misses_too_few_rewards_or_equal_ones(
    rollouts: list[Rollout], expected: str | None
) -> None:
    batch = joined(rollouts)
    assert batch.dropped.get(0) == expected
    assert batch.groups_with_spread == (expected is None)
    trained = [advantage is not None for advantage in batch.advantages()]
    assert trained == [expected is None and each.reward is not None for each in batch.rollouts]


def test_the_advantage_is_over_the_rollouts_without_a_miss() -> None:
    batch = joined(group(0, 0, 1, 0, 1, 0, 1, misses=2))
    assert batch.advantages("none") == [-0.5, 0.5, -0.5, 0.5, -0.5, 0.5, None, None]
    assert [row.rollout for row in batch.rows("none")] == [0, 1, 2, 3, 4, 5]


def test_the_first_groups_with_a_signal_are_kept_and_no_more_than_the_step_needs() -> None:
    batch = joined(
        group(0, 1, 1, 1, 1), group(1, 0, 1, 1, 1), group(2, misses=4), group(3, 0, 0, 1, 1), group(4, 0, 0, 0, 1),
        most=2,
    )  # fmt: skip
    assert batch.dropped == {0: "spread", 2: "misses", 4: "surplus"}
    assert {batch.rollouts[row.rollout].request.group for row in batch.rows()} == {1, 3}
    assert batch.summary()["groups_dropped"] == {"misses": 1, "rewards": 0, "spread": 1, "surplus": 1}
    # Where the deviation is that of the step, groups dropped for other reasons than their rewards have no part in it.
    others = joined(group(0, 1, 1, 1, 1), group(1, 0, 1, 1, 1), group(3, 0, 0, 1, 1))
    assert batch.advantages("batch")[4:8] == others.advantages("batch")[4:8]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([None, 0.0, 0.5, 1.0]), st.sampled_from([True, False, None]))
    ),
    st.integers(0, 4),
)
def test_a_limit_drops_only_what_would_be_trained_on(
    rollouts: list[tuple[int, float | None, bool | None]], most: int
) -> None:
    groups = [number for number, _, _ in rollouts]
    missed = [is_miss for _, _, is_miss in rollouts]
    rewards = [None if is_miss is not False else reward for _, reward, is_miss in rollouts]
    whole, limited = dropped_groups(groups, rewards, missed), dropped_groups(groups, rewards, missed, most)
    assert whole.items() <= limited.items()
    assert {limited[number] for number in limited.keys() - whole.keys()} <= {"surplus"}
    assert len(set(groups)) - len(limited) == min(most, len(set(groups)) - len(whole))


def test_rollouts_that_ended_by_a_miss_are_not_undecided() -> None:
    batch = joined(group(0, 1, None, misses=6), group(1, misses=8))
    assert (batch.undecided, batch.missed) == (1, 14)
    batch.refuse_undecided(0.0)
    assert (batch.summary()["undecided"], batch.summary()["missed"]) == (1, 14)


def test_a_judge_that_fails_is_seen_beside_misses() -> None:
    batch = joined(group(0, None, None, None, 1, misses=4), group(1, misses=8))
    with pytest.raises(TrainError, match=r"3 of 4 are undecided.*3 times: the judge was away"):
        batch.refuse_undecided(0.5)


def test_the_metrics_have_the_figures_of_tools_of_rollouts_that_can_call_them() -> None:
    assert "tools" not in joined(group(0, 0, 1, 0, 1)).summary()
    of = recorded()
    mixed = RolloutBatch((*group(0, 0, 1, 0, 1), *(missed(1, of=of) for _ in range(4))))
    figures = mixed.summary()
    assert figures["tools"]["miss_share"] == figures["tools"]["call_share"] == 1.0
    assert figures["tools"]["hit_rate_by_tool"] == {"add": 0.0}
    assert (figures["forks"], figures["turns_mean"]) == (0, 1.0)


@given(st.lists(st.sampled_from([True, False, None]), max_size=16))
def test_fewer_misses_never_drop_a_group(missed: list[bool | None]) -> None:
    better = [False if each else each for each in missed]
    assert is_complete(better) or not is_complete(missed)


def steps(*shares: float, groups: int = 8) -> list[list[float]]:
    return [[share] * groups for share in shares]


def test_misses_that_grow_end_a_round_with_the_figures() -> None:
    reason = growing_misses(steps(0.2, 0.2, 0.2, 0.2, 0.3, 0.5, 0.6, 0.6, 0.7))
    assert "grew from 20% in the first 4 steps to 60% in the last 4" in reason


@for_each(
    "some",
    [
        [],
        steps(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0),
        steps(*[0.4] * 20),
        steps(*[0.5] * 4, *[0.1] * 4),
        steps(*[0.0] * 4, *[0.09] * 4),
        [[], *steps(0.0, groups=1), [], [], *steps(1.0, groups=1), [], [], []],
        [[0.0], [], [], [], [1.0], [], [], []],
    ],
)
def test_constant_falling_slight_and_too_few_misses_do_not(some: list[list[float]]) -> None:
    assert growing_misses(some) == ""


def test_chance_seldom_ends_a_round_and_growth_nearly_always_does() -> None:
    def rounds(start: float, end: float, count: int = 200) -> int:
        """Rounds of 24 steps of 8 groups of 8 that end early; prompts differ in how often they miss."""
        ended = 0
        for seed in range(count):
            rng = random.Random(seed)
            done: list[list[float]] = []
            for step in range(24):
                mean = start + (end - start) * step / 23
                rates = [rng.betavariate(2 * mean, 2 * (1 - mean)) for _ in range(8)]
                done.append([sum(rng.random() < rate for _ in range(8)) / 8 for rate in rates])
                if growing_misses(done):
                    ended += 1
                    break
        return ended

    assert rounds(0.2, 0.2) <= 10
    assert rounds(0.22, 0.63) >= 190


def test_misses_of_the_gate_are_scored_against_the_candidate() -> None:
    rewards, missed = [1.0, None, 0.5, None], [False, True, False, False]
    assert gate_rewards(rewards, missed, "candidate") == [1.0, 0.0, 0.5, None]
    assert gate_rewards(rewards, missed, "deployed") == [1.0, 0.75, 0.5, None]
    assert gate_rewards(rewards, missed, "deployed", at_bound=True) == [1.0, 1.0, 0.5, None]
    assert gate_rewards([None], [True], "deployed") == [1.0]


@given(st.lists(st.tuples(st.none() | st.floats(0, 1), st.booleans()), max_size=8))
def test_a_candidates_miss_scores_least_and_the_bound_most(
    answers: list[tuple[float | None, bool]],
) -> None:
    rewards, missed = [reward for reward, _ in answers], [is_miss for _, is_miss in answers]
    own = gate_rewards(rewards, missed, "candidate")
    deployed = gate_rewards(rewards, missed, "deployed")
    bound = gate_rewards(rewards, missed, "deployed", at_bound=True)
    for mine, theirs, most in zip(own, deployed, bound, strict=True):
        assert (mine is None) == (theirs is None) == (most is None)
        if mine is not None and theirs is not None and most is not None:
            assert mine <= theirs <= most
