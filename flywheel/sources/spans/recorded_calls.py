"""Joins model spans to the calls that `flywheel serve` has recorded: what was sent and answered, byte for byte.

Clients record less than they send. AgentScope hides hints, and nobody records parameters of the chat template. The
attributes of a span whose response id names a recorded call are replaced by those of the call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Raw
from msgspec.structs import replace

from flywheel.records import exclusion
from flywheel.records.chat import has_media, text_of
from flywheel.records.request_id import request_id_in
from flywheel.records.tool_calls import FINISH_FUNCTIONS, finished
from flywheel.records.trace import ChatMessage, ModelAnswer, ModelCall, is_reminder
from flywheel.sources.spans.span import Attributes, Keywords, Messages, Span, SpanKind, in_order

_TEMPLATE: Final[Mapping[str, object]] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "continue_final_message": False,
    "documents": None,
    "reasoning_effort": None,
    "truncate_prompt_tokens": None,
}
"""Parameters that change how the server renders the prompt, and their defaults."""


def with_calls(spans: Mapping[str, Span], calls: Mapping[str, ModelCall]) -> dict[str, Span]:
    """The spans of one trace, with the request id of each model span, and the call if it is among `calls`."""
    found = dict(spans)
    for span_id, span in spans.items():
        if span.kind is not SpanKind.LLM or (request_id := request_id_in(span.attributes.gen_ai.response.id)) is None:
            continue
        if (call := calls.get(request_id)) is not None and not _is_readable(call):
            call = None
        attributes = span.attributes if call is None else _joined(span.attributes, call)
        found[span_id] = replace(span, attributes=attributes, request_id=request_id, call=call)
        if call is not None:
            found[span_id] = replace(found[span_id], cut=frozenset(), limit=0)
    for agent in spans.values():
        if agent.kind is SpanKind.AGENT and agent.attributes.flywheel.root_conversation:
            found[agent.span_id] = _with_contents(agent, found)
    return found


def _is_readable(call: ModelCall) -> bool:
    """Whether all messages have the form of chat messages. Servers refuse others, or read them in their own way."""
    return all(map(_is_message, call.messages))


def _is_message(message: ChatMessage) -> bool:
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(message.get("role"), str) or "parts" in message:
        return False
    if not (calls is None or (isinstance(calls, list) and all(isinstance(each, dict) for each in calls))):
        return False
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    return content is None or isinstance(content, str)


def _with_contents(agent: Span, spans: Mapping[str, Span]) -> Span:
    """An agent that was found in the calls alone, with its input, the question of its first call, and its output, the
    answer of the last one."""
    own = sorted(
        (span for span in spans.values() if span.parent_id == agent.span_id and span.call is not None), key=in_order
    )
    calls = [span.call for span in own if span.call is not None]
    gen_ai = agent.attributes.gen_ai
    if calls and (asked := question_of(calls[0].messages)) is not None:
        gen_ai = replace(gen_ai, input=Messages(_raw([asked])))
    if calls and calls[-1].answers:
        gen_ai = replace(gen_ai, output=Messages(_raw([_returned(calls[-1].answers[0])])))
    return replace(agent, attributes=replace(agent.attributes, gen_ai=gen_ai))


def _returned(answer: ModelAnswer) -> ChatMessage:
    """What an agent returned whose last call had this answer. If it finishes by a function, that is its argument."""
    message = message_of(answer)
    for call in answer.tool_calls:
        if not answer.content and (name := call["function"]["name"]) in FINISH_FUNCTIONS:
            message["content"] = finished(name, call["function"]["arguments"])
    return message


def _joined(attributes: Attributes, call: ModelCall) -> Attributes:
    """The attributes of a model span as its call has them."""
    gen_ai = replace(
        attributes.gen_ai,
        input=Messages(_raw(call.messages)),
        tool=replace(attributes.gen_ai.tool, definitions=_raw(call.tools)),
    )
    if call.prompt_tokens or call.completion_tokens:
        counts = {"input_tokens": call.prompt_tokens or 0, "output_tokens": call.completion_tokens or 0}
        gen_ai = replace(gen_ai, usage=_raw(counts))
    if not gen_ai.request.model:
        gen_ai = replace(gen_ai, request=replace(gen_ai.request, model=call.model))
    if call.answers and not call.is_interrupted:
        gen_ai = replace(gen_ai, output=Messages(_raw([message_of(call.answers[0])])))
    kept = Keywords(structured_model=attributes.input.kwargs.structured_model)
    return replace(attributes, gen_ai=gen_ai, input=replace(attributes.input, args=_raw(None), kwargs=kept))


def _raw(value: Any) -> Raw:
    try:
        return Raw(orjson.dumps(value))
    except orjson.JSONEncodeError:
        # Numbers beyond 64 bits and lone surrogates.
        return Raw(json.dumps(value).encode())


def message_of(answer: ModelAnswer) -> ChatMessage:
    """The answer of a model as a message."""
    message: ChatMessage = {"role": "assistant", "content": answer.content}
    if answer.is_refusal:
        message = {"role": "assistant", "content": None, "refusal": answer.content}
    if answer.reasoning.strip():
        message["reasoning_content"] = answer.reasoning.strip()
    return message | {"tool_calls": list(answer.tool_calls)} if answer.tool_calls else message


_RENDERED: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
"""The parts of a content that vLLM renders as text, and their keys."""


def exact_prompt(call: ModelCall) -> tuple[ChatMessage, ...]:
    """The messages of a call as they were sent, each with its content as text, as templates get it from vLLM."""
    return tuple(_exact(message) for message in call.messages)


def _exact(message: ChatMessage) -> ChatMessage:
    left_out = ("content", "parts", "refusal")
    fields = {key: value for key, value in message.items() if value is not None and key not in left_out}
    return {"role": fields.pop("role", "user"), "content": _rendered(message.get("content")), **fields}


def _rendered(content: Any) -> str:
    """A content as vLLM renders it for a template that takes texts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = (part.get(_RENDERED.get(str(part.get("type")), "")) for part in content)
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def inexact_because(call: ModelCall) -> str:
    """Why a prompt of `exact_prompt` is not what the model was sent; empty if it is."""
    reasons = {
        exclusion.IMAGE: any(map(has_media, call.messages)),
        exclusion.TEMPLATE_PARAMETERS: any(
            call.parameters.get(name) not in (default, None, "", {}, []) for name, default in _TEMPLATE.items()
        ),
    }
    return "; ".join(reason for reason, applies in reasons.items() if applies)


def question_of(messages: Sequence[ChatMessage]) -> ChatMessage | None:
    """The message that a call answers: the last one of a user that is not wholly a reminder of the framework's."""
    asked = [message for message in messages if message.get("role") == "user"]
    return next((message for message in reversed(asked) if not is_reminder(text_of(message))), None)
