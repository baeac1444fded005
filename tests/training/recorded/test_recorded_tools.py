"""Tool calls of rollouts, answered from recordings, and the loop of model and tools around them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.states import Split
from flywheel.records.tool_calls import FINISH_FUNCTIONS, SharedRecordings, ToolResult, finish_answer
from flywheel.training.data.rollout import AnsweredCall, CallOutcome, tool_metrics
from flywheel.training.recorded.recorded_rollout import End, RecordedLoop, RecordedTools, ToolTurn
from flywheel.training.recorded.recordings import TraceRecording, results_of, tools_by_name
from tests.cases import for_each
from tests.training.recorded.recordings import ADD, FINISH, call, identity, recording, said, shared_recordings, tool

ARGUMENTS = st.sampled_from([{"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": "1", "b": 2}])
TRACES = st.lists(st.tuples(ARGUMENTS, st.sampled_from(["3", "4"])), max_size=6)


def tools_for(*recordings: TraceRecording, **values: Any) -> RecordedTools:
    """The tools of a rollout of the first recording's task."""
    finish = {"generate_response"}
    own = results_of(recordings[0], finish)
    if len(recordings) > 1:
        values["shared"] = shared_recordings(recordings, recordings[0].split)
    return RecordedTools(recordings[0].tools, own, finish_tools=finish, **values)


def ask(tools: RecordedTools, *arguments: Any) -> list[tuple[CallOutcome, str | None]]:
    """One call of `add` after the other."""
    turns = [tools.answer([call("add", each)]) for each in arguments]
    return [(turn.calls[0].outcome, turn.calls[0].result and turn.calls[0].result.content) for turn in turns]


MISS = (CallOutcome.MISS, None)


# --- own results


@given(TRACES, st.lists(ARGUMENTS, max_size=12))
def test_answers_are_those_of_the_rule(trace: list[tuple[dict[str, Any], str]], asked: list[dict[str, Any]]) -> None:
    tools = tools_for(recording(*((call("add", arguments), result) for arguments, result in trace)))
    for place, arguments in enumerate(asked):
        results = [result for known, result in trace if identity(known) == identity(arguments)]
        earlier = sum(identity(known) == identity(arguments) for known in asked[:place])
        expected = results[earlier] if earlier < len(results) else None
        if expected is None and len(set(results)) == 1:
            expected = results[-1]
        assert ask(tools, arguments) == [MISS if expected is None else (CallOutcome.TRACE, expected)]


@given(TRACES)
def test_a_rollout_that_repeats_its_trace_gets_the_results_of_its_trace(
    trace: list[tuple[dict[str, Any], str]],
) -> None:
    tools = tools_for(recording(*((call("add", arguments), result) for arguments, result in trace)))
    found = ask(tools, *(arguments for arguments, _ in trace))
    assert found == [(CallOutcome.TRACE, result) for _, result in trace]


def test_rollouts_of_a_task_do_not_count_each_others_calls() -> None:
    trace = recording((call("add", {"a": 1}), "1"), (call("add", {"a": 1}), "one"))
    assert ask(tools_for(trace), {"a": 1}) == ask(tools_for(trace), {"a": 1}) == [(CallOutcome.TRACE, "1")]


def test_results_of_calls_in_one_recorded_message_are_found_by_their_ids() -> None:
    one, two = call("add", {"a": 1}, "0"), call("add", {"a": 2}, "1")
    answers = [{"role": "tool", "tool_call_id": each, "name": "add", "content": each} for each in ("1", "0")]
    trace = TraceRecording("t", "", Split.TRAIN, (ADD,), (said(one, two), *answers))
    assert ask(tools_for(trace), {"a": 1}, {"a": 2}) == [(CallOutcome.TRACE, "0"), (CallOutcome.TRACE, "1")]


