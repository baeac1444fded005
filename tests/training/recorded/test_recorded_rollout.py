"""Rollouts with recorded tools, from request to completion; the policy's messages are written by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flywheel.records.tool_calls import SharedRecordings, ToolResult
from flywheel.records.trace import ChatMessage
from flywheel.training.data.rollout import CallOutcome, Completion, exchange
from flywheel.training.engine.served_application import Limits
from flywheel.training.recorded.recorded_rollout import ToolSetup
from flywheel.training.recorded.recordings import call_key, tools_by_name
from tests.training.engine.scripted_session import (
    END,
    ScriptedPolicy,
    recorded_task,
    render,
    rollout_request,
    written,
)
from tests.training.recorded.recordings import ADD, FINISH, call, said, steps
from tests.waiting import until

ONE, TWO = call("add", {"a": 1}), call("add", {"a": 2})
TRACE = steps((ONE, "1"), (TWO, "ValueError: no"), (ONE, "another 1"))
SETUP = ToolSetup(finish_tools=("generate_response",), max_turns=5)
TASK = recorded_task(TRACE, (ADD, FINISH))


def answered(text: str = "It is 1.") -> ChatMessage:
    return {"role": "assistant", "content": text}


def run(
    *messages: ChatMessage | int | None,
    setup: ToolSetup = SETUP,
    context: int = 2000,
    task: Any = TASK,
    max_tokens: int | None = 1000,
    **request: Any,
) -> tuple[Completion, ScriptedPolicy]:
    policy = ScriptedPolicy(messages, context)
    asked = rollout_request(task, max_tokens, **request)
    return asyncio.run(policy.roll_out(asked, setup)), policy


def outcomes(completion: Completion) -> list[CallOutcome]:
    return [each.outcome for each in completion.calls]


def test_turns_of_model_and_tools_are_one_sample() -> None:
    first, second = said(call("add", {"a": 1}), content="Let me see. "), said(call("add", {"a": 2}))
    completion, policy = run(first, second, answered())
    assert (completion.text, completion.error, completion.turns, completion.forks) == ("It is 1.", "", 3, 0)
    assert not completion.missed and not completion.truncated
    [sample] = completion.samples
    own = [token for token, mine in zip(sample.token_ids, sample.loss_mask, strict=True) if mine]
    assert own == [*written(first), END, *written(second), END, *written(answered()), END]
    assert sample.token_ids == (*render(policy.bodies[-1]["messages"]), *written(answered()), END)
    # What the tools answered is context, and the judge sees it.
    assert [step["role"] for step in completion.steps] == ["assistant", "tool", "assistant", "tool"]
    assert (completion.steps[1]["content"], completion.steps[3]["content"]) == ("1", "ValueError: no")
    assert (completion.steps[3]["status"], "status" in completion.steps[1]) == ("error", False)
    shown = exchange(rollout_request(TASK).prompt, completion)
    assert (shown.trajectory, shown.answer) == (completion.steps, "It is 1.")
    assert outcomes(completion) == [CallOutcome.TRACE] * 2
    assert all(body["tools"] == [ADD, FINISH] for body in policy.bodies)


def test_a_task_without_tools_is_one_message() -> None:
    """Whatever it says: without tools, the text of a call is text."""
    task = recorded_task((), (), agent="reply")
    completion, policy = run(answered(), task=task)
    assert (completion.text, completion.steps, completion.turns, completion.error) == ("It is 1.", (), 1, "")
    assert "tools" not in policy.bodies[0]
    [sample] = completion.samples
    assert sample.token_ids == (*render(task.prompt), *written(answered()), END)
    cut, policy = run(answered("a" * 100), task=task, max_tokens=40, max_turn_tokens=30)
    assert (cut.text, cut.truncated, policy.limits) == ("a" * 30, True, [30])


def test_the_kth_identical_call_gets_the_kth_result_in_the_next_prompt() -> None:
    again = said(call("add", {"a": 1}), call("add", {"a": 1}))
    completion, policy = run(again, answered())
    results = [each for each in policy.bodies[1]["messages"] if each["role"] == "tool"]
    assert [each["content"] for each in results] == ["1", "another 1"]
    assert [each["tool_call_id"] for each in results] == [each["id"] for each in again["tool_calls"]]
    assert completion.error == ""


def test_a_miss_has_a_reason_and_no_answer_but_its_tokens() -> None:
    completion, policy = run(said(call("add", {"a": 1}), call("add", {"a": 9}), content="Well,"))
    assert (completion.missed, completion.text, completion.truncated) == (True, "", False)
    assert completion.error == 'no recorded result for add({"a": 9})'
    assert len(policy.bodies) == 1
    assert sum(completion.samples[0].loss_mask) == len(completion.token_ids) > 0
    assert outcomes(completion) == [CallOutcome.TRACE, CallOutcome.MISS]


def test_a_miss_can_be_an_error_of_the_tool() -> None:
    setup = ToolSetup(on_miss="error", max_turns=5)
    completion, policy = run(said(call("add", {"a": 9})), answered("No."), setup=setup)
    assert "ToolUnavailableError" in policy.bodies[1]["messages"][-1]["content"]
    assert (completion.text, completion.missed, outcomes(completion)) == ("No.", False, [CallOutcome.MISS])
    policy = ScriptedPolicy([said(call("add", {"a": 9}))])
    served = rollout_request(TASK, None, as_served=True)
    in_gate = asyncio.run(policy.roll_out(served, setup, ToolSetup(max_turns=5)))
    assert in_gate.missed, "the gate has tools of its own"


def test_results_of_other_traces_answer() -> None:
    key = call_key(tools_by_name([ADD])["add"], {"a": 9})
    setup = ToolSetup(shared=SharedRecordings({key: ToolResult("nine")}))
    completion, policy = run(said(call("add", {"a": 9})), answered(), setup=setup)
    assert policy.bodies[1]["messages"][-1]["content"] == "nine"
    assert outcomes(completion) == [CallOutcome.SHARED]


def test_recorded_failures_are_those_that_the_task_names() -> None:
    errors = ["tool add: out of order"]
    task = recorded_task(steps((call("add", {"a": 1}), "out of order")), (ADD,), errors=errors)
    completion, _ = run(said(call("add", {"a": 1})), answered(), task=task)
    assert completion.steps[1]["status"] == "error"


LOOP = "It is the sum of the sum. " * 40


def test_a_message_that_loops_is_one_only_where_its_tokens_ended_it() -> None:
    cut, _ = run(answered(LOOP), max_tokens=900)
    assert (cut.truncated, cut.text) == (True, LOOP[:900])
    assert "is repeated 34 times" in cut.loop
    ended, _ = run(answered(LOOP), max_tokens=2000, context=5000)
    assert (ended.truncated, ended.loop) == (False, "")
    long, _ = run(answered("".join(f"{n}, " for n in range(300))), max_tokens=900)
    assert (long.truncated, long.loop) == (True, "")


def test_a_finish_tool_is_the_answer() -> None:
    completion, _ = run(said(call("add", {"a": 1})), said(call("generate_response", {"response": "It is 1."})))
    assert (completion.text, completion.turns, completion.error) == ("It is 1.", 2, "")
    assert [step["role"] for step in completion.steps] == ["assistant", "tool"]


def test_errors_of_the_policy_are_told_to_it() -> None:
    wrong = said(call("divide", {"a": 1}), call("add", "{'a'"))
    completion, policy = run(wrong, answered())
    told = [each["content"] for each in policy.bodies[1]["messages"][-2:]]
    assert told[0].startswith("ToolNotFoundError") and told[1].startswith("InvalidArgumentsError")
    assert completion.error == ""


@pytest.mark.parametrize("sends", [True, False])
def test_reasoning_is_sent_again_only_where_the_agent_does(sends: bool) -> None:
    thinking = {**said(call("add", {"a": 1})), "reasoning": "Hm. ", "refusal": None}
    task = recorded_task(TRACE, (ADD,), sends_reasoning=sends)
    completion, policy = run(thinking, answered(), task=task)
    assert policy.bodies[1]["messages"][1].get("reasoning") == ("Hm. " if sends else None)
    # Without it, the prompt of the second turn does not continue the first: a sample of its own.
    assert (completion.forks, len(completion.samples)) == (0, 1) if sends else (1, 2)
    assert len(completion.token_ids) == len(written(thinking)) + len(written(answered())) + 2


def test_an_agent_that_sends_something_else_forks_and_each_token_is_trained_once() -> None:
    """Two turns in three continue their prompts."""

    class Trimming(ScriptedPolicy):
        async def chat(self, body: Any, limits: Limits) -> Any:
            trimmed = [{**m, "content": (m.get("content") or "").strip()} for m in body["messages"]]
            return await super().chat({**body, "messages": trimmed}, limits)

    policy = Trimming([said(call("add", {"a": 1}), content="So "), said(call("add", {"a": 2})), answered()])
    completion = asyncio.run(policy.roll_out(rollout_request(TASK), SETUP))
    assert (completion.turns, completion.forks, len(completion.samples)) == (3, 1, 2)
    assert [sum(sample.loss_mask) for sample in completion.samples] == [
        policy.lengths[0],
        policy.lengths[1] + policy.lengths[2],
    ]


def test_all_turns_together_have_the_tokens_of_a_training_rollout() -> None:
    first = said(call("add", {"a": 1}))
    used = len(written(first)) + 1
    completion, policy = run(first, answered("a" * 100), max_tokens=used + 20)
    assert policy.limits == [used + 20, 20]
    assert (completion.truncated, completion.text, len(completion.token_ids)) == (True, "a" * 20, used + 20)


def test_a_prompt_that_fills_the_context_ends_it() -> None:
    first = said(call("add", {"a": 1}))
    after = len(rollout_request(TASK).prompt.token_ids) + len(written(first)) + 1 + len("1") + 3
    for room in (7, 0):
        completion, policy = run(first, answered("a" * 100), context=after + room, setup=ToolSetup(max_turns=5))
        assert (completion.truncated, completion.error, completion.text) == (True, "", "a" * room)
        assert (len(policy.bodies), completion.turns) == (2, 2 if room else 1)
    completion, _ = run(first, context=5)
    assert (completion.truncated, completion.error) == (False, "its prompt fills the context")


def test_turns_end() -> None:
    calls = [said(call("add", {"a": 2})) for _ in range(3)]
    completion, _ = run(*calls, setup=ToolSetup(max_turns=3))
    assert (completion.truncated, completion.turns, completion.error) == (True, 3, "")


def test_the_gate_has_the_limits_of_the_server() -> None:
    _, policy = run(said(call("add", {"a": 1})), answered(), max_tokens=None, as_served=True)
    assert policy.limits == [None, None]


def test_a_rollout_of_the_gate_is_cut_with_the_steps_it_has() -> None:
    completion, _ = run(said(call("add", {"a": 1})), None, as_served=True, seconds=0.2)
    assert (completion.truncated, completion.error, completion.text, completion.turns) == (True, "", "", 1)
    assert len(completion.steps) == 2
    completion, _ = run(None, as_served=True, seconds=0.2)
    assert (completion.truncated, completion.error) == (False, "no message within 0.2 s")


def test_what_the_engine_refuses_costs_this_rollout() -> None:
    completion, _ = run(said(call("add", {"a": 1})), 400)
    assert completion.error == "the model's server refused a request: it is wrong (HTTP status 400)"
    assert (completion.truncated, completion.missed, completion.turns) == (False, False, 1)


def test_a_rollout_that_is_given_up_ends_at_once() -> None:
    async def give_up() -> None:
        policy = ScriptedPolicy([said(call("add", {"a": 1})), None])
        rollout = asyncio.create_task(policy.roll_out(rollout_request(TASK), SETUP))
        await until(lambda: len(policy.bodies) == 2, "the second message")
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(give_up())
