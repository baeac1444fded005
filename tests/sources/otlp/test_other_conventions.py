"""What SDKs with other conventions send: genuine requests, saved in `tests/data/traces`, and spans by hand.

The saved ones are of an agent with a tool that is asked twice, and where the SDK can, once for a structured answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.records import exclusion
from flywheel.records.exclusion import WORDS, Exclusion
from flywheel.records.states import SkipReason
from flywheel.records.task import exclusion_of_tools
from flywheel.records.trace import Reply
from tests.sources.otlp.exporting import JSON, PROTOBUF, pairs, request, span
from tests.sources.studio.reading import MUCH_LATER, read_all

TRACES = Path(__file__).parents[2] / "data" / "traces"
SYSTEM = {"role": "system", "content": "You report the weather."}
CHAT, AGENT = {"gen_ai.operation.name": "chat"}, {"gen_ai.operation.name": "invoke_agent"}


async def read(client: httpx2.AsyncClient, inbox: Path, *spans: Span) -> list[Reply]:
    answer = await client.post("/v1/traces", content=request(*spans).SerializeToString(), headers=PROTOBUF)
    assert (answer.status_code, answer.content) == (200, b"")
    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    return replies


def event(name: str, **attributes: Any) -> Span.Event:
    return Span.Event(
        name=name, attributes=pairs({key.replace("__", "."): value for key, value in attributes.items()})
    )


def with_events(number: int, attributes: dict[str, Any], *events: Span.Event, parent: int = 0) -> Span:
    made = span(number, attributes, parent=parent)
    made.events.extend(events)
    return made


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.json")), ids=lambda path: path.stem)
async def test_what_each_sdk_sends_becomes_the_replies_of_its_agent(
    client: httpx2.AsyncClient, inbox: Path, path: Path
) -> None:
    answer = await client.post("/v1/traces", content=path.read_bytes(), headers=JSON)
    assert (answer.status_code, answer.json()) == (200, {})
    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    shown = sorted(
        (reply for reply in replies if reply.skip is not SkipReason.NESTED), key=lambda one: one.started_at
    )
    first, *others = shown
    assert (first.query, first.answer, first.skip) == ("Weather in Paris?", "It is 18 degrees in Paris.", None)
    assert {(reply.agent, reply.model) for reply in shown} == {("meteo", "small")}
    assert first.history == (SYSTEM,)
    call, result = first.trajectory
    assert [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in call["tool_calls"]] == [
        ("weather", {"city": "Paris"})
    ]
    assert call["content"] in ("", "I look it up.")
    assert (result["tool_call_id"], json.loads(result["content"])) == (call["tool_calls"][0]["id"], {"degrees": 18})
    assert first.input_tokens > 0 < first.output_tokens
    assert first.prompt_reason == ""
    if not path.stem.startswith("agent-365"):
        assert exclusion_of_tools(first.tools, first.trajectory) is Exclusion.TOOLS
        (tool,) = first.tools
        function = tool["function"]
        assert (function["name"], function["description"]) == ("weather", "The weather of a city.")
        assert function["parameters"]["required"] == ["city"]
        second = others[0]
        assert (second.query, second.answer, second.turn, second.trajectory) == ("Thanks!", "You are welcome.", 1, ())
        assert second.prompt_reason == ""
        assert second.conversation_id == first.conversation_id
        # Version 7 of the Vercel AI SDK gives the calls of the turn before in no message.
        if not path.stem.startswith("vercel-ai-7"):
            assert [message["role"] for message in second.history] == [
                "system", "user", "assistant", "tool", "assistant",
            ]  # fmt: skip
    else:
        assert exclusion_of_tools(first.tools, first.trajectory) is Exclusion.UNDEFINED
        assert WORDS[Exclusion.UNDEFINED].why.endswith("the trace has no tool definitions")
        assert "gen_ai.tool.definitions" in WORDS[Exclusion.UNDEFINED].remedy
    if path.stem.startswith("pydantic"):
        assert json.loads(others[1].answer) == {"city": "Paris", "degrees": 18}
        assert others[1].trajectory == first.trajectory
        assert others[1].prompt_reason == exclusion.FINISH_FUNCTION
    if path.stem.startswith("vercel"):
        assert others[1].answer == '{"city":"Paris","degrees":18}'
    if path.stem.startswith(("vercel-ai-4", "vercel-ai-5", "vercel-ai-6", "openllmetry-openai")):
        assert {(reply.conversation_id, reply.user) for reply in shown} == {("s-1", "ann")}


CALL = {"id": "c-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("gen_ai.system.message", {"content": "Be brief."}),
    ("gen_ai.user.message", {"content": "Weather?"}),
    ("gen_ai.assistant.message", {"tool_calls": [CALL]}),
    ("gen_ai.tool.message", {"id": "c-1", "content": '{"degrees": 18}'}),
    ("gen_ai.user.message", {"content": "And?"}),
    ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "18."}}),
]


@pytest.mark.parametrize("holder", ["", "gen_ai.event.content", "event.body", "body"])
async def test_messages_in_events_are_read_wherever_their_body_is(
    client: httpx2.AsyncClient, inbox: Path, holder: str
) -> None:
    events = [event(name, **({holder: json.dumps(body)} if holder else body)) for name, body in BODIES]
    (reply,) = await read(client, inbox, span(1, AGENT), with_events(2, CHAT, *events, parent=1))
    assert (reply.query, reply.answer, reply.prompt_reason) == ("And?", "18.", "")
    system, before, asked, result = reply.history
    assert (system["content"], before["content"], asked["tool_calls"]) == ("Be brief.", "Weather?", [CALL])
    assert (result["tool_call_id"], result["content"]) == ("c-1", '{"degrees": 18}')


async def test_texts_in_events_that_are_json_stay_texts_and_parts_are_read(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    """As Strands writes them: the contents are JSON of Bedrock's blocks."""
    blocks = json.dumps(
        [{"text": "I look."}, {"toolUse": {"toolUseId": "c-1", "name": "weather", "input": {"a": 1}}}]
    )
    call = with_events(
        2,
        CHAT,
        event("gen_ai.user.message", content='{"city":"Paris"}'),
        event("gen_ai.assistant.message", content=blocks),
        event("gen_ai.tool.message", content='[{"toolResult": {"toolUseId": "c-1", "content": [{"text": "18"}]}}]'),
        event("gen_ai.user.message", content='["and", 1]'),
        event("gen_ai.choice", message='{"degrees": 18}', finish_reason="end_turn"),
        parent=1,
    )
    (reply,) = await read(client, inbox, span(1, AGENT), call)
    assert (reply.query, reply.answer, reply.prompt_reason) == ('["and", 1]', '{"degrees": 18}', "")
    asked, said, result = reply.history
    assert (asked["content"], said["content"]) == ('{"city":"Paris"}', "I look.")
    assert (result["tool_call_id"], said["tool_calls"][0]["function"]["name"]) == ("c-1", "weather")
    assert (result["role"], result["content"]) == ("tool", "18")


