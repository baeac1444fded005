"""The formats of AgentScope's own trainers: AgentJet (once ASTuner) and Trinity-RFT."""

from __future__ import annotations

import json

from flywheel.training.data.formats import messages
from flywheel.training.data.formats.export_format import ExportSample, Record

AGENTJET = ("main_query", "init_messages", "task_id", "env_type", "metadata")


def agentjet(sample: ExportSample) -> Record:
    """The fields of AgentJet's `Task`, for its `jsonl` task reader."""
    return {key: sample.line[key] for key in AGENTJET}


def trinity(sample: ExportSample) -> Record:
    """A row for Trinity-RFT: `question` and `answer` for its workflows, `messages` for its SFT reader.

    `messages` and `tools` are JSON text, which its formatter decodes: lists of objects would be aligned to one schema
    by the `datasets` versions that it allows.
    """
    line = sample.line
    given = messages.prompt(line)
    return {
        "task_id": line["task_id"],
        "system_prompt": "\n\n".join(m["content"] for m in given if m["role"] in ("system", "developer")),
        "question": line["question"],
        "answer": line["answer"],
        "prompt": json.dumps(given, ensure_ascii=False),
        "messages": json.dumps([*given, *messages.reply(line)], ensure_ascii=False),
        "tools": messages.tools(line),
    }
