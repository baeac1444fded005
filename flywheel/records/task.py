"""The task of a reply: the line it is exported as, the entry that the ledger stores, and batches of entries.

Plain data, no I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import orjson
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from flywheel.records import exclusion
from flywheel.records.exclusion import ANY_MODEL, Exclusion, TrainedModels
from flywheel.records.request_id import BASE_BY_ID
from flywheel.records.selection import TaskClass
from flywheel.records.similarity import beginning_of, opening
from flywheel.records.states import SkipReason, Split
from flywheel.records.tool_calls import FINISH_FUNCTIONS, Call, calls_in, functions_by_name
from flywheel.records.trace import ChatMessage, Checkpoint, Cursor, DeadRow, Reply, ToolDefinition
from flywheel.system.files import json_line

TaskLine = dict[str, Any]
"""A line of a task file, parsed: keys and types as `task_line` writes them, and what a user has added."""

NO_CONVERSATION = frozenset({"", "unknown", "[no_session_id]"})
"""Ids that clients and servers write without a conversation: unrelated dialogues share them."""


ID_OF_LINE: Final = "t-"
"""How ids begin that are hashes."""

METADATA: Final = frozenset({
    "answer", "qa_hash", "source", "trace_id", "span_id", "conversation_id", "user_id", "agent_name", "model",
    "adapter", "turn", "started_at", "ended_at", "service", "input_tokens", "output_tokens", "prompt_tokens",
    "tools_json", "trajectory_json", "structured_json", "images_json", "errors_json", "answer_reasoning",
    "refusal", "reference", "adapter_source",
    "prompt_exact", "prompt_reason", "prompt_source", "parameters_json", "extra_json", "split",
})  # fmt: skip
"""The keys of `metadata` in a task's line that say where it comes from. Any others are the user's."""


def task_line(reply: Reply, source: str, key: str = "") -> TaskLine:
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
            "answer_reasoning": reply.reasoning,
            "refusal": reply.is_refusal,
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


class TraceParts(NamedTuple):
    """What the metadata of a task's line has as JSON texts."""

    tools: tuple[ToolDefinition, ...]
    steps: tuple[ChatMessage, ...]
    """The messages between question and traced answer."""
    errors: tuple[str, ...]
    """The steps that failed."""


def trace_parts(line: Mapping[str, Any]) -> TraceParts:
    # Unlike orjson, it keeps integers beyond 64 bits exact.
    texts = (line["metadata"][key] for key in ("tools_json", "trajectory_json", "errors_json"))
    return TraceParts(*(tuple(json.loads(text)) for text in texts))


def whole_line(line: TaskLine) -> TaskLine:
    """A task's line with what its source had besides: the user's own keys, and those of its metadata."""
    metadata = {name: value for name, value in line["metadata"].items() if name != "extra_json"}
    extra = orjson.loads(line["metadata"]["extra_json"])
    return {**extra, **line, "metadata": {**extra.get("metadata", {}), **metadata}}


def is_traced(line: TaskLine) -> bool:
    """Whether the answer of a task is an agent's reply, not the right answer of a data set: it comes from a trace, or
    from a file's line with the `qa_hash` of AgentJet's traced tasks."""
    if not line["metadata"]["trace_id"].startswith(ID_OF_LINE):
        return True
    return "qa_hash" in orjson.loads(line["metadata"]["extra_json"]).get("metadata", {})


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


def task_id(trace_id: str, span_id: str, start: str = "") -> str:
    """The key of a reply's task. The file's path is not in it: a moved or migrated database keeps its tasks.

    `start` tells a reply from the one that was stored first with its trace and its span.
    """
    of = f"{trace_id}\0{span_id}\0{start}" if start else f"{trace_id}\0{span_id}"
    return "t-" + hashlib.sha256(of.encode()).hexdigest()[:20]


def row_id(own: str, *said: object) -> str:
    """The id of a file's row with a task. `own` is the id that the file gives it, empty for none; what is `said` are
    question, answer, history, images and tools, before anything is redacted."""
    return hashed([own, *said])


