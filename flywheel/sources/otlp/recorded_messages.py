"""Reads what foreign conventions record as messages and tools: texts, JSON, flattened attributes, events.

What is not understood stays as a part that was not read, so that the prompt counts as inexact.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import orjson

from flywheel.records.chat import Message, constructed, is_parts, tool_of, with_unread
from flywheel.records.trace import get_path
from flywheel.sources.calls.responses_api import answer_of
from flywheel.sources.spans.recorded_calls import message_of

Nested = dict[str, Any]
"""Attributes as Studio nests them, or an object with such attributes."""
Loaded = Callable[[str], Any]
"""The value of JSON text; the text itself if it is no object, list or quoted text."""
EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_LONGEST_REPR: Final = 10_000

_EVENT: Final = re.compile(r"gen_ai\.(system|developer|user|assistant|tool)\.message|gen_ai\.(choice)")
_OF_MESSAGE: Final = frozenset(
    {"role", "content", "contents", "parts", "name", "tool_call_id", "tool_calls", "function_call", "finish_reason",
     "id", "function_call_name", "function_call_arguments_json", "refusal", "reasoning", "reasoning_content",
     "status"}
)  # fmt: skip
"""The fields of a flattened message that are understood. Reasoning never counts as text."""
_SAID: Final = frozenset({"content", "parts", "tool_calls", "refusal", "function_call"})
"""Those of them that hold what is said."""


def messages_in(value: Any, role: str) -> list[Message]:
    """The messages in a recorded value: a text, messages, also flattened, or a request or response of OpenAI's or
    LangChain's interfaces."""
    value = of_langchain(value)
    match value:
        case str():
            return [{"role": role, "content": value}] if value else []
        case {"role": str(), "content": _} | {"role": str(), "tool_calls": _}:
            return [value]
        case {"output": list()} | [{"output": list()}]:
            return [message_of(answer_of(value[0] if isinstance(value, list) else value))]
        case {"generations": [[{"message": dict(message)}, *_], *_]}:
            return messages_in(message, role)
        case {"messages": list(messages)} | list(messages):
            if len(messages) == 1 and isinstance(messages[0], list) and not _is_pair(messages[0]):
                (messages,) = messages  # LangChain's models are given lists of conversations.
            said = [_paired(message) for message in messages]
            return said if any(map(_has_role, said)) and all(map(_is_said, said)) else []
    items, has_gap = _listed(value)
    said = [_message(inner, role) for item in items if isinstance(inner := _inner(item, "message"), dict)]
    if said and (has_gap or len(said) < len(items)):
        said[0] = with_unread(said[0], "missing message")
    return said


def first_messages(values: Iterable[Any], role: str) -> list[Message]:
    """The messages of the first value that has any."""
    return next(filter(None, (messages_in(value, role) for value in values)), [])


def of_langchain(value: Any) -> Any:
    """What LangChain's callbacks were given or returned, without what they add to it; any other value as it is."""
    if isinstance(value, dict) and value.keys() & {"tags", "metadata", "kwargs"}:
        for key in ("inputs", "outputs", "output", "input_str"):
            if key in value:
                inner = value[key]
                if key == "input_str" and isinstance(inner, str) and len(inner) <= _LONGEST_REPR:
                    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                        inner = literal_eval(inner)
                return constructed(inner)
    return constructed(value)


def _is_pair(value: Any) -> bool:
    """Whether a value is LangChain's short form of a message: its role and its text."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(text, str) for text in value)
        and value[0] in ("system", "user", "human", "assistant", "ai", "tool", "developer")
    )


def _paired(value: Any) -> Any:
    if not _is_pair(value):
        return constructed(value)
    role = {"human": "user", "ai": "assistant"}.get(value[0], value[0])
    return {"role": role, "content": value[1]}


def _has_role(value: Any) -> bool:
    return bool(get_path(value, "role"))


def _is_said(value: Any) -> bool:
    """Whether a value is a message, or an item that stands among messages in OpenAI's Responses API."""
    kind = get_path(value, "type")
    return _has_role(value) or (
        isinstance(kind, str) and (kind == "reasoning" or kind.endswith(("_call", "_output")))
    )


def _message(fields: Nested, role: str) -> Message:
    """A flattened message of OpenInference or OpenLLMetry, or the body of an event, in the OpenAI form.

    What is not understood of it, or missing in it, is a part that was not read.
    """
    message: Message = {
        key: fields[key]
        for key in ("name", "tool_call_id", "finish_reason", "refusal")
        if fields.get(key) is not None
    }
    message["role"] = fields["role"] if isinstance(fields.get("role"), str) else role
    unread = sorted(fields.keys() - _OF_MESSAGE)
    content = fields.get("content", fields.get("parts"))
    parts, has_gap = _listed(fields.get("contents", content))
    if isinstance(content, str):
        # OpenLLMetry writes some texts as JSON.
        message["content"] = "" if content == '""' else _parts(content) or content
    elif parts:
        message["content"] = [_part(_inner(part, "message_content")) for part in parts]
    elif isinstance(content, dict):
        message["content"] = content if message["role"] == "tool" else [content]
    elif content is not None and not isinstance(content, list):
        message["content"] = orjson.dumps(content).decode()
    unread += ["missing part"] if has_gap else []
    given = fields.get("tool_calls")
    if isinstance(given, str):
        with suppress(orjson.JSONDecodeError):
            given = orjson.loads(given)
    calls, has_gap = _listed(given)
    calls = [call for each in calls if isinstance(call := _inner(each, "tool_call"), dict)]
    called = fields.get("function_call")
    if isinstance(fields.get("function_call_name"), str):
        called = {"name": fields["function_call_name"], "arguments": fields.get("function_call_arguments_json")}
    if isinstance(called, dict) and called.get("name"):
        calls.append(called)
    if calls:
        message["tool_calls"] = calls
    unread += ["missing tool call"] if has_gap or (given not in EMPTY and not calls) else []
    if not message.keys() & _SAID and not fields.keys() & {"content", "reasoning", "reasoning_content"}:
        unread.append("message without content")
    for kind in unread:
        message = with_unread(message, kind)
    return message