def test_what_has_no_key_or_no_result_is_not_answered() -> None:
    trace = recording((call("add", {"a": 1}), None), (call("add", "{"), "odd"), (call("other", {}), "x"))
    own = results_of(trace)
    assert (own.calls, list(own.by_key.values()), own.results) == (3, [()], ())
    (found,) = tools_for(trace).answer([call("add", {"a": 1})]).calls
    assert (found.outcome, found.repeats_trace) == (CallOutcome.MISS, True)


# --- results of other traces


def heard(result: str, conversation: str, split: Split = Split.TRAIN) -> TraceRecording:
    return recording((call("add", {"a": 7}), result), conversation=conversation, split=split)


@for_each(
    ("others", "expected"),
    [
        ([("7", "x")], MISS),
        ([("7", "x"), ("7", "x")], MISS),
        ([("7", "x"), ("7", "y")], (CallOutcome.SHARED, "7")),
        ([("7", "x"), ("7", "y"), ("8", "z")], MISS),
        ([("7", "x"), ("7", "y"), ("8", "x")], MISS),
        ([("7", ""), ("7", "")], (CallOutcome.SHARED, "7")),
        ([("7", "own"), ("7", "y")], (CallOutcome.SHARED, "7")),
    ],
)
def test_results_are_shared_where_conversations_agree_and_none_differs(
    others: list[tuple[str, str]], expected: tuple[CallOutcome, str | None]
) -> None:
    own = recording((call("add", {"a": 1}), "1"), conversation="own")
    tools = tools_for(own, *(heard(*other) for other in others))
    assert ask(tools, {"a": 7}, {"a": 7}) == [expected] * 2


def test_an_error_and_a_result_with_the_same_text_differ() -> None:
    failed = recording((call("add", {"a": 7}), "7"), conversation="y", errors=("tool add: 7",))
    assert shared_recordings([heard("7", "x"), failed], Split.TRAIN).results == {}


def test_the_own_result_counts_also_where_others_agree_on_another_one() -> None:
    own = heard("seven", "own")
    assert ask(tools_for(own, heard("7", "x"), heard("7", "y")), {"a": 7}) == [(CallOutcome.TRACE, "seven")]
    own = recording((call("add", {"a": 7}), "7"), (call("add", {"a": 7}), "8"))
    shared = shared_recordings([heard("7", "x"), heard("7", "y")], Split.TRAIN)
    tools = RecordedTools(own.tools, results_of(own), shared=shared)
    assert ask(tools, *[{"a": 7}] * 3)[2] == MISS


def test_a_changed_definition_is_another_tool() -> None:
    renamed = tool("add", "Add two numbers, at last.")
    others = [
        recording((call("add", {"a": 7}), "7"), conversation=name, tools=(renamed,)) for name in ("x", "y", "z")
    ]
    assert ask(tools_for(recording(), *others), {"a": 7}) == [MISS]


def test_sharing_is_limited_to_offered_tools() -> None:
    agreeing = [heard("7", "x"), heard("7", "y")]
    assert shared_recordings(agreeing, Split.TRAIN, offered={"another"}) == SharedRecordings()
    offered = [each.digest for each in tools_by_name([ADD]).values()]
    assert len(shared_recordings(agreeing, Split.TRAIN, offered=offered).results) == 1


RECORDINGS = st.lists(
    st.builds(
        lambda trace, conversation, split: recording(
            *((call("add", arguments), result) for arguments, result in trace), conversation=conversation, split=split
        ),
        TRACES,
        st.sampled_from(["x", "y", "z", ""]),
        st.sampled_from(Split),
    ),
    max_size=6,
)


@given(RECORDINGS)
def test_training_does_not_depend_on_held_out_traces(some: list[TraceRecording]) -> None:
    train = [each for each in some if each.split is Split.TRAIN]
    assert shared_recordings(some, Split.TRAIN) == shared_recordings(train, Split.TRAIN)