def hashed(value: object) -> str:
    """An id made of a JSON value; the order of keys does not matter."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Numbers beyond 64 bits.
        text = json.dumps(value, sort_keys=True).encode()
    return ID_OF_LINE + hashlib.sha256(text).hexdigest()[:20]


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


def exclusion_of_tools(tools: Sequence[Mapping[str, Any]], steps: Sequence[ChatMessage]) -> Exclusion | None:
    """The exclusion of a reply that was offered these tools and made these steps; None without tools.

    Calls of finish functions are answers, not calls. Functions that only `rollout.finish_tools` names are not known
    here: planning leaves out what has no other call.
    """
    if not tools and not any(step.get("tool_calls") or step.get("role") == "tool" for step in steps):
        return None
    if not tools:
        return Exclusion.UNDEFINED
    offered = functions_by_name(tools).keys() - FINISH_FUNCTIONS
    calls = calls_in(steps)
    calls = [call for call in calls if call.name not in FINISH_FUNCTIONS]
    if any(call.name in offered and call.result is not None and _is_well_formed(call) for call in calls):
        return Exclusion.TOOLS
    # A result without a call shows that one was made.
    has_results = any(step.get("role") == "tool" and str(step.get("name")) not in FINISH_FUNCTIONS for step in steps)
    return Exclusion.UNRECORDED if calls or has_results else Exclusion.UNCALLED


def class_of(reply: Reply) -> TaskClass:
    """The class of a reply's task. Calls of finish functions are answers, not calls."""
    if reply.turn or any(message.get("role") == "user" for message in reply.history):
        return TaskClass.SEVERAL_TURNS
    called = {call.name for call in calls_in(reply.trajectory)} - FINISH_FUNCTIONS
    return (TaskClass.NO_TOOLS, TaskClass.ONE_TOOL, TaskClass.SEVERAL_TOOLS)[min(len(called), 2)]


def _is_well_formed(call: Call) -> bool:
    try:
        return isinstance(call.parsed, dict)
    except ValueError:
        return False


class Entry(Struct, frozen=True, gc=False):
    """A reply as the ledger stores it: its task as one JSON object, and the columns that are queried.

    - `line`: the task in UTF-8 without a line end; empty if `skip` says why there is none. Its split is provisional,
      as the ledger decides the split of the conversation.
    - `content`: a 63-bit hash of the line and `skip`, which differs if a re-extracted reply differs.
    - `beginning`: a hash of the beginning of the conversation, 0 without a task.
    - `words`, `numbers`: what a first turn is compared by (see `similarity.opening`); packed, empty in a later turn.
    - `linked`: the reply's own spans do not show the conversation before it. The ledger finds the earlier turns by
      conversation id and time.
    - `excluded`: why rounds leave the task out (see `exclusion`).
    - `target`: the target whose task it is; empty without `targets`, and for none of them.
    - `structure`: the class of the task (`TaskClass`); empty without a task.
    - `model`: the model that was requested.
    - `asked_alias`: the alias, if nothing recorded says which of its versions answered.
    - `follows`: an earlier turn may have hidden a message, which the ledger can find out.
    - `calls`: the request ids of the model calls; `missing`: those of them that were not found in the call log.
    - `root`: the conversation whose split this one takes; empty for its own.
    - `user`: who asked, as the trace says; empty if it does not. `service`: the service that answered.
    - `waits`: what it needs is not there yet: it is pending, and no task.
    - `own_id`: the id that a file gives its row; empty if it gives none.
    """

    span_id: str
    trace_id: str
    conversation_id: str
    agent: str
    adapter: str
    started_at: str
    key: str
    line: bytes
    content: int
    beginning: int = 0
    words: bytes = b""
    numbers: int = 0
    linked: bool = False
    excluded: str = ""
    model: str = ""
    asked_alias: str = ""
    follows: bool = False
    skip: SkipReason | None = None
    detail: str = ""
    calls: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    root: str = ""
    target: str = ""
    structure: str = ""
    user: str = ""
    service: str = ""
    waits: bool = False
    own_id: str = ""

    @property
    def split_key(self) -> str:
        """The key of the conversation whose split this one has: its own, or that of its `root`."""
        return conversation_key(self.root or self.conversation_id, self.trace_id)


RawTrace = tuple[dict[int, bytes], bool]
"""The packed rows of a trace by number, and whether it is open: spans are missing that may still arrive."""


