"""Where a span keeps what: the meaning of its attributes in every client and server generation, in one place.

Each function takes the first of: the GenAI convention (`gen_ai.…`), the function call that AgentScope 1.x records
(`agentscope.function.…`), the layout of generation 1 (at the root). Nothing here knows of traces or replies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from msgspec import Raw, Struct

from flywheel.sources.studio.messages import (
    FINISH_FUNCTIONS,
    Message,
    blocks_of,
    call_of,
    chat_of,
    is_media,
    messages_of,
    result_text,
    tool_of,
)
from flywheel.sources.studio.recorded import NOTHING, first_of, items_of, value_of
from flywheel.sources.studio.reprs import is_result, parse_call
from flywheel.sources.studio.span import Span
from flywheel.trace import ChatMessage, get_path

_REMEMBERED: Final = 8_192
"""Bytes of a message or of tool definitions, above which their meaning is not kept for the next time."""


def first_text(*candidates: Any) -> str:
    """The first of some values that is a text and not empty."""
    for value in candidates:
        if isinstance(value, str) and value:
            return value
    return ""


def _messages(raw: Raw) -> list[Message]:
    """The messages that the GenAI convention has in an attribute. Raises ReprError."""
    return messages_of(value_of(raw), encoded=True)


def _argument(span: Span, named: Raw) -> Raw:
    """An argument of the traced call: the named one, or the first one."""
    return first_of(span.attributes.recorded.input.args) if named == NOTHING else named


def agent_name(span: Span) -> str:
    attributes = span.attributes
    return (
        attributes.gen_ai.agent.name
        or first_text(get_path(value_of(attributes.metadata), "name"))
        or span.name.removeprefix("invoke_agent ")
    )


def agent_id(span: Span) -> str:
    """Which agent it was, whatever its name; empty where the client or the server left it out."""
    return span.attributes.gen_ai.agent.id or first_text(get_path(value_of(span.attributes.metadata), "id"))


def user_id(span: Span) -> str:
    """Who asked, where the application says so by OpenTelemetry's attributes."""
    for person in (span.attributes.user, span.attributes.enduser):
        if person.id != "":
            return str(person.id)
    return ""


def agent_input(span: Span) -> list[Message]:
    """The messages an agent was handed. Raises ReprError."""
    written = _messages(span.attributes.gen_ai.input.messages)
    return written or messages_of(value_of(_argument(span, span.attributes.recorded.input.kwargs.msg)))


def agent_output(span: Span) -> Message | None:
    """The message an agent returned, None where it returned none. Raises ReprError."""
    written = _messages(span.attributes.gen_ai.output.messages)
    if written:
        return written[-1]
    recorded = value_of(span.attributes.recorded.output)
    # Servers that convert old spans write an empty object where there was no output.
    if recorded is None or recorded in ({}, []):
        return None
    # A custom agent may return bare text, empty or decoded by the server because it was also JSON.
    found = messages_of(recorded)
    return found[-1] if found else {"role": "assistant", "content": [{"type": "text", "text": recorded}]}


def returned_metadata(span: Span) -> dict[str, Any]:
    """The metadata of the returned message, which only the repr of AgentScope 1.x has. Raises ReprError."""
    written = bytes(span.attributes.recorded.output)
    if written.startswith(b'"') and written.count(b"metadata={") == written.count(b"metadata={}"):
        return {}
    found = messages_of(value_of(span.attributes.recorded.output))
    metadata = found[-1].get("metadata") if found else None
    return metadata if isinstance(metadata, dict) else {}


def wants_structure(span: Span) -> bool:
    """Whether an agent or a model was asked for structured output (AgentScope 1.x records the argument)."""
    wanted = span.attributes.recorded.input.kwargs.structured_model
    return wanted is not NOTHING and bool(value_of(wanted))


def conversation(span: Span) -> list[ChatMessage]:
    """The messages a model was called with, in the OpenAI form; nobody may change them. Raises ReprError."""
    written = _chat(span.attributes.gen_ai.input.messages, encoded=True)
    return written or _chat(_argument(span, span.attributes.recorded.input.kwargs.messages))


def _chat(raw: Raw, *, encoded: bool = False) -> list[ChatMessage]:
    """Messages in the OpenAI form. One call repeats most of what the one before it was given."""
    chat: list[ChatMessage] = []
    if raw is NOTHING:
        return chat
    if items := items_of(raw):
        for item in items:
            data = bytes(item)
            chat += _said(data) if len(data) <= _REMEMBERED else _said.__wrapped__(data)
        return chat
    for message in messages_of(value_of(raw), encoded=encoded):
        chat += chat_of(message)
    return chat


@lru_cache(maxsize=1024)
def _said(data: bytes) -> tuple[ChatMessage, ...]:
    """One item of a list of messages in the OpenAI form."""
    value = value_of(Raw(data))
    if isinstance(value, dict) and "role" in value:
        return tuple(chat_of(value))
    return tuple(chat for message in messages_of(value) for chat in chat_of(message))


def speaker(span: Span) -> str:
    """The agent's name, as its own messages in a model call's input carry it. Raises ReprError."""
    written = _messages(span.attributes.gen_ai.input.messages)
    given = written or messages_of(value_of(_argument(span, span.attributes.recorded.input.kwargs.messages)))
    names = (message.get("name") for message in reversed(given) if message.get("role") == "assistant")
    return next((name for name in names if isinstance(name, str)), "")


