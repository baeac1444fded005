"""Steps of an agent, in the form of a task's trajectory."""

from __future__ import annotations

import json
from typing import Any

from flywheel.records.trace import ChatMessage


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    """The definition of a tool; `properties` are the schemas of its parameters."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def made(name: str, arguments: Any, result: str | None = None, **more: Any) -> tuple[ChatMessage, ...]:
    """One call, with its result if there is one; `arguments` as an object or as the text that the model wrote."""
    text = arguments if isinstance(arguments, str | None) else json.dumps(arguments, ensure_ascii=False)
    call = {"id": "0", "type": "function", "function": {"name": name, "arguments": text}}
    asked: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [call]}
    if result is None:
        return (asked,)
    return asked, {"role": "tool", "tool_call_id": "0", "name": name, "content": result, **more}
