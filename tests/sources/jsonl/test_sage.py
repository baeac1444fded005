"""SAGE's dialogs and the samples of its benchmark: what is trained on, and that nothing of a line vanishes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.ground_truth import GroundTruth, ground_truth_of
from flywheel.records.states import SkipReason
from flywheel.records.task import Entry
from flywheel.records.tool_calls import calls_in
from flywheel.records.trace import ChatMessage
from flywheel.sources.jsonl.record import DataRow, LineError, entry_of_line, has_target, rows_of

ASKED = {"role": "user", "content": "Is it cold in Oslo?"}
LOOKS = {"role": "assistant", "content": "I look it up with weather_query_001."}
FOUND = {"role": "tool", "tool_id": "weather_query_001", "content": "Done.", "result": '{"celsius": -7}'}
BARE = {"role": "tool", "tool_id": "weather_query_001", "content": "-7"}
KNOWN = {**FOUND, "content": '{"city": "Oslo"}'}
ANSWER = {"role": "assistant", "content": "Yes, -7 °C."}
NO_ARGUMENTS = "a part of type call without arguments at messages[1] was not read"


def dialog(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"dialog_id": "sft_000001", "goal": "Pack", "turns": list(turns), "target_tools": ["weather_query_001"],
            "metadata": {"difficulty": "easy"}, "split": "train", **more}  # fmt: skip


def entry(line: Any) -> Entry:
    return entry_of_line(json.dumps(line).encode(), Path("sage.jsonl"), datetime(2026, 5, 6, tzinfo=UTC))


def task(line: Any) -> dict[str, Any]:
    read = json.loads(entry(line).line)
    assert isinstance(read, dict)
    return read


def row(line: Any) -> DataRow:
    [found] = rows_of([json.dumps(line).encode()], Path("sage.jsonl"), "read the rows")
    return found


def steps(read: dict[str, Any]) -> list[ChatMessage]:
    return list(json.loads(read["metadata"]["trajectory_json"]))


def test_a_dialog_with_arguments_is_the_conversation_that_it_tells() -> None:
    read = task(dialog(ASKED, LOOKS, KNOWN, ANSWER))
    assert (read["main_query"], read["answer"]) == (ASKED["content"], ANSWER["content"])
    [call] = calls_in(steps(read))
    assert (call.name, call.parsed, call.result) == ("weather_query_001", {"city": "Oslo"}, '{"celsius": -7}')
    assert (read["metadata"]["prompt_exact"], read["metadata"]["prompt_reason"]) == (True, "")
    extra = json.loads(read["metadata"]["extra_json"])
    assert (extra["goal"], extra["dialog_id"], extra["metadata"]) == ("Pack", "sft_000001", {"difficulty": "easy"})
    made, result, answer = row(dialog(ASKED, LOOKS, KNOWN, ANSWER)).reply
    assert (made["content"], result["tool_call_id"]) == (LOOKS["content"], made["tool_calls"][0]["id"])
    assert all("weight" not in message for message in (made, answer))
    given = task(dialog(ASKED, LOOKS, {**BARE, "arguments": {"city": "Oslo"}}, ANSWER))
    assert (calls_in(steps(given))[0].parsed, given["metadata"]["prompt_exact"]) == ({"city": "Oslo"}, True)


@pytest.mark.parametrize(
    "result", [FOUND, BARE, {**FOUND, "content": ""}, {**FOUND, "content": '["Oslo"]'}, {**FOUND, "content": "null"}]
)
def test_a_call_without_arguments_makes_the_prompt_inexact_and_is_no_target(result: dict[str, Any]) -> None:
    line = dialog(ASKED, LOOKS, result, ANSWER)
    read = task(line)
    assert NO_ARGUMENTS in read["metadata"]["prompt_reason"].split("; ")
    [call] = calls_in(steps(read))
    assert (call.name, call.result) == ("weather_query_001", result.get("result", result["content"]))
    for made, _, answer in (row(line).reply, row(read).reply):
        assert (made["weight"], made["content"], "weight" in answer) == (0, LOOKS["content"], False)
    assert "content.call without arguments" in row(line).unread_keys


@pytest.mark.parametrize("result", [{"role": "tool", "content": "-7"}, {"role": "tool", "result": "-7"}])
def test_what_may_have_called_an_unnamed_tool_is_no_target(result: dict[str, Any]) -> None:
    first, *_, answer = row(dialog(ASKED, LOOKS, result, ANSWER)).reply
    assert (first["content"], first["weight"], "weight" in answer) == (LOOKS["content"], 0, False)
    called = row(dialog(ASKED, LOOKS, KNOWN, result, ANSWER)).reply
    assert not any("weight" in message for message in called), "the call of the first result is known"


def test_a_dialog_that_ends_in_a_result_has_nothing_to_train_on() -> None:
    line = dialog(ASKED, LOOKS, FOUND)
    assert entry(line).skip is SkipReason.UNFINISHED
    assert not has_target(row(line).reply)


def test_several_results_are_of_several_calls() -> None:
    other = {**BARE, "tool_id": "calendar_002", "content": "Monday"}
    said = steps(task(dialog(ASKED, LOOKS, BARE, other, BARE, ANSWER)))
    assert [message["role"] for message in said] == ["assistant", "tool"] * 3
    calls = calls_in(said)
    assert [(call.name, call.result) for call in calls] == [
        ("weather_query_001", "-7"),
        ("calendar_002", "Monday"),
        ("weather_query_001", "-7"),
    ]
    assert len({call.id for call in calls}) == 3


def test_earlier_turns_are_the_history() -> None:
    read = task(dialog(ASKED, LOOKS, BARE, ANSWER, {"role": "user", "content": "Thanks!"}, ANSWER))
    assert [message["role"] for message in read["init_messages"]] == ["user", "assistant", "tool", "assistant"]
    assert NO_ARGUMENTS in read["metadata"]["prompt_reason"]


@pytest.mark.parametrize(
    ("turns", "kind"),
    [
        ([ASKED, BARE, ANSWER], "call without arguments"),
        ([ASKED, LOOKS, FOUND, ANSWER], "text beside a result"),
        ([ASKED, LOOKS, {"role": "tool", "content": "-7"}, ANSWER], "result without a tool_id"),
        ([ASKED, LOOKS, {**KNOWN, "tool_id": ""}, ANSWER], "text beside a result"),
        ([ASKED, {"role": "critic", "content": "Hm."}, ANSWER], "critic turn"),
        ([ASKED, {**LOOKS, "tool_id": "weather_query_001"}, KNOWN, ANSWER], "tool_id"),
        ([{**ASKED, "result": "-7"}, ANSWER], "result"),
        (
            [ASKED, LOOKS, {**FOUND, "result": [{"type": "hologram"}, {"type": "text", "text": "x"}]}, ANSWER],
            "hologram",
        ),
    ],
)
def test_what_is_not_read_is_said(turns: list[Any], kind: str) -> None:
    read = task(dialog(*turns))
    assert f"a part of type {kind} at messages[" in read["metadata"]["prompt_reason"]
    assert f"content.{kind}" in row(dialog(*turns)).unread_keys
    assert read["answer"] == ANSWER["content"]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"rows": [1, None, {"é": "😀"}]}, '{"rows": [1, null, {"é": "😀"}]}'),
        ([1, 2], "1\n2"),
        ([{"type": "text", "text": "-7"}], "-7"),
        ({"content": [{"type": "text", "text": "-7"}], "isError": False}, "-7"),
        (False, "false"),
        (0, "0"),
        ("", ""),
        (2**70, str(2**70)),
    ],
)
def test_results_are_text_whatever_is_nested_in_them(result: Any, text: str) -> None:
    [call] = calls_in(steps(task(dialog(ASKED, LOOKS, {**KNOWN, "result": result}, ANSWER))))
    assert call.result == text


def test_rows_of_a_table_are_the_same_dialogs() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    lines = [dialog(ASKED, LOOKS, FOUND, ANSWER), dialog(ASKED, LOOKS, KNOWN, ANSWER)]
    for line, told in zip(lines, pyarrow.Table.from_pylist(lines).to_pylist(), strict=True):
        assert "null" in json.dumps(told)
        plain, read = row(line), row(told)
        assert (read.reply, read.task["prompt"]) == (plain.reply, plain.task["prompt"])
        assert read.unread_keys == plain.unread_keys


texts = st.text(st.sampled_from('ab {}"[]:\\\n<é😀\ud83d'), max_size=6)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
ROLES = ("user", "assistant", "tool", "tool", "system", "critic")
turn_dicts = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES)},
    optional={
        "content": texts | st.just('{"a": 1}') | anything,
        "tool_id": st.sampled_from(["f", "g"]) | anything,
        "result": anything,
        "arguments": st.just({"a": 1}) | anything,
        "tool_call_id": st.none() | st.just("1"),
        "tool_calls": st.none() | anything,
    },
)


@given(st.lists(turn_dicts | anything, max_size=6))
def test_any_dialog_is_a_task_or_says_why_not(turns: list[Any]) -> None:
    try:
        read = entry(dialog(ASKED, *turns, ANSWER))
    except LineError as error:
        assert str(error)
        return
    assert read.detail if read.skip else read.line
    if read.skip:
        return
    shown = json.loads(read.line)
    metadata = shown["metadata"]
    told = [*shown["init_messages"], *json.loads(metadata["trajectory_json"])]
    said = [each for each in turns if isinstance(each, dict) and isinstance(each.get("role"), str)]
    results = [each for each in said if each["role"] == "tool"]
    assert len([message for message in told if message["role"] == "tool"]) == len(results)
    made = [call for message in told for call in message.get("tool_calls") or () if call["id"].startswith("call-")]
    assert len(made) == sum(bool(each.get("tool_id")) and not each.get("tool_call_id") for each in results)


no_arguments: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    role=st.sampled_from(ROLES[1:4]),
    content=st.sampled_from(["", "Done.", "[1]", "7", "null", None]),
    tool_id=st.sampled_from(["f", "g", None]),
    result=st.sampled_from([None, "{}", {}, "é"]),
    arguments=st.sampled_from([None, "", "[]", 7]),
)


@given(st.lists(no_arguments, max_size=6))
def test_no_message_with_a_call_without_arguments_is_trained_on(turns: list[Any]) -> None:
    for message in row(dialog({"role": "user", "content": "?"}, *turns, ANSWER)).reply:
        assert message.get("weight") == 0 or not message.get("tool_calls")


SELECTION = {
    "sample_id": "ts_000001",
    "task_type": "tool_selection",
    "instruction": "Is it cold in Oslo?",
    "context": "The user travels on Monday.",
    "candidate_tools": ["weather_query_001", "calendar_002"],
    "ground_truth": {"top_k": ["weather_query_001"], "explanation": "Only one tool tells the weather."},
    "metadata": {"difficulty": "easy", "tags": ["weather"]},
    "split": "dev",
}
PLANNING = {
    **SELECTION,
    "sample_id": "tp_000001",
    "ground_truth": {
        "plan_steps": [{"step_id": 1, "description": "Look.", "tool_id": "weather_query_001"}],
        "tool_sequence": ["weather_query_001", "calendar_002"],
        "success_criteria": "It is known.",
    },
}
DIRECT = {
    "sample_id": "tj_000001",
    "task_type": "timing_judgment",
    "instruction": "What is 2 plus 2?",
    "ground_truth": {"should_call_tool": False, "reasoning_chain": "A sum.", "direct_answer": "4"},
    "split": "test",
}
CALLED = {**DIRECT, "ground_truth": {"should_call_tool": True, "reasoning_chain": "It changes."}}


@pytest.mark.parametrize(
    ("line", "truth"),
    [
        (SELECTION, GroundTruth(("weather_query_001",))),
        (PLANNING, GroundTruth(("weather_query_001", "calendar_002"), 2)),
        (DIRECT, GroundTruth((), None, "4")),
        (CALLED, GroundTruth()),
        ({**DIRECT, "metadata": {"ground_truth": {"answer": "four"}}}, GroundTruth(answer="four")),
    ],
)
def test_a_sample_of_the_benchmark_is_a_task_with_its_ground_truth(line: dict[str, Any], truth: GroundTruth) -> None:
    found = row(line)
    assert (found.task["main_query"], found.reply) == (line["instruction"], ())
    assert ground_truth_of(found.task) == truth
    extra = json.loads(found.task["metadata"]["extra_json"])
    assert extra["ground_truth"] == line["ground_truth"]
    assert "split" in found.unread_keys
    assert entry(line).skip is SkipReason.NO_ANSWER


def test_candidate_tools_are_offered_by_name_and_the_prompt_says_so() -> None:
    found = row(SELECTION).task
    assert [tool["function"] for tool in json.loads(found["metadata"]["tools_json"])] == [
        {"name": "weather_query_001"},
        {"name": "calendar_002"},
    ]
    assert found["init_messages"] == [{"role": "system", "content": "The user travels on Monday."}]
    assert "a part of type definitions of candidate_tools at messages[1]" in found["metadata"]["prompt_reason"]
    tool = {"type": "function", "function": {"name": "weather_query_001", "parameters": {"type": "object"}}}
    whole = row({**SELECTION, "tools": [tool]}).task["metadata"]
    assert (json.loads(whole["tools_json"]), whole["prompt_exact"]) == ([tool], True)


truths = st.dictionaries(
    st.sampled_from(["top_k", "tool_sequence", "should_call_tool", "direct_answer", "plan_steps"]), anything
)
samples = st.fixed_dictionaries(
    {"sample_id": anything, "instruction": texts | anything, "ground_truth": truths},
    optional={"context": anything, "candidate_tools": anything, "metadata": anything, "split": anything},
)


@given(samples)
def test_any_sample_is_a_task_or_says_why_not(line: dict[str, Any]) -> None:
    try:
        assert entry(line).skip is not None
    except LineError as error:
        assert str(error)