class Batch(Struct, frozen=True):
    """What some rows of a source brought, stored in one transaction: entries, dead rows, checkpoints and the cursor.

    Without a cursor, as in a re-scan, the stored cursor stays. `rows` is the number of rows read, `more` whether rows
    follow, `kinds` the spans by kind of the traces without an agent. `private_calls` are the request ids that private
    traces name: these calls are to be erased. `left_out` has, by trace, how many spans fit several runs with its id.
    """

    cursor: Cursor | None
    entries: tuple[Entry, ...] = ()
    dead: tuple[DeadRow, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    open_traces: int = 0
    warnings: tuple[str, ...] = ()
    rows: int = 0
    more: bool = False
    kinds: dict[str, int] = {}
    private_calls: tuple[str, ...] = ()
    left_out: dict[str, int] = {}


def joined(batches: Sequence[Batch]) -> Batch:
    """Consecutive batches of one pass over traces as one batch. Of a trace that was extracted more than once, the
    last time counts."""
    last = {entry.trace_id: at for at, batch in enumerate(batches) for entry in batch.entries}
    return replace(
        next((batch for batch in reversed(batches) if batch.cursor is not None), batches[-1]),
        entries=tuple(
            entry for at, batch in enumerate(batches) for entry in batch.entries if last[entry.trace_id] == at
        ),
        dead=tuple(row for batch in batches for row in batch.dead),
        checkpoints=tuple(checkpoint for batch in batches for checkpoint in batch.checkpoints),
        warnings=tuple(warning for batch in batches for warning in batch.warnings),
        private_calls=tuple(call for batch in batches for call in batch.private_calls),
        left_out={trace: count for batch in batches for trace, count in batch.left_out.items()},
        rows=sum(batch.rows for batch in batches),
    )


def entry_of(reply: Reply, source: str, models: TrainedModels = ANY_MODEL) -> Entry:
    """The entry of a reply from `source`; `models` says whose replies are trained on."""
    line = task_line(reply, source)
    whole = line_bytes(line)
    skip = reply.skip
    words, numbers = (b"", 0) if skip or reply.turn else opened(reply.query)
    reason = line["metadata"]["prompt_reason"]
    # If the id is of Flywheel's own server, it says which version answered, whatever name the request used.
    by_id = "" if reply.adapter else BASE_BY_ID
    model = by_id if reply.adapter_source == "id" else storable(reply.model)
    excluded = {exclusion.OF_REASON.get(one, Exclusion.INEXACT) for one in reason.split("; ") if one}
    if (of_tools := exclusion_of_tools(reply.tools, reply.trajectory)) is not None:
        excluded.add(of_tools)
    if not models.trains(model, reply.adapter):
        excluded.add(Exclusion.MODEL)
    target = models.target_of(reply.agent, storable(reply.model), reply.adapter)
    if models.targets and not target:
        excluded.add(Exclusion.TARGET)
    return Entry(
        span_id=reply.span_id,
        trace_id=reply.trace_id,
        conversation_id=storable(reply.conversation_id),
        agent=storable(reply.agent),
        adapter=storable(reply.adapter),
        started_at=line["metadata"]["started_at"],
        key=line["task_id"],
        line=b"" if skip else whole,
        content=xxhash.xxh3_64_intdigest(whole, xxhash.xxh32_intdigest(str(skip).encode())) >> 1,
        beginning=0 if skip else beginning_of(line),
        words=words,
        numbers=numbers,
        linked=not (reply.history or reply.model or reply.prompt),
        excluded="" if skip else exclusion.column(excluded),
        model=model,
        asked_alias=model if model in models.aliases and not reply.adapter_source else "",
        follows=not (reason or reply.prompt) and any(message.get("role") == "assistant" for message in reply.history),
        skip=skip,
        detail=storable(reply.skip_detail),
        calls=reply.calls,
        missing=reply.missing,
        root=reply.root,
        target=target,
        structure="" if skip else class_of(reply).value,
        user=storable(reply.user),
        service=storable(reply.service),
    )


def opened(query: str) -> tuple[bytes, int]:
    """`words` and `numbers` of an entry with this first question."""
    words, numbers = opening(query)
    return words.tobytes(), numbers


def storable(text: str) -> str:
    """A text that UTF-8 can encode: lone surrogates, which JSON allows, become `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def line_bytes(line: dict[str, object]) -> bytes:
    """A task line as JSON without a line end. Lone surrogates become `?`."""
    try:
        return orjson.dumps(line)
    except orjson.JSONEncodeError:
        return json_line(line)[:-1]