async def test_events_of_a_tool_are_its_arguments_and_its_result(client: httpx2.AsyncClient, inbox: Path) -> None:
    tool = with_events(
        3,
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "weather", "gen_ai.tool.call.id": "c-1"},
        event("gen_ai.tool.message", role="tool", content='{"city": "Paris"}', id="c-1"),
        event("gen_ai.choice", message='[{"text": "18"}]', id="c-1"),
        parent=1,
    )
    asked = with_events(
        2,
        CHAT,
        event("gen_ai.user.message", content="Weather?"),
        event("gen_ai.choice", message={"tool_calls": [CALL]}),
        parent=1,
    )
    agent = with_events(
        1, AGENT, event("gen_ai.user.message", content="Weather?"), event("gen_ai.choice", message="18.")
    )
    (reply,) = await read(client, inbox, agent, asked, tool)
    assert [step["content"] for step in reply.trajectory] == ["", "18"]
    assert (reply.query, reply.answer) == ("Weather?", "18.")


async def test_of_several_choices_the_first_one_is_the_answer(client: httpx2.AsyncClient, inbox: Path) -> None:
    choices = [{"index": place, "message": {"content": text}} for place, text in ((1, "Second."), (0, "First."))]
    call = with_events(
        2, CHAT, event("gen_ai.user.message", content="Hello"), *(event("gen_ai.choice", **each) for each in choices),
        parent=1,
    )  # fmt: skip
    (reply,) = await read(client, inbox, span(1, AGENT), call)
    assert (reply.answer, reply.skip_detail) == ("First.", "first of 2 answers to the last model call")
    flat = {"llm.request.type": "chat", "gen_ai.prompt.0.content": "Hello", "gen_ai.prompt.0.role": "user"}
    said = {f"gen_ai.completion.{place}.content": f"Choice {place}." for place in range(11)}
    told = await read(client, inbox, span(5, AGENT, trace=2), span(6, flat | said, trace=2, parent=5))
    assert [(one.answer, one.skip_detail) for one in told if one.trace_id.endswith("2")] == [
        ("Choice 0.", "first of 11 answers to the last model call")
    ]


