"""Which prompts are taken, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.task import METADATA, task_line
from flywheel.training.data.prompts import (
    TOLERANCE,
    Prompt,
    asked,
    asked_as_served,
    longest_needed,
    schedule,
    seed_of,
)
from tests.factories.task import round_task
from tests.factories.trace import reply
from tests.training.data.rollouts import prompt


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


def test_two_replies_to_one_prompt_are_two_examples() -> None:
    def replied(name: str, text: str) -> Prompt:
        asking = prompt(name, (1, 2))
        return replace(
            asking, task=asking.task.model_copy(update={"reply": ({"role": "assistant", "content": text},)})
        )

    prompts = [replied("t-1", "7"), replied("t-2", "seven"), replied("t-3", "7")]
    kept = asked(prompts, {}, max_model_len=100, max_completion_tokens=40, by_reply=True)
    assert [each.task.task_id for each in kept.prompts] == ["t-2", "t-3"]
    kept = asked(prompts, {}, max_model_len=100, max_completion_tokens=40)
    assert [each.task.task_id for each in kept.prompts] == ["t-3"]


def test_rollouts_are_as_long_as_99_of_100_traced_replies() -> None:
    prompts = [replace(prompt(f"t-{n}", (n,)), needs=n) for n in range(1, 201)]
    found = asked(prompts, {}, max_model_len=4096)
    assert {each.max_tokens for each in found.prompts} == {198}
    assert longest_needed([700]) == 700
    assert longest_needed([0, 0, 3, 0, 9]) == 9, "what is not known says nothing"


def test_the_context_bounds_what_the_traces_need_prompt_by_prompt() -> None:
    lengths = {"t-short": (10, 90), "t-long": (60, 5), "t-full": (95, 5), "t-over": (96, 5), "t-most": (30, 70)}
    prompts = [replace(prompt(name, range(length)), needs=needs) for name, (length, needs) in lengths.items()]
    found = asked(prompts, {}, max_model_len=100)
    limits = {each.task.task_id: each.max_tokens for each in found.prompts}
    assert limits == {"t-short": 90, "t-long": 40, "t-full": 5, "t-most": 70}
    assert found.left_out == {"t-over": "its prompt has 96 tokens, and rollout.max_model_len leaves room for 95"}


def test_where_no_length_is_known_the_context_alone_bounds_a_rollout() -> None:
    found = asked([prompt("t-1", range(40)), prompt("t-2", range(100))], {}, max_model_len=100)
    assert [(each.task.task_id, each.max_tokens) for each in found.prompts] == [("t-1", 60)]


def test_a_limit_that_is_set_holds_whatever_the_traces_need() -> None:
    [found] = asked([replace(prompt("t-1"), needs=700)], {}, max_model_len=100, max_completion_tokens=40).prompts
    assert found.max_tokens == 40


def test_the_gate_leaves_out_only_what_the_server_could_not_answer() -> None:
    prompts = [prompt(f"t-{length}", range(length)) for length in (1, 98, 99)]
    found = asked_as_served([*prompts, prompt("t-1-again", (0,))], {"t-x": "no"}, context=100)
    assert [each.task.task_id for each in found.prompts] == ["t-98", "t-1-again"]
    assert found.left_out == {
        "t-x": "the chat template refuses it (no)",
        "t-1": "its prompt is that of t-1-again",
        "t-99": "its prompt has 99 tokens, and the server's context leaves room for 98",
    }


def test_a_prompt_that_is_not_as_long_as_what_the_model_was_sent_is_left_out() -> None:
    """A message that the trace does not show has more tokens than a template's date."""
    cases = {"t-unknown": 0, "t-same": 28, "t-date": 28 + TOLERANCE, "t-longer": 29 + TOLERANCE, "t-shorter": 4}
    prompts = [
        Prompt(prompt(name, ()).task.model_copy(update={"prompt_tokens": sent}), (place, *range(27)))
        for place, (name, sent) in enumerate(cases.items())
    ]
    found = asked(prompts, {"t-refused": "no"}, max_model_len=100, max_completion_tokens=40)
    assert [p.task.task_id for p in found.prompts] == ["t-unknown", "t-same", "t-date"]
    assert found.inexact == {
        "t-longer": f"its prompt has 28 tokens, and the model was sent {29 + TOLERANCE}",
        "t-shorter": "its prompt has 28 tokens, and the model was sent 4",
    }
    assert found.left_out.keys() == {"t-refused", *found.inexact}


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


def of_program(name: str, *, prompt: str = "a", **line: Any) -> Prompt:
    messages = [{"role": "user", "content": prompt}]
    whole = {"task_id": name, "prompt": messages, "metadata": {"trace_id": name}, **line}
    task = round_task(name, "?", reference="", prompt=messages, agent="program", line=whole, prompt_tokens=9000)
    return Prompt(task, (5, 6, 7), needs=3)


def test_a_task_for_the_users_agent_is_known_by_its_whole_line() -> None:
    """Its prompt is only an example: neither its length nor its tokens decide anything."""
    some = [
        of_program("t-1"),
        of_program("t-2", metadata={"trace_id": "t-2", "level": 1}),
        of_program("t-3", metadata={"trace_id": "t-3", "level": 2}),
        of_program("t-4", env="shop"),
        of_program("t-5"),
    ]
    for found in (asked(some, {}, max_model_len=4), asked_as_served(some, {}, context=4)):
        assert [prompt.task.task_id for prompt in found.prompts] == ["t-2", "t-3", "t-4", "t-5"]
        assert found.left_out == {"t-1": "its prompt is that of t-5"}
        assert found.inexact == {}
    assert {prompt.max_tokens for prompt in asked(some, {}, max_model_len=64).prompts} == {64}
    limited = asked(some, {}, max_model_len=64, max_completion_tokens=10)
    assert {prompt.max_tokens for prompt in limited.prompts} == {10}


def test_what_a_trace_says_of_its_task_is_known() -> None:
    line = task_line(reply(1), "db")
    assert set(line["metadata"]) == METADATA
