"""Recordings of real traces, their way into a round, and the hit rate to expect of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from flywheel.records.states import Split
from flywheel.records.task import task_line
from flywheel.records.tool_calls import SharedRecordings
from flywheel.training.data.rollout import CallOutcome
from flywheel.training.recorded.expected_hits import HitRate, expected_hits
from flywheel.training.recorded.recorded_rollout import RecordedLoop, RecordedTools
from flywheel.training.recorded.recordings import TraceRecording, recording_of, results_of
from tests.sources.studio.reading import read_all
from tests.training.recorded.recordings import ADD, call, recording, shared_recordings, tool

STUDIO = Path(__file__).parents[2] / "data" / "studio"


@pytest.fixture(scope="module")
def traces() -> list[TraceRecording]:
    """The replies of real agents with tools, as a database of the current version has them."""
    replies, _, _ = read_all(STUDIO / "new_v2.sqlite")
    lines = [task_line(reply, "studio") for reply in replies if reply.skip is None and reply.tools]
    return [recording_of(line, Split.TRAIN) for line in lines]


def test_rollouts_that_repeat_real_traces_have_their_steps(traces: list[TraceRecording]) -> None:
    outcomes: list[tuple[str, CallOutcome]] = []
    for trace in traces:
        loop = RecordedLoop([], RecordedTools(trace.tools, results_of(trace)))
        for step in trace.steps:
            if step.get("tool_calls"):
                loop.advance(step)
        told = [(step["role"], step["content"]) for step in trace.steps if step.get("name") != "no_such_tool"]
        again = [(step["role"], step["content"]) for step in loop.steps if step.get("name") != "no_such_tool"]
        assert [each for each in again if each[0] == "tool"] == [each for each in told if each[0] == "tool"]
        outcomes += [(each.name, each.outcome) for each in loop.calls]
    assert len(outcomes) == 18
    assert {each for each in outcomes if each[1] is not CallOutcome.TRACE} == {
        ("no_such_tool", CallOutcome.UNKNOWN_TOOL)
    }


def test_errors_of_real_traces_are_marked(traces: list[TraceRecording]) -> None:
    failed = [each for trace in traces for each in results_of(trace).results if each.result.failed]
    assert {example.tool.name for example in failed} >= {"flaky_lookup"}


def test_the_split_is_that_of_the_ledger(traces: list[TraceRecording]) -> None:
    replies, _, _ = read_all(STUDIO / "new_v2.sqlite")
    assert recording_of(task_line(replies[0], "studio"), Split.HELD_OUT).split is Split.HELD_OUT
    assert all(trace.conversation and trace.question for trace in traces)


def test_shared_recordings_are_written_and_read_as_json(traces: list[TraceRecording]) -> None:
    again = [replace(trace, conversation=f"again {trace.conversation}") for trace in traces]
    shared = shared_recordings([*traces, *again], Split.TRAIN)
    assert shared.results
    adapter = TypeAdapter(SharedRecordings)
    assert adapter.validate_json(adapter.dump_json(shared)) == shared


def test_the_expected_hit_rate_is_that_between_traces_of_one_question() -> None:
    traces = [
        recording((call("add", {"a": 1}), "1"), (call("add", {"a": 2}), "2"), question="x"),
        recording((call("add", {"a": 1}), "1"), (call("search", {}), "-"), question="x", tools=(ADD, tool("search"))),
        recording((call("add", {"a": 1}), "1"), question="y"),
        recording(question="x"),
        recording(question="x", tools=()),
    ]
    found = expected_hits(traces)
    # The first is asked add(1) and search, which it was not offered; the second add(1) and add(2).
    assert (found.offered, found.usable) == (4, 3)
    assert found.best == found.repeated == HitRate({"add": 2}, {"add": 3}, rollouts=2, complete=1)
    assert (found.repeated.rate, found.repeated.complete_share) == (2 / 3, 1 / 2)


def test_system_prompts_do_not_make_questions_different() -> None:
    one, other = (recording((call("add", {"a": 1}), "1"), question="x") for _ in range(2))
    timed = replace(other, messages=({"role": "system", "content": "It is noon."}, *other.messages))
    assert expected_hits([one, timed]).repeated.rate == 1.0


def test_a_finish_tool_is_no_call_of_the_estimate() -> None:
    one, other = (call("generate_response", {"response": answer}) for answer in ("one", "uno"))
    traces = [recording((call("add", {"a": 1}), "1"), (done, "ok"), question="x 1") for done in (one, other)]
    found = expected_hits(traces, {"generate_response"})
    assert (found.repeated.calls, found.copied.calls) == ({"add": 2}, {"add": 2})
    assert found.repeated.rate == found.copied.rate == 1.0


@pytest.mark.parametrize(
    ("arguments", "is_copied"),
    [
        ({"a": 12, "b": 7}, True),
        ({"a": 12, "b": 8}, False),
        ({"a": 1}, False),
        ({"a": 12.5}, False),
        ({"a": 2.5}, True),
        ({"city": "NEW york"}, True),
        ({"city": "Paris"}, False),
        ({"cities": ["New York", {"n": 12}]}, True),
        ({"cities": ["New York", {"n": 13}]}, False),
        ({"deep": True, "limit": None, "text": ""}, True),
        ({"unit": "metric"}, True),
        ({"unit": "imperial"}, False),
        ("{1", False),
    ],
)
def test_without_a_repeated_question_arguments_count_that_the_conversation_shows(
    arguments: Any, is_copied: bool
) -> None:
    """Other replies to the question will have the same ones. Defaults need not be shown."""
    about = tool("about", unit={"type": "string", "default": "metric"})
    asked = "Add 12 and 7, and 2.5 for New York."
    shown = recording((call("about", {}), "x"), (call("about", arguments), "x"), question=asked, tools=(about,))
    found = expected_hits([shown])
    assert found.repeated == HitRate()
    assert found.best == found.copied == HitRate({"about": 1 + is_copied}, {"about": 2}, 1, int(is_copied))


def test_arguments_of_any_depth_can_be_looked_for() -> None:
    for depth in range(700, 1010):
        nested = call("add", '{"a": ' + "[" * depth + "12" + "]" * depth + "}")
        found = expected_hits([recording((call("add", {}), "x"), (nested, "x"), question="12")])
        assert found.copied.calls == {"add": 2}


def test_arguments_may_come_from_earlier_results_but_not_from_own_words() -> None:
    steps_of = (call("add", {"a": 1}), "42"), (call("add", {"a": 42}), "99")
    found = expected_hits([recording(*steps_of, question="1?")])
    assert found.copied.rate == 1.0
    found = expected_hits([recording(*reversed(steps_of), question="1?")])
    assert found.copied.rate == 0.5


def test_without_recordings_nothing_is_expected() -> None:
    assert (expected_hits([]).best.rate, expected_hits([]).best.complete_share) == (None, None)
    assert expected_hits([recording()]).best.rate is None
