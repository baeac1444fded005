"""The messages of a task in the chat form that templates of `transformers` take.

Differs from the task line in one point: the arguments of a tool call are an object and not JSON text, as templates
that go through them require.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flywheel.formats.export_format import LeftOut
from flywheel.trace import ChatMessage

INT64 = range(-(2**63), 2**63)


def prompt(line: dict[str, Any]) -> list[ChatMessage]:
    """What the agent was given. Raises LeftOut where text alone is not what it was given."""
    if metadata(line, "images_json"):
        raise LeftOut("the question holds an image, of which only a reference is kept")
    return messages(line["prompt"])


def reply(line: dict[str, Any]) -> list[ChatMessage]:
    """The whole reply: the agent's steps and what its tools returned, then its answer.

    Raises LeftOut for a reply that nobody should learn to write word by word.
    """
    if not line["answer"].strip():
        raise LeftOut("the answer is empty")
    if metadata(line, "structured_json") is not None:
        # The model handed it in by a call that ends the reply; the text beside it is the agent framework's.
        raise LeftOut("the answer is structured output, which the model did not write as text")
    return [*messages(metadata(line, "trajectory_json")), {"role": "assistant", "content": line["answer"]}]


def tools(line: dict[str, Any]) -> str:
    """The offered tools as JSON text, `null` without any: trainers decode it, and its type is always the same."""
    offered = metadata(line, "tools_json")
    return json.dumps(offered, ensure_ascii=False) if offered else "null"


def metadata(line: dict[str, Any], name: str) -> Any:
    """A part of the task line that is kept as JSON text."""
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
    """A call in OpenAI's form; `name` and `arguments` may also stand in it without a `function` around them."""
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
        # pandas' parser, which `datasets` reads with, takes no more, and gives up on the whole file.
        raise ValueError(digits)
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