def model_output(span: Span) -> Message | None:
    """The message a model answered with."""
    written = _messages(span.attributes.gen_ai.output.messages)
    if written:
        return {"role": "assistant", **written[-1]}
    output = value_of(span.attributes.recorded.output)
    if isinstance(output, str) and is_result(output):
        output = parse_call(output)
    content = get_path(output, "content")
    return None if content is None else {"role": "assistant", "content": content}


def model_name(span: Span) -> str:
    attributes = span.attributes
    return attributes.gen_ai.request.model or first_text(get_path(value_of(attributes.metadata), "model_name"))


def answering_model(span: Span) -> str:
    """The model that says it answered: behind an alias, the version that served the call."""
    return span.attributes.gen_ai.response.model


def response_id(span: Span) -> str:
    """The id of the response, as the server made it."""
    return span.attributes.gen_ai.response.id


def hides_a_message(span: Span) -> bool:
    """Whether a model was sent a message of which the trace shows no part.

    AgentScope's tracer leaves out hints, such as the runtime reminder of 2.0.6 and later: a message that holds
    nothing else is recorded with no parts. Models are not sent empty messages.
    """
    raw = span.attributes.gen_ai.input.messages
    if not any(message["content"] == "" and "tool_calls" not in message for message in conversation(span)):
        return False
    return any(message.get("parts") == [] for message in _messages(raw))


def holds_media(span: Span) -> bool:
    """Whether a model was sent an image, or anything else that is no text."""
    written = span.attributes.gen_ai.input.messages
    raw = bytes(_argument(span, span.attributes.recorded.input.kwargs.messages) if written is NOTHING else written)
    if not any(mark in raw for mark in _MEDIA):
        return False
    messages = messages_of(value_of(Raw(raw)), encoded=True)
    return any(is_media(block) for message in messages for block in blocks_of(message))


_MEDIA: Final = (b"image", b"audio", b"video", b'"blob"', b'"uri"', b'"file"')
"""Where no such word stands, there is none."""


def offers_a_finish(span: Span) -> bool:
    """Whether a model was offered a function by which it hands in its answer."""
    offered = (span.attributes.gen_ai.tool.definitions, span.attributes.recorded.input.kwargs.tools)
    return any(name.encode() in bytes(raw) for raw in offered if raw is not NOTHING for name in FINISH_FUNCTIONS)


def sets_template_parameters(span: Span) -> bool:
    """Whether a request says something to the chat template that no prompt of a task can repeat."""
    kwargs = span.attributes.recorded.input.kwargs
    beside = value_of(kwargs.extra_body)
    named = {name: value_of(getattr(kwargs, name)) for name in _TEMPLATE}
    if isinstance(beside, dict):
        named |= {name: beside[name] for name in (*_TEMPLATE, "enable_thinking") if name in beside}
    return any(value not in (None, "", {}, []) for value in named.values())


_TEMPLATE: Final = ("chat_template", "chat_template_kwargs", "documents", "reasoning_effort")


def tokens(span: Span) -> tuple[int, int]:
    """Input and output tokens of a model call."""
    attributes = span.attributes
    usage = value_of(attributes.gen_ai.usage) or get_path(value_of(attributes.recorded.output), "usage")
    if not isinstance(usage, dict):
        return 0, 0
    return _count(usage.get("input_tokens")), _count(usage.get("output_tokens"))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 2**63 else 0


def tool_definitions(span: Span) -> tuple[dict[str, Any], ...]:
    """The tools a model was offered, in the OpenAI form, without the finish functions; nobody may change them."""
    offered = _offered(span.attributes.gen_ai.tool.definitions)
    return (_offered(span.attributes.recorded.input.kwargs.tools) if offered is None else offered) or ()


def _offered(raw: Raw) -> tuple[dict[str, Any], ...] | None:
    if raw is NOTHING:
        return None
    data = bytes(raw)
    return _tools(data) if len(data) <= 4 * _REMEMBERED else _tools.__wrapped__(data)


@lru_cache(maxsize=64)
def _tools(data: bytes) -> tuple[dict[str, Any], ...] | None:
    """Tools in the OpenAI form; None where nothing is said of any."""
    written = value_of(Raw(data))
    if not written:
        return None
    if not isinstance(written, list):
        return ()
    tools = [tool_of(definition) for definition in written if isinstance(definition, dict)]
    return tuple(tool for tool in tools if tool["function"].get("name") not in FINISH_FUNCTIONS)


class ToolUse(Struct):
    """What a tool span carried out: the call in the OpenAI form, its arguments and what it returned, as recorded."""

    span: Span
    call: dict[str, Any]
    arguments: Any
    output: Any

    @property
    def id(self) -> str:
        return str(self.call["id"])

    @property
    def name(self) -> str:
        return str(self.call["function"]["name"])

    @property
    def result(self) -> str | None:
        """The text it returned; None where it returned nothing."""
        return None if self.output is None else result_text(self.output)


def tool_use(span: Span) -> ToolUse:
    """What a tool span carried out."""
    tool = span.attributes.gen_ai.tool
    recorded = span.attributes.recorded
    name = value_of(tool.name)
    written = value_of(tool.call)
    called = value_of(recorded.input.tool_call)
    arguments = output = None
    if isinstance(written, dict):
        call = call_of({**written, "name": name})
        arguments, output = written.get("arguments"), written.get("result")
    else:
        old = called or value_of(span.attributes.metadata)
        call = call_of(old if isinstance(old, dict) else {"name": name})
    if arguments is None:
        arguments = get_path(called, "input")
    return ToolUse(span, call, arguments, value_of(recorded.output) if output is None else output)