async def test_events_without_contents_are_no_answer(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Instrumentations write them so where capturing content is disabled."""
    call = with_events(
        2,
        CHAT,
        event("gen_ai.user.message", gen_ai__system="x"),
        event("gen_ai.choice", message={}, index=0),
        parent=1,
    )
    (reply,) = await read(client, inbox, span(1, AGENT), call)
    assert reply.skip in (SkipReason.NO_ANSWER, SkipReason.NO_QUERY)


def prompt(*texts: str, role: str = "user") -> dict[str, str]:
    return {
        f"gen_ai.prompt.{place}.{key}": value
        for place, text in enumerate(texts)
        for key, value in (("role", role), ("content", text))
    }


def completion(text: str) -> dict[str, str]:
    return {"llm.request.type": "chat", "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": text}


async def test_flattened_messages_are_in_the_order_of_their_numbers(client: httpx2.AsyncClient, inbox: Path) -> None:
    texts = [f"Text {place}" for place in range(13)]
    call = span(2, {**dict(reversed(prompt(*texts).items())), **completion("Done.")}, parent=1)
    (reply,) = await read(
        client, inbox, span(1, {"traceloop.span.kind": "workflow", "traceloop.entity.name": "w"}), call
    )
    assert [*(message["content"] for message in reply.history), reply.query] == texts
    assert (reply.agent, reply.answer, reply.prompt_reason) == ("w", "Done.", "")


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_gap_in_the_numbers_makes_the_prompt_inexact(
    client: httpx2.AsyncClient, inbox: Path, missing: int
) -> None:
    flat = {key: value for key, value in prompt("a", "b", "c").items() if f".{missing}." not in key}
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, flat | completion("Done."), parent=1))
    assert (reply.query, reply.answer) == ("c", "Done.")
    assert reply.prompt_reason == "a part of type missing message at messages[0] was not read"


async def test_a_gap_in_the_tools_makes_the_prompt_inexact(client: httpx2.AsyncClient, inbox: Path) -> None:
    tool = {"llm.request.functions.1.name": "f", "llm.request.functions.1.parameters": '{"type": "object"}'}
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, prompt("Hi") | completion("Hi.") | tool, parent=1))
    assert [each["function"] for each in reply.tools] == [{"name": "f", "parameters": {"type": "object"}}]
    assert reply.prompt_reason == "a part of type missing tool definition at messages[0] was not read"


async def test_dropped_attributes_make_the_prompt_inexact(client: httpx2.AsyncClient, inbox: Path) -> None:
    """SDKs keep 128 attributes of a span."""
    call = span(2, prompt("Hello") | completion("Hi."), parent=1)
    call.dropped_attributes_count = 3
    (reply,) = await read(client, inbox, span(1, AGENT), call)
    assert reply.answer == "Hi."
    assert "a part of type dropped attribute or event at messages[0] was not read" in reply.prompt_reason


async def test_contents_that_are_json_of_parts_are_read(client: httpx2.AsyncClient, inbox: Path) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "hologram", "data": 1}, {"type": "text", "text": "this?"}]
    data = '[{"city": "Paris"}]'
    said = prompt(data, json.dumps(parts)) | completion('["rain", 1.50]')
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, said, parent=1))
    assert [message["content"] for message in reply.history] == [data]
    assert (reply.query, reply.answer) == ("What is\nthis?", '["rain", 1.50]')
    assert reply.prompt_reason == "a part of type hologram at messages[1] was not read"


async def test_what_is_not_understood_of_a_flattened_message_is_named(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    said = prompt("Hello") | {"gen_ai.prompt.0.attachment": "x", "gen_ai.prompt.1.role": "user"} | completion("Hi.")
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, said, parent=1))
    assert "a part of type attachment at messages[0] was not read" in reply.prompt_reason
    assert "a part of type message without content at messages[1] was not read" in reply.prompt_reason


async def test_an_agent_of_traceloop_s_decorators_has_its_own_question(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    agent = {
        "traceloop.span.kind": "agent",
        "traceloop.entity.name": "desk",
        "traceloop.entity.input": json.dumps({"args": ["Hello?"], "kwargs": {}}),
        "traceloop.entity.output": '"{\\"a\\": 1}"',
    }
    (reply,) = await read(client, inbox, span(1, agent), span(2, prompt("Hello") | completion("Hi."), parent=1))
    assert (reply.agent, reply.query, reply.answer) == ("desk", "Hello?", '{"a": 1}')


def constructor(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": kwargs}


async def test_messages_of_langchain_are_read_wherever_messages_are(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Also with the calls of Anthropic's models, which stand twice, and one that is no JSON."""
    content = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "c-1", "name": "f", "input": {"a": 1}}]
    calls = [{"name": "f", "args": {"a": 1}, "id": "c-1", "type": "tool_call"}]
    broken = [{"name": "g", "args": "{", "id": "c-2", "error": None, "type": "invalid_tool_call"}]
    sent = [
        constructor("SystemMessage", content="Be brief.", type="system"),
        constructor("HumanMessage", content="Hello", type="human"),
        constructor("AIMessageChunk", content=content, tool_calls=calls, invalid_tool_calls=broken),
        constructor("ToolMessage", content="F", tool_call_id="c-1", status="success"),
        {"type": "ai", "content": "Between.", "additional_kwargs": {}, "response_metadata": {}},
        constructor("ChatMessage", content="More", role="user"),
    ]
    written = {"gen_ai.input.messages": json.dumps(sent)}
    written["gen_ai.output.messages"] = json.dumps([constructor("AIMessage", content="Hi.", type="ai")])
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, CHAT | written, parent=1))
    assert (reply.query, reply.answer, reply.prompt_reason) == ("More", "Hi.", "")
    assert [message["role"] for message in reply.history] == ["system", "user", "assistant", "tool", "assistant"]
    said, result = reply.history[2:4]
    assert (said["content"], [call["function"] for call in said["tool_calls"]]) == (
        "I look.",
        [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{"}],
    )
    assert (result["tool_call_id"], result["content"]) == ("c-1", "F")


async def test_a_message_that_langchain_could_not_serialise_is_named(client: httpx2.AsyncClient, inbox: Path) -> None:
    odd = {"lc": 1, "type": "not_implemented", "id": ["shop", "CartMessage"], "repr": "CartMessage()"}
    sent = [odd, constructor("RemoveMessage", content="", id="1"), constructor("HumanMessage", content="Hello")]
    written = {
        "gen_ai.input.messages": json.dumps(sent),
        "gen_ai.output.messages": '[{"role": "ai", "content": "Hi."}]',
    }
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, CHAT | written, parent=1))
    assert (reply.query, reply.answer) == ("Hello", "Hi.")
    for kind, place in (("CartMessage", 0), ("remove message", 1)):
        assert f"a part of type {kind} at messages[{place}] was not read" in reply.prompt_reason


