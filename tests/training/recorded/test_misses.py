"""Which groups are trained on, and when misses end a round."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from flywheel.training.data.groups import gate_rewards, growing_misses, is_complete
from tests.cases import for_each


@for_each(
    ("without", "missed", "failed", "expected"),
    [
        (8, 0, 0, True),
        (6, 2, 0, True),
        (5, 3, 0, False),
        (4, 1, 0, True),
        (3, 0, 0, False),
        (4, 0, 4, True),
        (3, 1, 0, False),
        (0, 8, 0, False),
        (0, 0, 0, False),
        (5, 2, 1, False),
    ],
)
def test_a_group_needs_three_quarters_and_four_rollouts_without_a_miss(
    without: int, missed: int, failed: int, expected: bool
) -> None:
    assert is_complete([False] * without + [True] * missed + [None] * failed) is expected


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