@given(RECORDINGS, st.randoms())
def test_what_is_shared_is_what_two_say_and_nobody_denies(some: list[TraceRecording], order: Any) -> None:
    shared = shared_recordings(some, Split.HELD_OUT).results
    said_by: dict[str, set[tuple[ToolResult, str]]] = {}
    for each in some:
        for example in results_of(each).results:
            said_by.setdefault(example.key, set()).add((example.result, each.conversation or each.task_id))
    expected = {
        found: next(iter(said))[0]
        for found, said in said_by.items()
        if len({result for result, _ in said}) == 1 and len({conversation for _, conversation in said}) > 1
    }
    assert shared == expected
    order.shuffle(some)
    assert shared_recordings(some, Split.HELD_OUT).results == expected


# --- errors of the policy


@for_each(
    ("made", "outcome", "text"),
    [
        (call("divide", {}), CallOutcome.UNKNOWN_TOOL, "no tool 'divide'. Available tools: add, generate_response"),
        ({"id": "r"}, CallOutcome.UNKNOWN_TOOL, "no tool ''"),
        (call("add", "{"), CallOutcome.UNPARSEABLE, "the arguments of add cannot be parsed: Expecting"),
        (call("add", "[1]"), CallOutcome.UNPARSEABLE, "they are not an object"),
        (call("add", '{"a": NaN}'), CallOutcome.UNPARSEABLE, "NaN is not valid in JSON"),
        (call("add", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), CallOutcome.UNPARSEABLE, "nested too deeply"),
        (call("add", '{"a": ' + "1" * 5000 + "}"), CallOutcome.UNPARSEABLE, "cannot be parsed"),
        (call("generate_response", "{"), CallOutcome.UNPARSEABLE, "the arguments of generate_response"),
    ],
)
def test_unknown_tools_and_unparseable_arguments_get_an_error_text(
    made: dict[str, Any], outcome: CallOutcome, text: str
) -> None:
    turn = tools_for(recording((call("add", {"a": 1}), "1"))).answer([made, call("add", {"a": 1})])
    (bad, good) = turn.calls
    assert (bad.outcome, turn.ended_by, good.outcome) == (outcome, "", CallOutcome.TRACE)
    assert bad.result is not None
    assert text in bad.result.content
    assert turn.steps[0]["status"] == "error"


def test_the_own_error_texts_count_as_failures_where_steps_are_checked() -> None:
    tools = tools_for(recording(), on_miss="error")
    calls = [call("divide"), call("add", "{"), call("add", {"a": 1})]
    made = TraceRecording("t", "", Split.TRAIN, (ADD, tool("divide")), (said(*calls), *tools.answer(calls).messages))
    assert [example.result.failed for example in results_of(made).results] == [True, True]


