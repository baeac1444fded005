"""What of a row is trained on: whole messages of the model with their text, their reasoning and their calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.errors import ConfigError
from flywheel.records.tool_calls import said_in
from flywheel.records.trace import ChatMessage
from flywheel.sources.jsonl.record import DataRow, rows_of

ASKED = {"role": "user", "content": "Weather in Oslo?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
RIGHT = {"role": "assistant", "content": "Rain."}


def called(arguments: Any = '{"city": "Oslo"}', name: str = "get_weather", **message: Any) -> ChatMessage:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **message}


CALL = called()
FINISH = called('{"response": "Rain."}', "generate_response")


def row(line: Any) -> DataRow:
    [found] = rows_of([json.dumps(line).encode()], Path("rows.jsonl"), "read the rows")
    return found


def reply(*said: Any) -> list[ChatMessage]:
    """What is trained of a conversation with these messages behind its question."""
    return list(row({"messages": [ASKED, *said]}).reply)


@pytest.mark.parametrize(
    "said",
    [
        [{**CALL, "content": "Let me look."}],
        [CALL],
        [CALL, RESULT],
        [CALL, RESULT, RIGHT],
        [FINISH],
        [{**FINISH, "content": "Done."}],
        [{**CALL, "content": "Let me look.", "reasoning_content": "Oslo is wet."}, RESULT],
        [RIGHT, {**RIGHT, "content": "It rains."}],
    ],
)
def test_the_reply_is_all_messages_behind_the_question(said: list[ChatMessage]) -> None:
    found = row({"messages": [ASKED, *said]})
    assert list(found.reply) == said
    assert (found.task["prompt"], found.worse_reply, found.unread_keys) == ([ASKED], (), ())
    assert list(row({"prompt": [ASKED], "completion": said}).reply) == said
    assert list(row({"prompt": ASKED["content"], "completion": said}).reply) == said
    assert list(row({"messages": json.dumps([ASKED, *said])}).reply) == said
    pair = row({"prompt": [ASKED], "chosen": said, "rejected": [CALL, RESULT]})
    assert (list(pair.reply), list(pair.worse_reply)) == (said, [CALL, RESULT])
    pair = row({"chosen": [ASKED, CALL], "rejected": [ASKED, *said]})
    assert (list(pair.reply), list(pair.worse_reply)) == ([CALL], said)


def test_texts_are_replies_behind_the_steps_that_a_line_has() -> None:
    assert row({"question": "1+1?", "answer": 2}).reply == ({"role": "assistant", "content": "2"},)
    assert list(row({"messages": [ASKED, CALL, RESULT], "answer": "Rain."}).reply) == [CALL, RESULT, RIGHT]
    whole = {**RIGHT, "reasoning_content": "Oslo is wet."}
    assert list(row({"messages": [ASKED, CALL, RESULT, whole], "answer": "Rain."}).reply) == [CALL, RESULT, whole]
    pair = row({"prompt": [ASKED], "chosen": "Rain.", "rejected": "Sun."})
    assert (pair.reply, pair.worse_reply[0]["content"]) == ((RIGHT,), "Sun.")


def test_a_line_of_the_task_file_has_its_steps_and_what_was_sent() -> None:
    steps = [{**CALL, "reasoning_content": "Look.", "reasoning_sent": False}, {**RESULT, "name": "get_weather"}]
    about = {"trajectory_json": json.dumps(steps), "answer_reasoning": "Oslo is wet.", "trace_id": "t"}
    found = row({"question": "Weather?", "answer": "Rain.", "metadata": about})
    assert list(found.reply) == [*steps, {**RIGHT, "reasoning_content": "Oslo is wet."}]
    assert json.loads(found.task["metadata"]["trajectory_json"]) == steps


@pytest.mark.parametrize("answer", [[RIGHT], "Rain."])
def test_what_a_prompt_has_behind_the_question_is_context(answer: Any) -> None:
    context = [{**CALL, "weight": 0}, RESULT]
    prompt = [ASKED, CALL, RESULT]
    assert list(row({"prompt": prompt, "completion": answer}).reply) == [*context, RIGHT]
    answered = row({"prompt": [ASKED, RIGHT], "completion": [CALL]})
    assert (list(answered.reply), answered.task["answer"]) == ([{**RIGHT, "weight": 0}, CALL], "")
    pair = row({"prompt": prompt, "chosen": answer, "rejected": "Sun."})
    assert list(pair.reply) == [*context, RIGHT]
    assert list(pair.worse_reply) == [*context, {**RIGHT, "content": "Sun."}]


@pytest.mark.parametrize(
    ("key", "said"),
    [("chosen", [RESULT]), ("rejected", [{"role": "assistant", "content": " "}]), ("chosen", []), ("rejected", "")],
)
def test_a_preference_without_a_message_of_the_model_is_a_wrong_line(key: str, said: Any) -> None:
    with pytest.raises(ConfigError, match=f"line 1: `{key}` holds no reply"):
        row({"prompt": [ASKED], "chosen": [RIGHT], "rejected": [CALL], key: said})


def test_an_empty_message_of_the_model_is_not_trained_on() -> None:
    assert reply({"role": "assistant", "content": None}, RIGHT) == [
        {"role": "assistant", "content": "", "weight": 0},
        RIGHT,
    ]


THOUGHT = "Oslo is wet."
REASONED: list[ChatMessage] = [
    {"role": "assistant", "content": "Rain.", "reasoning_content": THOUGHT},
    {"role": "assistant", "content": "Rain.", "reasoning": THOUGHT},
    {"role": "assistant", "content": "Rain.", "thinking": THOUGHT, "reasoning_content": None, "reasoning": ""},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "Rain."}]},
    {"role": "assistant", "content": [{"type": "reasoning", "text": THOUGHT}, {"type": "text", "text": "Rain."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHT}]},
            {"type": "output_text", "text": "Rain."},
        ],
    },
    {"role": "assistant", "content": [{"reasoningContent": {"reasoningText": {"text": THOUGHT}}}, {"text": "Rain."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
            {"type": "redacted_thinking", "data": "AA"},
            {"type": "text", "text": "Rain."},
        ],
    },
    {"role": "model", "parts": [{"text": THOUGHT, "thought": True}, {"text": "Rain."}]},
]


@pytest.mark.parametrize("said", REASONED)
def test_reasoning_is_that_of_its_message_in_every_form(said: ChatMessage) -> None:
    [told] = reply(said)
    assert told == {**RIGHT, "reasoning_content": THOUGHT}
    found = row({"messages": [ASKED, said, ASKED, said, {**said, "content": "More."}]})
    assert [message.get("reasoning_content") for message in found.reply][:1] == [THOUGHT]
    assert found.task["prompt"][1] == told, "the template decides on earlier reasoning"
    pair = row({"prompt": [ASKED], "chosen": [said], "rejected": [RIGHT]})
    assert (list(pair.reply), pair.worse_reply) == ([told], (RIGHT,))


def test_reasoning_before_a_call_is_that_of_the_call() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}
    told = reply(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Look."}, use]},
        {"role": "user", "content": [result]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "Rain."}],
        },
    )
    assert said_in(told) == said_in(
        [{**CALL, "reasoning_content": "Look."}, RESULT, {**RIGHT, "reasoning_content": THOUGHT}]
    )


def test_reasoning_in_the_text_stays_there() -> None:
    text = "<think>\nOslo is wet.\n</think>\n\nRain."
    assert reply({"role": "assistant", "content": text}) == [{"role": "assistant", "content": text}]


def test_reasoning_beside_an_answer_is_its_reasoning() -> None:
    found = row({"question": "1+1?", "answer": "2", "reasoning": "One and one."})
    assert found.reply == ({"role": "assistant", "content": "2", "reasoning_content": "One and one."},)
    assert found.unread_keys == ()
    setting = row({"question": "1+1?", "answer": "2", "reasoning": "on"})
    assert (setting.reply, setting.unread_keys) == (({"role": "assistant", "content": "2"},), ("reasoning",))
    pair = row({"prompt": "1+1?", "chosen": "2", "rejected": "3", "reasoning": "One and one."})
    assert (pair.reply[0], pair.unread_keys) == ({"role": "assistant", "content": "2"}, ("reasoning",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"city": "Oslo"}, '{"city": "Oslo"}'),
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        ('"{\\"city\\": \\"Oslo\\"}"', '{"city": "Oslo"}'),
        (json.dumps(json.dumps('{"n": 123456789012345678901234567890}')), '{"n": 123456789012345678901234567890}'),
        ({"n": 123456789012345678901234567890}, '{"n": 123456789012345678901234567890}'),
        ({"n": -9223372036854775809, "half": "\ud83d"}, '{"n": -9223372036854775809, "half": "?"}'),
        (None, "{}"),
        ("", "{}"),
        (" ", "{}"),
        ({}, "{}"),
        ("null", "{}"),
        ('""', "{}"),
        ('{"city": "Oslo"', '{"city": "Oslo"'),
        ('"{\\"city\\": "', '"{\\"city\\": "'),
        ('["Oslo"]', '["Oslo"]'),
        (["Oslo"], '["Oslo"]'),
        ('"Oslo"', '"Oslo"'),
        ("Oslo", "Oslo"),
        ("7", "7"),
        (False, "false"),
    ],
)
def test_arguments_are_json_text(given: Any, expected: str) -> None:
    for found in (
        row({"messages": [ASKED, called(given)]}).reply[0],
        row({"messages": [ASKED, called(given), RESULT, ASKED, RIGHT]}).task["prompt"][1],
        row({"prompt": [ASKED], "chosen": [RIGHT], "rejected": [called(given)]}).worse_reply[0],
    ):
        assert found["tool_calls"] == called(expected)["tool_calls"]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "get_weather", "arguments": {"city": "Oslo"}},
        {"name": "get_weather", "parameters": {"city": "Oslo"}},
        {"function": {"name": "get_weather", "args": {"city": "Oslo"}, "arguments": None}},
        {"type": "custom", "custom": {"name": "get_weather", "input": '{"city": "Oslo"}'}},
    ],
)
def test_a_call_of_another_form_is_one_all_the_same(call: Any) -> None:
    [told] = reply({"role": "assistant", "content": None, "tool_calls": [call]})
    assert said_in([told]) == said_in([CALL])


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"tools": json.dumps([json.dumps(TOOL)])},
        {"tools": [TOOL["function"]]},
        {"functions": [TOOL["function"]]},
        {"functions": json.dumps([TOOL["function"]])},
        {"functions": [json.dumps(TOOL["function"])], "tools": None},
    ],
)
def test_tools_in_every_form(given: dict[str, Any]) -> None:
    found = row({"messages": [ASKED, CALL], **given})
    assert (json.loads(found.task["metadata"]["tools_json"]), found.unread_keys) == ([TOOL], ())


def test_the_older_interface_of_functions_is_read() -> None:
    called_once = {"role": "assistant", "content": None, "function_call": CALL["tool_calls"][0]["function"]}
    result = {"role": "function", "name": "get_weather", "content": "rain"}
    told = reply(called_once, result, called_once)
    assert said_in(told) == said_in([CALL, RESULT, CALL])
    assert told[1]["tool_call_id"] == told[0]["tool_calls"][0]["id"] != told[2]["tool_calls"][0]["id"]
    history = row({"messages": [ASKED, called_once, result, RIGHT, ASKED, RIGHT]}).task["prompt"]
    assert [message["role"] for message in history] == ["user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize("weight", [0, 0.0, False])
def test_a_message_of_weight_zero_is_context(weight: Any) -> None:
    assert reply({**CALL, "weight": weight}, RESULT, {**RIGHT, "weight": 1}) == [{**CALL, "weight": 0}, RESULT, RIGHT]
    found = row({"messages": [ASKED, {**RIGHT, "weight": weight}, ASKED, {**RIGHT, "weight": None}]})
    assert (found.task["prompt"], found.reply) == ([ASKED, RIGHT, ASKED], (RIGHT,))
    block = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {}}
    assert reply({"role": "assistant", "content": [block], "weight": weight}, RIGHT)[0]["weight"] == 0
    said = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "No.", "weight": weight}]
    told = row({"conversations": [*said, {"from": "gpt", "value": "Rain.", "weight": 1}]}).reply
    assert told == ({"role": "assistant", "content": "No.", "weight": 0}, RIGHT)


@pytest.mark.parametrize(
    ("line", "unread"),
    [
        ({"messages": [ASKED, {**RIGHT, "train": False, "weight": 0.5}]}, ("train", "weight")),
        ({"messages": [ASKED, {**RIGHT, "reasoning": {"steps": []}}]}, ("reasoning",)),
        ({"messages": [{**ASKED, "persona": "x"}, RIGHT, ASKED, {**RIGHT, "prefix": True}]}, ("persona", "prefix")),
        ({"messages": [ASKED, {**CALL, "tool_calls": [{"name": "f", "score": 1}]}]}, ("tool_calls.score",)),
        ({"prompt": [ASKED], "chosen": [{**RIGHT, "a": 1}], "rejected": [{**CALL, "b": 1}]}, ("a", "b")),
        ({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!", "loss": 0}]}, ("loss",)),
        ({"messages": [ASKED, RIGHT], "system": "Be brief.", "tools": "none"}, ("tools", "system")),
        ({"messages": [ASKED, {"role": "critic", "content": "Hm."}, RIGHT]}, ("role.critic",)),
        ({"messages": [{**ASKED, "content": [{"type": "image_url", "image_url": "x"}, {"type": "text", "text": "?"}]},
                       {**RIGHT, "content": [{"type": "hologram"}, {"type": "text", "text": "!"}]}]},
         ("content.image", "content.hologram")),
        ({"messages": [ASKED, {**RIGHT, "name": "Friday", "id": "m", "metadata": {"a": 1}, "annotations": [1],
                               "audio": {"id": "a"}, "refusal": None, "weight": 1, "train": None, "a": "", "b": [],
                               "c": {}, "d": {"e": None}, "function_call": {"name": None, "arguments": None}}]}, ()),
        ({"question": "1+1?", "answer": "2", "level": 3, "metadata": {"source": "x"}}, ()),
        ({"messages": [ASKED, RIGHT], "tools": "null", "functions": "[]"}, ()),
        ({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}], "system": "Hm."}, ()),
    ],
)  # fmt: skip
def test_keys_with_a_value_that_are_not_read_are_named(line: Any, unread: tuple[str, ...]) -> None:
    found = row(line)
    assert found.unread_keys == unread
    assert found.reply, "the row is used"


def test_rows_of_a_table_have_what_their_lines_had() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    schema = {"properties": {"city": {"type": "string"}, "unit": {"type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    of_time = called({"zone": "CET", "at": {"hour": 3}}, "get_time", content=None)
    use = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo", "unit": None}}
    parts = [{"text": "I look."}, {"toolUse": {"toolUseId": "c1", "name": "get_weather", "input": {"city": "Oslo"}}}]
    lines: list[Any] = [
        {"messages": [ASKED, called({"city": "Oslo"}), RESULT, {**RIGHT, "weight": 0}, RIGHT], "tools": [tool]},
        {"messages": [ASKED, {**of_time, "thinking": "Late."}], "tools": [tool]},
        {
            "messages": [
                ASKED,
                {**RIGHT, "function_call": {"name": "get_weather", "arguments": "{}"}, "content": None},
            ]
        },
        {"messages": [ASKED, {**RIGHT, "audio": {"id": "a"}, "train": True}]},
    ]
    blocks: list[Any] = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]},
                      {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, use]}]},
        {"messages": [{"role": "user", "content": [{"text": "?"}]}, {"role": "assistant", "content": parts}]},
    ]  # fmt: skip
    for rows in (lines, blocks):
        of_table = pyarrow.Table.from_pylist(rows).to_pylist()
        assert json.dumps(of_table) != json.dumps(rows)
        for line, told in zip(rows, of_table, strict=True):
            plain, read = row(line), row(told)
            assert (read.reply, read.unread_keys) == (plain.reply, plain.unread_keys)
            assert read.task["prompt"] == plain.task["prompt"]
    # Whether this null is the author's cannot be known: its schema permits it.
    [first] = row(
        pyarrow.Table.from_pylist([*lines[:1], {"messages": [ASKED, called({"unit": "C"})]}]).to_pylist()[0]
    ).reply[:1]
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo", "unit": None}


words = st.text(st.sampled_from('ab {}"\\\n<é😀'), min_size=1, max_size=6).filter(str.strip)
values = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def said_messages(draw: st.DrawFn) -> tuple[list[ChatMessage], list[ChatMessage]]:
    """Messages behind a question in the OpenAI chat form, and the same as some program may write them."""
    plain: list[ChatMessage] = []
    written: list[ChatMessage] = []
    for place in range(draw(st.integers(1, 3))):
        text = draw(words | st.just(""))
        reasoning = draw(words | st.just(""))
        arguments = draw(st.none() | st.dictionaries(words, values, max_size=2))
        if not text and not reasoning and arguments is None:
            text = "."
        message: ChatMessage = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if arguments is not None:
            function = {"name": draw(st.sampled_from(["f", "g"])), "arguments": json.dumps(arguments)}
            message["tool_calls"] = [{"id": f"c{place}", "type": "function", "function": function}]
        plain.append(message)
        written.append(draw(st.sampled_from([_with_keys, _with_blocks]))(draw, message, arguments))
        if arguments is not None and (place or draw(st.booleans())):
            result = {"role": "tool", "tool_call_id": f"c{place}", "content": draw(words)}
            plain.append(result)
            written.append(result)
    return plain, written


def _with_keys(draw: st.DrawFn, message: ChatMessage, arguments: Any) -> ChatMessage:
    text = message["content"]
    found: ChatMessage = {"role": "assistant", "content": text or draw(st.sampled_from(["", None]))}
    if text and draw(st.booleans()):
        found["content"] = [{"type": "text", "text": text, "image_url": None}]
    key = draw(st.sampled_from(["reasoning", "reasoning_content", "thinking"]))
    found |= {"reasoning": None, "thinking": "", "tool_calls": None, key: message.get("reasoning_content")}
    if arguments is None:
        return found
    [call] = message["tool_calls"]
    encoded = call["function"]["arguments"]
    given = draw(st.sampled_from([arguments, encoded, json.dumps(encoded)]))
    function = {"name": call["function"]["name"], "arguments": given}
    if draw(st.booleans()):
        return found | {"function_call": function}
    return found | {"tool_calls": [draw(st.sampled_from([{**call, "function": function}, function]))]}


def _with_blocks(draw: st.DrawFn, message: ChatMessage, arguments: Any) -> ChatMessage:
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        kind = draw(st.sampled_from(["thinking", "reasoning"]))
        blocks.append({"type": kind, draw(st.sampled_from([kind, "text"])): reasoning, "signature": None})
    if text := message["content"]:
        blocks.append({"type": draw(st.sampled_from(["text", "output_text"])), "text": text})
    if arguments is not None:
        [call] = message["tool_calls"]
        use = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}
        blocks.append(use)
    return {"role": "assistant", "content": blocks}


@given(said_messages(), st.sampled_from(["messages", "completion", "chosen", "rejected", "conversation"]))
def test_whatever_the_form_a_reply_says_the_same(told: tuple[list[ChatMessage], list[ChatMessage]], key: str) -> None:
    plain, written = told
    line: dict[str, Any] = {"prompt": [ASKED], key: written}
    if key == "messages":
        line = {"messages": [ASKED, *written]}
    elif key in ("chosen", "rejected"):
        line |= {"chosen": [RIGHT], "rejected": [RIGHT], key: written}
    elif key == "conversation":
        line = {"chosen": [ASKED, *written], "rejected": [ASKED, RIGHT]}
    found = row(line)
    read = found.worse_reply if key == "rejected" else found.reply
    assert said_in(read) == said_in(plain)
    assert all("weight" not in message for message in read)
    assert found.unread_keys == ()
