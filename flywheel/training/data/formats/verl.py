"""The format of verl: the columns of its `RLHFDataset`."""

from __future__ import annotations

import json

from flywheel.records.trace import ChatMessage
from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import Sample
from flywheel.training.data.formats.writer import Record

DATA_SOURCE = "flywheel"
"""verl chooses the reward function by this name. It has none for it, so that one must be configured."""


def verl(sample: Sample) -> Record:
    line = sample.line
    about = line["metadata"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [_flat(message) for message in messages.prompt(line)],
        "ability": "agent",
        "reward_model": {"style": "rule", "ground_truth": line["answer"]},
        "extra_info": {
            "task_id": line["task_id"],
            "split": about["split"],
            "question": line["question"],
            "answer": line["answer"],
            "agent_name": about["agent_name"],
            "score": sample.score,
            "tools_json": messages.tools(line),
            "structured_json": about["structured_json"],
        },
    }


def _flat(message: ChatMessage) -> ChatMessage:
    """The message with the arguments of tool calls as JSON text: they differ by tool, and a column has one type."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {"name": call["function"]["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
