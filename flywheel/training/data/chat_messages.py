"""The messages of a task in the chat format of `transformers` templates.

The arguments of a tool call are an object and not JSON text as in the task line: templates iterate over them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flywheel.records.trace import ChatMessage


class LeftOut(Exception):  # noqa: N818 - not an error: the format has no place for this task
    """A task that a format cannot hold. The text is the reason, in one clause."""


INT64 = range(-(2**63), 2**63)


def prompt(line: dict[str, Any]) -> list[ChatMessage]:
    """The prompt of the agent. Raises LeftOut if it held more than text."""
    if metadata(line, "images_json"):
        raise LeftOut("the question holds an image, of which only a reference is kept")
    return messages(line["prompt"])


def reply(line: dict[str, Any]) -> list[ChatMessage]:
    """The whole reply: the agent's steps with the results of its tools, then its answer.

    Raises LeftOut for a reply that the model did not write as text, and for one that is not to be trained on as a
    whole.
    """
    if not line["answer"].strip():
        raise LeftOut("the answer is empty")
    if metadata(line, "structured_json") is not None:
        # The model returned it by a tool call that ends the reply; the text is the agent framework's.
        raise LeftOut("the answer is structured output, which the model did not write as text")
    steps = metadata(line, "trajectory_json")
    if any(step.get("weight") == 0 and step.get("tool_calls") for step in steps):
        raise LeftOut("a call of it is not to be trained on (a weight of 0), which the format cannot say")
    return [*messages(steps), {"role": "assistant", "content": line["answer"]}]


def tools(line: dict[str, Any]) -> str:
    """The offered tools as JSON text, `null` without any. Always text, so that the column has one type."""
    offered = metadata(line, "tools_json")
    return json.dumps(offered, ensure_ascii=False) if offered else "null"


def metadata(line: dict[str, Any], name: str) -> Any:
    """A value of the task line's metadata that is JSON text."""
    return json.loads(line["metadata"][name])


def messages(raw: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [_message(message) for message in raw]


def _message(message: ChatMessage) -> ChatMessage:
    made: ChatMessage = {"role": message["role"], "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [None])]
    made.update({key: str(message[key]) for key in ("tool_call_id", "name") if message.get(key)})
    return made


def _call(call: Any) -> dict[str, Any]:
    """A tool call in OpenAI's format. `name` and `arguments` may also be given without `function` around them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise LeftOut("a tool call names no function")
    about = {"name": function["name"], "arguments": _arguments(function)}
    return {"id": str(call.get("id") or ""), "type": "function", "function": about}


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    written = function.get("arguments") or {}
    if isinstance(written, str):
        try:
            written = json.loads(written, parse_int=_int64, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            written = None
    if not isinstance(written, dict):
        raise LeftOut("the arguments of a tool call are not a JSON object that every reader takes")
    return written


def _int64(digits: str) -> int:
    number = int(digits)
    if number not in INT64:
        # The parser of pandas, which `datasets` uses, fails on the whole file for larger numbers.
        raise ValueError(digits)
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
