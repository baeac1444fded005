"""Messages of every dialect: the text that a reader saw, the OpenAI form, images as references."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.records.chat import (
    chat_of,
    has_media,
    images_of,
    is_refusal,
    messages_of,
    reasoning_in,
    result_text,
    text_of,
    tool_of,
    unread_in,
    without_finish,
)
from tests.cases import for_each
from tests.sources.studio.writer import message, part

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}

OWN = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "secret"},
        {"type": "text", "text": "one"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"x": 1}},
        {"type": "tool_result", "id": "c1", "name": "add", "output": [{"type": "text", "text": "2"}]},
        {"type": "text", "text": "two"},
        {"type": "text", "text": "three"},
    ],
}
GENAI = message(
    "assistant",
    {"type": "reasoning", "content": "secret"},
    part("one"),
    {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"x": 1}},
    {"type": "tool_call_response", "id": "c1", "response": '[{"type": "text", "text": "2", "id": "r"}]'},
    part("two"),
    part("three"),
)


@pytest.mark.parametrize("written", [OWN, GENAI], ids=["blocks", "parts"])
def test_reasoning_and_tools_are_no_text(written: dict[str, Any]) -> None:
    assert text_of(written) == "one\ntwo\nthree"


@pytest.mark.parametrize("written", [OWN, GENAI], ids=["blocks", "parts"])
def test_one_message_becomes_call_result_and_answer(written: dict[str, Any]) -> None:
    call, result, answer = without_finish(chat_of(written))
    assert call == {"role": "assistant", "content": "one", "tool_calls": [CALL]}
    assert result == RESULT
    assert answer == {"role": "assistant", "content": "two\nthree"}


@pytest.mark.parametrize(
    ("said", "text", "refuses"),
    [
        ({"content": None, "refusal": "No."}, "No.", True),
        ({"content": "", "refusal": "No."}, "No.", True),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No.", True),
        ({"parts": [{"type": "refusal", "content": "No."}]}, "No.", True),
        ({"content": "Yes.", "refusal": None}, "Yes.", False),
        ({"content": "Yes.", "refusal": "But no."}, "Yes.\nBut no.", False),
        ({"content": None, "refusal": "", "tool_calls": [CALL]}, "", False),
        ({"content": None, "refusal": "No.", "tool_calls": [CALL]}, "No.", False),
    ],
)
def test_a_refusal_is_a_text(said: dict[str, Any], text: str, refuses: bool) -> None:
    message = {"role": "assistant", **said}
    assert (text_of(message), is_refusal(message)) == (text, refuses)
    assert chat_of(message)[0]["content"] == text


def test_the_openai_form_stays() -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL], "name": "Solver"}
    assert chat_of(asked) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert chat_of(RESULT) == [RESULT]
    assert chat_of({"role": "user", "content": "hi", "name": "Bob"}) == [{"role": "user", "content": "hi"}]
    assert chat_of({"role": "assistant", "content": None}) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize("wrap", [lambda m: [m], lambda m: m, json.dumps, lambda m: json.dumps([m])])
def test_messages_as_a_list_an_object_or_json(wrap: Any) -> None:
    (read,) = messages_of(wrap(message("user", part("What is 12?"))), encoded=True)
    assert text_of(read) == "What is 12?"


@pytest.mark.parametrize("value", [None, 0, "", [], {}, 3.5, True, {"other": 1}])
def test_no_message_where_there_is_none(value: Any) -> None:
    assert messages_of(value, encoded=True) == []


def test_text_that_looks_like_json_is_text_unless_it_is_encoded() -> None:
    assert text_of(messages_of('{"role": "x"}')[0]) == '{"role": "x"}'
    assert text_of(messages_of("{not json", encoded=True)[0]) == "{not json"


def test_text_that_a_server_decoded_is_put_back() -> None:
    assert text_of(message("assistant", {"type": "text", "content": 12})) == "12"
    assert text_of(message("assistant", {"type": "text", "content": {"a": "é"}})) == '{"a": "é"}'
    assert text_of(message("assistant", {"type": "text", "content": None})) == ""


def test_images_are_references() -> None:
    url = "https://example.com/a.png"
    own = [
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA" * 1000}},
        {"type": "audio", "source": {"type": "url", "url": "https://example.com/a.mp3"}},
    ]
    first, second = images_of({"content": own})
    assert first == url
    assert second.startswith("sha256:") and len(second) < 80
    assert images_of(message("user", {"type": "uri", "uri": url, "modality": "image"})) == [url]
    assert images_of(message("user", {"type": "uri", "uri": url, "modality": "video"})) == []
    assert images_of({"content": [{"type": "image_url", "image_url": {"url": url}}]}) == [url]
    assert images_of({"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}) != []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("[{broken", "[{broken"),
        ('[{"a": 1}]', '[{"a": 1}]'),
        ({"content": [part("x")], "state": "error"}, "x"),
        ([1, 2], "1\n2"),
        ({"a": 1}, '{"a": 1}'),
        ([{"a": 1}, {"b": 2}], '[{"a": 1}, {"b": 2}]'),
        ([{"type": "book", "title": "x"}], '[{"type": "book", "title": "x"}]'),
        ([{"type": "json", "json": {"count": 41}}], '{"count": 41}'),
        (["a", 2, None, "b"], "a\n2\nb"),
        ([part("x"), {"a": 1}], 'x\n{"a": 1}'),
        ({"content": [{"type": "text", "text": "x"}], "structuredContent": {"y": 1}, "isError": False}, "x"),
        ([{"type": "resource", "resource": {"uri": "file:///a", "text": "x"}}], "x"),
        ([{"type": "resource_link", "name": "a", "uri": "file:///a"}], "a\nfile:///a"),
        ("ToolResponse(content=[{'type': 'text', 'text': 'it\\'s'}], id='1')", "it's"),
        ("ToolResponse(content=[{'type'", "ToolResponse(content=[{'type'"),
        (None, ""),
    ],
)
def test_results(value: Any, text: str) -> None:
    assert result_text(value) == text


SKU = {"sku": 77}
STOCK = {"id": "c1", "type": "function", "function": {"name": "stock", "arguments": '{"sku": 77}'}}
CALLING = [
    {"toolUse": {"toolUseId": "c1", "name": "stock", "input": SKU}},
    {"functionCall": {"id": "c1", "name": "stock", "args": SKU}},
    {"function_call": {"name": "stock", "args": SKU}, "thought_signature": "c1"},
    {"functionCall": {"name": "stock", "args": SKU}, "thoughtSignature": "c1"},
    {"type": "function_call", "id": "fc", "call_id": "c1", "name": "stock", "arguments": '{"sku": 77}'},
    {"type": "server_tool_use", "id": "c1", "name": "stock", "input": SKU},
    {"type": "mcp_tool_use", "id": "c1", "name": "stock", "server_name": "s", "input": SKU},
    {"type": "tool-call", "toolCallId": "c1", "toolName": "stock", "input": SKU},
    {"type": "tool_call", "id": "c1", "name": "stock", "arguments": SKU},
]


@pytest.mark.parametrize("block", CALLING, ids=lambda block: str(block.get("type", next(iter(block)))))
def test_a_call_of_each_dialect(block: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "I look."}, block]}
    assert chat_of(message) == [{"role": "assistant", "content": "I look.", "tool_calls": [STOCK]}]
    assert list(unread_in(message)) == []


PAGE = {"type": "web_search_result", "title": "Stock", "url": "https://x/77", "encrypted_content": "AAA"}
RETURNING: list[tuple[dict[str, Any], str]] = [
    ({"toolResult": {"toolUseId": "c1", "content": [{"text": "41"}, {"json": SKU}]}}, '41\n{"sku": 77}'),
    ({"functionResponse": {"id": "c1", "name": "stock", "response": {"output": "41"}}}, "41"),
    ({"function_response": {"id": "c1", "name": "stock", "response": {"result": "41"}}}, "41"),
    ({"function_response": {"id": "c1", "response": {"n": 41, "output": 2}}}, '{"n": 41, "output": 2}'),
    ({"type": "function_call_output", "call_id": "c1", "output": "41"}, "41"),
    ({"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "41"}]}, "41"),
    ({"type": "tool_call_response", "id": "c1", "result": "41"}, "41"),
    ({"type": "tool_call_response", "id": "c1", "response": "41", "result": "other"}, "41"),
    ({"type": "mcp_tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "41"}]}, "41"),
    ({"type": "tool-result", "toolCallId": "c1", "output": {"type": "json", "value": SKU}}, '{"sku": 77}'),
    ({"type": "tool-result", "toolCallId": "c1", "toolName": "stock", "result": "41"}, "41"),
    ({"type": "web_search_tool_result", "tool_use_id": "c1", "content": [PAGE]}, "Stock\nhttps://x/77"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "text"), RETURNING)
def test_a_result_of_each_dialect(block: dict[str, Any], text: str) -> None:
    message = {"role": "user", "content": [block]}
    (result,) = chat_of(message)
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c1", text)
    assert list(unread_in(message)) == (["web_search_result"] if "https" in text else [])


@pytest.mark.parametrize(
    ("content", "text", "unread"),
    [
        ([{"type": "output_text", "text": "Lima."}], "Lima.", []),
        ([{"type": "input_text", "text": "Capital?"}], "Capital?", []),
        ([{"text": "Lima."}, {"cachePoint": {"type": "default"}}], "Lima.", []),
        ([{"type": "text", "text": "Lima."}, {"type": "cache_point"}], "Lima.", []),
        ([{"citationsContent": {"content": [{"text": "Lima."}], "citations": []}}], "Lima.", []),
        ([{"reasoningContent": {"reasoningText": {"text": "Peru."}}}, {"text": "Lima."}], "Lima.", []),
        ([{"text": "Peru.", "thought": True}, {"text": "Lima."}], "Lima.", []),
        ([{"type": "redacted_thinking", "data": "AA"}, {"type": "text", "text": "Lima."}], "Lima.", []),
        ([{"type": "text", "text": "Lima."}, {"type": "hologram", "of": "x"}], "Lima.", ["hologram"]),
        ([{"text": "Lima."}, {"executableCode": {"code": "1"}}], "Lima.", ["executableCode"]),
        ([{"type": "hologram"}, {"type": "hologram"}], "", ["hologram", "hologram"]),
    ],
)
def test_parts_of_each_dialect(content: list[Any], text: str, unread: list[str]) -> None:
    message = {"role": "assistant", "content": content}
    assert (text_of(message), list(unread_in(message))) == (text, unread)


def test_items_of_responses_are_messages_and_calls_in_a_row_one() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "stock", "arguments": '{"sku": 77}'},
        {"type": "function_call", "call_id": "c2", "name": "stock", "arguments": '{"sku": 77}'},
        {"type": "function_call_output", "call_id": "c1", "output": "41"},
        {"type": "computer_call", "id": "x"},
    ]
    messages = messages_of(items)
    chat = [each for message in messages for each in chat_of(message)]
    assert [(each["role"], len(each.get("tool_calls", ()))) for each in chat] == [
        ("user", 0), ("assistant", 2), ("tool", 0), ("assistant", 0),
    ]  # fmt: skip
    assert [kind for message in messages for kind in unread_in(message)] == ["computer_call"]


def test_media_in_a_result_are_media() -> None:
    picture = {"type": "image", "data": "AA", "mimeType": "image/png"}
    assert has_media({"role": "tool", "content": [{"type": "tool_result", "id": "c", "output": [picture]}]})
    assert has_media({"role": "user", "content": [{"inlineData": {"mimeType": "image/png", "data": "AA"}}]})
    assert images_of({"content": [{"fileData": {"mimeType": "image/png", "fileUri": "https://x/a.png"}}]}) == [
        "https://x/a.png"
    ]
    assert not has_media({"role": "user", "content": [{"type": "tool_result", "id": "c", "output": "text"}]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["text", "toolUse", "toolResult", "functionCall", "functionResponse", "citationsContent", "json",
                     "reasoningContent", "inlineData", "document", "image", "guardContent", "new"]),
    st.none() | st.sampled_from(["text", "tool_use", "tool_result", "function_call", "json", "document", "resource",
                                 "tool-result", "web_search_tool_result", "search_result", "input_image", "new"]),
    json_values,
)  # fmt: skip
def test_no_part_is_too_odd_to_be_read(key: str, kind: str | None, value: Any) -> None:
    block = {key: value, "content": value, "output": value} | ({"type": kind} if kind else {})
    for content in ([block], block, [value, block], value):
        message = {"role": "user", "content": content}
        assert all(isinstance(each["content"], str) for each in chat_of(message))
        assert all(isinstance(each, str) for each in unread_in(message))
        assert isinstance(result_text(content), str)
        has_media(message), images_of(message), is_refusal(message)


@given(st.text("abc_-é", min_size=1, max_size=8), st.sampled_from([[], ["b"]]))
def test_a_part_of_an_unknown_type_is_said(kind: str, before: list[str]) -> None:
    name = f"new-{kind}"
    message = {"role": "user", "content": [*before, {"type": name, "text": "x"}]}
    assert list(unread_in(message)) == [name]
    assert result_text([{"type": name, "text": "x"}]) == json.dumps([{"type": name, "text": "x"}], ensure_ascii=False)


def test_finish_functions_are_no_steps() -> None:
    finish = {"id": "f", "type": "function", "function": {"name": "generate_response", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [finish]},
        {"role": "tool", "tool_call_id": "f", "name": "", "content": "Successfully generated response."},
        {"role": "assistant", "content": "thought", "tool_calls": [finish]},
        {"role": "assistant", "content": "", "tool_calls": [CALL, finish]},
        {**RESULT, "name": ""},
        {"role": "assistant", "content": "a"},
    ]
    assert without_finish(talk) == [
        talk[0],
        {"role": "assistant", "content": "thought"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        RESULT,
        talk[-1],
    ]


def test_tool_definitions_get_one_form() -> None:
    flat = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}}
    nested = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
    assert tool_of(flat) == tool_of(nested) == nested


CALLS = [
    {"id": f"c{n}", "type": "function", "function": {"name": "number", "arguments": f'{{"n": {n}}}'}} for n in (3, 4)
]
ANTHROPIC: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Use tools."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"id": "c3", "type": "tool_use", "name": "number", "input": {"n": 3}},
            {"id": "c4", "type": "tool_use", "name": "number", "input": {"n": 4}},
        ],
    },
    *(
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": f"c{n}", "content": [{"type": "text", "text": f"is {n}"}]}
            ],
        }
        for n in (3, 4)
    ),
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Two."}]},
]
GEMINI: list[dict[str, Any]] = [
    {"role": "user", "parts": [{"text": "Use tools."}]},
    {
        "role": "model",
        "parts": [
            {"text": "I look."},
            {"function_call": {"id": None, "name": "number", "args": {"n": 3}}, "thought_signature": "c3"},
            {"function_call": {"id": "c4", "name": "number", "args": {"n": 4}}},
        ],
    },
    *(
        {
            "role": "user",
            "parts": [{"function_response": {"id": f"c{n}", "name": "number", "response": {"output": f"is {n}"}}}],
        }
        for n in (3, 4)
    ),
    {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "Two."}]},
]


@pytest.mark.parametrize("given", [ANTHROPIC, GEMINI], ids=["anthropic", "gemini"])
def test_what_other_interfaces_are_given_becomes_the_openai_form(given: list[dict[str, Any]]) -> None:
    told = without_finish([chat for one in messages_of(given) for chat in chat_of(one)])
    assert told == [
        {"role": "user", "content": "Use tools."},
        {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c3", "name": "number", "content": "is 3"},
        {"role": "tool", "tool_call_id": "c4", "name": "number", "content": "is 4"},
        {"role": "assistant", "content": "Two."},
    ]


def test_dashscope_gives_its_blocks_no_types() -> None:
    asked = {"role": "user", "content": [{"text": "What is this?"}, {"image": "https://i.example/q.png"}]}
    assert chat_of(asked) == [{"role": "user", "content": "What is this?"}]
    assert images_of(asked) == ["https://i.example/q.png"]


def test_a_result_may_be_json_of_reprs_of_blocks() -> None:
    blocks = json.dumps(["TextBlock(type='text', text=\"it's\\n[1]\", id='a')", "DataBlock(type='data', id='b')"])
    assert result_text(blocks) == "it's\n[1]"


@pytest.mark.parametrize(
    "text", ['["TextBlock(type=', "[\"TextBlock(type='text', text='cut\"]", '["TextBlock(x)", "y"]']
)
def test_what_only_looks_like_reprs_of_blocks_is_a_text(text: str) -> None:
    assert result_text(text) == text


THINKS = [{"type": "reasoning", "content": "I add."}, {"type": "text", "content": "It is 2."}]


@for_each(
    ("written", "expected"),
    [
        ({"role": "assistant", "content": "It is 2.", "thinking": "I add."}, ["I add."]),
        ({"role": "assistant", "content": "It is 2.", "thinking": " ", "reasoning": "I add."}, ["I add."]),
        ({"role": "assistant", "parts": THINKS}, ["I add."]),
        ({"role": "assistant", "parts": THINKS, "reasoning_content": "I add"}, ["I add"]),
        ({"role": "assistant", "parts": [THINKS[0], {"type": "thinking", "thinking": "Again."}]}, ["I add.\nAgain."]),
        (
            {"role": "assistant", "parts": [{"type": "tool_call_response", "id": "c", "response": "2"}, THINKS[0]]},
            [None, "I add."],
        ),
        ({"role": "user", "parts": THINKS, "reasoning": "I add."}, [None]),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": {"a": 1}}]}, [None]),
        (
            {
                "role": "assistant",
                "parts": [THINKS[0], {"type": "tool_call_response", "id": "c", "response": "2"}, *THINKS],
            },
            ["I add.", None, "I add."],
        ),
    ],
)
def test_reasoning_is_that_of_its_message(written: dict[str, Any], expected: list[str | None]) -> None:
    told = chat_of(written, with_reasoning=True)
    assert [message.get("reasoning_content") for message in told] == expected
    without = [{key: value for key, value in each.items() if key != "reasoning_content"} for each in told]
    assert chat_of(written) == [each for each in without if each["content"] or len(without) == 1]


def test_reasoning_beside_the_fields_of_langchain_is_the_messages() -> None:
    more = {"additional_kwargs": {"reasoning_content": "I add."}, "response_metadata": {}}
    [message] = messages_of([{"type": "ai", "content": "It is 2.", **more}])
    assert reasoning_in(message) == "I add."
