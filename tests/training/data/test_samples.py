"""Which rollouts are trained on, with which advantages and weights, and how they become micro-batches."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.training.data.groups import Scale, dropped_groups, group_advantages
from flywheel.training.data.rollout import Rollout, RolloutBatch
from flywheel.training.data.samples import (
    Pair,
    Sample,
    TrainingRow,
    divided,
    micro_batches,
    token_counts,
    token_weights,
)
from tests.training.data.rollouts import prompt, reply, request, rollout, verdict


def advantages(*rewards: float | None) -> list[float | None]:
    return group_advantages([0] * len(rewards), rewards)


def row(number: int, length: int, trained: int = 1) -> TrainingRow:
    mask = (*(False for _ in range(length - trained)), *(True for _ in range(trained)))
    return TrainingRow(number, Sample((1,) * length, mask, tuple(-0.5 if own else None for own in mask)), 1.0)


def test_an_advantage_is_the_distance_to_the_mean_in_deviations() -> None:
    deviation = statistics.stdev([1, 0, 0, 1])
    assert advantages(1, 0, 0, 1) == pytest.approx(
        [0.5 / deviation, -0.5 / deviation] * 1 + [-0.5 / deviation, 0.5 / deviation]
    )


def test_rewards_that_differ_by_the_judges_noise_get_no_large_advantage() -> None:
    assert advantages(0.5, 0.5, 0.5, 0.54) == pytest.approx([-0.1, -0.1, -0.1, 0.3])


def test_an_undecided_rollout_has_no_part_in_the_baseline_of_its_group() -> None:
    with_it, without = advantages(1, None, 0, 0, 0), advantages(1, 0, 0, 0)
    assert [with_it[0], *with_it[2:]] == without
    assert with_it[1] is None


def test_groups_are_compared_within_themselves_and_scaled_as_configured() -> None:
    groups, rewards = [0, 1] * 4, [1, 0.6, 0, 0.6, 0, 0.6, 0, 0.2]
    assert group_advantages(groups, rewards, "none")[:2] == pytest.approx([0.75, 0.1])
    assert group_advantages(groups, rewards)[:2] == pytest.approx([0.75 / 0.5, 0.1 / 0.2])
    whole = statistics.stdev(rewards)
    assert group_advantages(groups, rewards, "batch")[:2] == pytest.approx([0.75 / whole, 0.1 / whole])


@pytest.mark.parametrize("span", [0.002, 40.0, 1e6])
def test_rewards_of_another_range_have_the_same_groups_and_advantages(span: float) -> None:
    groups = [group for group in range(3) for _ in range(4)]
    rewards = [0.5, 0.5, 0.5, 0.519, 0.5, 0.5, 0.5, 0.54, 1, 0, 0, 1]
    scaled = [reward * span for reward in rewards]
    for scale in get_args(Scale):
        factor = span if scale == "none" else 1.0
        wanted = [each and each * factor for each in group_advantages(groups, rewards, scale)]
        found = group_advantages(groups, scaled, scale, span)
        assert [each is None for each in found] == [True] * 4 + [False] * 8
        assert found[4:] == pytest.approx(wanted[4:])
    assert dropped_groups(groups, scaled, [False] * 12, span=span) == {0: "spread"}


def test_truncated_rollouts_are_left_out_on_request_and_still_count_in_their_group() -> None:
    cut = Rollout(request(0), reply(prompt(), (8, 9), (-0.5, -0.5), "sev", truncated=True), verdict(1))
    some = RolloutBatch((cut, *(rollout(0, 0) for _ in range(3))))
    assert len(some.rows()) == 4
    left = some.rows(mask_truncated=True)
    assert [each.rollout for each in left] == [1, 2, 3]
    assert [each.advantage for each in left] == [each.advantage for each in some.rows()[1:]]


def test_context_missing_logprobs_and_a_first_token_carry_no_loss() -> None:
    sample = Sample((1, 2, 3, 4, 5), (True, True, False, True, True), (-1.0, -1.0, None, None, -1.0))
    assert sample.trained == [1, 4]
    unknown = Rollout(request(0), reply(prompt(), (8, 9), (None, None), "seven"), verdict(1))
    some = RolloutBatch((unknown, *(rollout(0, 0) for _ in range(3))))
    assert [each.rollout for each in some.rows()] == [1, 2, 3]


def test_weights_of_tokens_sum_to_the_normaliser() -> None:
    rows = [row(0, 10, 4), row(0, 20, 2), row(1, 5, 3)]
    counts = token_counts(rows)
    assert counts == {0: 6, 1: 3}
    assert token_weights(counts, "dapo", tokens=9, rollouts=2, longest=8) == {0: 1, 1: 1}
    # Half of the loss for each rollout, however many samples and tokens it has.
    by_rollout = token_weights(counts, "grpo", tokens=9, rollouts=2, longest=8)
    assert {number: counts[number] * weight / 9 for number, weight in by_rollout.items()} == {0: 0.5, 1: 0.5}
    assert token_weights(counts, "dr_grpo", tokens=9, rollouts=2, longest=8) == {0: 9 / 16, 1: 9 / 16}


def test_micro_batches_keep_the_budget_with_their_padding() -> None:
    rows = [row(number, length) for number, length in enumerate([3, 50, 7, 8, 8, 2, 30, 100])]
    batches = micro_batches(rows, 60)
    assert sorted(each.rollout for some in batches for each in some) == list(range(8))
    sizes = [(len(some), max(len(each.sample.token_ids) for each in some)) for some in batches]
    assert sizes[0] == (1, 100)
    assert all(count * longest <= 60 for count, longest in sizes[1:])
    assert len(batches) <= 1 + math.ceil((50 + 30 + 8 * 5) / 60) + 1
    assert micro_batches([], 60) == []


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(2, 60)), max_size=20), st.integers(1, 6))
def test_processes_share_rows_by_their_tokens_and_a_rollout_is_whole(made: list[tuple[int, int]], parts: int) -> None:
    rows = [row(number, length) for number, length in made]
    found = divided(rows, parts)
    assert len(found) == parts
    assert sorted(map(id, (each for part in found for each in part))) == sorted(map(id, rows)), "each row once"
    for part in found:
        places = [next(at for at, each in enumerate(rows) if each is one) for one in part]
        assert places == sorted(places), "in their order"
    rollouts = [{each.rollout for each in part} for part in found]
    assert sum(map(len, rollouts)) == len({each.rollout for each in rows}), "no rollout is in two parts"
    tokens = [sum(each.tokens for each in part) for part in found]
    longest = max((sum(each.tokens for each in rows if each.rollout == of) for of in {*range(7)}), default=0)
    assert max(tokens) - min(tokens) <= longest
    assert bool(found[0]) == bool(rows)


def test_one_process_has_all_rows_and_pairs_are_shared_alone() -> None:
    rows = [row(1, 9), row(0, 4), row(1, 2)]
    assert divided(rows, 1) == [rows]
    assert divided(rows, 2) == [[rows[0], rows[2]], [rows[1]]]
    pairs = [Pair(name, row(0, length).sample, row(0, 2).sample) for name, length in (("a", 4), ("b", 9), ("c", 5))]
    assert [[pair.task_id for pair in part] for part in divided(pairs, 2)] == [["b"], ["a", "c"]]
