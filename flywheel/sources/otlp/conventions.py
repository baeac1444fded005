"""How agents of other frameworks say what AgentScope says in its own way, by OpenTelemetry's GenAI conventions.

They may put the messages into an event of the span, the system prompt into an attribute of its own, and name a model
call after the provider's operation. Here that becomes the form the Studio reader knows. Nothing is taken away, and
where AgentScope's form is there already, nothing is changed.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flywheel.trace import get_path

_MODEL_CALLS: Final = {"generate_content", "text_completion"}
_SPAN_KINDS: Final = {"AGENT": "invoke_agent", "LLM": "chat", "TOOL": "execute_tool", "FORMATTER": "format"}
"""What AgentScope before 1.0.9 wrote as `span.kind`."""
_IN_EVENTS: Final = (("input", "messages"), ("output", "messages"), ("system_instructions",), ("tool", "definitions"))
"""What instrumentations also write into `gen_ai.client.inference.operation.details` events, below `gen_ai`."""
UNKNOWN: Final = "unknown"


def complete(attributes: dict[str, Any], events: Sequence[dict[str, Any]]) -> None:
    """Add to a span's nested attributes what its events and its system instructions say."""
    for path in _IN_EVENTS:
        for event in reversed(events):
            told = get_path(event, "attributes", "gen_ai", *path)
            if told is not None and get_path(attributes, "gen_ai", *path) is None:
                _put(attributes, told, "gen_ai", *path)
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
    """The operation in the words the reader knows, where it has one for it."""
    written = get_path(attributes, "gen_ai", "operation", "name")
    if written is None:
        kind = get_path(attributes, "span", "kind")
        return _SPAN_KINDS.get(kind) if isinstance(kind, str) else None
    return "chat" if written in _MODEL_CALLS else str(written)


def conversation(attributes: dict[str, Any]) -> str:
    """Which dialogue a span belongs to."""
    for path in (("gen_ai", "conversation", "id"), ("project", "run_id"), ("session", "id")):
        if (found := get_path(attributes, *path)) not in (None, "", {}, []):
            return str(found)
    return UNKNOWN
