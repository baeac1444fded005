"""Agents that follow OpenTelemetry's GenAI conventions in ways of their own, and AgentScope before 1.0.9."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply
from tests.sources.otlp.exporting import PROTOBUF, pairs, request, span, stored
from tests.sources.studio.reading import MUCH_LATER, by_id, read_all
from tests.sources.studio.writer import DATA

ASKED = [{"role": "user", "parts": [{"type": "text", "content": "Weather in Paris?"}]}]
ANSWERED = [{"role": "assistant", "parts": [{"type": "text", "content": "Rain."}], "finish_reason": "stop"}]
AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "Meteo"}


async def read(client: httpx2.AsyncClient, inbox: Path, *spans: Span) -> list[Reply]:
    answer = await client.post("/v1/traces", content=request(*spans).SerializeToString(), headers=PROTOBUF)
    assert (answer.status_code, answer.content) == (200, b"")
    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    return replies


def with_event(of: Span, **attributes: Any) -> Span:
    of.events.add(
        name="gen_ai.client.inference.operation.details",
        attributes=pairs({f"gen_ai.{key.replace('__', '.')}": value for key, value in attributes.items()}),
    )
    return of


def both(asked: Any = ASKED, answered: Any = ANSWERED) -> dict[str, str]:
    return {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps(answered)}


async def test_messages_in_attributes_with_tools_and_instructions(client: httpx2.AsyncClient, inbox: Path) -> None:
    call = {"type": "tool_call", "id": "t-1", "name": "weather", "arguments": {"city": "Paris"}}
    response = {"type": "tool_call_response", "id": "t-1", "response": "rainy"}
    second = [*ASKED, {"role": "assistant", "parts": [call]}, {"role": "tool", "parts": [response]}]
    instructions = json.dumps([{"type": "text", "content": "You know the weather."}])
    model = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "small",
        "gen_ai.system_instructions": instructions,
    }
    replies = await read(
        client,
        inbox,
        span(2, {**model, **both(ASKED, [{"role": "assistant", "parts": [call]}])}, parent=1),
        span(
            3,
            {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": "weather",
                "gen_ai.tool.call.id": "t-1",
                "gen_ai.tool.call.arguments": '{"city": "Paris"}',
                "gen_ai.tool.call.result": "rainy",
            },
            parent=1,
        ),
        span(4, {**model, **both(second, ANSWERED)}, parent=1),
        span(1, {**AGENT, **both(), "session.id": "s-9", "gen_ai.system_instructions": instructions}),
    )
    (reply,) = replies
    assert (reply.query, reply.answer, reply.skip) == ("Weather in Paris?", "Rain.", None)
    assert (reply.agent, reply.conversation_id, reply.model, reply.service) == ("Meteo", "s-9", "small", "shop")
    assert reply.history == ({"role": "system", "content": "You know the weather."},)
    assert [message["role"] for message in reply.trajectory] == ["assistant", "tool"]
    assert reply.trajectory[1]["content"] == "rainy"


async def test_messages_in_events(client: httpx2.AsyncClient, inbox: Path) -> None:
    asked, answered = json.dumps(ASKED), json.dumps(ANSWERED)
    chat = span(2, {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": "c"}, parent=1)
    with_event(
        chat,
        input__messages=asked,
        output__messages=answered,
        system_instructions='[{"type":"text","content":"Be kind."}]',
    )
    agent = with_event(span(1, {**AGENT, "gen_ai.conversation.id": "c", "session.id": "s"}), input__messages=asked)
    with_event(agent, output__messages=answered)
    (reply,) = await read(client, inbox, chat, agent)
    assert (reply.query, reply.answer, reply.conversation_id) == ("Weather in Paris?", "Rain.", "c")
    assert reply.history == ({"role": "system", "content": "Be kind."},)


async def test_an_attribute_is_not_replaced_by_an_event(client: httpx2.AsyncClient, inbox: Path) -> None:
    agent = with_event(span(1, {**AGENT, **both()}), output__messages=json.dumps(ASKED))
    (reply,) = await read(client, inbox, agent)
    assert reply.answer == "Rain."


CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "my-agent"}


def chat(number: int, parent: int) -> Span:
    """A model call that `flywheel serve` answered."""
    response = f"chatcmpl-{request_id(number)}"
    return span(number, {**CHAT, **both(), "gen_ai.response.id": response}, parent=parent)


def request_id(number: int) -> str:
    return f"fw-{'0' * 16}-base-{number:016x}"


async def test_an_agent_s_span_without_messages_takes_those_of_its_model_calls(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    """As instrumentations write an agent around the agent, with the messages of both, or of the outer one, elsewhere.
    A tool's agent below an agent that answered is nested all the same."""
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ask"}
    replies = await read(
        client,
        inbox,
        span(1, AGENT),
        span(2, {**AGENT, "gen_ai.agent.name": "inner"}, parent=1),
        chat(3, 2),
        span(4, {"gen_ai.operation.name": "invoke_agent"}),
        span(5, {**AGENT, **both()}, parent=4),
        chat(6, 5),
        span(7, tool, parent=5),
        span(8, {**AGENT, **both(), "gen_ai.agent.name": "asked"}, parent=7),
        chat(9, 8),
    )
    found = {int(reply.span_id, 16): (reply.skip, reply.calls) for reply in replies}
    assert found == {
        1: (None, (request_id(3),)),
        2: (SkipReason.NESTED, ()),
        4: (None, (request_id(6),)),
        5: (SkipReason.NESTED, ()),
        8: (SkipReason.NESTED, (request_id(9),)),
    }
    shown = {(reply.query, reply.answer, reply.model) for reply in replies if reply.skip is None}
    assert shown == {("Weather in Paris?", "Rain.", "my-agent")}


