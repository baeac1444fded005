"""Spans of OpenInference and Langfuse by hand: what their SDKs seldom send, send in parts, or should never send.

Shapes are those of openinference-instrumentation-langchain 0.1.80 and mlflow 3.17.2, where a test names them.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply, ReplySelection
from flywheel.sources.otlp.conventions import CONVENTIONS, TEXTS
from flywheel.sources.otlp.inbox import COLUMNS
from flywheel.sources.otlp.rows import rows_of
from flywheel.sources.spans.replies import replies_of
from flywheel.sources.studio.schema import SCHEMAS, packed
from tests.sources.otlp.exporting import PROTOBUF, pairs, request, span, stored
from tests.sources.studio.reading import MUCH_LATER, by_id, read_all

KIND = "openinference.span.kind"
TYPE = "langfuse.observation.type"


def messages(direction: str, *said: dict[str, str]) -> dict[str, str]:
    """Messages of OpenInference, flattened."""
    return {
        f"llm.{direction}_messages.{place}.message.{key}": value
        for place, message in enumerate(said)
        for key, value in message.items()
    }


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def llm(number: int, parent: int, *, given: str = "Hello", said: str = "Hi.", trace: int = 1, **more: Any) -> Span:
    attributes = {KIND: "LLM", "llm.model_name": "small", **messages("input", asked(given)), **more}
    return span(number, attributes | messages("output", answered(said)), parent=parent, trace=trace)


def chain(number: int, parent: int = 0, kind: str = "CHAIN", *, trace: int = 1, **more: Any) -> Span:
    return span(number, {KIND: kind, **{key.replace("__", "."): value for key, value in more.items()}}, parent=parent,
                trace=trace)  # fmt: skip


async def send(client: httpx2.AsyncClient, *spans: Span) -> None:
    answer = await client.post("/v1/traces", content=request(*spans).SerializeToString(), headers=PROTOBUF)
    assert (answer.status_code, answer.content) == (200, b"")


async def read(client: httpx2.AsyncClient, inbox: Path, *spans: Span) -> list[Reply]:
    await send(client, *spans)
    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    return replies


async def test_without_an_agent_the_outermost_span_above_a_model_call_is_the_reply(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    """Also if that span is of no convention, such as that of a web framework."""
    (reply,) = await read(client, inbox, llm(4, 3), chain(3, 2), chain(2, 1), span(1, {"http.route": "/ask"}))
    assert (reply.span_id, reply.trace_id) == (f"{1:016x}", f"{1:032x}")
    assert (reply.agent, reply.query, reply.answer, reply.skip) == ("span 1", "Hello", "Hi.", None)


async def test_the_outermost_agent_is_the_reply(client: httpx2.AsyncClient, inbox: Path) -> None:
    agent = {"input__value": "Hello?", "output__value": "Hi!", "session__id": "s-2", "agent__name": "Ann"}
    replies = by_id(
        await read(client, inbox, llm(4, 3), chain(3, 2, "AGENT"), chain(2, 1, "AGENT", **agent), chain(1))
    )
    outer, inner = replies[f"{2:016x}"], replies[f"{3:016x}"]
    assert (outer.agent, outer.query, outer.answer, outer.skip) == ("Ann", "Hello?", "Hi!", None)
    assert (outer.conversation_id, inner.skip) == ("s-2", SkipReason.NESTED)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
async def test_the_spans_of_a_trace_arrive_in_any_order_in_requests_of_their_own(
    client: httpx2.AsyncClient, inbox: Path, order: tuple[int, ...]
) -> None:
    spans = [chain(1, 0, "AGENT"), chain(2, 1), llm(3, 2), chain(4, 2, "TOOL", tool__name="f", output__value="1")]
    for place in order:
        await send(client, spans[place])
    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert [(reply.query, reply.answer, reply.skip) for reply in replies] == [("Hello", "Hi.", None)]
    assert dead == []


async def test_attributes_of_the_genai_convention_come_first(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Of two conventions in one span, attribute by attribute."""
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "By GenAI."}]}]
    call = llm(2, 1, **{"gen_ai.output.messages": json.dumps(said), "gen_ai.request.model": "large"})
    (reply,) = await read(client, inbox, call, chain(1, 0, "AGENT", gen_ai__agent__name="Bob", agent__name="Ann"))
    assert (reply.agent, reply.model, reply.query, reply.answer) == ("Bob", "large", "Hello", "By GenAI.")
    operation = {"gen_ai.operation.name": "execute_tool", KIND: "AGENT"}
    assert await read(client, inbox, span(5, operation, trace=2)) == [reply]


