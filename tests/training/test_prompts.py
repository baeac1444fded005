"""Which prompts are taken, and when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.training.prompts import asked, schedule, seed_of
from tests.training.rollouts import prompt


def test_a_prompt_that_leaves_no_room_for_a_completion_is_left_out() -> None:
    prompts = [prompt(f"t-{length}", range(length)) for length in (1, 59, 60, 61, 200)]
    found = asked(prompts, {}, max_model_len=100, max_completion_tokens=40)
    assert [p.task.task_id for p in found.prompts] == ["t-1", "t-59", "t-60"]
    assert found.left_out == {
        "t-61": "its prompt has 61 tokens, and rollout.max_model_len leaves room for 60",
        "t-200": "its prompt has 200 tokens, and rollout.max_model_len leaves room for 60",
    }


def test_a_prompt_that_comes_again_is_asked_once_where_it_came_last() -> None:
    prompts = [prompt("t-1", (1, 2)), prompt("t-2", (3,)), prompt("t-3", (1, 2)), prompt("t-4", (1, 2, 3))]
    found = asked(prompts, {"t-5": "two users in a row"}, max_model_len=100, max_completion_tokens=40)
    assert [p.task.task_id for p in found.prompts] == ["t-2", "t-3", "t-4"]
    assert found.left_out == {
        "t-5": "the chat template refuses it (two users in a row)",
        "t-1": "its prompt is that of t-3",
    }


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 20), st.integers(0, 5))
def test_every_prompt_is_taken_equally_often_and_none_twice_in_a_step(
    count: int, per_step: int, steps: int, seed: int
) -> None:
    plan = schedule(count, per_step=per_step, steps=steps, seed=seed)
    assert [len(step) for step in plan] == [per_step] * steps
    for step in plan:
        assert len(set(step)) == min(count, per_step)
    taken = Counter(index for step in plan for index in step)
    assert set(taken) <= set(range(count))
    often = [taken[index] for index in range(count)]
    assert max(often) - min(often) <= 1


def test_the_plan_depends_on_the_seed_alone() -> None:
    first = schedule(20, per_step=4, steps=10, seed=1)
    assert schedule(20, per_step=4, steps=10, seed=1) == first
    assert schedule(20, per_step=4, steps=10, seed=2) != first
    assert first[:5] != first[5:]


def test_nothing_to_plan_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        schedule(0, per_step=1, steps=1, seed=1)


def test_seeds_differ_in_every_part_and_fit_everywhere() -> None:
    assert seed_of(1, "a", 2) == seed_of(1, "a", 2)
    seeds = {seed_of(run, "rollout", step, sample) for run in range(5) for step in range(20) for sample in range(20)}
    assert len(seeds) == 5 * 20 * 20
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 23) != seed_of(12, 3)
