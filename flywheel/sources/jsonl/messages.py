"""Parses chat messages of other programs: their texts and images, and the last question with its answer.

A value of an unexpected type raises LineError; the line becomes a dead letter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.records.trace import ChatMessage

_KEPT: Final = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that are kept beside its role and its text."""
_NAMES: Final = ("name", "tool_call_id")


class LineError(ValueError):
    """A line that cannot be a task. The text says why, and at which key."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation split at its last user message: `history` before it, `trajectory` and `answer` after it.

    `request` is the prompt that the agent received, if that is another text.
    """

    history: tuple[ChatMessage, ...] = ()
    query: str = ""
    images: tuple[str, ...] = ()
    trajectory: tuple[ChatMessage, ...] = ()
    answer: str = ""
    request: str = ""


def messages_of(value: Any, where: str) -> list[ChatMessage]:
    """A list of messages, the content of each reduced to its text. `where` names the key. Raises LineError."""
    if not isinstance(value, list):
        raise LineError(f"`{where}` is {kind(value)}, not a list of messages")
    return [_message(message, f"{where}[{place}]") for place, message in enumerate(value)]


def dialogue_of(value: Any, where: str) -> Dialogue:
    """A list of messages as a dialogue. Raises LineError."""
    messages = messages_of(value, where)
    asked = _last(messages, "user")
    if asked is None:
        return Dialogue(history=tuple(messages))
    trajectory, answer = split_answer(messages[asked + 1 :])
    return Dialogue(
        history=tuple(messages[:asked]),
        query=messages[asked]["content"],
        images=_images(value[asked].get("content")),
        trajectory=trajectory,
        answer=answer,
    )


def split_answer(messages: Sequence[ChatMessage]) -> tuple[tuple[ChatMessage, ...], str]:
    """The messages before the last assistant message, and its text."""
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
    calls = kept.get("tool_calls") or []
    if not isinstance(calls, list):
        raise LineError(f"`{where}.tool_calls` is {kind(calls)}, not a list of calls")
    for place, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(_function(call).get("name"), str):
            raise LineError(f"`{where}.tool_calls[{place}]` names no function")
    return {"role": role, "content": _text(value.get("content"), f"{where}.content"), **kept}


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """Name and arguments of a tool call: its `function`, its `custom` tool or, in some templates, the call itself."""
    function = call.get("function", call.get("custom", call))
    return function if isinstance(function, dict) else {}


def normalized(message: ChatMessage) -> ChatMessage:
    """A message in the form of the OpenAI API: ids and names are strings, and each tool call has a `function`."""
    changed: ChatMessage = {key: str(message[key]) for key in _NAMES if isinstance(message.get(key), int | float)}
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_normalized_call(call) for call in calls]
    return {**message, **changed}


def _normalized_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict) and isinstance(call.get("id", ""), str | None):
        return call
    function = _function(call)
    call_id = "" if call.get("id") is None else str(call["id"])
    arguments = function.get("arguments", function.get("input"))
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    """The text of a content: a string, null, or a list of parts of which some are text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, str | dict) for part in content):
        raise LineError(f"`{where}` is {kind(content)}, neither text nor a list of parts")
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    return "\n".join(text for text in texts if isinstance(text, str))


def _images(content: Any) -> tuple[str, ...]:
    """The images of a content, each once: addresses, or the hashes of embedded data."""
    urls: list[str] = []
    for part in content if isinstance(content, list) else []:
        match part:
            case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
                urls.append(url)
            case {"type": "image", "source": {"url": str(url)}} | {"type": "image", "image": str(url)}:
                urls.append(url)
    hashed = (f"sha256:{hashlib.sha256(url.encode()).hexdigest()}" if url[:5] == "data:" else url for url in urls)
    return tuple(dict.fromkeys(image for image in hashed if image))


_KINDS: Final = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}


def kind(value: Any) -> str:
    """The JSON type of a value, for a message."""
    return "null" if value is None else _KINDS.get(type(value), "an object")