async def test_texts_that_are_json_stay_texts(client: httpx2.AsyncClient, inbox: Path) -> None:
    given, said = '{"city": "Paris", "n": 1}', '["rain",1.50]'
    (reply,) = await read(client, inbox, chain(1, 0, "AGENT"), llm(2, 1, given=given, said=said))
    assert (reply.query, reply.answer) == (given, said)
    seen = "langfuse.observation"
    generation = {TYPE: "generation", f"{seen}.input": json.dumps([asked(given)]), f"{seen}.output": said}
    replies = await read(client, inbox, span(3, {TYPE: "span"}, trace=2), span(4, generation, parent=3, trace=2))
    assert (replies[-1].query, replies[-1].answer) == (given, said)


async def test_an_agent_that_ended_without_an_answer(client: httpx2.AsyncClient, inbox: Path) -> None:
    """One whose last model call asked for a tool, and one without a model call."""
    wanted = {"role": "assistant", "tool_calls.0.tool_call.function.name": "f"}
    call = span(2, {KIND: "LLM", **messages("input", asked("Hello")), **messages("output", wanted)}, parent=1)
    replies = await read(client, inbox, chain(1, 0, "AGENT"), call, chain(3, 0, "AGENT", trace=2))
    assert [(reply.query, reply.skip, reply.skip_detail) for reply in replies] == [
        ("Hello", SkipReason.NO_ANSWER, "its last model call asked for f"),
        (
            "",
            SkipReason.NO_ANSWER,
            "the agent's span has no messages (gen_ai.input.messages, gen_ai.output.messages), and there is no model"
            " call below it: does the instrumentation capture content?",
        ),
    ]


async def test_tool_calls_without_ids_have_the_results_that_the_model_was_sent(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    """Two calls of one tool that ended in the other order; and if no later model call was sent results, those of the
    tools with the calls' arguments."""

    def calls(*arguments: str) -> dict[str, str]:
        prefix = "tool_calls.{}.tool_call"
        said = {"role": "assistant"}
        for place, text in enumerate(arguments):
            said |= {
                f"{prefix.format(place)}.id": f"c{place}",
                f"{prefix.format(place)}.function.name": "f",
                f"{prefix.format(place)}.function.arguments": text,
            }
        return said

    def tool(number: int, arguments: str, result: str) -> Span:
        return chain(number, 1, "TOOL", tool__name="f", input__value=arguments, output__value=result)

    sent = [asked("Hello"), calls('{"x": 1}', '{"x": 2}')]
    results = [{"role": "tool", "tool_call_id": f"c{place}", "content": text} for place, text in enumerate("ab")]
    first = span(2, {KIND: "LLM", **messages("input", sent[0]), **messages("output", sent[1])}, parent=1)
    last = span(
        9, {KIND: "LLM", **messages("input", *sent, *results), **messages("output", answered("Done."))}, parent=1
    )
    tools = [tool(3, '{"x": 2}', "B"), tool(4, '{"x": 1}', "A")]
    ending = chain(1, 0, "AGENT", input__value="Hello", output__value="Done.")
    (reply,) = await read(client, inbox, ending, first, *tools)
    assert [(step["tool_call_id"], step["content"]) for step in reply.trajectory[1:]] == [("c0", "A"), ("c1", "B")]
    await send(client, last)
    (reply,) = await read(client, inbox, ending)
    assert [(step["tool_call_id"], step["content"]) for step in reply.trajectory[1:]] == [("c0", "a"), ("c1", "b")]


async def test_a_graph_of_langchain(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Its messages are LangChain's own everywhere but on model calls, and a tool returns one of them."""
    returned = {"type": "tool", "data": {"content": "12", "type": "tool", "tool_call_id": "c0", "status": "success"}}
    state = {
        "messages": [{"type": "human", "data": {"content": "Hello"}}, {"type": "ai", "data": {"content": "Hi."}}]
    }
    json_type = {"input__mime_type": "application/json", "output__mime_type": "application/json"}
    wanted = "llm.output_messages.0.message.tool_calls.0.tool_call"
    call = llm(4, 3, said="", **{f"{wanted}.id": "c0", f"{wanted}.function.name": "f"})
    (reply,) = await read(
        client,
        inbox,
        chain(
            1, input__value=json.dumps({"messages": [asked("Hello")]}), output__value=json.dumps(state), **json_type
        ),
        chain(3, 1, input__value=json.dumps(state), output__value="[]", **json_type),
        call,
        chain(5, 1, "TOOL", tool__name="f", input__value="{}", output__value=json.dumps(returned), **json_type),
        llm(6, 3, given="Hello"),
    )
    assert (reply.query, reply.answer, reply.skip) == ("Hello", "Hi.", None)
    assert reply.trajectory[1] == {"role": "tool", "tool_call_id": "c0", "name": "f", "content": "12"}


async def test_a_model_call_that_two_instrumentations_record_is_one(client: httpx2.AsyncClient, inbox: Path) -> None:
    (reply,) = await read(client, inbox, chain(1, 0, "AGENT"), llm(2, 1), llm(3, 2, **{"llm.token_count.prompt": 7}))
    assert (reply.trajectory, reply.input_tokens) == ((), 7)


async def test_spans_of_mlflow_in_the_genai_convention(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Its agents' spans have no messages, and functions of no type an operation of no convention."""
    said = {
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Hello"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Hi."}]}]),
        "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be kind."}]),
    }
    replies = await read(
        client,
        inbox,
        span(1, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "agent"}),
        span(2, {"gen_ai.operation.name": "chat", "session.id": '"s-1"', **said}, parent=1),
        span(3, {"gen_ai.operation.name": "UNKNOWN"}, trace=2),
        span(4, {"gen_ai.operation.name": "chat", **said}, parent=3, trace=2),
    )
    assert [(reply.query, reply.answer, reply.skip, reply.conversation_id) for reply in replies] == [
        ("Hello", "Hi.", None, "s-1"),
        ("Hello", "Hi.", None, "unknown"),
    ]
    assert all(reply.history == ({"role": "system", "content": "Be kind."},) for reply in replies)


