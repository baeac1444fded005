"""The formats of TRL: prompts for GRPO, whole replies for SFT, pairs of replies for DPO; all conversational."""

from __future__ import annotations

from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import ExportSample, Record


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
