"""The format of verl: the columns of its `RLHFDataset`, written as parquet."""

from __future__ import annotations

import json
from typing import Any

from flywheel.records.trace import ChatMessage
from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import ExportSample, Record

DATA_SOURCE = "flywheel"
"""verl chooses the reward function by this name. It has none for it, so that one must be configured."""


def verl(sample: ExportSample) -> Record:
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


def verl_schema(pa: Any, typed: frozenset[str]) -> Any:
    """The columns. Messages have the fields of tool calls only if one of them has any: a template that tests whether
    a message has tool calls would take a null for one."""
    text = pa.string()
    message = [("role", text), ("content", text)]
    if "prompt" in typed:
        function = pa.struct([("name", text), ("arguments", text)])
        call = pa.struct([("id", text), ("type", text), ("function", function)])
        message += [("tool_calls", pa.list_(call)), ("tool_call_id", text), ("name", text)]
    about = ("task_id", "split", "question", "answer", "agent_name", "tools_json", "structured_json")
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct(message))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([*((name, text) for name in about), ("score", pa.float64())])),
        ]
    )
