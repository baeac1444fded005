"""What a source brings in one step: replies as the ledger stores them, and where to go on. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from flywheel import exclusion
from flywheel.exclusion import ANY_MODEL, Exclusion, TrainedModels
from flywheel.files import json_line
from flywheel.similarity import PromptSignature, beginning_of, prompt_signatures
from flywheel.states import SkipReason, Split
from flywheel.task import Task, task_id
from flywheel.trace import Checkpoint, Cursor, DeadRow, Reply


class Entry(Struct, frozen=True, gc=False):
    """A reply as the ledger stores it: what is asked of it often, and its task as one JSON object.

    `line` is the task in UTF-8 without a line end, empty where `skip` says why there is none. Its split is
    provisional: the ledger knows which side the conversation is on. `content` is a 63-bit hash of all that, to notice
    that a reply looks different when it is read again. `beginning` says what its conversation begins with, 0 where it
    has no task; `words` and `bands` what that is like (see `similarity`), where this is the first turn. A reply is
    `linked` when its own spans do not show the conversation before it: the ledger then finds the earlier turns by
    conversation id and time. `excluded` says why rounds leave its task out (see `exclusion`), `model` which model was
    asked. Where nothing recorded tells which version of the alias answered, `asked_alias` is the alias; where an
    earlier turn may have hidden a message, it `follows`: then the ledger knows more.
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
    words: tuple[int, ...] = ()
    bands: tuple[int, ...] = ()
    linked: bool = False
    excluded: str = ""
    model: str = ""
    asked_alias: str = ""
    follows: bool = False
    skip: SkipReason | None = None
    detail: str = ""


RawTrace = tuple[dict[int, bytes], bool]
"""The packed rows of a trace by number, and whether it is open: spans are missing that may still arrive."""


class Batch(Struct, frozen=True):
    """What some rows of a source brought, stored in one transaction: entries, dead rows, checkpoints and the cursor.

    A reader may leave the rows of `traces` unparsed; extraction replaces them by entries. Without a cursor, as in a
    re-scan, the stored cursor stays. `rows` is the number of rows read, `more` whether rows follow, `kinds` the spans
    by kind of the traces without an agent.
    """

    cursor: Cursor | None
    entries: tuple[Entry, ...] = ()
    dead: tuple[DeadRow, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    traces: tuple[RawTrace, ...] = ()
    open_traces: int = 0
    warnings: tuple[str, ...] = ()
    rows: int = 0
    more: bool = False
    kinds: dict[str, int] = {}


def joined(batches: Sequence[Batch]) -> Batch:
    """Consecutive batches of one pass as one batch."""
    last = batches[-1]
    if len(batches) == 1:
        return last
    return replace(
        last,
        entries=tuple(entry for batch in batches for entry in batch.entries),
        dead=tuple(row for batch in batches for row in batch.dead),
        checkpoints=tuple(checkpoint for batch in batches for checkpoint in batch.checkpoints),
        warnings=tuple(warning for batch in batches for warning in batch.warnings),
        rows=sum(batch.rows for batch in batches),
    )


_NO_SIGNATURE: Final = PromptSignature()


def entry_of(reply: Reply, source: str, models: TrainedModels = ANY_MODEL) -> Entry:
    """A reply from `source` in the ledger's form; `models` says whose replies are trained on."""
    return entries_of((reply,), source, models)[0]


def entries_of(replies: Sequence[Reply], source: str, models: TrainedModels = ANY_MODEL) -> list[Entry]:
    """`entry_of` each of them; many take less time at once."""
    begin = [reply.turn == 0 and not reply.skip for reply in replies]
    signatures = iter(
        prompt_signatures([reply.query for reply, begins in zip(replies, begin, strict=True) if begins])
    )
    return [
        _entry(reply, source, next(signatures) if begins else _NO_SIGNATURE, models)
        for reply, begins in zip(replies, begin, strict=True)
    ]


def _entry(reply: Reply, source: str, signature: PromptSignature, models: TrainedModels) -> Entry:
    line = Task(task_id(reply.trace_id, reply.span_id), Split.TRAIN, source, reply).line()
    whole = line_bytes(line)
    skip = reply.skip
    reason = line["metadata"]["prompt_reason"]
    # Whatever the request called it, an id of Flywheel's own server tells which version answered.
    model = "" if reply.adapter_source == "id" else storable(reply.model)
    return Entry(
        span_id=reply.span_id,
        trace_id=reply.trace_id,
        conversation_id=storable(reply.conversation_id),
        agent=storable(reply.agent),
        adapter=storable(reply.adapter),
        started_at=line["metadata"]["started_at"],
        key=line["task_id"],
        line=b"" if skip else whole,
        content=xxhash.xxh3_64_intdigest(whole + str(skip).encode()) >> 1,
        beginning=0 if skip else beginning_of(line),
        words=signature.words,
        bands=signature.bands,
        linked=not reply.history and not reply.model,
        excluded="" if skip else exclusion.column(_exclusions(reply, reason, model, models)),
        model=model,
        asked_alias=models.alias if model and model == models.alias and not reply.adapter_source else "",
        follows=not reason and any(message.get("role") == "assistant" for message in reply.history),
        skip=skip,
        detail=storable(reply.skip_detail),
    )


def _exclusions(reply: Reply, prompt_reason: str, model: str, models: TrainedModels) -> set[Exclusion]:
    """Why rounds leave a reply out of training and gate."""
    found = exclusion.of_prompt(prompt_reason)
    if reply.tools or any(step.get("tool_calls") or step.get("role") == "tool" for step in reply.trajectory):
        found.add(Exclusion.TOOLS)
    if not models.trains(model, reply.adapter):
        found.add(Exclusion.MODEL)
    return found


def storable(text: str) -> str:
    """A text as UTF-8 can hold it: lone surrogates, which JSON allows in traces, become `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def line_bytes(line: dict[str, object]) -> bytes:
    """A task line as JSON without its end. Lone surrogates, which traces can hold and UTF-8 cannot, become `?`."""
    try:
        return orjson.dumps(line)
    except orjson.JSONEncodeError:
        return json_line(line)[:-1]
