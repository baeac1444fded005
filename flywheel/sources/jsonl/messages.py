"""Chat messages as other programs write them: their texts and images, and where question and answer are.

Whatever has the wrong type is a LineError: it costs its own line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.trace import ChatMessage

_KEPT: Final = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""What of a message is kept beside its role and its text."""
_NAMES: Final = ("name", "tool_call_id")


class LineError(ValueError):
    """A line that is no task; the text says why, and where."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation around its last user message: what came before it, and what answered it."""

    history: tuple[ChatMessage, ...] = ()
    query: str = ""
    images: tuple[str, ...] = ()
    trajectory: tuple[ChatMessage, ...] = ()
    answer: str = ""


def messages_of(value: Any, where: str) -> list[ChatMessage]:
    """A list of messages, each with text as its content. Raises LineError."""
    if not isinstance(value, list):
        raise LineError(f"`{where}` is {kind(value)}, not a list of messages")
    return [_message(message, f"{where}[{place}]") for place, message in enumerate(value)]


def dialogue_of(value: Any, where: str) -> Dialogue:
    """Question and answer of a list of messages. Raises LineError."""
    messages = messages_of(value, where)
    asked = _last(messages, "user")
    if asked is None:
        return Dialogue(history=tuple(messages))
    trajectory, answer = answered(messages[asked + 1 :])
    return Dialogue(
        history=tuple(messages[:asked]),
        query=messages[asked]["content"],
        images=_images(value[asked].get("content")),
        trajectory=trajectory,
        answer=answer,
    )


def answered(messages: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], str]:
    """The steps before the last assistant message, and its text."""
    last = _last(messages, "assistant")
    if last is None:
        return tuple(messages), ""
    return tuple(messages[:last]), str(messages[last]["content"])


def _last(messages: Sequence[ChatMessage], role: str) -> int | None:
    return next((place for place in reversed(range(len(messages))) if messages[place]["role"] == role), None)


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise LineError(f"`{where}` is {kind(value)}, not a message")
    role = value.get("role")
    if not isinstance(role, str) or not role:
        raise LineError(f"`{where}.role` is {kind(role)}, not a text")
    kept = {key: value[key] for key in _KEPT if value.get(key) is not None}
    for key in _NAMES:
        if isinstance(kept.get(key, ""), bool | list | dict):
            raise LineError(f"`{where}.{key}` is {kind(kept[key])}, not a text")
    if kept.get("tool_calls"):
        _check_calls(kept["tool_calls"], f"{where}.tool_calls")
    return {"role": role, "content": _text(value.get("content"), f"{where}.content"), **kept}


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise LineError(f"`{where}` is {kind(calls)}, not a list of calls")
    for place, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(_called(call).get("name"), str):
            raise LineError(f"`{where}[{place}]` names no function")


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call: its `function`, its `custom` tool, or, as some templates write it, itself."""
    function = call.get("function", call.get("custom", call))
    return function if isinstance(function, dict) else {}


def in_chat_form(message: ChatMessage) -> ChatMessage:
    """A message as it goes on: ids and names are texts, and a call holds its function."""
    made: ChatMessage = {key: str(message[key]) for key in _NAMES if isinstance(message.get(key), int | float)}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_in_chat_form(call) for call in calls]
    return {**message, **made} if made else message


def _in_chat_form(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict) and isinstance(call.get("id", ""), str | None):
        return call
    function = _called(call)
    name, arguments = function["name"], function.get("arguments", function.get("input"))
    told = "" if call.get("id") is None else str(call["id"])
    return {"id": told, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    """The text of a content: text itself, nothing, or parts of which some are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        raise LineError(f"`{where}` is {kind(content)}, neither text nor a list of parts")
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    return "\n".join(text for text in texts if isinstance(text, str))


def _images(content: Any) -> tuple[str, ...]:
    parts = content if isinstance(content, list) else []
    return tuple(dict.fromkeys(image for part in parts if (image := _image(part))))


def _image(part: Any) -> str:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            pass
        case {"type": "image", "source": {"url": str(url)}} | {"type": "image", "image": str(url)}:
            pass
        case _:
            return ""
    # Embedded data is named by its hash: it has no address.
    return f"sha256:{hashlib.sha256(url.encode()).hexdigest()}" if url.startswith("data:") else url


def kind(value: Any) -> str:
    """The JSON type of a value, for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case _:
            return "an object"