def _part(part: Any) -> Any:
    """A part of a content. Pydantic AI's events call its type a kind."""
    if not isinstance(part, dict):
        return part
    if isinstance(part.get("image"), dict) and "image" in part["image"]:
        return {
            "type": "image_url",
            "image_url": part["image"]["image"].get("url", "")
            if isinstance(part["image"]["image"], dict)
            else part["image"]["image"],
        }
    if isinstance(kind := part.get("kind"), str) and "type" not in part:
        key = "thinking" if kind == "thinking" else "text"
        return {"type": kind, key: part.get("text")} if kind in ("text", "thinking") else {**part, "type": kind}
    return part


def _parts(text: str) -> list[Any] | None:
    """The parts in a text that is JSON of parts of a message; None for any other text, JSON too."""
    if not text.startswith("["):
        return None
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return [_part(part) for part in value] if is_parts(value) else None


def _inner(item: Any, name: str) -> Any:
    """What OpenInference has one level deeper, under a name."""
    return item[name] if isinstance(item, dict) and isinstance(item.get(name), dict) else item


def _listed(value: Any) -> tuple[list[Any], bool]:
    """The items of a list whose indices may be parts of attribute names, in their order, and whether some are
    missing. Indices may be of any size."""
    if isinstance(value, list):
        return value, False
    if not isinstance(value, dict):
        return [], False
    keys = sorted(filter(str.isdecimal, value), key=lambda key: (len(key), key))
    return [value[key] for key in keys], keys != [str(place) for place in range(len(keys))]


def tools_in(value: Any, loaded: Loaded) -> tuple[list[Any], bool]:
    """Definitions of tools, and whether some are missing: OpenAI's, JSON texts, flattened, or the parameters of a
    request by Pydantic AI."""
    if isinstance(value, dict) and "function_tools" in value:
        value = [tool for key in ("function_tools", "output_tools") for tool in _listed(value.get(key))[0]]
        return [tool_of(each) for each in value if isinstance(each, dict)], False
    items, has_gap = _listed(value)
    tools = []
    for item in items:
        tool = get_path(_inner(item, "tool"), "json_schema") or item
        tool = loaded(tool) if isinstance(tool, str) else tool
        if isinstance(tool, dict):
            schema = tool.get("parameters")
            tools.append({**tool, "parameters": loaded(schema)} if isinstance(schema, str) else tool)
    return tools, has_gap


def in_events(events: Any) -> tuple[list[Message], list[Message]]:
    """The messages that were sent and the answers, in events: those of a span, or those that Pydantic AI writes into
    an attribute."""
    sent: list[Message] = []
    choices: list[tuple[int, Message]] = []
    for event in events if isinstance(events, list | tuple) else ():
        if not isinstance(event, dict):
            continue
        written = event.get("event.name") or get_path(event, "event", "name") or event.get("name")
        if (found := _EVENT.fullmatch(str(written))) is None:
            continue
        held = event.get("attributes")
        body = _body(held if isinstance(held, dict) else event)
        if found[2]:
            place = body.get("index")
            message = body.get("message", body)
            if isinstance(message, str) and (fields := _fields_in(message)) and fields.keys() <= _OF_MESSAGE:
                message = fields
            if not (isinstance(message, dict) and message.keys() & _SAID):
                message = {"content": message}
            reason = {"finish_reason": str(body.get("finish_reason") or "stop")}
            if any(message.get(key) not in EMPTY for key in _SAID):
                place = place if isinstance(place, int) else len(choices)
                choices.append((place, {**reason, **_message(message, "assistant")}))
        else:
            # An event has other attributes than those of its message.
            fields = {key: value for key, value in body.items() if key in _OF_MESSAGE}
            if found[1] == "tool":
                fields.setdefault("tool_call_id", fields.get("id"))
            sent.append(_message(fields, found[1]))
    got = [message for _, message in sorted(choices, key=lambda choice: choice[0])]
    return sent, got


def _body(held: Nested) -> Nested:
    """The body of an event: an object in one of its attributes, also as JSON, or else its attributes."""
    for written in (get_path(held, "gen_ai", "event", "content"), get_path(held, "event", "body"), held.get("body")):
        value = _fields_in(written)
        if value is not None and value.keys() & {"message", "role", *_SAID}:
            return value
        if written not in EMPTY:
            return {**held, "content": written}
    return held


def _fields_in(value: Any) -> Nested | None:
    """An object, or one in JSON text."""
    if isinstance(value, str) and value.startswith("{"):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    return value if isinstance(value, dict) else None
