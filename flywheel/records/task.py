"""The task: prompt and context of one reply, with its answer as reference, and the line it is exported as."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from flywheel.records import exclusion
from flywheel.records.states import Split
from flywheel.records.trace import ChatMessage, Reply

NO_CONVERSATION = frozenset({"", "unknown", "[no_session_id]"})
"""Ids that clients and servers write without a conversation: unrelated dialogues share them."""


METADATA: Final = frozenset({
    "answer", "qa_hash", "source", "trace_id", "span_id", "conversation_id", "user_id", "agent_name", "model",
    "adapter", "turn", "started_at", "ended_at", "service", "input_tokens", "output_tokens", "prompt_tokens",
    "tools_json", "trajectory_json", "structured_json", "images_json", "errors_json", "reference", "adapter_source",
    "prompt_exact", "prompt_reason", "prompt_source", "parameters_json", "extra_json", "split",
})  # fmt: skip
"""The keys of `metadata` in a task's line that say where it comes from. Any others are the user's."""


def task_line(reply: Reply, source: str, key: str = "") -> dict[str, Any]:
    """One line of `tasks.jsonl`, as AgentJet, Trinity-RFT, TRL and verl read it: always the same keys and types.

    `key` is the task id, by default the one of the reply. `prompt` is what the model was sent, if the call
    log shows it, or else the history with the request as its last message. The split is provisional: the ledger
    decides it.
    """
    prompt: list[ChatMessage] = list(reply.prompt)
    if not prompt:
        prompt = [*reply.history, {"role": "user", "content": reply.request or reply.query}]
    reason = reply.prompt_reason
    if reply.images and exclusion.IMAGE not in reason:
        reason = "; ".join(filter(None, (reason, exclusion.IMAGE)))
    return {
        "task_id": key or task_id(reply.trace_id, reply.span_id),
        "main_query": reply.query,
        "init_messages": list(reply.history),
        "env_type": "no_env",
        "question": reply.query,
        "answer": reply.answer,
        "prompt": prompt,
        "metadata": {
            "answer": reply.answer,
            "qa_hash": qa_hash(reply.query, reply.answer),
            "source": source,
            "trace_id": reply.trace_id,
            "span_id": reply.span_id,
            "conversation_id": reply.conversation_id,
            "user_id": reply.user,
            "agent_name": reply.agent,
            "model": reply.model,
            "adapter": reply.adapter,
            "turn": reply.turn,
            "started_at": _iso(reply.started_at),
            "ended_at": _iso(reply.ended_at),
            "service": reply.service,
            "input_tokens": reply.input_tokens,
            "output_tokens": reply.output_tokens,
            "prompt_tokens": reply.prompt_tokens,
            "tools_json": _json(reply.tools) if reply.tools else "[]",
            "trajectory_json": _json(reply.trajectory) if reply.trajectory else "[]",
            "structured_json": "null" if reply.structured is None else _json(reply.structured),
            "images_json": _json(reply.images) if reply.images else "[]",
            "errors_json": _json(reply.errors) if reply.errors else "[]",
            "reference": reply.reference,
            "adapter_source": reply.adapter_source,
            "prompt_exact": not reason,
            "prompt_reason": reason,
            "prompt_source": "calls" if reply.prompt else "trace",
            "parameters_json": _json(reply.parameters) if reply.parameters else "{}",
            "extra_json": _json(reply.extra) if reply.extra else "{}",
            "split": Split.TRAIN.value,
        },
    }


def whole_line(line: dict[str, Any]) -> dict[str, Any]:
    """A task's line with what its source had besides: the user's own keys, and those of its metadata."""
    metadata = {name: value for name, value in line["metadata"].items() if name != "extra_json"}
    extra = orjson.loads(line["metadata"]["extra_json"])
    return {**extra, **line, "metadata": {**extra.get("metadata", {}), **metadata}}


def _json(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, UnicodeDecodeError):
        # Numbers beyond 64 bits and lone surrogates.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _iso(at: datetime) -> str:
    """`isoformat`; orjson takes a third of the time in UTC."""
    return orjson.dumps(at)[1:-1].decode() if at.tzinfo is UTC else at.isoformat()


def qa_hash(query: str, answer: str) -> str:
    """sha256 of query, a newline and answer: existing task files carry exactly this."""
    return hashlib.sha256(f"{query}\n{answer}".encode("utf-8", "surrogatepass")).hexdigest()


def task_id(trace_id: str, span_id: str) -> str:
    """The key of a reply's task. The file's path is not in it: a moved or migrated database keeps its tasks."""
    return "t-" + hashlib.sha256(f"{trace_id}\0{span_id}".encode()).hexdigest()[:20]


def conversation_key(conversation_id: str, trace_id: str) -> str:
    """The key of a conversation: its id, or its trace if the id is none."""
    return trace_id if conversation_id in NO_CONVERSATION else conversation_id


def split_of(conversation_id: str, trace_id: str, *, train_ratio: float, seed: int) -> Split:
    """The split of a conversation by a hash: it does not change when data grows.

    Replies without a real conversation id are split by trace.
    """
    group = conversation_key(conversation_id, trace_id)
    digest = hashlib.sha256(f"{seed}\0{group}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return Split.TRAIN if share < train_ratio else Split.HELD_OUT