async def test_metadata_of_the_application_name_no_agent(client: httpx2.AsyncClient, inbox: Path) -> None:
    metadata = json.dumps({"name": "release 7", "id": "7", "model_name": "none"})
    (reply,) = await read(client, inbox, chain(1, 0, "AGENT", metadata=metadata), llm(2, 1))
    assert (reply.agent, reply.model) == ("span 1", "small")
    assert "release 7" in stored(inbox)[0]["attributes"]


async def test_old_names_of_langfuse(client: httpx2.AsyncClient, inbox: Path) -> None:
    seen = "langfuse.observation"
    generation = {TYPE: "generation", f"{seen}.input": "Hello", f"{seen}.output": "Hi.", "langfuse.session.id": "s-3"}
    (reply,) = await read(
        client, inbox, span(1, {TYPE: "agent", "langfuse.user.id": "ann"}), span(2, generation, parent=1)
    )
    assert (reply.query, reply.answer, reply.conversation_id, reply.user) == ("Hello", "Hi.", "s-3", "ann")


async def test_indices_of_any_size_and_with_gaps(client: httpx2.AsyncClient, inbox: Path) -> None:
    huge = "9" * 5_000
    prefix = "llm.input_messages"
    call = span(
        2,
        {
            KIND: "LLM",
            f"{prefix}.1000000000.message.content": "second",
            f"{prefix}.1000000000.message.role": "user",
            f"{prefix}.{huge}.message.content": "third",
            f"{prefix}.7.message.content": "first",
            f"{prefix}.x.message.content": "no index",
            f"{prefix}.-1.message.content": "no index",
            f"{prefix}.8": "no message",
            **messages("output", answered("Hi.")),
        },
        parent=1,
    )
    (reply,) = await read(client, inbox, chain(1, 0, "AGENT"), call)
    assert [message["content"] for message in reply.history] == ["first", "second"]
    assert reply.query == "third"


NAMES = (
    KIND,
    TYPE,
    "openinference",
    "openinference.span",
    "langfuse",
    "langfuse.observation",
    "langfuse.observation.usage_details",
    "langfuse.session",
    "llm",
    "llm.input_messages",
    "llm.input_messages.0",
    "llm.input_messages.0.message",
    "llm.input_messages.0.message.contents.0.message_content.image",
    "llm.input_messages.0.message.tool_calls.0.tool_call.function",
    "llm.tools.0.tool.json_schema",
    "llm.model_name",
    "input",
    "output",
    "metadata",
    "tool",
    "gen_ai",
    "gen_ai.input",
    "gen_ai.output.messages",
    "gen_ai.prompt.0.tool_calls",
    "gen_ai.prompt.0.tool_calls.0",
    "gen_ai.completion.0.content.0.type",
    "gen_ai.event.content",
    "ai",
    "ai.prompt",
    "ai.response",
    "ai.response.toolCalls",
    "ai.result",
    "pydantic_ai.all_messages",
    "all_messages_events",
    "events",
    "traceloop",
    *(path for convention in CONVENTIONS for paths in convention.values.values() for path in paths),
    *(name.rstrip(".") for name in TEXTS),
    *(f"{name}0.message.content" for name in TEXTS),
)
KINDS = (
    "ai.generateText",
    "ai.streamText.doStream",
    "ai.toolCall",
    "AGENT",
    "LLM",
    "TOOL",
    "CHAIN",
    "agent",
    "generation",
    "tool",
    "span",
)
FIELDS = (
    "lc",
    "id",
    "inputs",
    "generations",
    "message",
    "function_tools",
    "parts",
    "event.name",
    "index",
    "name",
    "text",
)
KEYS = ("role", "content", "messages", "output", "args", "kwargs", "data", "tools", "type")
VALUES = st.one_of(
    st.sampled_from(KINDS),
    st.text(max_size=8),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.floats(),
    st.lists(st.text(max_size=3), max_size=3),
    st.recursive(
        st.none()
        | st.integers()
        | st.text(max_size=3)
        | st.sampled_from(["role", "tool_calls", "constructor", "gen_ai.choice", "gen_ai.user.message"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from((*KEYS, *FIELDS)),
                inner,
            )
        ),
    ).map(json.dumps),
)