async def test_agents_whose_spans_show_no_reply_leave_their_calls_to_the_call_log(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    """As instrumentations write them that capture no content."""
    replies = await read(
        client,
        inbox,
        span(1, AGENT),
        span(2, {**AGENT, "gen_ai.agent.name": "inner"}, parent=1),
        span(3, {**CHAT, "gen_ai.response.id": f"chatcmpl-{request_id(3)}"}, parent=2),
    )
    found = {int(reply.span_id, 16): (reply.skip, reply.calls) for reply in replies}
    assert found == {1: (SkipReason.NO_ANSWER, ()), 2: (SkipReason.NESTED, ())}


async def test_a_reply_that_failed_or_is_another_agent_s_keeps_its_calls(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    failed = span(1, AGENT)
    failed.status.code = failed.status.STATUS_CODE_ERROR
    replies = await read(
        client,
        inbox,
        failed,
        chat(2, 1),
        span(3, {**AGENT, **both()}, trace=2),
        span(4, AGENT, parent=3, trace=2),
        span(5, {**CHAT, "gen_ai.response.id": request_id(5)}, parent=4, trace=2),
    )
    found = by_id(replies)
    assert {int(name, 16): (reply.skip, bool(reply.calls)) for name, reply in found.items()} == {
        1: (SkipReason.ERROR, True),
        3: (None, True),
        4: (SkipReason.NESTED, True),
    }


async def test_earlier_turns_in_the_agent_s_input_are_turns(client: httpx2.AsyncClient, inbox: Path) -> None:
    def said(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "parts": [{"type": "text", "content": text}]}

    asked = [said("system", "Be kind."), *ASKED, said("assistant", "Rain."), said("user", "And in Rome?")]
    answered = [said("assistant", "Sun.")]
    more = [*asked, *answered, said("user", "And here:"), said("user", "Oslo?")]
    for trace, given in enumerate((asked[:2], asked, more), 1):
        replies = await read(
            client,
            inbox,
            span(2 * trace, {**CHAT, **both(given, answered)}, parent=2 * trace - 1, trace=trace),
            span(2 * trace - 1, {**AGENT, **both(given, answered)}, trace=trace),
        )
    assert [(reply.query, reply.turn) for reply in replies] == [
        ("Weather in Paris?", 0),
        ("And in Rome?", 1),
        ("Oslo?", 2),
    ]


async def test_structured_attribute_values(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Where an SDK can, messages are values and not text."""

    def value(of: Any) -> AnyValue:
        made = AnyValue()
        if isinstance(of, list):
            made.array_value.values.extend(value(item) for item in of)
        elif isinstance(of, dict):
            for key, item in of.items():
                made.kvlist_value.values.add(key=key, value=value(item))
        else:
            made.string_value = of
        return made

    agent = span(1, AGENT)
    agent.attributes.add(key="gen_ai.input.messages", value=value(ASKED))
    agent.attributes.add(key="gen_ai.output.messages", value=value(ANSWERED))
    (reply,) = await read(client, inbox, agent)
    assert (reply.query, reply.answer, reply.conversation_id) == ("Weather in Paris?", "Rain.", "unknown")


async def test_a_provider_s_own_operation_is_a_model_call(client: httpx2.AsyncClient, inbox: Path) -> None:
    model = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.request.model": "gemini",
        "gen_ai.usage.input_tokens": 4,
    }
    (reply,) = await read(client, inbox, span(2, {**model, **both()}, parent=1), span(1, {**AGENT, **both()}))
    assert (reply.model, reply.input_tokens) == ("gemini", 4)


async def test_an_answer_that_reads_as_a_number_stays_as_it_was_said(client: httpx2.AsyncClient, inbox: Path) -> None:
    for number, text in enumerate(["1e3", "007", "1.50", "true", "12345678901234567890123", "NaN"], 1):
        attributes = {
            **AGENT,
            "agentscope.function.input": '{"kwargs": {"msg": "?"}}',
            "agentscope.function.output": text,
        }
        replies = await read(client, inbox, span(number, attributes, trace=number))
        assert by_id(replies)[f"{number:016x}"].answer == text


async def test_text_that_looks_like_json_and_cannot_be_kept_as_it_stays_text(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    texts = {
        "deep": "[" * 300 + "]" * 300,
        "deeper": "[" * 5000 + "]" * 5000,
        "surrogate": '"\\ud800"',
        "broken": '{"a":',
    }
    await read(client, inbox, span(1, {**AGENT, **both(), **texts}))
    kept = json.loads(stored(inbox)[0]["attributes"])
    assert {name: kept[name] for name in texts} == texts


async def test_two_attributes_that_claim_one_place(client: httpx2.AsyncClient, inbox: Path) -> None:
    await read(
        client, inbox, span(1, {**AGENT, "a": 1, "a.b": 2, "c.d": 3, "c": 4, "gen_ai.usage.input_tokens": "many"})
    )
    (row,) = stored(inbox)
    kept = json.loads(row["attributes"])
    assert (kept["a"], kept["c"]) == ({"b": 2}, 4)


async def test_spans_of_agentscope_before_1_0_9(client: httpx2.AsyncClient, inbox: Path) -> None:
    """They are read as from a Studio of their time."""
    status = {"UNSET": 0, "OK": 1, "ERROR": 2}
    spans = []
    for row in stored(DATA / "old.sqlite"):
        attributes = json.loads(row["attributes"])
        sent = {
            "span.kind": row["spanKind"],
            "project.run_id": row["run_id"],
            **{name: json.dumps(attributes[name]) for name in ("input", "output", "metadata") if name in attributes},
        }
        made = Span(
            trace_id=bytes.fromhex(row["traceId"]),
            span_id=bytes.fromhex(row["id"]),
            parent_span_id=bytes.fromhex(row["parentSpanId"]),
            name=row["name"],
            start_time_unix_nano=_ns(row["startTime"]),
            end_time_unix_nano=_ns(row["endTime"]),
            attributes=pairs(sent),
        )
        made.status.code, made.status.message = status[row["status"]], row["statusMessage"] or ""
        for event in json.loads(row["events"]):
            made.events.add(name=event["name"], attributes=pairs(event["attributes"]))
        spans.append(made)
    for first in range(0, len(spans), 200):
        await read(client, inbox, *spans[first : first + 200])
    replies, _, _ = read_all(inbox)
    genuine, _, _ = read_all(DATA / "old.sqlite")
    assert len(genuine) > 90
    for ours, theirs in zip(replies, genuine, strict=True):
        assert (ours.span_id, ours.query, ours.answer, ours.history, ours.trajectory, ours.skip) == (
            theirs.span_id,
            theirs.query,
            theirs.answer,
            theirs.history,
            theirs.trajectory,
            theirs.skip,
        )
        assert (ours.agent, ours.conversation_id, ours.model) == (theirs.agent, theirs.conversation_id, theirs.model)


def _ns(text: str) -> int:
    return round(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000) * 1_000_000
