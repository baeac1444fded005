"""A model call that a server has recorded, and the span by which a trace has it."""

from __future__ import annotations

import json
from typing import Any

from flywheel.records.request_id import new_request_id
from flywheel.records.trace import ModelAnswer, ModelCall
from tests.sources.studio.writer import message, part

REMINDER = "<system-reminder>\nIt is Monday.\n</system-reminder>"
SENT = (
    {"role": "system", "name": "system", "content": [{"type": "text", "text": "You do sums."}]},
    {"role": "user", "name": "user", "content": [{"type": "text", "text": "What is 1 + 1?"}]},
    {"role": "user", "name": "user", "content": [{"type": "text", "text": REMINDER}]},
)
MARK = new_request_id("0" * 16, "my-agent@r0007")


def recorded_call(request_id: str = MARK, **values: Any) -> ModelCall:
    defaults: dict[str, Any] = {
        "model": "my-agent",
        "messages": SENT,
        "parameters": {"temperature": 0.5},
        "answers": (ModelAnswer(content="2", finish_reason="stop"),),
        "prompt_tokens": 42,
        "completion_tokens": 5,
    }
    return ModelCall(request_id, **{**defaults, **values})


def marked(row: dict[str, Any], request_id: str = MARK, **gen_ai: Any) -> dict[str, Any]:
    attributes = json.loads(row["attributes"])
    attributes["gen_ai"] |= {"response": {"id": f"chatcmpl-{request_id}"}, **gen_ai}
    return row | {"attributes": json.dumps(attributes)}


HIDING = [message("system", part("You do sums.")), message("user", part("What is 1 + 1?")), message("assistant")]
