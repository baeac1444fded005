"""Translates conversations in the format of ShareGPT, as LLaMA-Factory and others write it, into chat messages.

https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html
"""

from __future__ import annotations

import json
from typing import Any, Final

from flywheel.records.trace import ChatMessage

_ROLES: Final = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "system": "system",
    "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
_CALLS: Final = frozenset({"function_call", "tool_call"})


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, each `{"from": …, "value": …}` or with a `role`."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, dict) and any(isinstance(each.get(key), str) for key in ("from", "role"))
            for each in value
        )
    )


def messages(said: list[ChatMessage], system: Any = None) -> list[ChatMessage]:
    """The messages of a conversation. Those with a `role` stay as they are. `system` is the system prompt, where it
    stands beside the conversation."""
    found: list[ChatMessage] = []
    if isinstance(system, str) and system.strip():
        found.append({"role": "system", "content": system})
    call_ids: list[str] = []
    for place, each in enumerate(said):
        speaker = each.get("from")
        if not isinstance(speaker, str):
            found.append(each)
        elif speaker in _CALLS and (calls := _calls(each.get("value"), place)):
            call_ids = [call["id"] for call in calls]
            found.append({**_others(each), "role": "assistant", "content": "", "tool_calls": calls})
        else:
            message = {**_others(each), "role": _ROLES.get(speaker, speaker), "content": each.get("value")}
            if message["role"] == "tool" and call_ids:
                message["tool_call_id"] = call_ids.pop(0)
            found.append(message)
    return found


def _others(message: ChatMessage) -> ChatMessage:
    return {key: value for key, value in message.items() if key not in ("from", "value")}


def _calls(value: Any, place: int) -> list[dict[str, Any]]:
    """The tool calls in the JSON text of a message, one or a list; empty for any other text."""
    try:
        written = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return []
    called = written if isinstance(written, list) else [written]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in called):
        return []
    return [
        {
            "id": f"call-{place}-{number}",
            "type": "function",
            "function": call,
        }
        for number, call in enumerate(called)
    ]
