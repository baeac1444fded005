"""Which of the tasks with tools a rollout can be answered from recordings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.exclusion import NONE_SELECTED, Exclusion, Scope, TaskScopes, column
from flywheel.records.states import Split
from flywheel.records.task import exclusion_of_tools
from flywheel.records.tool_calls import FINISH_FUNCTIONS
from flywheel.records.trace import ChatMessage
from flywheel.training.recorded.recordings import TraceRecording, results_of
from tests.training.recorded.recordings import ADD, FINISH, call, said, steps, tool

RESULT: ChatMessage = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "3"}
FLAT = {"type": "function", **ADD["function"]}
Tools = tuple[dict[str, Any], ...]
Steps = tuple[ChatMessage, ...]

CASES: list[tuple[Tools, Steps, Exclusion | None]] = [
    ((), (), None),
    ((), ({"role": "assistant", "content": "Let me think."},), None),
    ((ADD,), steps((call(arguments={"a": 1}), "1")), Exclusion.TOOLS),
    ((FLAT,), steps((call(arguments={"a": 1}), "1")), Exclusion.TOOLS),
    ((ADD,), steps((call(), "TimeoutError: none came")), Exclusion.TOOLS),
    ((ADD,), steps((call("other"), "1"), (call(), "2")), Exclusion.TOOLS),
    ((ADD,), (), Exclusion.UNCALLED),
    ((FINISH,), (), Exclusion.UNCALLED),
    ((ADD, FINISH), steps((call("generate_response", {"response": "3"}), "done")), Exclusion.UNCALLED),
    ((ADD,), steps((call(), None)), Exclusion.UNRECORDED),
    ((ADD,), steps((call("other"), "1")), Exclusion.UNRECORDED),
    ((ADD,), steps((call(arguments="{1"), "1")), Exclusion.UNRECORDED),
    ((ADD,), steps((call(arguments="[1]"), "1")), Exclusion.UNRECORDED),
    ((ADD,), (RESULT,), Exclusion.UNRECORDED),
    ((), steps((call(), "1")), Exclusion.UNDEFINED),
    ((), (RESULT,), Exclusion.UNDEFINED),
    (({"type": "function", "function": {"name": ["add"]}},), steps((call(), "1")), Exclusion.UNRECORDED),
    ((ADD,), ({"role": "tool", "name": ["add"], "content": "1"},), Exclusion.UNRECORDED),
]


@pytest.mark.parametrize(("tools", "told", "expected"), CASES)
def test_what_a_trace_recorded_of_its_calls(tools: Tools, told: Steps, expected: Exclusion | None) -> None:
    assert exclusion_of_tools(tools, told) is expected


NAMES = st.sampled_from(["add", "look_up", "generate_response"])
ARGUMENTS = st.sampled_from(['{"a": 1}', "{}", "", "[1]", "{1", "null", '{"a": NaN}'])
MADE = st.lists(st.tuples(NAMES, ARGUMENTS, st.sampled_from([None, "1", "2"])), max_size=4)
OFFERED = st.lists(st.sampled_from([ADD, tool("look_up"), FINISH, FLAT]), max_size=3)


@given(tools=OFFERED, made=MADE)
def test_it_is_what_rollouts_find_in_the_same_trace(tools: list[dict[str, Any]], made: list[Any]) -> None:
    """The exclusion is stored when a reply is read; the recordings are read from its line when a round is planned."""
    told = steps(*((call(name, arguments), result) for name, arguments, result in made))
    found = exclusion_of_tools(tools, told)
    results = results_of(TraceRecording("t", "c", Split.TRAIN, tuple(tools), told), FINISH_FUNCTIONS)
    assert (found is Exclusion.TOOLS) == results.trains(use_uncalled=False)
    if tools and found is not Exclusion.UNRECORDED:
        assert results.trains(use_uncalled=True)
        assert results.gates(accepted=True) and results.gates(accepted=False) == (found is Exclusion.TOOLS)
    assert (found is None) <= (not tools)


def test_parallel_calls_need_one_result() -> None:
    first, second = call(arguments={"a": 1}), call(arguments={"a": 2})
    answer = {"role": "tool", "tool_call_id": second["id"], "name": "add", "content": "3"}
    assert exclusion_of_tools((ADD,), (said(first, second), answer)) is Exclusion.TOOLS


EXCLUSIONS = st.frozensets(st.sampled_from(Exclusion))
ANY_TAKEN = st.builds(TaskScopes, *2 * (st.builds(Scope, EXCLUSIONS, if_accepted=EXCLUSIONS),))


@given(have=st.frozensets(st.sampled_from(Exclusion)), takes=ANY_TAKEN, split=st.sampled_from(Split))
def test_a_task_is_left_out_for_what_its_split_does_not_take(
    have: frozenset[Exclusion], takes: TaskScopes, split: Split
) -> None:
    scope = takes.train if split is Split.TRAIN else takes.gate
    assert set(takes.leaving_out(column(have), split, is_rejected=False)) == have - scope.exclusions
    rejected = set(takes.leaving_out(column(have), split, is_rejected=True))
    assert rejected == have - (scope.exclusions - scope.if_accepted)
    assert set(NONE_SELECTED.leaving_out(column(have), split, is_rejected=False)) == have
