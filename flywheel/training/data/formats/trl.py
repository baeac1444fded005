"""The formats of TRL: prompts for GRPO, whole replies for SFT, pairs of replies for DPO; all conversational."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from flywheel.records.tool_calls import said_in
from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import ExportSample, LeftOut, Record
from flywheel.training.data.preference_pairs import Reply


def grpo(sample: ExportSample) -> Record:
    """A prompt; the other columns are what reward functions get as keyword arguments."""
    line = sample.line
    return {
        "prompt": messages.prompt(line),
        "answer": line["answer"],
        "structured": line["metadata"]["structured_json"],
        "tools": messages.tools(line),
        "task_id": line["task_id"],
        "agent_name": line["metadata"]["agent_name"],
        "score": sample.score,
    }


def sft(sample: ExportSample) -> Record:
    """Prompt and completion, so that the loss is on this reply alone: earlier turns had verdicts of their own."""
    line = sample.line
    return {
        "prompt": messages.prompt(line),
        "completion": messages.reply(line),
        "tools": messages.tools(line),
        "task_id": line["task_id"],
        "score": sample.score,
    }


def dpo(chosen: ExportSample, rejected: ExportSample) -> Record:
    """One prompt with a better and a worse reply."""
    return {
        "prompt": messages.prompt(chosen.line),
        "chosen": messages.reply(chosen.line),
        "rejected": messages.reply(rejected.line),
        "tools": messages.tools(chosen.line),
        "chosen_score": chosen.score,
        "rejected_score": rejected.score,
        "chosen_task_id": chosen.line["task_id"],
        "rejected_task_id": rejected.line["task_id"],
    }


def reply(number: int, sample: ExportSample) -> tuple[bytes, Reply[int]]:
    """The hash of a reply's prompt and tools, and the reply with that of all it says. Raises LeftOut for one that
    cannot be in a pair."""
    line = sample.line
    said = said_in(messages.reply(line))
    if sample.score is None:
        raise LeftOut("there is no score")
    return _digest([messages.prompt(line), messages.tools(line)]), Reply(number, _digest(said), sample.score)


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
