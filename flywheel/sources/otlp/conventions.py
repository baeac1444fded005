"""Translates spans of other frameworks, which follow OpenTelemetry's GenAI conventions, into AgentScope's form.

Other frameworks may put messages into span events, the system prompt into an attribute of its own, and name a model
call after the provider's operation. The translation only adds what is missing: it removes and changes nothing.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flywheel.records.trace import get_path

_MODEL_CALLS: Final = {"generate_content", "text_completion"}
_SPAN_KINDS: Final = {"AGENT": "invoke_agent", "LLM": "chat", "TOOL": "execute_tool", "FORMATTER": "format"}
"""Operations by the `span.kind` of AgentScope before 1.0.9."""
_IN_EVENTS: Final = (("input", "messages"), ("output", "messages"), ("system_instructions",), ("tool", "definitions"))
"""Attributes below `gen_ai` that may stand in `gen_ai.client.inference.operation.details` events instead."""
UNKNOWN: Final = "unknown"


def complete(attributes: dict[str, Any], events: Sequence[dict[str, Any]]) -> None:
    """Add the messages in a span's events and its system instructions to its nested attributes."""
    for path in _IN_EVENTS:
        for event in reversed(events):
            value = get_path(event, "attributes", "gen_ai", *path)
            if value is not None and get_path(attributes, "gen_ai", *path) is None:
                _put(attributes, value, "gen_ai", *path)
    if operation(attributes) == "chat":
        _lead_with_instructions(attributes)


def _lead_with_instructions(attributes: dict[str, Any]) -> None:
    parts = get_path(attributes, "gen_ai", "system_instructions")
    if isinstance(parts, str):
        parts = [{"type": "text", "content": parts}]
    given = get_path(attributes, "gen_ai", "input", "messages")
    if not (isinstance(parts, list) and parts and isinstance(given, list)):
        return
    if not any(get_path(message, "role") == "system" for message in given):
        _put(attributes, [{"role": "system", "parts": parts}, *given], "gen_ai", "input", "messages")


def _put(attributes: dict[str, Any], value: Any, *path: str) -> None:
    for key in path[:-1]:
        if not isinstance(attributes.get(key), dict):
            attributes[key] = {}
        attributes = attributes[key]
    attributes[path[-1]] = value


def operation(attributes: dict[str, Any]) -> str | None:
    """The operation under the name that the reader knows, if it has one for it."""
    written = get_path(attributes, "gen_ai", "operation", "name")
    if written is None:
        kind = get_path(attributes, "span", "kind")
        return _SPAN_KINDS.get(kind) if isinstance(kind, str) else None
    return "chat" if written in _MODEL_CALLS else str(written)


def conversation(attributes: dict[str, Any]) -> str:
    """The id of the conversation of a span; `unknown` without one."""
    for path in (("gen_ai", "conversation", "id"), ("project", "run_id"), ("session", "id")):
        if (found := get_path(attributes, *path)) not in (None, "", {}, []):
            return str(found)
    return UNKNOWN
