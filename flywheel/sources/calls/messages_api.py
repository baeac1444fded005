"""Translates requests and responses of `/v1/messages` into the chat form, as vLLM does to call the model.

One thing differs: for chat templates that want the system prompt first, vLLM appends messages of the role `system` to
it; here they stay where they are.
https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from typing import Any, Final

from msgspec import Struct

from flywheel.records.trace import ChatMessage, ModelAnswer, ToolCall, ToolDefinition, get_path

Item = dict[str, Any]
"""An object of the interface: a request, a response, or a part of one."""
PROMPT: Final = frozenset({"system", "messages", "tools", "metadata"})
"""The keys of a request that become messages, tools and the user."""
OUTPUT: Final = "content"
"""The key of a response that has the list with the answer."""
_FINISH_REASONS: Final = {
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"
}  # fmt: skip
"""Reasons of ends, by the name that chat completions have for them."""
_BILLING: Final = "x-anthropic-billing-header"
"""Beginning of a text of Claude Code's that changes with each request, and that vLLM leaves out."""


def prompt_of(request: Item) -> tuple[tuple[ChatMessage, ...] | None, tuple[ToolDefinition, ...]]:
    """Messages (None if they are none) and tools of a request."""
    messages: list[ChatMessage] = []
    if system := _system(request.get("system")):
        messages.append({"role": "system", "content": system})
    sent = request.get("messages")
    if not isinstance(sent, list | None) or not all(isinstance(message, dict) for message in sent or ()):
        return None, ()
    for message in sent or ():
        _add(messages, message)
    return tuple(messages), tuple(_tool(tool) for tool in _objects(request.get("tools")))


def parameters_of(request: Item) -> dict[str, Any]:
    """The parameters that vLLM makes of others and that change the prompt."""
    effort = get_path(request, "output_config", "effort")
    if get_path(request, "thinking", "type") == "disabled":
        effort = "none"  # for some models "low"
    return {"reasoning_effort": effort} if effort is not None else {}


def user_of(request: Item) -> Any:
    return get_path(request, "metadata", "user_id")


def _system(value: Any) -> str:
    texts = [value] if isinstance(value, str) else [_text(block.get("text")) for block in _objects(value)]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _add(messages: list[ChatMessage], message: Item) -> None:
    """Add a message. Results of tools become messages before the text that was sent with them."""
    role, content = _text(message.get("role")), message.get("content")
    if role == "system":
        if text := _system(content):
            messages.append({"role": "system", "content": text})
        return
    if not isinstance(content, list):
        messages.append({"role": role, "content": content})
        return
    parts: list[Item] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for block in _objects(content):
        match block.get("type"):
            case "image":
                parts.append(_image(block))
            case "thinking":
                thoughts.append(_text(block.get("thinking")))
            case "tool_use":
                calls.append(_tool_call(block))
            case "tool_result" if role == "user":
                messages += _result(block)
            case "tool_result" | "text":
                parts += _text_part(block)
    if role == "user" and not parts:
        return
    is_text = len(parts) == 1 and parts[0]["type"] == "text"
    made: ChatMessage = {"role": role, "content": parts[0]["text"] if is_text else parts or None}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    messages.append(made)


def _text_part(block: Item) -> list[Item]:
    """The part that a text becomes, or a result that does not stand in a message of the user."""
    if block["type"] == "text":
        return [{"type": "text", "text": text}] if (text := _text(block.get("text"))) else []
    # vLLM writes a list of blocks as Python does.
    return [{"type": "text", "text": f"Tool result: {block.get('content') or ''}"}]


def _result(block: Item) -> list[ChatMessage]:
    """The messages of a tool's result: its texts, its images as the user's, and the tools that it has found."""
    content = block.get("content")
    blocks = _objects(content)
    texts = [_text(part.get("text")) for part in blocks if part.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(texts)
    made: list[ChatMessage] = [{"role": "tool", "tool_call_id": _text(block.get("tool_use_id")), "content": text}]
    if images := [_image(part) for part in blocks if part.get("type") == "image"]:
        made.append({"role": "user", "content": images})
    named = (part.get("tool_name") or part.get("name") for part in blocks if part.get("type") == "tool_reference")
    if tools := [{"type": "tool_reference", "name": name} for name in named if name]:
        made.append({**made[0], "content": tools})
    return made


def _image(block: Item) -> Item:
    source = block.get("source")
    url = _text(get_path(source, "url"))
    if get_path(source, "type") != "url":
        media_type = _text(get_path(source, "media_type")) or "image/jpeg"
        url = f"data:{media_type};base64,{_text(get_path(source, 'data'))}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: Item) -> ToolCall:
    given = block.get("input")
    arguments = given if given and isinstance(given, str) else json.dumps(given or {})
    function = {"name": _text(block.get("name")), "arguments": arguments}
    return {"id": _text(block.get("id")), "type": "function", "function": function}  # type: ignore[typeddict-item]


def _tool(tool: Item) -> ToolDefinition:
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {names[key]: value for key, value in tool.items() if key in names and value is not None}
    return {"type": "function", "function": function}


def _objects(value: Any) -> list[Item]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def answer_of(response: Item) -> ModelAnswer:
    """The answer in a response's content blocks."""
    blocks = _objects(response.get("content"))
    reason = _text(response.get("stop_reason"))
    content = "".join(_text(block.get("text")) for block in blocks if block.get("type") == "text")
    calls = tuple(_tool_call(block) for block in blocks if block.get("type") == "tool_use")
    return ModelAnswer(
        content,
        "".join(_text(block.get("thinking")) for block in blocks if block.get("type") == "thinking"),
        calls,
        _FINISH_REASONS.get(reason, reason),
        is_refusal=reason == "refusal" and bool(content.strip()) and not calls,
    )


class Stream(Struct):
    """A response while its events arrive. `is_whole`: it has said how the answer ended."""

    is_whole: bool = False
    _message: Item = {}
    _blocks: dict[int, Item] = {}

    def add(self, event: Item) -> None:
        index, delta = event.get("index"), event.get("delta")
        match event.get("type"):
            case "message_start" if isinstance(message := event.get("message"), dict):
                self._message = {**message, **self._message}
            case "message_delta":
                reason = get_path(delta, "stop_reason")
                usage = {
                    key: value
                    for each in (self._message.get("usage"), event.get("usage"))
                    if isinstance(each, dict)
                    for key, value in each.items()
                }
                self._message = {**self._message, "usage": usage, "stop_reason": reason}
                self.is_whole |= bool(reason)
            case "message_stop":
                self.is_whole = True
            case "content_block_start" if isinstance(index, int) and isinstance(
                block := event.get("content_block"), dict
            ):
                self._blocks[index] = {**block, "input": ""} if block.get("type") == "tool_use" else {**block}
            case "content_block_delta" if isinstance(index, int) and isinstance(delta, dict):
                block = self._blocks.setdefault(index, {"type": "text"})
                for key, name in (("text", "text"), ("thinking", "thinking"), ("input", "partial_json")):
                    if part := _text(delta.get(name)):
                        block[key] = _text(block.get(key)) + part

    def response(self) -> Item:
        """The response so far, assembled from the parts that have arrived."""
        blocks = [self._blocks[index] for index in sorted(self._blocks)]
        return {**self._message, "content": blocks}
