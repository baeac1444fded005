"""Translates lines of SAGE's data sets into the keys of other lines: dialogs of `agent_sft`, samples of
`agent_benchmark`.

https://github.com/intellistream/SAGE
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flywheel.records import chat
from flywheel.records.ground_truth import KEY as GROUND_TRUTH
from flywheel.records.task import TaskLine
from flywheel.records.trace import ChatMessage, get_path


def translate(line: TaskLine) -> bool:
    """Give a line of SAGE the messages of its dialog or of its sample; false for any other line.

    The messages of a sample are its `context` and its `instruction`. The candidate tools, of which it has the names
    only, are its `tools`, and its metadata have the ground truth.
    """
    match line:
        case {"turns": [_, *_]} if all(isinstance(get_path(each, "role"), str) for each in line["turns"]):
            line["messages"] = chat.of_turns(line.pop("turns"))
        case {"sample_id": _, "instruction": str(instruction), "ground_truth": dict(truth)}:
            asked: ChatMessage = {"role": "user", "content": instruction}
            if isinstance(names := line.get("candidate_tools"), list) and not line.get("tools"):
                asked = chat.with_unread(asked, "definitions of candidate_tools")
                line["tools"] = [{"name": name} for name in names if isinstance(name, str)]
            context = [{"role": "system", "content": line["context"]}] if line.get("context") else []
            line["messages"] = [*context, asked]
            if isinstance(metadata := line.get("metadata") or {}, dict):
                line["metadata"] = {GROUND_TRUTH: _ground_truth(truth), **metadata}
        case _:
            return False
    return True


def _ground_truth(given: Mapping[str, Any]) -> dict[str, Any]:
    """The ground truth of a sample, with its own keys."""
    match given:
        case {"tool_sequence": list(tools)}:
            return {"target_tools": tools, "optimal_steps": len(tools), **given}
        case {"top_k": list(tools)}:
            return {"target_tools": tools, **given}
        case {"should_call_tool": False}:
            answer = given.get("direct_answer")
            return {"target_tools": [], **({"answer": answer} if answer else {}), **given}
    return {**given}