async def test_the_envelope_with_a_version_is_read(client: httpx2.AsyncClient, inbox: Path) -> None:
    """System instructions stand before its messages, and texts may stand for messages."""
    written = {
        "gen_ai.operation.name": "Chat",
        "gen_ai.system_instructions": '[{"type": "text", "content": "Be brief."}]',
        "gen_ai.input.messages": json.dumps({"version": "0.1.0", "messages": ["Hello"]}),
        "gen_ai.output.messages": json.dumps({"version": "0.1.0", "messages": ["Hi."]}),
    }
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, written, parent=1))
    assert (reply.query, reply.answer, reply.prompt_reason) == ("Hello", "Hi.", "")
    assert reply.history == ({"role": "system", "content": "Be brief."},)


def vercel(number: int, operation: str, parent: int = 0, **attributes: Any) -> Span:
    flat = {f"ai.{key.replace('__', '.')}": value for key, value in attributes.items()}
    return span(number, {"ai.operationId": f"ai.{operation}", **flat}, parent=parent)


async def test_the_vercel_sdk_s_streams_calls_and_results_are_read(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Arguments and results as it writes them; the answer is JSON and stays a text."""
    asked = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "odd"}]}]
    calls = [
        {"toolCallId": "c-1", "toolName": "f", "input": '{"a": 1}'},
        {"toolCallId": "c-2", "toolName": "f", "args": {}},
    ]
    tools = [json.dumps({"type": "function", "name": "f", "inputSchema": {"type": "object"}})]
    (reply,) = await read(
        client,
        inbox,
        vercel(1, "streamText", prompt=json.dumps({"system": "Be brief.", "messages": asked}),
               response__text='{"b":2}'),
        vercel(2, "streamText.doStream", 1, prompt__messages=json.dumps(asked), prompt__tools=tools,
               response__toolCalls=json.dumps(calls), response__id="r-1"),
        vercel(3, "toolCall", 1, toolCall__name="f", toolCall__id="c-1", toolCall__args='{"a":1}',
               toolCall__result='"plain text"'),
        vercel(4, "toolCall", 1, toolCall__name="f", toolCall__id="c-2", toolCall__args="{}",
               toolCall__result='{"x":1}'),
        vercel(5, "streamText.doStream", 1, prompt__messages=json.dumps(asked), response__text='{"b":2}'),
    )  # fmt: skip
    assert (reply.query, reply.answer, reply.skip) == ("Hello", '{"b":2}', None)
    assert [call["function"]["arguments"] for call in reply.trajectory[0]["tool_calls"]] == ['{"a": 1}', "{}"]
    assert [step["content"] for step in reply.trajectory[1:]] == ["plain text", '{"x":1}']
    assert [tool["function"] for tool in reply.tools] == [{"name": "f", "parameters": {"type": "object"}}]
    assert "a part of type odd at messages[0] was not read" in reply.prompt_reason


async def test_a_stream_of_the_vercel_sdk_that_ends_in_a_call_has_no_answer(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    calls = json.dumps([{"toolCallId": "c-1", "toolName": "ask_user", "input": "{}"}])
    (reply,) = await read(
        client,
        inbox,
        vercel(1, "streamText", prompt='{"prompt": "Hello"}', response__text="", response__toolCalls=calls),
        vercel(2, "streamText.doStream", 1, prompt__messages='[{"role": "user", "content": "Hello"}]',
               response__toolCalls=calls),
    )  # fmt: skip
    assert (reply.query, reply.answer) == ("Hello", "")
    assert reply.skip in (SkipReason.NO_ANSWER, SkipReason.UNFINISHED)


ASKED = {"role": "user", "parts": [{"type": "text", "content": "Weather?"}]}


def handed_in(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "parts": [{"type": "tool_call", "id": "c-9", "name": name, "arguments": arguments}]}


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("final_result", {"city": "Paris"}, '{"city": "Paris"}'),
        ("final_result", {"response": "Rain."}, "Rain."),
        ("final_result_Report", {"city": "Paris"}, '{"city": "Paris"}'),
    ],
)
async def test_the_arguments_of_pydantic_ai_s_output_tool_are_the_answer(
    client: httpx2.AsyncClient, inbox: Path, name: str, arguments: dict[str, Any], answer: str
) -> None:
    """What it said to a model whose answer was not valid is no question."""
    retry = {"role": "user", "parts": [{"type": "text", "content": "1 error\n\nFix the errors and try again."}]}
    done = {"type": "tool_call_response", "id": "c-9", "name": name, "result": "Final result processed."}
    said = handed_in(name, **arguments)
    everything = [ASKED, retry, said, {"role": "user", "parts": [done]}]
    agent = span(1, {"agent_name": "meteo", "pydantic_ai.all_messages": json.dumps(everything)})
    messages = {"gen_ai.input.messages": json.dumps([ASKED]), "gen_ai.output.messages": json.dumps([said])}
    (reply,) = await read(client, inbox, agent, span(2, CHAT | messages, parent=1))
    assert (reply.agent, reply.query, reply.answer, reply.skip) == ("meteo", "Weather?", answer, None)


async def test_the_output_tool_is_the_answer_also_without_a_span_of_the_agent(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    said = json.dumps([handed_in("final_result", city="Paris")])
    messages = {"gen_ai.input.messages": json.dumps([ASKED]), "gen_ai.output.messages": said}
    (reply,) = await read(client, inbox, span(1, {}), span(2, CHAT | messages, parent=1))
    assert (reply.query, reply.answer, reply.trajectory) == ("Weather?", '{"city": "Paris"}', ())


async def test_thoughts_in_pydantic_ai_s_events_are_no_text(client: httpx2.AsyncClient, inbox: Path) -> None:
    said = [{"kind": "thinking", "text": "Hm."}, {"kind": "text", "text": "Rain."}]
    events = [
        {"event.name": "gen_ai.user.message", "role": "user", "content": "Weather?"},
        {"event.name": "gen_ai.choice", "index": 0, "message": {"role": "assistant", "content": said}},
    ]
    (reply,) = await read(client, inbox, span(1, AGENT), span(2, CHAT | {"events": json.dumps(events)}, parent=1))
    assert (reply.query, reply.answer, reply.prompt_reason) == ("Weather?", "Rain.", "")
