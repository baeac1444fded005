"""Where a span keeps what: the meaning of its attributes in every client and server generation, in one place.

Each function takes the first of: the GenAI convention (`gen_ai.…`), the function call that AgentScope 1.x records
(`agentscope.function.…`), the layout of generation 1 (at the root). Nothing here knows of traces or replies.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from msgspec import Raw

from flywheel.studio.content import FINISH_FUNCTIONS, Message, call_of, chat_of, messages_of, result_text, tool_of
from flywheel.studio.literal import ReprError, is_result, parse_call
from flywheel.studio.recorded import NOTHING, first_of, items_of, value_of
from flywheel.studio.span import Span
from flywheel.trace import ChatMessage, SpanStatus

_ERROR_TEXT: Final = re.compile(r"(?:Error|[A-Z]\w*(?:Error|Exception)): ")
_REMEMBERED: Final = 8_192
"""Bytes of a message or of tool definitions, above which their meaning is not kept for the next time."""


def dig(value: Any, *keys: str) -> Any:
    """The value below nested keys, or None where there is no such path."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _text(*candidates: Any) -> str:
    for value in candidates:
        if isinstance(value, str) and value:
            return value
    return ""


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
    return span.attributes.user.id or span.attributes.enduser.id


def agent_input(span: Span) -> list[Message]:
    """The messages an agent was handed. Raises ReprError."""
    written = messages_of(value_of(span.attributes.gen_ai.input.messages), encoded=True)
    return written or messages_of(value_of(_argument(span, span.attributes.recorded.input.kwargs.msg)))


def agent_output(span: Span) -> Message | None:
    """The message an agent returned, None where it returned none. Raises ReprError."""
    written = messages_of(value_of(span.attributes.gen_ai.output.messages), encoded=True)
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
    output = value_of(span.attributes.recorded.output)
    if isinstance(output, str) and "metadata={" not in output:
        # Parsing a repr costs more than everything else about a reply.
        return {}
    found = messages_of(output)
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
    return tuple(chat for message in messages_of(value_of(Raw(data))) for chat in chat_of(message))


def speaker(span: Span) -> str:
    """The agent's name, as its own messages in a model call's input carry it. Raises ReprError."""
    written = messages_of(value_of(span.attributes.gen_ai.input.messages), encoded=True)
    given = written or messages_of(value_of(_argument(span, span.attributes.recorded.input.kwargs.messages)))
    names = (message.get("name") for message in reversed(given) if message.get("role") == "assistant")
    return next((name for name in names if isinstance(name, str)), "")


def model_output(span: Span) -> Message | None:
    """The message a model answered with."""
    written = messages_of(value_of(span.attributes.gen_ai.output.messages), encoded=True)
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
    first, second = dig(usage, "input_tokens"), dig(usage, "output_tokens")
    return _count(first), _count(second)


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


def tool_call(span: Span) -> dict[str, Any]:
    """The call a tool span carried out, in the OpenAI form."""
    tool = span.attributes.gen_ai.tool
    name = value_of(tool.name)
    if isinstance(call := value_of(tool.call), dict):
        return call_of({**call, "name": name})
    recorded = value_of(span.attributes.recorded.input.tool_call) or value_of(span.attributes.metadata)
    return call_of(recorded if isinstance(recorded, dict) else {"name": name})


def tool_arguments(span: Span) -> dict[str, Any]:
    """The arguments of a tool span's call as an object."""
    written = dig(value_of(span.attributes.gen_ai.tool.call), "arguments")
    recorded = written if written is not None else dig(value_of(span.attributes.recorded.input.tool_call), "input")
    return recorded if isinstance(recorded, dict) else {}


def tool_output(span: Span) -> Any:
    """What a tool returned, as it was recorded."""
    written = dig(value_of(span.attributes.gen_ai.tool.call), "result")
    return written if written is not None else value_of(span.attributes.recorded.output)


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


def tool_failure(span: Span, output: Any) -> str:
    """Why a tool call failed that returned `output`, in one line; empty for one that did not.

    2.x says so by the result's state. 1.x returns what went wrong as a text that begins with its kind, and both end
    the span as if all were well.
    """
    if told := error_text(span):
        return told
    if output is None or (isinstance(output, str) and "Error:" not in output and "Exception:" not in output):
        # Most results: no need to find the text in them.
        return ""
    state = dig(output, "state")
    text = " ".join(result_text(output).split())
    if state == "error":
        return text or "the tool says so"
    return text if not isinstance(state, str) and is_error_text(text) else ""


def is_error_text(text: str) -> bool:
    """Whether a tool's result reads as what AgentScope writes for a tool that raised or is not there."""
    return _ERROR_TEXT.match(text) is not None


def was_cut_short(span: Span) -> bool:
    """Whether a model call or a tool says that it was interrupted before its end."""
    if exception(span)[0].endswith("CancelledError"):
        return True
    reasons = value_of(span.attributes.gen_ai.response.finish_reasons)
    if isinstance(reasons, list) and "interrupted" in reasons:
        return True
    output = tool_output(span)
    if isinstance(output, str) and is_result(output):
        try:
            return "is_interrupted=True" in output and parse_call(output).get("is_interrupted") is True
        except ReprError:
            return False
    return dig(output, "state") == "interrupted" or dig(output, "is_interrupted") is True
