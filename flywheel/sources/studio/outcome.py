"""How a span ended: well, with an error, cut short by its user, or waiting for somebody.

Some clients say it by a status or an event, some by a result's state or only by its text, and end the span as if all
were well. Nothing here knows of traces or replies.
"""

from __future__ import annotations

import re
from typing import Any, Final

from flywheel.sources.studio.attributes import ToolUse, first_text
from flywheel.sources.studio.recorded import NOTHING, value_of
from flywheel.sources.studio.reprs import ReprError, is_result, parse_call
from flywheel.sources.studio.span import Span
from flywheel.trace import SpanStatus, get_path

_ERROR_TEXT: Final = re.compile(r"\A(?:Error|[A-Z]\w*(?:Error|Exception)): ")
_STATE: Final = "state=<ToolResultState."
_FAILED: Final = f"{_STATE}ERROR"


def exception(span: Span) -> tuple[str, str]:
    """Type and message of the last exception recorded in a span, two empty texts without one."""
    for event in reversed(span.events):
        if event.get("name") != "exception":
            continue
        details = event.get("attributes")
        kind = first_text(get_path(details, "exception", "type"), get_path(details, "exception.type"))
        return kind, first_text(get_path(details, "exception", "message"), get_path(details, "exception.message"))
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
    if output is None or (
        isinstance(output, str) and "Error:" not in output and "Exception:" not in output and _FAILED not in output
    ):
        # Most results: no need to find the text in them.
        return ""
    state = _state(output)
    text = " ".join((tool.result or "").split())
    if state == "error":
        return text or "the tool says so"
    return text if not isinstance(state, str) and is_error_text(text) else ""


def _state(returned: Any) -> Any:
    """The state that 2.x gives a tool's result, up to 2.0.6 in a repr; None where there is none."""
    if not isinstance(returned, str):
        return get_path(returned, "state")
    if not is_result(returned) or _STATE not in returned:
        return None
    try:
        written = parse_call(returned).get("state")
    except ReprError:
        return None
    return written.removeprefix("<").rpartition(": ")[2].strip("'>") if isinstance(written, str) else None


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
    returned = get_path(value_of(call), "result")
    returned = value_of(output) if returned is None else returned
    if _state(returned) == "interrupted":
        return True
    if isinstance(returned, str) and is_result(returned):
        try:
            return "is_interrupted=True" in returned and parse_call(returned).get("is_interrupted") is True
        except ReprError:
            return False
    return get_path(returned, "is_interrupted") is True


def waits_for(span: Span) -> list[str]:
    """The tools for which an agent stopped: a person has to allow them, or they are carried out elsewhere (2.x)."""
    pause = span.attributes.agentscope.agent
    allowed, elsewhere = pause.hitl_pending_tools, pause.external_execution_pending_tools
    if allowed is NOTHING and elsewhere is NOTHING:
        return []
    return [str(name) for raw in (allowed, elsewhere) for name in value_of(raw) or ()]
