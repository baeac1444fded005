"""Which key of a line is what, for every kind of line that is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.ground_truth import ground_truth_of
from flywheel.records.privacy import PrivateNames
from flywheel.records.states import SkipReason
from flywheel.records.task import Entry, entry_of, line_bytes, task_id, task_line, whole_line
from flywheel.sources.jsonl.record import LineError, entry_of_line
from tests.factories.trace import reply

NOW = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
SOURCE = Path("/data/tasks.jsonl")
SYSTEM = {"role": "system", "content": "You do sums."}
USER = {"role": "user", "content": "What is 1 plus 1?"}
ASSISTANT = {"role": "assistant", "content": "2"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c"}


def entry(value: Any) -> Entry:
    return entry_of_line(json.dumps(value).encode(), SOURCE, NOW)


def task(value: Any) -> dict[str, Any]:
    read = json.loads(entry(value).line)
    assert isinstance(read, dict)
    return read


KINDS: dict[str, dict[str, Any]] = {
    "AgentJet": {
        "task_id": "no_id",
        "main_query": USER["content"],
        "init_messages": [SYSTEM],
        "env_type": "no_env",
        "metadata": {"answer": "2"},
    },
    "AgentJet with the question twice": {
        "main_query": USER["content"],
        "init_messages": [SYSTEM, USER],
        "metadata": {"answer": "2"},
    },
    "AgentJet without a main query": {"main_query": "", "init_messages": [SYSTEM, USER], "metadata": {"answer": "2"}},
    "TRL, texts": {"init_messages": [SYSTEM], "prompt": USER["content"], "completion": "2"},
    "TRL, messages": {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
    "TRL with a reference": {"prompt": [SYSTEM, USER], "reference": "2"},
    "TRL with an answer beside a completion": {"prompt": [SYSTEM, USER], "completion": "No idea", "answer": "2"},
    "Trinity": {"question": USER["content"], "answer": "2", "init_messages": [SYSTEM]},
    "Trinity with a number": {"question": USER["content"], "answer": 2, "init_messages": [SYSTEM]},
    "OpenAI": {"messages": [SYSTEM, USER, ASSISTANT]},
    "OpenAI with parts": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": USER["content"]}]},
            {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
        ]
    },
    "nulls beside it": {
        "main_query": None,
        "question": None,
        "prompt": None,
        "answer": None,
        "metadata": None,
        "messages": [SYSTEM, USER, ASSISTANT],
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_question_history_and_answer_of_every_kind_of_line(kind: str) -> None:
    read = task(KINDS[kind])
    assert read["main_query"] == read["question"] == USER["content"]
    assert read["answer"] == read["metadata"]["answer"] == "2"
    assert read["init_messages"] == [SYSTEM]
    assert read["prompt"] == [SYSTEM, USER]
    assert read["task_id"].startswith("t-")


def test_a_line_has_the_keys_and_types_of_every_task() -> None:
    def types(value: Any) -> Any:
        return {key: types(part) for key, part in value.items()} if isinstance(value, dict) else type(value)

    model = types(task_line(reply(1), "s", "t"))
    for kind in KINDS.values():
        assert types(task(kind)) == model


def test_the_same_task_in_every_form_has_the_same_key() -> None:
    assert len({entry(kind).key for kind in KINDS.values()}) == 1
    assert len({entry(kind).trace_id for kind in KINDS.values()}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_sages_data_sets_beside_a_question_are_the_users_own(kind: str) -> None:
    own = {
        "turns": [USER, {"role": "tool", "tool_id": "f"}],
        "sample_id": "1",
        "instruction": "x",
        "ground_truth": {},
    }
    read = task({**KINDS[kind], **own})
    extra = json.loads(read["metadata"].pop("extra_json"))
    expected = task(KINDS[kind])
    expected["metadata"].pop("extra_json")
    assert read == expected
    assert own.items() <= extra.items()


@pytest.mark.parametrize("turns", [[], ["How much?", "And now?"], [{"speaker": "me"}], "text", {"role": "user"}, 3])
def test_turns_that_are_no_dialog_are_no_question(turns: Any) -> None:
    assert entry({"turns": turns, "answer": "2"}).skip is SkipReason.NO_QUERY


def test_a_later_turn_keeps_its_history_and_its_steps() -> None:
    later = {"role": "user", "content": "Double it."}
    read = task({"messages": [SYSTEM, USER, ASSISTANT, later, CALL, RESULT, {"role": "assistant", "content": "4"}]})
    assert (read["main_query"], read["answer"]) == ("Double it.", "4")
    assert read["init_messages"] == [SYSTEM, USER, ASSISTANT]
    assert [step["role"] for step in json.loads(read["metadata"]["trajectory_json"])] == ["assistant", "tool"]
    assert json.loads(read["metadata"]["trajectory_json"])[0]["tool_calls"] == CALL["tool_calls"]
    assert read["metadata"]["turn"] == 1
    beside = task({"main_query": "Double it.", "init_messages": [SYSTEM, USER, ASSISTANT], "answer": "4"})
    assert beside["init_messages"] == read["init_messages"]


def test_images_are_kept_as_references() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    read = task({"messages": [{"role": "user", "content": parts}, ASSISTANT]})
    address, embedded = json.loads(read["metadata"]["images_json"])
    assert address == "https://x/y.png"
    assert embedded.startswith("sha256:")


def test_what_flywheel_exports_comes_back_as_it_was() -> None:
    first = reply(
        1, turn=3, model="m", adapter="m@r0001", adapter_source="id", service="s", input_tokens=3, output_tokens=4
    )
    second = reply(
        2,
        history=(),
        request="another agent's text",
        trajectory=({"role": "assistant", "content": "x"},),
        tools=({"type": "function"},),
        images=("https://x/y.png",),
        structured={"a": [1]},
        conversation_id="unknown",
        user="user-7",
    )
    for told in (first, second, reply(3, history=(SYSTEM, USER, ASSISTANT))):
        key = task_id(told.trace_id, told.span_id)
        line = task_line(told, "/a.sqlite", key)
        line["metadata"]["split"] = "held-out"
        read = entry_of_line(line_bytes(line), SOURCE, NOW)
        expected = dict(line)
        expected["metadata"] = {**line["metadata"], "source": str(SOURCE), "span_id": key, "split": "train"}
        assert json.loads(read.line) == json.loads(line_bytes(expected))
        original = entry_of(told, "/a.sqlite")
        assert (read.key, read.trace_id, read.started_at) == (key, original.trace_id, original.started_at)
        assert (read.conversation_id, read.agent, read.adapter) == (told.conversation_id, told.agent, told.adapter)


def test_a_prompt_of_another_conversation_is_not_the_request() -> None:
    read = task(
        {"question": "q", "answer": "a", "init_messages": [SYSTEM], "prompt": [{"role": "user", "content": "p"}]}
    )
    assert read["prompt"] == [SYSTEM, {"role": "user", "content": "q"}]


def test_ids_that_tell_nothing_apart_do_not_make_tasks_one() -> None:
    useless = ["no_id", "", "   ", None, 7, "x" * 300, "two\nlines"]
    keys = [entry({"task_id": own, "question": f"q{place}", "answer": "a"}).key for place, own in enumerate(useless)]
    assert len(set(keys)) == len(useless)
    assert all(key.startswith("t-") for key in keys)


def test_a_usable_id_is_kept() -> None:
    read = entry({"task_id": "mine-1", "question": "q", "answer": "a"})
    assert (read.key, read.own_id, json.loads(read.line)["task_id"]) == ("mine-1", "mine-1", "mine-1")


def test_answers_to_one_question_share_a_trace_and_not_a_key() -> None:
    one, other = (entry({"question": "q", "answer": answer}) for answer in ("a", "b"))
    assert one.key != other.key
    assert one.trace_id == other.trace_id


def test_a_conversation_of_sharegpt() -> None:
    said = [
        {"from": "human", "value": "What is 1 plus 1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ]
    tools = [{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}]
    value = {"conversations": said, "system": "You do sums.", "tools": json.dumps(tools)}
    read = task(value)
    assert (read["main_query"], read["answer"], read["init_messages"]) == ("What is 1 plus 1?", "It is 2.", [SYSTEM])
    call, result = json.loads(read["metadata"]["trajectory_json"])
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 1}'}
    assert (result["content"], result["tool_call_id"]) == ("2", call["tool_calls"][0]["id"])
    assert json.loads(read["metadata"]["tools_json"]) == [{"type": "function", "function": tools[0]}]
    assert entry(value).key == entry(value).key


@pytest.mark.parametrize("said", [[], ["hello"], [{"speaker": "me"}], "text", {"a": 1}, None])
def test_what_is_no_conversation_of_sharegpt_is_the_users_own(said: Any) -> None:
    read = task({"question": "q", "answer": "a", "conversations": said})
    assert json.loads(read["metadata"]["extra_json"])["conversations"] == said


@pytest.mark.parametrize(
    ("truth", "answer"),
    [("72", "72"), (72, 72), ({"target": 98, "numbers": [1, 2]}, '{"target": 98, "numbers": [1, 2]}')],
)
def test_a_row_of_verl_has_its_right_answer_as_ground_truth(truth: Any, answer: Any) -> None:
    row = {"data_source": "gsm8k", "prompt": [USER], "ability": "math",
           "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": {"index": 0}}  # fmt: skip
    assert entry(row).skip is SkipReason.NO_ANSWER
    kept = json.loads(task({**row, "completion": "72!"})["metadata"]["extra_json"])
    assert kept["metadata"]["ground_truth"] == {"answer": answer}
    own = {**row, "completion": "72!", "metadata": {"ground_truth": {"answer": "its own"}}}
    assert ground_truth_of(task(own)).answer == "its own"


@pytest.mark.parametrize("key", ["user_id", "conversation_id"])
def test_an_id_beyond_64_bits_stays_itself(key: str) -> None:
    line = f'{{"question": "q", "answer": "a", "metadata": {{"{key}": 18446744073709551617}}}}'
    read = json.loads(entry_of_line(line.encode(), SOURCE, NOW).line)
    assert read["metadata"][key] == "18446744073709551617"


def test_a_user_whose_id_is_beyond_64_bits_is_private() -> None:
    line = b'{"question": "q", "answer": "a", "metadata": {"user_id": 18446744073709551617}}'
    private = PrivateNames(users=frozenset({"18446744073709551617"}))
    assert entry_of_line(line, SOURCE, NOW, private=private).skip is SkipReason.PRIVATE


def test_tool_calls_and_results_among_the_parts_are_steps() -> None:
    said = [
        USER,
        {"role": "assistant", "content": [
            {"type": "text", "text": "I add."}, {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}]}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 2."}]},
    ]  # fmt: skip
    read = task({"messages": said})
    assert (read["main_query"], read["answer"]) == (USER["content"], "It is 2.")
    call, result = json.loads(read["metadata"]["trajectory_json"])
    assert (call["content"], call["tool_calls"][0]["function"]["name"]) == ("I add.", "add")
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c", "2")
    assert entry({"messages": said[:3]}).skip is SkipReason.UNFINISHED


def test_a_part_that_was_not_read_is_said() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "hologram", "of": "x"}]}
    read = task({"messages": [SYSTEM, asked, ASSISTANT]})
    assert (read["main_query"], read["metadata"]["prompt_exact"]) == ("What is this?", False)
    assert read["metadata"]["prompt_reason"] == "a part of type hologram at messages[1] was not read"
    assert task(read)["metadata"]["prompt_reason"] == read["metadata"]["prompt_reason"]


REFUSAL = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
REFUSAL_PART = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot help with that."}]}


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [USER, REFUSAL]},
        {"messages": [USER, REFUSAL_PART]},
        {"prompt": [USER], "completion": [REFUSAL]},
        {"question": "q", "answer": "I cannot help with that.", "metadata": {"refusal": True}},
    ],
)
def test_a_refusal_is_an_answer(value: dict[str, Any]) -> None:
    read = task(value)
    assert (read["answer"], read["metadata"]["refusal"]) == ("I cannot help with that.", True)
    assert task(read)["metadata"]["refusal"] is True, "its own line was read otherwise"


def test_a_text_beside_which_a_refusal_is_empty_is_none() -> None:
    read = task({"messages": [USER, {**ASSISTANT, "refusal": None}]})
    assert (read["answer"], read["metadata"]["refusal"]) == ("2", False)


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": "1 and 1."},
        {"reasoning": "1 and 1."},
        {"content": [{"type": "thinking", "thinking": "1 and 1."}, {"type": "text", "text": "2"}]},
    ],
)
def test_the_reasoning_of_the_last_message_is_the_answers(said: dict[str, Any]) -> None:
    read = task({"messages": [USER, {**CALL, "reasoning_content": "I add."}, RESULT, {**ASSISTANT, **said}]})
    assert (read["answer"], read["metadata"]["answer_reasoning"]) == ("2", "1 and 1.")


def test_an_answer_handed_in_by_a_finish_function_is_finished() -> None:
    finish = {"id": "f", "type": "function", "function": {"name": "generate_response", "arguments": "{}"}}
    assert entry({"messages": [USER, {**ASSISTANT, "tool_calls": [finish]}]}).skip is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, SkipReason.NO_QUERY),
        ({"question": "  ", "answer": "a"}, SkipReason.NO_QUERY),
        ({"messages": [SYSTEM]}, SkipReason.NO_QUERY),
        ({"messages": []}, SkipReason.NO_QUERY),
        ({"question": "q"}, SkipReason.NO_ANSWER),
        ({"question": "q", "answer": " "}, SkipReason.NO_ANSWER),
        ({"messages": [USER, ASSISTANT, USER]}, SkipReason.NO_ANSWER),
        ({"messages": [USER, CALL]}, SkipReason.UNFINISHED),
        ({"messages": [USER, {**CALL, "content": "Let me add."}]}, SkipReason.UNFINISHED),
        ({"messages": [USER, CALL, RESULT]}, SkipReason.UNFINISHED),
        ({"messages": [USER, ASSISTANT, RESULT]}, SkipReason.UNFINISHED),
        ({"prompt": [USER], "completion": [CALL, RESULT]}, SkipReason.UNFINISHED),
        ({"messages": [USER, {"role": "assistant", "content": None, "refusal": " "}]}, SkipReason.NO_ANSWER),
    ],
)
def test_without_question_or_answer_there_is_no_task(value: dict[str, Any], reason: SkipReason) -> None:
    read = entry(value)
    assert (read.skip, read.line) == (reason, b"")
    assert read.detail
    assert read.key != entry({**value, "another": 1}).key


def test_half_an_emoji_costs_nothing() -> None:
    read = task({"question": "a \ud83d b", "answer": "c", "metadata": {"conversation_id": "\ud83d"}})
    assert read["main_query"] == "a ? b"
    assert read["metadata"]["conversation_id"] == "?"


def test_the_environment_and_the_tools_of_a_line_are_kept() -> None:
    read = task({"question": "q", "answer": "a", "env_type": "appworld", "tools": [{"type": "function"}]})
    assert read["env_type"] == "appworld"
    assert json.loads(read["metadata"]["tools_json"]) == [{"type": "function"}]


def test_a_description_of_another_type_is_left_out() -> None:
    odd = {"model": {}, "turn": -3, "started_at": 7, "input_tokens": "many", "tools_json": "["}
    odd |= {"conversation_id": 9, "user_id": 7}
    metadata = task({"question": "q", "answer": "a", "metadata": odd})["metadata"]
    assert (metadata["model"], metadata["turn"], metadata["input_tokens"]) == ("", 0, 0)
    assert metadata["started_at"] == NOW.isoformat()
    assert (metadata["conversation_id"], metadata["user_id"]) == ("9", "7")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    json_values
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": json_values},
        optional={"tool_calls": json_values | st.lists(st.just(CALL["tool_calls"][0]) | json_values, max_size=2)},
    ),
    max_size=3,
)
keys = [
    "task_id",
    "main_query",
    "question",
    "prompt",
    "messages",
    "init_messages",
    "answer",
    "completion",
    "metadata",
    "tools",
]


@given(st.dictionaries(st.sampled_from(keys), json_values | messages, max_size=5))
def test_any_object_is_an_entry_or_a_bad_line(value: dict[str, Any]) -> None:
    try:
        read = entry(value)
    except LineError as error:
        assert str(error)
        return
    assert (read.skip is None) == bool(read.line)
    assert read.span_id == read.key != ""
    if read.line:
        assert json.loads(read.line)["main_query"].strip() or json.loads(read.line)["metadata"]["images_json"] != "[]"


@pytest.mark.parametrize(
    ("reference", "kept"), [("38", "38"), (38, "38"), (0.5, "0.5"), (None, ""), (True, ""), ([1], "")]
)
def test_a_reference_and_the_steps_that_failed_are_kept(reference: Any, kept: str) -> None:
    errors = json.dumps(["tool add: ValueError: no"])
    about = {"reference": reference, "errors_json": errors, "answer_reasoning": "I see."}
    read = task({"question": "q", "answer": "a", "metadata": about})
    assert read["metadata"]["answer_reasoning"] == "I see."
    assert (read["metadata"]["reference"], read["metadata"]["errors_json"]) == (kept, errors.replace(", ", ","))


ODD_CALLS: dict[str, Any] = {
    "a text": "search",
    "a number": 7,
    "one call": {"function": {"name": "f"}},
    "no call": [3],
    "a function that is a text": [{"function": "search"}],
    "no name": [{"id": "1", "function": {"arguments": "{}"}}],
}


@pytest.mark.parametrize("key", ["messages", "init_messages", "prompt", "completion"])
@pytest.mark.parametrize("calls", ODD_CALLS.values(), ids=ODD_CALLS)
def test_calls_of_another_shape_are_a_bad_line(key: str, calls: Any) -> None:
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, ASSISTANT]
    with pytest.raises(LineError, match=rf"`{key}\[1\]\.tool_calls"):
        entry({"question": "q", "answer": None if key == "completion" else "a", key: turns})


def test_a_call_without_a_function_around_it_is_one_all_the_same() -> None:
    calls: list[dict[str, Any]] = [
        {"name": "f", "arguments": {"a": 1}},
        {"id": 7, "type": "custom", "custom": {"name": "g", "input": "x"}},
        CALL["tool_calls"][0],
    ]
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, ASSISTANT]
    read = task({"messages": turns})
    [step] = json.loads(read["metadata"]["trajectory_json"])
    assert step["tool_calls"] == [
        {"id": "", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "7", "type": "function", "function": {"name": "g", "arguments": "x"}},
        CALL["tool_calls"][0],
    ]
    later = task({"messages": [*turns, USER, ASSISTANT]})
    assert later["init_messages"][1]["tool_calls"] == step["tool_calls"]


def test_ids_and_names_of_messages_are_texts() -> None:
    turns = [USER, CALL, {**RESULT, "tool_call_id": 7, "name": 8}, ASSISTANT]
    assert json.loads(task({"messages": turns})["metadata"]["trajectory_json"])[1] == {
        **RESULT,
        "tool_call_id": "7",
        "name": "8",
    }
    with pytest.raises(LineError, match=r"messages\[2\]\.name` is an object"):
        entry({"messages": [USER, CALL, {**RESULT, "name": {}}, ASSISTANT]})


def test_tools_and_steps_of_another_shape_are_left_out() -> None:
    good = {"type": "function", "function": {"name": "f"}}
    steps = [7, {"role": "tool"}, {"role": "assistant", "tool_calls": "x"}, {"content": "y"}]
    bad = [{"type": "function", "function": "search"}, {"function": None}, 3, [good]]
    for told in ({"tools": [*bad, good]}, {"metadata": {"tools_json": json.dumps([*bad, good])}}):
        assert json.loads(task({"question": "q", "answer": "a", **told})["metadata"]["tools_json"]) == [good]
    read = task({"question": "q", "answer": "a", "metadata": {"trajectory_json": json.dumps(steps)}})
    assert json.loads(read["metadata"]["trajectory_json"]) == [{"role": "tool"}]


@pytest.mark.parametrize("depth", [200, 260, 900, 5000])
def test_a_line_that_is_nested_very_deeply_costs_itself(depth: int) -> None:
    nest = "[" * depth + "]" * depth
    calls = f'[{{"name": "f", "arguments": {nest}}}]'
    for told in (
        f'"x": {nest}',
        f'"tools": [{{"f": {nest}}}]',
        f'"init_messages": [{{"role": "assistant", "tool_calls": {calls}}}]',
    ):
        text = f'{{"question": "q", "answer": "a", {told}}}'.encode()
        if depth < 254:
            assert json.loads(entry_of_line(text, SOURCE, NOW).line)["question"] == "q"
        else:
            with pytest.raises(LineError, match=r"deep|not JSON"):
                entry_of_line(text, SOURCE, NOW)
    metadata = {"tools_json": f'[{{"f": {nest}}}]', "trajectory_json": f"[{nest}]", "structured_json": nest}
    assert task({"question": "q", "answer": "a", "metadata": metadata})["question"] == "q"


LONG = "123456789012345678901234567890"


@pytest.mark.parametrize("digits", [LONG, f"-{LONG}", "9" * 300, "7", "18446744073709551616", "9223372036854775807"])
def test_integers_are_read_to_the_digit(digits: str) -> None:
    for told in (
        f'"question": "q", "answer": {digits}',
        f'"prompt": "q", "completion": {digits}',
        f'"question": "q", "metadata": {{"answer": {digits}}}',
        f'"question": "half \\ud83d", "answer": {digits}',
    ):
        assert json.loads(entry_of_line(f"{{{told}}}".encode(), SOURCE, NOW).line)["answer"] == digits
    about = f'{{"question": {digits}, "answer": 1.5, "metadata": {{"reference": {digits}}}}}'
    read = json.loads(entry_of_line(about.encode(), SOURCE, NOW).line)
    assert (read["question"], read["answer"], read["metadata"]["reference"]) == (digits, "1.5", digits)


def test_messages_and_tools_may_be_json_text() -> None:
    turns = [SYSTEM, USER, CALL, RESULT, ASSISTANT]
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = {"question": USER["content"], "answer": "2"}
    told = {**asked, "prompt": json.dumps([SYSTEM, USER]), "tools": json.dumps(tools)}
    read = task({**told, "messages": json.dumps(turns)})
    plain = task({**asked, "messages": turns, "tools": tools})
    assert (read["init_messages"], read["task_id"]) == (plain["init_messages"], plain["task_id"])
    assert read["metadata"] == {**plain["metadata"], "span_id": read["task_id"]}
    assert task({"messages": json.dumps(turns), "tools": "null"})["question"] == USER["content"]
    with pytest.raises(LineError, match="`messages` is"):
        entry({**told, "messages": "no JSON"})


OWN = {
    "task_id": "shop-1",
    "question": "Which shoes?",
    "answer": "The red ones.",
    "database": {"path": "shop.db", "rows": [1, 2]},
    "seed": 7,
    "metadata": {"agent_name": "shop", "start_page": "http://localhost/", "difficulty": None},
}


def test_a_tasks_own_keys_are_kept() -> None:
    line = task(OWN)
    assert json.loads(line["metadata"]["extra_json"]) == {
        "database": OWN["database"],
        "seed": 7,
        "metadata": {"start_page": "http://localhost/", "difficulty": None},
    }
    assert list(line) == list(task({"question": "q", "answer": "a"}))
    assert task({"question": "q", "answer": "a", "metadata": {"agent_name": "x"}})["metadata"]["extra_json"] == "{}"
    whole = whole_line(line)
    assert (whole["database"], whole["seed"], whole["task_id"]) == (OWN["database"], 7, "shop-1")
    assert whole["metadata"]["start_page"] == "http://localhost/"
    assert whole["metadata"]["difficulty"] is None
    assert whole["metadata"]["agent_name"] == "shop"
    assert "extra_json" not in whole["metadata"]
    # Read back from a task file of Flywheel, they are the same, and so is what the agent gets of it.
    assert task(line)["metadata"]["extra_json"] == line["metadata"]["extra_json"]
    assert task(whole)["metadata"]["extra_json"] == line["metadata"]["extra_json"]


def test_own_keys_do_not_replace_those_of_flywheel() -> None:
    line = task({**OWN, "metadata": {"extra_json": '{"main_query": "x", "metadata": {"span_id": "x", "own": 1}}'}})
    whole = whole_line(line)
    assert (whole["main_query"], whole["metadata"]["own"]) == ("Which shoes?", 1)
    assert whole["metadata"]["span_id"] == line["metadata"]["span_id"] == "shop-1"
    assert task({**OWN, "metadata": {"extra_json": '{"metadata": 3}'}})["metadata"]["extra_json"] == json.dumps(
        {"database": OWN["database"], "seed": 7}, separators=(",", ":")
    )
