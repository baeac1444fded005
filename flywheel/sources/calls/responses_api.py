"""Translates requests and responses of `/v1/responses` into the chat form, as vLLM does to call the model.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from flywheel.records.trace import (
    ChatMessage,
    ModelAnswer,
    ToolCall,
    ToolDefinition,
    ToolFunction,
    get_path,
    refusal_of,
)

Item = dict[str, Any]
"""An object of the interface: a request, a response, or a part of one."""
PROMPT: Final = frozenset({"input", "instructions"})
"""The keys of a request that become messages."""
OUTPUT: Final = "output"
"""The key of a response that has the list with the answer."""
_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_FINISH_REASONS: Final = {"max_output_tokens": "length"}
"""Reasons of incomplete responses, by the name that chat completions have for them."""


def prompt_of(request: Item) -> tuple[tuple[ChatMessage, ...] | None, tuple[ToolDefinition, ...]]:
    """Messages (None if the input is none) and tools of a request."""
    messages: list[ChatMessage] = []
    if instructions := request.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    asked = request.get("input")
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    elif isinstance(asked, list) and all(isinstance(item, dict) for item in asked):
        for item in asked:
            _add(messages, item)
    elif asked is not None:
        return None, ()
    return tuple(messages), tuple(_tool(tool) for tool in _objects(request.get("tools")))


def parameters_of(request: Item) -> dict[str, Any]:
    """The parameters that vLLM makes of others and that change the prompt."""
    return {}


def user_of(request: Item) -> Any:
    return request.get("user")


def _add(messages: list[ChatMessage], item: Item) -> None:
    """Add an item of the input. Reasoning, text and function calls of one answer become one message."""
    said = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    match item.get("type", "message"):
        case "function_call":
            call = _tool_call(item)
            if said is None:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            else:
                said["tool_calls"] = [*said.get("tool_calls", ()), call]
        case "function_call_output":
            result = _content(item.get("output"))
            messages.append({"role": "tool", "content": result, "tool_call_id": _text(item.get("call_id"))})
        case "reasoning":
            if said is None or "reasoning" in said:
                messages.append({"role": "assistant", "content": None, "reasoning": _reasoning(item)})
            else:
                said["reasoning"] = _reasoning(item)
        case "message" if item.get("role") == "assistant":
            text = _text(item.get("content"))
            if said is not None and said.get("content") is None:
                said["content"] = text
            else:
                messages.append({"role": "assistant", "content": text})
        case _:
            message = {"role": _text(item.get("role")), "content": _content(item.get("content"))}
            messages.append(message | ({"name": item["name"]} if "name" in item else {}))


def _content(value: Any) -> Any:
    """The content of a message, with its parts under the names of chat completions."""
    if not isinstance(value, list):
        return value
    return [_part(part) if isinstance(part, dict) else part for part in value]


def _part(part: Item) -> Item:
    match part:
        case {"type": "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
    return part


def _tool_call(item: Item) -> ToolCall:
    function: ToolFunction = {"name": _text(item.get("name")), "arguments": _text(item.get("arguments"))}
    return {"id": _text(item.get("call_id") or item.get("id")), "type": "function", "function": function}


def _tool(tool: Item) -> ToolDefinition:
    if tool.get("type") != "function" or isinstance(tool.get("function"), dict):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _reasoning(item: Item) -> str:
    return _text(item.get("content")) or _text(item.get("summary"))


def _text(value: Any) -> str:
    """A text, or the texts of content parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = (part.get("text", part.get("refusal")) for part in _objects(value))
        return "".join(text for text in texts if isinstance(text, str))
    return str(value) if isinstance(value, int | float) else ""


def _objects(value: Any) -> list[Item]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def answer_of(response: Item) -> ModelAnswer:
    """The answer in a response's output items."""
    content = refusal = reasoning = ""
    calls: list[ToolCall] = []
    for item in _objects(response.get("output")):
        kind = item.get("type")
        if kind == "message":
            said = item.get("content")
            if refused := refusal_of(item):
                refusal += refused
                said = [part for part in _objects(said) if part.get("type") != "refusal"]
            content += _text(said)
        elif kind == "reasoning":
            reasoning += _reasoning(item)
        elif kind == "function_call":
            calls.append(_tool_call(item))
    reason = ""
    if response.get("status") == "completed":
        reason = "tool_calls" if calls else "stop"
    elif response.get("status") == "incomplete":
        cause = _text(get_path(response, "incomplete_details", "reason"))
        reason = _FINISH_REASONS.get(cause, cause)
    is_refusal = bool(refusal) and not content and not calls
    text = "\n".join(filter(None, (content, refusal)))
    return ModelAnswer(text, reasoning, tuple(calls), reason, is_refusal=is_refusal)


class Stream(Struct):
    """A response while its events arrive. `is_whole`: its last event has arrived."""

    is_whole: bool = False
    _last: Item = {}
    _items: dict[int, Item] = {}

    def add(self, event: Item) -> None:
        kind, index = _text(event.get("type")), event.get("output_index")
        if isinstance(event.get("response"), dict):
            self._last = event["response"]
        if kind in _ENDS:
            self.is_whole = True
        if not isinstance(index, int):
            return
        if kind in ("response.output_item.added", "response.output_item.done"):
            if isinstance(item := event.get("item"), dict):
                self._items[index] = item if kind.endswith("done") else {**item, "content": ""}
            return
        item = self._items.setdefault(index, {})
        delta = event.get("delta")
        if not isinstance(delta, str):
            return
        match kind:
            case "response.output_text.delta":
                item["type"], key = "message", "content"
            case "response.refusal.delta":
                item["type"], key = "message", "refusal"
            case (
                "response.reasoning_text.delta" | "response.reasoning_summary_text.delta" | "response.reasoning.delta"
            ):
                item["type"], key = "reasoning", "content"
            case "response.function_call_arguments.delta":
                item["type"], key = "function_call", "arguments"
            case _:
                return
        item[key] = (item[key] if isinstance(item.get(key), str) else "") + delta

    def response(self) -> Item:
        """The response so far: as its last event has it, or assembled from the parts that have arrived."""
        if self._last.get("output"):
            return self._last
        return {**self._last, "output": [self._items[index] for index in sorted(self._items)]}
