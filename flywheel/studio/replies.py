"""From an agent span and what lies below it to a reply: question, answer, history, steps, and why it is no task.

Interruption. What is recognisable differs by client. AgentScope 1.0.7 exports no agent span at all then, so such a
reply ends as unfinished; later 1.x ends the span with `asyncio.CancelledError`; 2.x ends it as if all were well, with
a fixed sentence, and only the last model call (finish reason) or tool result (`is_interrupted`, state) tells. A
returned message may also say so itself (`_is_interrupted` in its metadata). The fixed sentence alone proves nothing:
a model may say it. It counts where no model call of the reply produced it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from flywheel.states import SkipReason
from flywheel.studio import attributes as at
from flywheel.studio.content import (
    FINISH_FUNCTIONS,
    Message,
    chat_of,
    images_of,
    text_of,
    without_finish,
)
from flywheel.studio.tree import Role, Tree
from flywheel.trace import ChatMessage, Reply, Selection, Span, SpanKind, SpanStatus

INTERRUPTION_SENTENCES: Final = frozenset(
    {
        "I noticed that you have interrupted me. What can I do for you?",
        "I notice the interruption. How can I help you?",
    }
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def finished_reply(tree: Tree, agent: Span, selection: Selection) -> Reply:
    """The reply of an agent span. Raises ReprError where its texts are garbled."""
    placement = tree.placements[agent.span_id]
    own = tree.own(agent.span_id)
    handed = at.agent_input(agent)
    output = at.agent_output(agent)
    answer = text_of(output) if output else ""
    request = _request(handed)
    conversation = _first_input(own)
    if not handed:
        # The agent was called without a message: it answers what it had observed before.
        request = next((m["content"] for m in reversed(conversation) if m["role"] != "system"), "")
    history, turn = _history(conversation, request, len(handed))
    asked = placement.asked if placement.role is Role.LAST else agent
    query = request if asked is agent else _request(at.agent_input(asked))
    images = tuple(dict.fromkeys(image for message in handed for image in images_of(message)))
    name = at.agent_name(agent)
    steps = trajectory(own, answer)
    skip, detail = _skip(agent, own, output, answer, bool(query.strip() or images), placement.role, name, selection)
    return Reply(
        span_id=agent.span_id,
        trace_id=agent.trace_id,
        conversation_id=agent.conversation_id,
        agent=name,
        query=query,
        answer=answer,
        started_at=_time(agent.started_ns),
        ended_at=_time(agent.ended_ns),
        request=request,
        turn=turn,
        history=history,
        trajectory=steps,
        images=images,
        structured=_structured(agent, own),
        errors=_errors(own, steps),
        status=agent.status,
        service=agent.service,
        user=at.user_id(agent),
        skip=skip,
        skip_detail=detail,
        **_of_models(own),
    )


def unfinished_reply(tree: Tree, parent_id: str, children: Sequence[Span]) -> Reply:
    """The reply of an agent span that never arrived, as far as its children tell."""
    own = tree.own(parent_id)
    conversation = _first_input(own)
    request = next((m["content"] for m in reversed(conversation) if m["role"] == "user"), "")
    history, turn = _history(conversation, request, 1)
    return Reply(
        span_id=parent_id,
        trace_id=children[0].trace_id,
        conversation_id=children[0].conversation_id,
        agent=next((name for span in own if (name := _speaker(span))), ""),
        query=request,
        answer="",
        started_at=_time(min(span.started_ns for span in own)),
        ended_at=_time(max(span.ended_ns for span in own)),
        request=request,
        turn=turn,
        history=history,
        trajectory=trajectory(own, ""),
        status=SpanStatus.UNSET,
        service=children[0].service,
        skip=SkipReason.UNFINISHED,
        skip_detail="the agent's own span has not arrived",
        **_of_models(own),
    )


def _request(handed: Sequence[Message]) -> str:
    """The text of the last message with text; those before it are history."""
    return next((text for message in reversed(handed) if (text := text_of(message))), "")


def _models(own: Sequence[Span]) -> list[Span]:
    return [span for span in own if span.kind is SpanKind.LLM]


def _of_models(own: Sequence[Span]) -> dict[str, Any]:
    """What the model calls of a reply say together."""
    calls = _models(own)
    counts = [at.tokens(call) for call in calls]
    answering = [name for call in calls if "@" in (name := at.answering_model(call))]
    return {
        "model": next((name for call in calls if (name := at.model_name(call))), ""),
        "adapter": answering[-1] if answering else "",
        "tools": tuple(next((tools for call in calls if (tools := at.tool_definitions(call))), ())),
        "input_tokens": sum(count[0] for count in counts),
        "output_tokens": sum(count[1] for count in counts),
    }


def _first_input(own: Sequence[Span]) -> list[ChatMessage]:
    """What the first model call was given: the conversation so far."""
    for call in _models(own):
        given = [message for written in at.model_input(call) for message in chat_of(written)]
        if given:
            # AgentScope 2.x already appends the empty message that it is about to fill.
            while given and given[-1] == {"role": "assistant", "content": ""}:
                given.pop()
            return without_finish(given)
    return []


def _history(conversation: Sequence[ChatMessage], request: str, handed: int) -> tuple[tuple[ChatMessage, ...], int]:
    """The conversation without the request, and how many turns came before.

    The request is the last user message of that text; a pipeline stage is handed an assistant's message. What was put
    behind it (retrieved knowledge, hints) stays: the model saw it.
    """
    places = [
        *(i for i, m in enumerate(conversation) if m["role"] == "user"),
        *(i for i, m in enumerate(conversation) if m["role"] == "assistant" and m["content"] == request),
        *(i for i, m in enumerate(conversation) if m["role"] == "user" and m["content"] == request),
    ]
    if not places:
        return tuple(conversation), 0
    place = places[-1]
    asked_before = sum(message["role"] == "user" for message in conversation[:place])
    return (*conversation[:place], *conversation[place + 1 :]), max(0, asked_before - max(0, handed - 1))


def _speaker(call: Span) -> str:
    """The agent's name as its own messages in a model call's input carry it."""
    written = at.model_input(call) if call.kind is SpanKind.LLM else []
    names = (message.get("name") for message in reversed(written) if message.get("role") == "assistant")
    return next((name for name in names if isinstance(name, str)), "")


def trajectory(own: Sequence[Span], answer: str) -> tuple[ChatMessage, ...]:
    """The steps between request and answer: what the model said and called, and what the tools returned."""
    calls = _models(own)
    tools = {at.tool_call(span)["id"] or span.span_id: span for span in own if span.kind is SpanKind.TOOL}
    steps: list[ChatMessage] = []
    called: set[str] = set()
    for place, call in enumerate(calls):
        said = at.model_output(call)
        for message in chat_of(said) if said else ():
            wanted = message.get("tool_calls", ())
            last = place == len(calls) - 1
            if wanted or (message["content"] and not (last and message["content"].strip() == answer.strip())):
                steps.append(message)
            for one in wanted:
                called.add(one["id"])
                finishes = one["function"]["name"] in FINISH_FUNCTIONS
                result = None if finishes else _result(one["id"], tools, calls[place + 1 :])
                if result is not None:
                    steps.append(
                        {
                            "role": "tool",
                            "tool_call_id": one["id"],
                            "name": one["function"]["name"],
                            "content": result,
                        }
                    )
    for call_id, span in tools.items():
        # A tool that no recorded model call asked for: the agent called it by itself.
        one = at.tool_call(span)
        if call_id not in called and one["function"]["name"] not in FINISH_FUNCTIONS:
            steps.append({"role": "assistant", "content": "", "tool_calls": [one]})
            if (result := at.tool_result(span)) is not None:
                name = one["function"]["name"]
                steps.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": result})
    return tuple(without_finish(steps))


def _result(call_id: str, tools: dict[str, Span], later: Sequence[Span]) -> str | None:
    """What a call returned: from its tool span, else from what the next model calls were given."""
    if call_id in tools:
        return at.tool_result(tools[call_id])
    for call in later:
        for written in at.model_input(call):
            for message in chat_of(written):
                if message["role"] == "tool" and message["tool_call_id"] == call_id:
                    return str(message["content"])
    return None


def _errors(own: Sequence[Span], steps: Sequence[ChatMessage]) -> tuple[str, ...]:
    """The model and tool calls that failed, with the reason; a failed call may have been made again since."""
    told = []
    spans = set()
    for span in own:
        spans.add(at.tool_call(span)["id"] if span.kind is SpanKind.TOOL else "")
        if span.kind is SpanKind.TOOL and (why := at.tool_failure(span)):
            told.append(f"tool {at.tool_call(span)['function']['name']}: {why}"[:500])
        elif span.kind is SpanKind.LLM and span.status is SpanStatus.ERROR:
            told.append(f"model: {at.error_text(span)}"[:500])
    for step in steps:
        # A call without a span of its own: 2.x makes none for a tool that is not there.
        if step["role"] == "tool" and step["tool_call_id"] not in spans and at.is_error_text(step["content"]):
            told.append(f"tool {step['name']}: {step['content']}"[:500])
    return tuple(told)


def _structured(agent: Span, own: Sequence[Span]) -> dict[str, Any] | None:
    """Structured output: 1.x has it in the returned message's metadata, 2.x in the finish function's arguments."""
    if at.wants_structure(agent):
        metadata = {key: value for key, value in at.returned_metadata(agent).items() if not key.startswith("_")}
        if metadata:
            return metadata
    for span in reversed(own):
        if span.kind is SpanKind.TOOL and at.tool_call(span)["function"]["name"] in FINISH_FUNCTIONS:
            arguments = at.tool_arguments(span)
            # Without a structure to fill, 1.x hands in the bare answer under this name.
            if arguments and set(arguments) != {"response"}:
                return arguments
    return None


def _skip(
    agent: Span,
    own: Sequence[Span],
    output: Message | None,
    answer: str,
    asked: bool,
    role: Role,
    name: str,
    selection: Selection,
) -> tuple[SkipReason | None, str]:
    if name in selection.exclude:
        return SkipReason.AGENT_EXCLUDED, f"ingest.agents.exclude names {name}"
    if role is Role.NESTED and name not in selection.include:
        return SkipReason.NESTED, "another agent called it as a tool"
    if role is Role.STAGE and name not in selection.include:
        return SkipReason.PIPELINE_STAGE, "another agent went on from its answer"
    if _was_interrupted(agent, own, output, answer):
        return SkipReason.INTERRUPTED, "the reply was interrupted"
    if agent.status is SpanStatus.ERROR:
        return SkipReason.ERROR, at.error_text(agent)
    if output is None:
        return SkipReason.ERROR, at.error_text(agent) or "the agent's span has no output"
    if not asked:
        return SkipReason.NO_QUERY, "the agent was handed no text and no image"
    return None, ""


def _was_interrupted(agent: Span, own: Sequence[Span], output: Message | None, answer: str) -> bool:
    if at.exception(agent)[0].endswith("CancelledError"):
        return True
    metadata = at.returned_metadata(agent) if output else {}
    if metadata.get("_is_interrupted") is True or metadata.get("is_interrupted") is True:
        return True
    inner = [span for span in own if span.kind in (SpanKind.LLM, SpanKind.TOOL)]
    if inner and at.was_cut_short(inner[-1]):
        return True
    said = [text_of(message) for call in _models(own) if (message := at.model_output(call))]
    return answer in INTERRUPTION_SENTENCES and bool(said) and answer not in said


def _time(ns: int) -> datetime:
    return _EPOCH + timedelta(microseconds=ns // 1000)
