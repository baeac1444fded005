"""The loop of model and tools, with messages written by hand in the place of a model."""

from __future__ import annotations

from typing import Any

import pytest

from flywheel.judge.rubric.checks.tool_calls import calls_of
from flywheel.records.trace import ChatMessage
from flywheel.records.verdict import Exchange
from flywheel.training.data.rollout import CallOutcome
from flywheel.training.recorded.recorded_rollout import End, RecordedLoop, RecordedTools
from flywheel.training.recorded.recordings import results_of
from tests.training.recorded.recordings import call, recording, said

PROMPT: list[ChatMessage] = [{"role": "user", "content": "What is 1 and 0?"}]


def loop(**values: Any) -> RecordedLoop:
    trace = recording((call("add", {"a": 1}), "1"), (call("add", {"a": 2}), "ValueError: no"))
    tools = RecordedTools(trace.tools, results_of(trace), finish_tools={"generate_response"}, **values)
    return RecordedLoop(PROMPT, tools)


def test_turns_follow_each_other_until_an_answer() -> None:
    rollout = loop()
    asking = said(call("add", {"a": 1}, "r-1"), call("add", {"a": 2}, "r-2"))
    rollout.advance(asking)
    assert rollout.end is None
    one = {"role": "tool", "tool_call_id": "r-1", "name": "add", "content": "1"}
    two = {"role": "tool", "tool_call_id": "r-2", "name": "add", "content": "ValueError: no"}
    assert rollout.messages == [*PROMPT, asking, one, two]
    rollout.advance({"role": "assistant", "content": "It is 1."})
    assert (rollout.end, rollout.answer) == (End.ANSWERED, "It is 1.")
    assert rollout.steps == [asking, one, {**two, "status": "error"}]
    with pytest.raises(ValueError, match="has ended: answered"):
        rollout.advance(asking)


def test_a_reply_without_calls_is_a_rollout_without_steps() -> None:
    rollout = loop()
    rollout.advance({"role": "assistant", "content": None})
    assert (rollout.end, rollout.answer, rollout.steps, rollout.messages) == (End.ANSWERED, "", [], PROMPT)


def test_reasoning_is_sent_again_where_the_caller_says_so() -> None:
    rollout = loop()
    rollout.advance({**said(call("add", {"a": 1})), "reasoning_content": "hm"})
    assert rollout.messages[1]["reasoning_content"] == "hm"


def test_a_miss_ends_it_without_an_answer() -> None:
    rollout = loop()
    rollout.advance(said(call("add", {"a": 9}), content="Well,"))
    assert (rollout.end, rollout.answer, len(rollout.steps)) == (End.MISS, "", 1)


def test_errors_of_the_policy_do_not_end_it() -> None:
    rollout = loop(on_miss="error")
    for made in (call("divide"), call("add", "{"), call("add", {"a": 9})):
        rollout.advance(said(made))
    assert (rollout.end, len(rollout.calls)) == (None, 3)
    # The checks of the steps see three failures.
    assert [each.failed for each in calls_of(Exchange("", "", trajectory=tuple(rollout.steps)))] == [True] * 3


def test_a_finish_tool_is_the_answer_and_no_step() -> None:
    rollout = loop()
    done = call("generate_response", {"response": "1"})
    first = call("add", {"a": 1})
    rollout.advance(said(first, done, call("add", {"a": 9})))
    assert (rollout.end, rollout.answer) == (End.FINISHED, "1")
    assert [step.get("tool_calls") for step in rollout.steps] == [[first], None]
    assert rollout.calls[-1].outcome is CallOutcome.FINISH
    for content, steps in (("", []), ("Now:", [{"role": "assistant", "content": "Now:"}])):
        rollout = loop()
        rollout.advance(said(done, content=content))
        assert (rollout.answer, rollout.steps) == ("1", steps)


def test_a_truncated_message_ends_it_and_its_calls_are_not_answered() -> None:
    rollout = loop()
    rollout.advance(said(call("add", {"a": 1}), content="It is"), truncated=True)
    assert (rollout.end, rollout.answer, rollout.calls, rollout.steps) == (End.TRUNCATED, "It is", [], [])
