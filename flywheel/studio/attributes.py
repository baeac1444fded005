"""Where a span keeps what: the meaning of its attributes in every client and server generation, in one place.

Each function takes the first of: the GenAI convention (`gen_ai.…`), the function call that AgentScope 1.x records
(`agentscope.function.…`), the layout of generation 1 (at the root). Nothing here knows of traces or replies.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from msgspec import Raw, Struct

from flywheel.nested import dig
from flywheel.studio.content import FINISH_FUNCTIONS, Message, call_of, chat_of, messages_of, result_text, tool_of
from flywheel.studio.literal import ReprError, is_result, parse_call
from flywheel.studio.recorded import NOTHING, first_of, items_of, value_of
from flywheel.studio.span import Span
from flywheel.trace import ChatMessage, SpanStatus

_ERROR_TEXT: Final = re.compile(r"(?:Error|[A-Z]\w*(?:Error|Exception)): ")
_REMEMBERED: Final = 8_192
"""Bytes of a message or of tool definitions, above which their meaning is not kept for the next time."""


def _text(*candidates: Any) -> str:
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
        or _text(dig(value_of(attributes.metadata), "name"))
        or span.name.removeprefix("invoke_agent ")
    )


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
    """Whether the caller asked for structured output (AgentScope 1.x records the argument)."""
    return bool(value_of(span.attributes.recorded.input.kwargs.structured_model))


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
    content = dig(output, "content")
    return None if content is None else {"role": "assistant", "content": content}


def model_name(span: Span) -> str:
    attributes = span.attributes
    return attributes.gen_ai.request.model or _text(dig(value_of(attributes.metadata), "model_name"))


def answering_model(span: Span) -> str:
    """The model that says it answered: behind an alias, the version that served the call."""
    return span.attributes.gen_ai.response.model


def tokens(span: Span) -> tuple[int, int]:
    """Input and output tokens of a model call."""
    attributes = span.attributes
    usage = value_of(attributes.gen_ai.usage) or dig(value_of(attributes.recorded.output), "usage")
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
        arguments = dig(called, "input")
    return ToolUse(span, call, arguments, value_of(recorded.output) if output is None else output)


def exception(span: Span) -> tuple[str, str]:
    """Type and message of the last exception recorded in a span, two empty texts without one."""
    for event in reversed(span.events):
        if event.get("name") != "exception":
            continue
        details = event.get("attributes")
        kind = _text(dig(details, "exception", "type"), dig(details, "exception.type"))
        return kind, _text(dig(details, "exception", "message"), dig(details, "exception.message"))
    return "", ""


def error_text(span: Span) -> str:
    """Why a span failed, in one line; empty for one that did not."""
    kind, message = exception(span)
    if span.status is not SpanStatus.ERROR and not kind:
        return ""
    cause = span.status_message or message
    return " ".join(f"{kind.rpartition('.')[2]}: {cause}".strip(": ").split()) or "the span ended with an error"


def tool_failure(tool: ToolUse) -> str:
    """Why a tool call failed, in one line; empty for one that did not.

    2.x says so by the result's state. 1.x returns what went wrong as a text that begins with its kind, and both end
    the span as if all were well.
    """
    if told := error_text(tool.span):
        return told
    output = tool.output
    if output is None or (isinstance(output, str) and "Error:" not in output and "Exception:" not in output):
        # Most results: no need to find the text in them.
        return ""
    state = dig(output, "state")
    text = " ".join((tool.result or "").split())
    if state == "error":
        return text or "the tool says so"
    return text if not isinstance(state, str) and is_error_text(text) else ""


def is_error_text(text: str) -> bool:
    """Whether a tool's result reads as what AgentScope writes for a tool that raised or is not there."""
    return _ERROR_TEXT.match(text) is not None


def was_cut_short(span: Span) -> bool:
    """Whether a model call or a tool says that it was interrupted before its end."""
    if span.events and exception(span)[0].endswith("CancelledError"):
        return True
    attributes = span.attributes
    reasons, call = attributes.gen_ai.response.finish_reasons, attributes.gen_ai.tool.call
    output = attributes.recorded.output
    if b"interrupted" not in b" ".join((reasons, call, output)):
        # Most of them: nothing needs to be read.
        return False
    found = value_of(reasons)
    if isinstance(found, list) and "interrupted" in found:
        return True
    returned = dig(value_of(call), "result")
    returned = value_of(output) if returned is None else returned
    if isinstance(returned, str) and is_result(returned):
        try:
            return "is_interrupted=True" in returned and parse_call(returned).get("is_interrupted") is True
        except ReprError:
            return False
    return dig(returned, "state") == "interrupted" or dig(returned, "is_interrupted") is True