EVENTS = ("gen_ai.user.message", "gen_ai.tool.message", "gen_ai.choice", "other")
BODIES = st.dictionaries(
    st.sampled_from(["content", "message", "role", "index", "tool_calls", "gen_ai.event.content", "body"]), VALUES
)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), min_size=1, max_size=3), st.data())
def test_no_shape_of_attributes_is_too_odd_to_be_stored_and_read(
    several: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Each span is stored, and its trace becomes replies or dead letters."""
    named = [
        {
            data.draw(st.sampled_from((KIND, TYPE, "ai.operationId", "traceloop.span.kind"))): data.draw(
                st.sampled_from(KINDS)
            ),
            **each,
        }
        for each in several
    ]
    spans = [span(number, each, parent=number - 1) for number, each in enumerate(named, 1)]
    for each in spans:
        each.events.add(name=data.draw(st.sampled_from(EVENTS)), attributes=pairs(data.draw(BODIES)))
    rows = rows_of(request(*spans))
    assert rows.rejected == 0
    schema = SCHEMAS["generation 2"]
    kept = {}
    for number, row in enumerate(rows.accepted, 1):
        columns = dict(zip(COLUMNS, row, strict=True))
        values = (columns[name] for name in schema.columns)
        kept[number] = packed((number, *(value.encode() if isinstance(value, str) else value for value in values)))
    replies, dead = replies_of(schema, kept, ReplySelection(), is_open=False, kinds=Counter())
    assert len(replies) + len(dead) <= len(spans)


async def test_a_trace_whose_outermost_span_has_not_arrived_has_no_reply_yet(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    """Else a span in the middle would stand for the agent, until the one above it arrives."""
    await send(client, llm(3, 2), chain(2, 1))
    assert read_all(inbox)[0] == []
    await send(client, chain(1))
    assert [reply.span_id for reply in read_all(inbox)[0]] == [f"{1:016x}"]


async def test_messages_of_an_event_come_before_those_of_another_convention(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    call = llm(2, 1)
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "By an event."}]}]
    name = "gen_ai.client.inference.operation.details"
    call.events.add(name=name, attributes=pairs({"gen_ai.output.messages": json.dumps(said)}))
    (reply,) = await read(client, inbox, chain(1, 0, "AGENT"), call)
    assert (reply.query, reply.answer) == ("Hello", "By an event.")


async def test_calls_and_tools_without_any_id_keep_their_results(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Their results in a later call cannot be told apart."""
    wanted = {"role": "assistant"} | {f"tool_calls.{n}.tool_call.function.name": name for n, name in enumerate("fg")}
    sent = [asked("Hello"), wanted, {"role": "tool", "content": "F"}, {"role": "tool", "content": "G"}]
    (reply,) = await read(
        client,
        inbox,
        chain(1, 0, "AGENT"),
        span(2, {KIND: "LLM", **messages("input", sent[0]), **messages("output", wanted)}, parent=1),
        chain(3, 1, "TOOL", tool__name="f", output__value="F"),
        chain(4, 1, "TOOL", tool__name="g", output__value="G"),
        span(5, {KIND: "LLM", **messages("input", *sent), **messages("output", answered("Done."))}, parent=1),
    )
    assert [step["content"] for step in reply.trajectory] == ["", "F", "G"]


async def test_of_two_texts_handed_to_an_agent_the_model_s_question_counts(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    seen = "langfuse.observation"
    handed = '{"args": ["customer 7"], "kwargs": {"q": "Hello!"}}'
    agent = span(1, {TYPE: "agent", f"{seen}.input": handed, f"{seen}.output": "Hi!"})
    (reply,) = await read(client, inbox, agent, llm(2, 1))
    assert (reply.query, reply.answer) == ("Hello", "Hi!")


async def test_an_agent_that_records_nothing_has_no_answer_of_an_agent_that_is_its_tool(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    spans = chain(1, 0, "AGENT"), chain(2, 1, "TOOL"), chain(3, 2, "AGENT"), llm(4, 3)
    replies = by_id(await read(client, inbox, *spans))
    assert (replies[f"{1:016x}"].answer, replies[f"{1:016x}"].skip) == ("", SkipReason.NO_ANSWER)
    assert replies[f"{3:016x}"].skip is SkipReason.NESTED
