"""Translates the attributes of OpenInference and Langfuse into those of OpenTelemetry's GenAI convention.

A span is translated when it is received, so that everything behind the receiver knows one convention. An attribute of
the GenAI convention that the span has already is kept.
https://github.com/Arize-ai/openinference/blob/main/spec/semantic_conventions.md
https://langfuse.com/integrations/native/opentelemetry
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from flywheel.records.chat import Message
from flywheel.records.trace import get_path
from flywheel.sources.calls.responses_api import answer_of
from flywheel.sources.spans.recorded_calls import message_of
from flywheel.sources.spans.truncation import breaks_off

Nested = dict[str, Any]
"""Attributes as Studio nests them, or an object with such attributes."""
Loaded = Callable[[str], Any]
"""The value of JSON text; the text itself if it is no object, list or quoted text."""

TEXTS: Final = (
    "llm.input_messages.",
    "llm.output_messages.",
    "input.value",
    "output.value",
    "langfuse.observation.input",
    "langfuse.observation.output",
)
"""How the attributes begin whose texts stay texts where they are JSON: each may be something that was said."""
_OPERATIONS: Final = {
    "agent": "invoke_agent",
    "llm": "chat",
    "generation": "chat",
    "tool": "execute_tool",
}
"""Operations by OpenInference's kind of a span and Langfuse's type of an observation. Others have none."""
_PARTS: Final = (("span", "kind"), ("input", "value"), ("output", "value"))
_JSON: Final = "application/json"
_USAGE: Final = "langfuse.observation.usage_details"
_COPIED: Final = {
    "session.id": ("langfuse.session.id",),
    "user.id": ("langfuse.user.id",),
    "gen_ai.agent.name": ("agent.name",),
    "gen_ai.request.model": ("llm.model_name", "llm.request.model_name", "langfuse.observation.model.name"),
    "gen_ai.usage.input_tokens": ("llm.token_count.prompt", f"{_USAGE}.input", f"{_USAGE}.prompt_tokens"),
    "gen_ai.usage.output_tokens": ("llm.token_count.completion", f"{_USAGE}.output", f"{_USAGE}.completion_tokens"),
    "gen_ai.tool.name": ("tool.name",),
    "gen_ai.tool.call.id": ("tool_call.id", "tool.id"),
}
"""Attributes that have another name, each with its names in both conventions."""


def translate(attributes: Nested, name: str, loaded: Loaded) -> None:
    """Add the attributes of the GenAI convention to the nested attributes of the span `name`."""
    own, seen = attributes.get("openinference"), get_path(attributes, "langfuse", "observation")
    if isinstance(own, dict):
        # A reader would take these for the function call that AgentScope records.
        own |= {key: attributes.pop(key) for key in ("input", "output", "metadata") if key in attributes}
        kind, given, returned = (get_path(own, *path) for path in _PARTS)
    elif isinstance(seen, dict):
        kind, given, returned = (seen.get(key) for key in ("type", "input", "output"))
    else:
        return
    asked, answered = (loaded(value) if isinstance(value, str) else value for value in (given, returned))
    if isinstance(own, dict):
        asked, answered = (
            _Cut(value) if _is_cut(get_path(own, part), value) else value
            for part, value in (("input", asked), ("output", answered))
        )
    operation = _OPERATIONS.get(str(kind).lower())
    _add(attributes, {"gen_ai.operation.name": operation})
    for key, sources in _COPIED.items():
        for source in sources:
            _add(attributes, {key: get_path(attributes, *source.split("."))})
    if operation == "chat":
        llm = attributes.pop("llm", None)
        sent, got = (
            [_message(each) for each in _indexed(get_path(llm, key), "message")]
            for key in ("input_messages", "output_messages")
        )
        tools = [tool.get("json_schema") for tool in _indexed(get_path(llm, "tools"), "tool")]
        # An answer of Langfuse may be JSON that is no message.
        answers = got or _messages(answered, "assistant") or ([] if own else _messages(returned, "assistant"))
        said = {
            "gen_ai.response.id": get_path(answered, "id"),
            "gen_ai.response.model": get_path(answered, "model"),
            "gen_ai.input.messages": sent or _messages(asked, "user"),
            "gen_ai.output.messages": answers,
            "gen_ai.tool.definitions": tools or get_path(asked, "tools"),
        }
    elif operation == "execute_tool":
        # LangChain's tools return a message.
        message = get_path(answered, "data")
        said = {
            "gen_ai.tool.name": "" if own else name,
            "gen_ai.tool.call.id": get_path(message, "tool_call_id"),
            "gen_ai.tool.call.arguments": get_path(asked, "kwargs") if get_path(asked, "args") == [] else given,
            "gen_ai.tool.call.result": returned if get_path(message, "content") is None else message,
        }
    else:
        said = _conversation(asked, answered)
    _add(attributes, said)


def _add(attributes: Nested, said: dict[str, Any]) -> None:
    """Add what is said by dotted names, and not there yet."""
    for key, value in said.items():
        path = key.split(".")
        if value not in (None, "", [], {}) and get_path(attributes, *path) is None:
            put(attributes, value, *path)


def put(attributes: Nested, value: Any, *path: str) -> None:
    """Set the attribute at a path."""
    for key in path[:-1]:
        if not isinstance(attributes.get(key), dict):
            attributes[key] = {}
        attributes = attributes[key]
    attributes[path[-1]] = value


def _conversation(asked: Any, answered: Any) -> dict[str, Any]:
    """The messages of an agent, if its answer is recorded as text or messages; else those of its model calls count.

    Of several arguments, only one that is a text or messages is surely the question.
    """
    if not (output := _messages(answered, "assistant")):
        return {}
    if not (messages := _messages(asked, "user")) and isinstance(asked, dict):
        arguments = [*asked.values()]
        if isinstance(asked.get("args"), list) and isinstance(asked.get("kwargs"), dict):
            arguments = [*asked["args"], *asked["kwargs"].values()]
        found = [said for each in arguments if (said := _messages(each, "user"))]
        messages = found[0] if len(found) == 1 else []
    return {"gen_ai.input.messages": messages, "gen_ai.output.messages": output}


class _Cut(str):
    """JSON that breaks off: a limit on the length of attributes has cut it."""


def _is_cut(recorded: Any, value: Any) -> bool:
    """Whether a value of OpenInference is cut: its type is that of JSON, and it is a text that breaks off."""
    return isinstance(value, str) and get_path(recorded, "mime_type") == _JSON and breaks_off(value)


def _messages(value: Any, role: str) -> list[Message] | str:
    """The messages in a recorded value: a text, messages, or a request or response of OpenAI's interfaces; JSON that
    breaks off stays a text, by which a reader knows it."""
    match value:
        case _Cut():
            return value
        case str():
            return [{"role": role, "content": value}] if value else []
        case {"role": str(), "content": _} | {"role": str(), "tool_calls": _}:
            return [value]
        case {"output": list()} | [{"output": list()}]:
            return [message_of(answer_of(value[0] if isinstance(value, list) else value))]
        case {"messages": list(messages)} | list(messages):
            return messages if any(map(_has_role, messages)) and all(map(_is_said, messages)) else []
    return []


def _has_role(value: Any) -> bool:
    return bool(get_path(value, "role"))


def _is_said(value: Any) -> bool:
    """Whether a value is a message, or an item that stands among messages in OpenAI's Responses API."""
    kind = get_path(value, "type")
    return _has_role(value) or (
        isinstance(kind, str) and (kind == "reasoning" or kind.endswith(("_call", "_output")))
    )


def _message(fields: Nested) -> Message:
    """A message of OpenInference in the OpenAI form."""
    texts = ("role", "content", "name", "tool_call_id")
    message: Message = {key: fields[key] for key in texts if isinstance(fields.get(key), str)}
    if parts := _indexed(fields.get("contents"), "message_content"):
        message["content"] = [
            {"type": "image_url", "image_url": part["image"].get("image")}
            if isinstance(part.get("image"), dict)
            else {"type": "text", **part}
            for part in parts
        ]
    if calls := _indexed(fields.get("tool_calls"), "tool_call"):
        message["tool_calls"] = calls
    return message


def _indexed(value: Any, name: str) -> list[Nested]:
    """The objects `name` in a list whose indices are parts of attribute names, in their order. Indices may be of any
    size, and some may be missing."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(filter(str.isdecimal, value), key=lambda key: (len(key), key))]
    items = value if isinstance(value, list) else []
    return [inner for item in items if isinstance(inner := get_path(item, name), dict)]
