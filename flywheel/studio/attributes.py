"""Where a span keeps what: the attribute paths of every client and server generation, in one place.

Each function takes the first of: the GenAI convention (`gen_ai.…`), the function call that AgentScope 1.x records
(`agentscope.function.…`), the layout of generation 1 (at the root). Nothing here knows of traces or replies.
"""

from __future__ import annotations

import re
from typing import Any, Final

from flywheel.studio.content import FINISH_FUNCTIONS, Message, call_of, messages_of, result_text, tool_of
from flywheel.studio.literal import ReprError, is_result, parse_call
from flywheel.trace import Span, SpanStatus

_ERROR_TEXT: Final = re.compile(r"(?:Error|[A-Z]\w*(?:Error|Exception)): ")


def dig(value: Any, *keys: str) -> Any:
    """The value below nested keys, or None where there is no such path."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _text(*candidates: Any) -> str:
    return next((value for value in candidates if isinstance(value, str) and value), "")


def _function(span: Span, *keys: str) -> Any:
    recorded = dig(span.attributes, "agentscope", "function")
    return dig(recorded if isinstance(recorded, dict) else span.attributes, *keys)


def _argument(span: Span, name: str) -> Any:
    """An argument of the traced call, by name or as the first one."""
    named = _function(span, "input", "kwargs", name)
    positional = _function(span, "input", "args")
    return positional[0] if named is None and isinstance(positional, list) and positional else named


def agent_name(span: Span) -> str:
    return _text(
        dig(span.attributes, "gen_ai", "agent", "name"),
        dig(span.attributes, "metadata", "name"),
        span.name.removeprefix("invoke_agent "),
    )


def user_id(span: Span) -> str:
    """Who asked, where the application says so by OpenTelemetry's attributes."""
    return _text(dig(span.attributes, "user", "id"), dig(span.attributes, "enduser", "id"))


def agent_input(span: Span) -> list[Message]:
    """The messages an agent was handed. Raises ReprError."""
    written = messages_of(dig(span.attributes, "gen_ai", "input", "messages"), encoded=True)
    return written or messages_of(_argument(span, "msg"))


def agent_output(span: Span) -> Message | None:
    """The message an agent returned, None where it returned none. Raises ReprError."""
    written = messages_of(dig(span.attributes, "gen_ai", "output", "messages"), encoded=True)
    if written:
        return written[-1]
    recorded = _function(span, "output")
    # Servers that convert old spans write an empty object where there was no output.
    if recorded is None or recorded in ({}, []):
        return None
    # A custom agent may return bare text, empty or decoded by the server because it was also JSON.
    found = messages_of(recorded)
    return found[-1] if found else {"role": "assistant", "content": [{"type": "text", "text": recorded}]}


def returned_metadata(span: Span) -> dict[str, Any]:
    """The metadata of the returned message, which only the repr of AgentScope 1.x has. Raises ReprError."""
    output = _function(span, "output")
    if isinstance(output, str) and "metadata={" not in output:
        # Parsing a repr costs more than everything else about a reply.
        return {}
    found = messages_of(output)
    metadata = found[-1].get("metadata") if found else None
    return metadata if isinstance(metadata, dict) else {}


def wants_structure(span: Span) -> bool:
    """Whether the caller asked for structured output (AgentScope 1.x records the argument)."""
    return bool(_function(span, "input", "kwargs", "structured_model"))


def model_input(span: Span) -> list[Message]:
    """The messages a model was called with."""
    written = messages_of(dig(span.attributes, "gen_ai", "input", "messages"), encoded=True)
    return written or messages_of(_argument(span, "messages"))


def model_output(span: Span) -> Message | None:
    """The message a model answered with."""
    written = messages_of(dig(span.attributes, "gen_ai", "output", "messages"), encoded=True)
    if written:
        return {"role": "assistant", **written[-1]}
    output = _function(span, "output")
    if isinstance(output, str) and is_result(output):
        output = parse_call(output)
    content = dig(output, "content")
    return None if content is None else {"role": "assistant", "content": content}


def model_name(span: Span) -> str:
    return _text(dig(span.attributes, "gen_ai", "request", "model"), dig(span.attributes, "metadata", "model_name"))


def answering_model(span: Span) -> str:
    """The model that says it answered: behind an alias, the version that served the call."""
    return _text(dig(span.attributes, "gen_ai", "response", "model"))


def tokens(span: Span) -> tuple[int, int]:
    """Input and output tokens of a model call."""
    usage = dig(span.attributes, "gen_ai", "usage") or _function(span, "output", "usage")
    counts = (dig(usage, "input_tokens"), dig(usage, "output_tokens"))
    first, second = (count if isinstance(count, int) and count > 0 else 0 for count in counts)
    return first, second


def tool_definitions(span: Span) -> list[dict[str, Any]]:
    """The tools a model was offered, in the OpenAI form, without the finish functions."""
    written = dig(span.attributes, "gen_ai", "tool", "definitions") or _function(span, "input", "kwargs", "tools")
    if not isinstance(written, list):
        return []
    tools = [tool_of(definition) for definition in written if isinstance(definition, dict)]
    return [tool for tool in tools if tool["function"].get("name") not in FINISH_FUNCTIONS]


def tool_call(span: Span) -> dict[str, Any]:
    """The call a tool span carried out, in the OpenAI form."""
    tool = dig(span.attributes, "gen_ai", "tool")
    if isinstance(dig(tool, "call"), dict):
        return call_of({**tool["call"], "name": tool.get("name")})
    recorded = _function(span, "input", "tool_call") or dig(span.attributes, "metadata")
    return call_of(recorded if isinstance(recorded, dict) else {"name": dig(tool, "name")})


def tool_arguments(span: Span) -> dict[str, Any]:
    """The arguments of a tool span's call as an object."""
    written = dig(span.attributes, "gen_ai", "tool", "call", "arguments")
    recorded = written if written is not None else _function(span, "input", "tool_call", "input")
    return recorded if isinstance(recorded, dict) else {}


def _tool_output(span: Span) -> Any:
    written = dig(span.attributes, "gen_ai", "tool", "call", "result")
    return written if written is not None else _function(span, "output")


def tool_result(span: Span) -> str | None:
    """The text a tool returned; None where it returned nothing."""
    output = _tool_output(span)
    return None if output is None else result_text(output)


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


def tool_failure(span: Span) -> str:
    """Why a tool call failed, in one line; empty for one that did not.

    2.x says so by the result's state. 1.x returns what went wrong as a text that begins with its kind, and both end
    the span as if all were well.
    """
    if told := error_text(span):
        return told
    output = _tool_output(span)
    state = dig(output, "state")
    text = " ".join((tool_result(span) or "").split())
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
    reasons = dig(span.attributes, "gen_ai", "response", "finish_reasons")
    if isinstance(reasons, list) and "interrupted" in reasons:
        return True
    output = _tool_output(span)
    if isinstance(output, str) and is_result(output):
        try:
            return "is_interrupted=True" in output and parse_call(output).get("is_interrupted") is True
        except ReprError:
            return False
    return dig(output, "state") == "interrupted" or dig(output, "is_interrupted") is True