@for_each("arguments", ["", "{}", "null"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    trace = recording((call("add", {}), "0"))
    (found,) = tools_for(trace).answer([call("add", arguments)]).calls
    assert found.outcome is CallOutcome.TRACE


# --- misses


def test_a_miss_ends_the_rollout_and_the_calls_after_it_are_counted_but_not_answered() -> None:
    calls = [call("add", {"a": each}) for each in (1, 9, 1)] + [call("generate_response", {"response": "!"})]
    turn = tools_for(recording((call("add", {"a": 1}), "1"))).answer(calls)
    assert [each.outcome for each in turn.calls] == [CallOutcome.TRACE, CallOutcome.MISS, CallOutcome.TRACE]
    assert (turn.ended_by, turn.answer, len(turn.messages)) == ("miss", "", 1)


# --- finish tools


@for_each(
    ("name", "arguments", "answer"),
    [
        ("generate_response", {"response": "yes", "sure": True}, "yes"),
        ("generate_response", {"city": "Köln"}, '{"city": "Köln"}'),
        ("submit", {"answer": "42"}, "42"),
        ("submit", {"answer": 42}, '{"answer": 42}'),
        ("submit", {"x": "1", "y": "2"}, '{"x": "1", "y": "2"}'),
        ("submit", {}, "{}"),
    ],
)
def test_the_answer_of_a_finish_tool(name: str, arguments: dict[str, Any], answer: str) -> None:
    assert finish_answer(name, arguments) == answer


@pytest.mark.parametrize("name", sorted(FINISH_FUNCTIONS))
def test_agentscopes_finish_functions_end_the_rollout_without_being_configured(name: str) -> None:
    own = recording((call(name, {"response": "x"}), "done"), tools=(tool(name),))
    assert not results_of(own).calls
    turn = RecordedTools(own.tools, results_of(own)).answer([call(name, {"response": "x"})])
    assert (turn.ended_by, turn.answer) == ("finish", "x")


def test_a_finish_tool_that_is_not_offered_is_unknown() -> None:
    turn = tools_for(recording(tools=(ADD,))).answer([call("generate_response", {"response": "x"})])
    assert (turn.ended_by, turn.calls[0].outcome) == ("", CallOutcome.UNKNOWN_TOOL)


# --- the loop


def loop() -> RecordedLoop:
    return RecordedLoop([], tools_for(recording((call("add", {"a": 1}), "1"))))


def test_a_reply_without_calls_is_a_rollout_without_steps() -> None:
    rollout = loop()
    rollout.advance({"role": "assistant", "content": None})
    assert (rollout.end, rollout.answer, rollout.steps, rollout.messages) == (End.ANSWERED, "", [], [])
    with pytest.raises(ValueError, match="has ended: answered"):
        rollout.advance(said(call("add", {"a": 1})))


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


# --- which tasks are asked


@for_each(
    ("trace", "expected"),
    [
        (recording((call("add", {"a": 1}), "1")), [True, True, True, True]),
        (recording(), [False, True, False, True]),
        (recording((call("generate_response", {"response": "x"}), "ok")), [False, True, False, True]),
        (recording((call("add", {"a": 1}), None)), [False] * 4),
        (recording((call("other", {"a": 1}), "1")), [False] * 4),
    ],
)
def test_tasks_are_asked_that_have_results_or_made_no_call(trace: TraceRecording, expected: list[bool]) -> None:
    own = results_of(trace, {"generate_response"})
    training = [own.trains(use_uncalled=each) for each in (False, True)]
    assert [*training, *(own.gates(accepted=each) for each in (False, True))] == expected


# --- metrics


def test_metrics_of_a_step() -> None:
    add = call("add", {"a": 1})
    own = recording((add, "1"), tools=(ADD, tool("search"), FINISH))
    tools = [tools_for(own, heard("7", "x"), heard("7", "y")) for _ in range(4)]
    done: list[ToolTurn] = [
        tools[0].answer([add, call("add", {"a": 7}), call("generate_response", {"response": "x"})]),
        tools[1].answer([add, call("search"), call("add", "{")]),
        tools[2].answer([call("generate_response", {"response": "x"})]),
        tools[3].answer([call("divide")]),
    ]
    assert tool_metrics([turn.calls for turn in done]) == {
        "call_share": 3 / 4,
        "miss_share": 1 / 4,
        "hit_rate": 3 / 4,
        "hit_rate_by_tool": {"add": 1.0, "search": 0.0},
        "argument_accuracy": 2 / 5,
        "tool_calls": {
            "trace": 2,
            "shared": 1,
            "miss": 1,
            "unknown tool": 1,
            "unparseable arguments": 1,
            "finish": 2,
        },
    }


def test_metrics_of_nothing() -> None:
    empty: list[list[AnsweredCall]] = [[], []]
    metrics = tool_metrics(empty)
    assert (metrics["call_share"], metrics["miss_share"], metrics["hit_rate"]) == (0.0, 0.0, None)
    assert (metrics["argument_accuracy"], tool_metrics([])["miss_share"]) == (None, None)
