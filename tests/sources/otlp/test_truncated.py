"""Spans whose attributes an SDK or a collector has cut, sent to the receiver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from flywheel.records.states import SkipReason
from flywheel.records.trace import Reply
from tests.sources.otlp.exporting import JSON, PROTOBUF, request, span, stored
from tests.sources.studio.reading import MUCH_LATER, by_id, read_all

FIXTURE = Path(__file__).parent.parent.parent / "data" / "otlp" / "truncated.json"
AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "desk"}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "small"}
KIND = "openinference.span.kind"
LONG = "Plan A is cheaper than plan B in the first year and dearer in all the years that follow it, which "


async def read(client: httpx2.AsyncClient, inbox: Path, *spans: Span) -> dict[int, Reply]:
    answer = await client.post("/v1/traces", content=request(*spans).SerializeToString(), headers=PROTOBUF)
    assert (answer.status_code, answer.content) == (200, b"")
    replies, dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    return {int(name, 16): reply for name, reply in by_id(replies).items()}


def messages(*said: tuple[str, str]) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in said])


def both(asked: str, answered: str) -> dict[str, str]:
    return {
        "gen_ai.input.messages": messages(("user", asked)),
        "gen_ai.output.messages": messages(("assistant", answered)),
    }


def limited(attributes: dict[str, Any], length: int) -> dict[str, Any]:
    """The attributes as an SDK with that limit sends them."""
    return {
        key: [item[:length] for item in value]
        if isinstance(value, list)
        else value[:length]
        if isinstance(value, str)
        else value
        for key, value in attributes.items()
    }


async def test_a_reply_with_cut_messages_is_skipped_and_shows_no_json(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    for body in json.loads(FIXTURE.read_text()):
        assert (await client.post("/v1/traces", json=body, headers=JSON)).status_code == 200
    (reply,), dead, _ = read_all(inbox, now=MUCH_LATER)
    assert dead == []
    assert (reply.query, reply.answer, reply.skip) == ("", "", SkipReason.TRUNCATED)
    assert reply.skip_detail == (
        "the question was cut (gen_ai.input.messages): raise the limit of the SDK or collector on the length of"
        " attributes"
    )


def llm(number: int, *, system: str = "Compare.", given: str = "A or B?", said: str = "A.", **more: Any) -> Span:
    """A model call of OpenInference: each text is an attribute of its own, and the request is another one."""
    texts = {
        "llm.input_messages.0.message.role": "system",
        "llm.input_messages.0.message.content": system,
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.content": given,
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": said,
        "input.value": json.dumps({"messages": [system, given], "model": "small"}),
        "input.mime_type": "application/json",
        "output.value": json.dumps({"choices": [{"message": {"content": said}}]}),
        "output.mime_type": "application/json",
    }
    return span(number, limited({KIND: "LLM", **texts, **more}, 120), parent=1)


@pytest.mark.parametrize(
    ("texts", "skip", "detail", "reason"),
    [
        ({"given": LONG * 2}, SkipReason.TRUNCATED, "the question was cut (at 120 characters)", None),
        ({"said": LONG * 2}, SkipReason.TRUNCATED, "the answer was cut (at 120 characters)", None),
        ({"system": LONG * 2}, None, "", "a text of span 2 was cut at 120 characters"),
        ({"given": LONG}, None, "", ""),
    ],
)
async def test_texts_that_were_attributes_of_their_own_are_cut_by_themselves(
    client: httpx2.AsyncClient, inbox: Path, texts: dict[str, str], skip: SkipReason | None, detail: str, reason: str
) -> None:
    """Together, as messages, they may be longer than the limit."""
    replies = await read(client, inbox, span(1, {KIND: "AGENT"}), llm(2, **texts))
    assert (replies[1].skip, replies[1].skip_detail.split(":")[0]) == (skip, detail)
    assert reason is None or replies[1].prompt_reason == reason


async def test_the_rows_of_spans_that_were_not_translated_are_those_of_studio(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    await read(client, inbox, span(1, {**AGENT, **both("A or B?", "A.")}), llm(2))
    ours, translated = (json.loads(row["attributes"]) for row in stored(inbox))
    assert "flywheel" not in ours
    assert translated["flywheel"]["longest"]["length"] == len(json.dumps({"messages": ["", ""], "model": ""})) + 20


@pytest.mark.parametrize("is_json", [True, False])
async def test_the_cut_value_of_an_openinference_span_is_a_text_only_where_it_is_no_json(
    client: httpx2.AsyncClient, inbox: Path, is_json: bool
) -> None:
    own = json.dumps([{"sku": 77, "name": "chair"}])[:-6]
    kind = "application/json" if is_json else "text/plain"
    values = {"input.value": own, "input.mime_type": kind, "output.value": "It is broken."}
    (reply,) = (await read(client, inbox, span(1, {KIND: "AGENT", **values}))).values()
    assert (reply.query, reply.skip) == (("", SkipReason.TRUNCATED) if is_json else (own, None))


async def test_cut_system_instructions_are_no_text_of_the_prompt(client: httpx2.AsyncClient, inbox: Path) -> None:
    instructions = json.dumps([{"type": "text", "content": "Compare plans for families."}])[:40]
    call = {**CHAT, **both("A or B?", "A."), "gen_ai.system_instructions": instructions}
    replies = await read(client, inbox, span(1, {**AGENT, **both("A or B?", "A.")}), span(2, call, parent=1))
    assert (replies[1].skip, replies[1].history) == (None, ())
    assert replies[1].prompt_reason == "the attribute gen_ai.system_instructions of span 2 was cut"


async def test_instructions_and_messages_are_cut_by_themselves(client: httpx2.AsyncClient, inbox: Path) -> None:
    """Together they are longer than the limit."""
    shown = {"gen_ai.system_instructions": json.dumps([{"type": "text", "content": "s" * 60}]), **both("A?", LONG)}
    call = span(2, limited({**CHAT, **shown}, 130), parent=1)
    told = limited({**AGENT, "gen_ai.agent.description": LONG * 2, **both("A?", "A.")}, 130)
    replies = await read(client, inbox, span(1, told), call)
    assert "was cut" in replies[1].prompt_reason
    row = json.loads(stored(inbox)[1]["attributes"])
    assert len(json.dumps(row["gen_ai"]["input"]["messages"])) > 130
    assert row["flywheel"]["longest"]["length"] == 130


async def test_elements_of_arrays_and_texts_of_events_count_by_themselves(
    client: httpx2.AsyncClient, inbox: Path
) -> None:
    tags = {"gen_ai.agent.tags": [LONG * 2, "short"], **both("A or B?", "A.")}
    agent = span(1, limited({**AGENT, **tags}, 120))
    assert (await read(client, inbox, agent))[1].skip is None
    event = span(0, limited({"note": f"about {LONG * 2}"}, 120)).attributes
    agent.events.add(name="note", time_unix_nano=1, attributes=event)
    output = span(0, limited({"gen_ai.output.messages": f"Well: {LONG * 2}"}, 120)).attributes[0]
    agent.attributes.append(output)
    reply = (await read(client, inbox, agent))[1]
    assert (reply.skip, reply.skip_detail[:30]) == (SkipReason.TRUNCATED, "the answer was cut (at 120 cha")


def request_id(number: int) -> str:
    return f"fw-{'0' * 16}-base-{number:016x}"


@pytest.mark.parametrize("said", [("A or B?", LONG), (LONG, "A.")], ids=["answer", "question"])
async def test_a_reply_that_was_cut_leaves_its_calls_to_the_call_log(
    client: httpx2.AsyncClient, inbox: Path, said: tuple[str, str]
) -> None:
    """Which has them whole. So do the agents that it called."""
    named = {**CHAT, "gen_ai.response.id": f"chatcmpl-{request_id(1)}"}
    inner = {**AGENT, "gen_ai.agent.name": "inner", **both("B?", "B.")}
    replies = await read(
        client,
        inbox,
        span(1, limited({**AGENT, **both(*said)}, 100)),
        span(2, named, parent=1),
        span(3, inner, parent=1),
        span(4, {**named, "gen_ai.response.id": f"chatcmpl-{request_id(2)}"}, parent=3),
    )
    assert {number: (reply.skip, reply.calls) for number, reply in replies.items()} == {
        1: (SkipReason.TRUNCATED, ()),
        3: (SkipReason.NESTED, ()),
    }


@pytest.mark.parametrize("more", ["", "B."])
async def test_texts_of_structured_messages_are_cut_by_themselves(
    client: httpx2.AsyncClient, inbox: Path, more: str
) -> None:
    """As SDKs do that send messages as objects; together they are longer than the limit."""
    agent = span(1, AGENT)
    for name, role, text in (
        ("input", "user", f"{LONG * 2}"[:120] + more),
        ("output", "assistant", f"A: {LONG * 2}"[:120]),
    ):
        said = agent.attributes.add(key=f"gen_ai.{name}.messages").value.array_value.values.add().kvlist_value.values
        said.add(key="role").value.string_value = role
        said.add(key="content").value.string_value = text
    reply = (await read(client, inbox, agent))[1]
    assert reply.skip == (None if more else SkipReason.TRUNCATED)


async def test_short_texts_that_are_put_together_hide_no_limit(client: httpx2.AsyncClient, inbox: Path) -> None:
    texts = {
        f"llm.input_messages.{place}.message.{key}": value
        for place in range(9)
        for key, value in (("role", "user"), ("content", "Why?"))
    }
    answered = {"llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": "A."}
    told = {**AGENT, "gen_ai.input.messages": LONG * 2, "gen_ai.output.messages": f"A: {LONG * 2}"}
    replies = await read(
        client, inbox, span(1, limited(told, 120)), span(2, {KIND: "LLM", **texts, **answered}, parent=1)
    )
    assert replies[1].skip is SkipReason.TRUNCATED


ASKED = [{"role": "user", "content": "Which plan is cheaper in the first year?"}]


@pytest.mark.parametrize(
    ("agent", "chat"),
    [
        pytest.param(
            {"ai.operationId": "ai.generateText", "ai.prompt": json.dumps({"messages": ASKED})},
            {"ai.operationId": "ai.generateText.doGenerate", "ai.prompt.messages": json.dumps(ASKED)},
            id="Vercel AI SDK",
        ),
        pytest.param(
            {"traceloop.span.kind": "agent", "traceloop.entity.input": json.dumps({"inputs": ASKED})},
            {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Which plan"},
            id="OpenLLMetry",
        ),
        pytest.param(
            {"pydantic_ai.all_messages": json.dumps(ASKED), "gen_ai.agent.name": "desk"},
            {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(ASKED)},
            id="Pydantic AI",
        ),
    ],
)
async def test_json_of_other_conventions_that_breaks_off_is_no_question(
    client: httpx2.AsyncClient, inbox: Path, agent: dict[str, Any], chat: dict[str, Any]
) -> None:
    replies = await read(client, inbox, span(1, limited(agent, 40)), span(2, limited(chat, 40), parent=1))
    (reply,) = replies.values()
    assert ("{" in reply.query, reply.skip) == (False, SkipReason.TRUNCATED)
    assert "the question was cut (gen_ai.input.messages)" in reply.skip_detail
