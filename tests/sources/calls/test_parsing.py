"""Parsing of recorded calls: plain responses, streams cut anywhere, errors, and whatever else may be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.sources.calls.parsing import events, parse
from flywheel.sources.spans.recorded_calls import inexact_because
from tests.cases import for_each
from tests.factories.foreign_call import PATHS, VALUES
from tests.sources.calls.recorded import assistant, chat, completion, delta, recorded, sse, tool, tool_call, user

SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_chat_with_its_parameters_and_its_answer() -> None:
    messages = [SYSTEM, {"role": "user", "name": "u", "content": [{"type": "text", "text": "1+2?"}]}]
    request = chat(
        messages,
        tools=[ADD],
        stream=False,
        stream_options=None,
        user="ann",
        request_id="x",
        temperature=0.5,
        chat_template_kwargs={"enable_thinking": False},
    )
    said = {**assistant(None, tool_call("add", '{"a":1,"b":2}')), "reasoning": "I add."}
    call = parse(recorded(request, completion(said, usage={"prompt_tokens": 12, "completion_tokens": 3}), retry=1))
    assert call.messages == tuple(messages)
    assert call.tools == (ADD,)
    assert call.parameters == {"temperature": 0.5, "chat_template_kwargs": {"enable_thinking": False}}
    assert (call.model, call.user, call.credential, call.retry, call.status) == ("agent", "ann", "c1", 1, 200)
    assert (call.prompt_tokens, call.completion_tokens) == (12, 3)
    assert (call.error, call.is_interrupted) == ("", False)
    (answer,) = call.answers
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("", "I add.", "tool_calls")
    assert answer.tool_calls == (tool_call("add", '{"a":1,"b":2}'),)


def test_several_choices_are_in_order_of_their_index() -> None:
    body = completion(assistant("a"), assistant("b"))
    body["choices"].reverse()
    assert [answer.content for answer in parse(recorded(chat([user("hi")], n=2), body)).answers] == ["a", "b"]


def test_no_usage_is_none() -> None:
    call = parse(recorded(chat([user("hi")]), completion(assistant("a"))))
    assert (call.prompt_tokens, call.completion_tokens) == (None, None)


STREAM_EVENTS = (
    delta(role="assistant", content=""),
    ": a comment",
    delta(1, role="assistant", content="B"),
    delta(reasoning="I ", reasoning_content="I "),
    delta(reasoning_content="add."),
    delta(content="Häl"),
    'event: unknown\nid: 7\nretry: 100\ndata: {"hello":\ndata: 1}',
    "data: no JSON",
    delta(content="lo\u2028"),
    delta(tool_calls=[{"index": 1, "id": "c1", "type": "function", "function": {"name": "mul", "arguments": ""}}]),
    delta(
        tool_calls=[{"index": 0, "id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a"'}}]
    ),
    delta(tool_calls=[{"index": 1, "function": {"arguments": "{}"}}, {"index": 0, "function": {"arguments": ":1}"}}]),
    delta(1, content="!", finish="stop"),
    delta(finish="tool_calls"),
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}},
)


@for_each("newline", ["\n", "\r\n", "\r"])
def test_a_stream_is_assembled_by_choice_and_by_tool_call(newline: str) -> None:
    stream = sse(*STREAM_EVENTS, newline="\n").replace(b"\n", newline.encode())
    call = parse(recorded(chat([user("hi")], n=2, stream=True), stream))
    first, second = call.answers
    assert (first.content, first.reasoning, first.finish_reason) == ("Hällo\u2028", "I add.", "tool_calls")
    assert first.tool_calls == (tool_call("add", '{"a":1}', "c0"), tool_call("mul", "{}", "c1"))
    assert (second.content, second.finish_reason) == ("B!", "stop")
    assert (call.prompt_tokens, call.completion_tokens, call.is_interrupted, call.error) == (5, 7, False, "")
    assert "stream" not in call.parameters


def test_a_stream_cut_at_any_byte_is_kept_and_marked() -> None:
    stream = sse(*STREAM_EVENTS)
    whole = parse(recorded(chat([user("hi")], n=2), stream)).answers
    ended = stream.index(b'"finish_reason": "tool_calls"')
    for cut in range(len(stream)):
        call = parse(recorded(chat([user("hi")], n=2), stream[:cut], is_complete=False))
        for answer, full in zip(call.answers, whole, strict=False):
            assert full.content.startswith(answer.content)
            assert full.reasoning.startswith(answer.reasoning)
        # What follows the end of the answers is not part of them.
        assert call.is_interrupted is (cut <= stream.index(b"\n", ended) - 1), cut
        assert call.error == ""
    assert parse(recorded(chat([user("hi")], n=2), stream, is_complete=False)).is_interrupted is False


def test_a_stream_that_the_server_ended_without_an_answer_is_interrupted() -> None:
    call = parse(recorded(chat([user("hi")]), sse(delta(content="Hal"), done=False)))
    assert (call.is_interrupted, call.answers[0].content) == (True, "Hal")


def test_an_error_in_the_middle_of_a_stream_is_said() -> None:
    stream = sse(delta(content="Hal"), {"error": {"message": "the engine died", "code": 500}})
    call = parse(recorded(chat([user("hi")]), stream))
    assert (call.error, call.is_interrupted, call.answers[0].content) == ("the engine died", False, "Hal")


def test_parts_of_tool_calls_without_index_or_with_repeated_names() -> None:
    parts = [
        {"id": "c0", "function": {"name": "add", "arguments": "{"}},
        {"function": {"name": "add", "arguments": "}"}},
        {"id": "c1", "function": {"name": "mul", "arguments": "{}"}},
    ]
    stream = sse(*(delta(tool_calls=[part]) for part in parts), delta(finish="tool_calls"))
    (answer,) = parse(recorded(chat([user("hi")]), stream)).answers
    assert answer.tool_calls == (tool_call("add", "{}", "c0"), tool_call("mul", "{}", "c1"))


def test_a_new_id_begins_a_new_tool_call_under_the_same_index() -> None:
    parts = [
        {"index": 0, "id": "c0", "function": {"name": "add", "arguments": '{"a"'}},
        {"index": 0, "id": "c0", "function": {"arguments": ":1}"}},
        {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": "2}"}},
    ]
    stream = sse(*(delta(tool_calls=[part]) for part in parts), delta(finish="tool_calls"))
    (answer,) = parse(recorded(chat([user("hi")]), stream)).answers
    assert answer.tool_calls == (tool_call("add", '{"a":1}', "c0"), tool_call("add", '{"a":2}', "c1"))


@for_each("call_id", ["", "0"])
def test_calls_of_a_whole_message_are_as_many_as_it_lists(call_id: str) -> None:
    calls = [tool_call("add", "{}", call_id), tool_call("mul", "{}", call_id)]
    (answer,) = parse(recorded(chat([user("hi")]), completion(assistant(None, *calls)))).answers
    assert answer.tool_calls == tuple(calls)


REFUSED = "I cannot help with that."
REFUSALS: tuple[tuple[str, Any], ...] = (
    ("/v1/chat/completions", completion({"role": "assistant", "content": None, "refusal": REFUSED})),
    ("/v1/chat/completions", completion({"role": "assistant", "content": [{"type": "refusal", "refusal": REFUSED}]})),
    ("/v1/chat/completions", sse(delta(refusal="I cannot "), delta(refusal="help with that.", finish="stop"))),
    ("/v1/responses", {"output": [{"type": "message", "content": [{"type": "refusal", "refusal": REFUSED}]}]}),
    (
        "/v1/responses",
        sse(
            {"type": "response.refusal.delta", "output_index": 0, "delta": "I cannot "},
            {"type": "response.refusal.delta", "output_index": 0, "delta": "help with that."},
            {"type": "response.completed", "response": {"status": "completed"}},
        ),
    ),
    ("/v1/messages", {"content": [{"type": "text", "text": REFUSED}], "stop_reason": "refusal"}),
)


@for_each(("path", "response"), REFUSALS)
def test_a_refusal_is_an_answer(path: str, response: Any) -> None:
    (answer,) = parse(recorded(chat([user("How?")]), response, path=path)).answers
    assert (answer.content, answer.is_refusal) == (REFUSED, True)


@for_each(
    "said",
    [
        {"content": "2", "refusal": None},
        {"content": "", "refusal": "", "tool_calls": [tool_call("add")]},
        {"content": None, "refusal": ""},
    ],
)
def test_an_empty_refusal_is_none(said: dict[str, Any]) -> None:
    (answer,) = parse(recorded(chat([user("hi")]), completion({"role": "assistant", **said}))).answers
    assert (answer.content, answer.is_refusal) == (said["content"] or "", False)


ERRORS: tuple[tuple[int, Any, str], ...] = (
    (400, {"error": {"message": "too long", "type": "BadRequestError"}}, "too long"),
    (400, {"object": "error", "message": "too long"}, "too long"),
    (401, {"error": "Unauthorized"}, "Unauthorized"),
    (422, {"detail": [{"msg": "field required"}]}, '[{"msg": "field required"}]'),
    (502, b"<html>Bad gateway</html>", "HTTP 502: <html>Bad gateway</html>"),
    (500, b"", "HTTP 500"),
    (200, b"<html>hello</html>", "the response is not a JSON object"),
    (0, b"", "no response began"),
)


@for_each(("status", "response", "error"), ERRORS)
def test_the_error_of_a_response(status: int, response: Any, error: str) -> None:
    call = parse(recorded(chat([user("hi")]), response, status=status, media_type="application/json"))
    assert (call.error, call.is_interrupted, call.answers) == (error, False, ())
    assert call.messages == (user("hi"),)


def test_a_client_that_disconnected_before_the_response_began() -> None:
    call = parse(recorded(chat([user("hi")]), b"", status=0, is_complete=False, media_type=""))
    assert (call.is_interrupted, call.error) == (True, "")


def test_a_plain_response_that_was_not_sent_to_its_end_is_interrupted() -> None:
    body = json.dumps(completion(assistant("Hello"))).encode()
    cut = parse(recorded(chat([user("hi")]), body[:40], is_complete=False, media_type="application/json"))
    whole = parse(recorded(chat([user("hi")]), body, is_complete=False, media_type="application/json"))
    assert cut.is_interrupted and cut.answers == ()
    assert whole.is_interrupted and whole.answers[0].content == "Hello"


def test_a_raw_completion_keeps_its_prompt_as_a_parameter() -> None:
    body = {"choices": [{"index": 0, "text": " Paris", "finish_reason": "stop"}]}
    call = parse(recorded({"model": "agent", "prompt": "The capital is"}, body, path="/v1/completions"))
    assert (call.messages, call.parameters) == ((), {"prompt": "The capital is"})
    assert call.answers[0].content == " Paris"
    stream = sse(*({"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in (" Pa", "ris")))
    assert parse(recorded({"prompt": "x"}, stream, path="/v1/completions")).answers[0].content == " Paris"


RESPONSES_OUTPUT = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I add."}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me add.", "annotations": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "call-1", "name": "add", "arguments": '{"a":1}'},
]


def test_a_request_for_a_response_in_the_chat_form() -> None:
    request = {
        "model": "agent",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
            *RESPONSES_OUTPUT,
            {"type": "function_call_output", "call_id": "call-1", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "max_output_tokens": 9,
    }
    body = {
        "object": "response",
        "status": "completed",
        "output": RESPONSES_OUTPUT,
        "usage": {"input_tokens": 4, "output_tokens": 2},
        "error": None,
    }
    call = parse(recorded(request, body, path="/v1/responses"))
    assert call.messages == (
        SYSTEM,
        user([{"type": "text", "text": "1+2?"}]),
        {
            "role": "assistant",
            "content": "Let me add.",
            "reasoning": "I add.",
            "tool_calls": [tool_call("add", '{"a":1}')],
        },
        {"role": "tool", "content": "3", "tool_call_id": "call-1"},
    )
    assert call.tools == ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    assert call.parameters == {"max_output_tokens": 9}
    (answer,) = call.answers
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Let me add.", "I add.", "tool_calls")
    assert answer.tool_calls == (tool_call("add", '{"a":1}'),)
    assert (call.prompt_tokens, call.completion_tokens) == (4, 2)


def response_events() -> list[dict[str, Any]]:
    return [
        {"type": "response.created", "response": {"status": "in_progress", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning", "content": None}},
        {"type": "response.reasoning_text.delta", "output_index": 0, "delta": "I add."},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message", "content": []}},
        {"type": "response.output_text.delta", "output_index": 1, "delta": "Let me"},
        {"type": "response.output_text.delta", "output_index": 1, "delta": " add."},
        {
            "type": "response.output_item.added",
            "output_index": 2,
            "item": {"type": "function_call", "call_id": "call-1", "name": "add", "arguments": ""},
        },
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"a":1}'},
        {"type": "response.output_item.done", "output_index": 2, "item": RESPONSES_OUTPUT[2]},
    ]


@for_each("output", [RESPONSES_OUTPUT, []])
def test_a_streamed_response_is_taken_from_its_last_event_or_its_parts(output: list[Any]) -> None:
    last = {"status": "completed", "output": output, "usage": {"input_tokens": 4, "output_tokens": 2}}
    stream = sse(*response_events(), {"type": "response.completed", "response": last}, done=False)
    call = parse(recorded({"input": "1+2?"}, stream, path="/v1/responses"))
    assert call.messages == (user("1+2?"),)
    (answer,) = call.answers
    assert (answer.content, answer.reasoning) == ("Let me add.", "I add.")
    assert answer.tool_calls == (tool_call("add", '{"a":1}'),)
    assert answer.finish_reason == "tool_calls"
    assert (call.prompt_tokens, call.is_interrupted) == (4, False)


def test_a_streamed_response_that_was_cut_is_kept_and_marked() -> None:
    stream = sse(*response_events()[:5], done=False)
    call = parse(recorded({"input": "1+2?"}, stream, path="/v1/responses", is_complete=False))
    assert (call.is_interrupted, call.answers[0].content) == (True, "Let me")


def test_the_failure_of_a_streamed_response_is_said() -> None:
    failed = {"status": "failed", "error": {"message": "the engine died"}, "output": []}
    stream = sse({"type": "response.failed", "response": failed}, done=False)
    assert parse(recorded({"input": "hi"}, stream, path="/v1/responses")).error == "the engine died"


ADD_TOOL = {"name": "add", "input_schema": {"type": "object"}}
MESSAGES_REQUEST: dict[str, Any] = {
    "model": "agent",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I add.", "signature": "s"},
                {"type": "text", "text": "Let me add."},
                {"type": "tool_use", "id": "call-1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "Sure?"},
            ],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "And 4?"},
    ],
    "tools": [ADD_TOOL],
    "max_tokens": 9,
    "stream": False,
    "metadata": {"user_id": "ann"},
}
MESSAGES: tuple[Any, ...] = (
    SYSTEM,
    user("1+2?"),
    {
        "role": "assistant",
        "content": "Let me add.",
        "reasoning": "I add.",
        "tool_calls": [tool_call("add", '{"a": 1}')],
    },
    tool("3"),
    user("Sure?"),
    assistant("Yes."),
    {"role": "system", "content": "Today is Monday."},
    user("And 4?"),
)


def message_body(**others: Any) -> dict[str, Any]:
    content = MESSAGES_REQUEST["messages"][1]["content"]
    usage = {"input_tokens": 4, "cache_read_input_tokens": 8, "output_tokens": 2}
    return {"type": "message", "content": content, "stop_reason": "tool_use", "usage": usage, **others}


def test_messages_become_those_of_a_chat() -> None:
    call = parse(recorded(MESSAGES_REQUEST, message_body(), path="/v1/messages"))
    assert call.messages == MESSAGES
    assert call.tools == (ADD,)
    assert call.parameters == {"max_tokens": 9}
    assert (call.user, call.error, call.is_interrupted) == ("ann", "", False)
    (answer,) = call.answers
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("Let me add.", "I add.", "tool_calls")
    assert answer.tool_calls == (tool_call("add", '{"a": 1}'),)
    assert (call.prompt_tokens, call.completion_tokens) == (12, 2)


def test_images_of_messages_are_those_of_a_chat() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    linked = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": [image, {"type": "text", "text": "ok"}]}
    request = {"messages": [{"role": "user", "content": [linked, {"type": "text", "text": "What?"}, result]}]}
    shown, data = (
        {"type": "image_url", "image_url": {"url": url}} for url in ("http://x/y.png", "data:image/png;base64,AA")
    )
    assert parse(recorded(request, message_body(), path="/v1/messages")).messages == (
        tool("ok"),
        user([data]),
        user([shown, {"type": "text", "text": "What?"}]),
    )


@for_each(
    "reason", [("max_tokens", "length"), ("end_turn", "stop"), ("stop_sequence", "stop"), ("refusal", "refusal")]
)
def test_ends_of_messages_have_the_names_of_a_chat(reason: tuple[str, str]) -> None:
    sent, name = reason
    (answer,) = parse(recorded(MESSAGES_REQUEST, message_body(stop_reason=sent), path="/v1/messages")).answers
    assert answer.finish_reason == name


def test_parameters_of_messages_that_change_the_prompt_are_seen() -> None:
    for others, effort in (
        ({"output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
    ):
        call = parse(recorded({**MESSAGES_REQUEST, **others}, message_body(), path="/v1/messages"))
        assert call.parameters["reasoning_effort"] == effort
        assert inexact_because(call)
    assert not inexact_because(parse(recorded(MESSAGES_REQUEST, message_body(), path="/v1/messages")))


def message_events() -> list[dict[str, Any]]:
    def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
        parts = [{"type": "content_block_delta", "index": index, "delta": each} for each in deltas]
        begin = {"type": "content_block_start", "index": index, "content_block": start}
        return [begin, *parts, {"type": "content_block_stop", "index": index}]

    return [
        {"type": "message_start", "message": {"id": "x", "content": [], "usage": {"input_tokens": 4}}},
        {"type": "ping"},
        *block(
            0,
            {"type": "thinking", "thinking": ""},
            {"type": "thinking_delta", "thinking": "I add."},
            {"type": "signature_delta", "signature": "s"},
        ),
        *block(
            1,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "Let me"},
            {"type": "text_delta", "text": " add."},
        ),
        *block(
            2,
            {"type": "tool_use", "id": "call-1", "name": "add", "input": {}},
            {"type": "input_json_delta", "partial_json": '{"a"'},
            {"type": "input_json_delta", "partial_json": ": 1}"},
        ),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]


def test_streamed_messages_are_assembled() -> None:
    call = parse(recorded(MESSAGES_REQUEST, sse(*message_events(), done=False), path="/v1/messages"))
    whole = parse(recorded(MESSAGES_REQUEST, message_body(), path="/v1/messages"))
    assert call.answers == whole.answers
    assert (call.prompt_tokens, call.completion_tokens, call.is_interrupted, call.error) == (4, 2, False, "")


def test_streamed_messages_that_were_cut_are_kept_and_marked() -> None:
    stream = sse(*message_events(), done=False)
    (whole,) = parse(recorded(MESSAGES_REQUEST, stream, path="/v1/messages")).answers
    ended = stream.index(b'"stop_reason": "tool_use"')
    for cut in range(0, len(stream), 7):
        call = parse(recorded(MESSAGES_REQUEST, stream[:cut], path="/v1/messages", is_complete=False))
        assert call.is_interrupted is (cut <= stream.index(b"\n", ended) - 1), cut
        assert all(whole.content.startswith(answer.content) for answer in call.answers)


def test_the_failure_of_streamed_messages_is_said() -> None:
    error = {"type": "error", "error": {"type": "internal_error", "message": "the engine died"}}
    stream = sse(*message_events()[:5], error, done=False)
    assert parse(recorded(MESSAGES_REQUEST, stream, path="/v1/messages")).error == "the engine died"
    refused = parse(recorded(MESSAGES_REQUEST, error, path="/v1/messages", status=400))
    assert (refused.error, refused.answers) == ("the engine died", ())


ODD_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "AA"},
            {"type": "tool_result", "tool_use_id": "call-0", "content": [{"type": "text", "text": "7"}]},
            {"type": "tool_use", "id": "call-1", "name": "find", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "call-1",
                "content": [{"type": "tool_reference", "tool_name": "add"}, {"type": "json", "json": 1}],
            },
        ],
    },
]
"""What vLLM leaves out is left out, and what it makes of the rest is made of it."""


@pytest.mark.slow
@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
@for_each("messages", [MESSAGES_REQUEST["messages"], ODD_MESSAGES])
def test_messages_become_what_vllm_makes_of_them(messages: list[dict[str, Any]]) -> None:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    request = {**MESSAGES_REQUEST, "messages": messages}
    made = AnthropicServingMessages.to_chat_completion_request(AnthropicMessagesRequest(**request))
    sent = json.loads(made.model_dump_json(exclude_none=True))
    call = parse(recorded(request, message_body(), path="/v1/messages"))
    assert [{key: value for key, value in message.items() if value is not None} for message in call.messages] == sent[
        "messages"
    ]
    assert [tool["function"] for tool in call.tools] == [tool["function"] for tool in sent["tools"]]


@for_each("request_body", [b"", b"\xff\xfe", b"[]", b"null", b'{"messages": "hi"}', b'{"messages": ["hi"]}'])
def test_a_request_that_is_none_says_so(request_body: bytes) -> None:
    call = parse(recorded(request_body, completion(assistant("a"))))
    assert call.messages == ()
    assert call.error


def test_lone_surrogates_are_read() -> None:
    call = parse(recorded(b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', completion(assistant("a"))))
    assert call.messages[0]["content"] == "\ud83d"


@pytest.mark.slow
@given(
    request=VALUES | st.binary(max_size=20),
    sent=st.lists(VALUES, max_size=4),
    is_stream=st.booleans(),
    path=st.sampled_from(PATHS),
    status=st.sampled_from([0, 200, 400]),
    is_complete=st.booleans(),
)
def test_nothing_that_is_sent_raises(
    request: Any, sent: list[Any], is_stream: bool, path: str, status: int, is_complete: bool
) -> None:
    response = sse(*(f"data: {json.dumps(event)}" for event in sent)) if is_stream else (sent or [{}])[0]
    parse(recorded(request, response, path=path, status=status, is_complete=is_complete))


@for_each("path", PATHS)
@for_each("deep", ['{"messages":', '{"input":', '{"choices":', '{"error":'])
def test_deep_nesting_raises_nothing(path: str, deep: str) -> None:
    for levels in (300, 900, 5000):
        body = (deep + "[" * levels + "]" * levels + "}").encode()
        parse(recorded(body, b"data: " + body, path=path))
        parse(recorded(body, body, path=path, media_type="application/json"))


def test_events_are_split_at_line_ends_only() -> None:
    assert list(events(b"\xef\xbb\xbfdata: a\x85\xe2\x80\xa8b\n\ndata:c\ndata: d\r\n\r\n:x\n\ndata: e")) == [
        b"a\x85\xe2\x80\xa8b",
        b"c\nd",
        b"e",
    ]


def test_messages_that_follow_tools_are_read_as_sent() -> None:
    messages = [user("1+2?"), assistant(None, tool_call("add")), tool("3"), user("and 4?")]
    assert parse(recorded(chat(messages), completion(assistant("7")))).messages == tuple(messages)
