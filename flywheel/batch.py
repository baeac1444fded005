"""What a source brings in one step: replies as the ledger stores them, and where to go on. Plain data, no I/O."""

from __future__ import annotations

import json

import orjson
import xxhash
from msgspec import Struct

from flywheel.opening import opening_of
from flywheel.states import SkipReason, Split
from flywheel.task import Task, task_id
from flywheel.trace import Cursor, DeadRow, Mark, Reply


class Entry(Struct, frozen=True):
    """A reply as the ledger stores it: what is asked of it often, and its task as one JSON object.

    `line` is the task in UTF-8 without a line end, empty where `skip` says why there is none. Its split is
    provisional: the ledger knows which side the conversation is on. `content` is a 63-bit hash of all that, to notice
    that a reply looks different when it is read again. `words` and `bands` say what the conversation begins like (see
    `opening`), where this is its first turn. A reply is `linked` when its own spans do not show the conversation
    before it: the ledger then finds the earlier turns by conversation id and time.
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
    words: tuple[int, ...] = ()
    bands: tuple[int, ...] = ()
    linked: bool = False
    skip: SkipReason | None = None
    detail: str = ""


class Batch(Struct, frozen=True):
    """One step of reading, to be stored in one transaction: replies, dead rows, what is remembered, the cursor.

    Without a cursor, which a look back at earlier rows has not, the stored one stays.
    """

    cursor: Cursor | None
    entries: tuple[Entry, ...] = ()
    dead: tuple[DeadRow, ...] = ()
    marks: tuple[Mark, ...] = ()
    open_traces: int = 0
    warnings: tuple[str, ...] = ()


def entry_of(reply: Reply, source: str) -> Entry:
    """A reply from `source` in the ledger's form."""
    key = task_id(reply.trace_id, reply.span_id)
    whole = line_bytes(Task(key, Split.TRAIN, source, reply).line())
    words, bands = opening_of(reply.query) if reply.turn == 0 and not reply.skip else ((), ())
    return Entry(
        span_id=reply.span_id,
        trace_id=reply.trace_id,
        conversation_id=reply.conversation_id,
        agent=reply.agent,
        adapter=reply.adapter,
        started_at=reply.started_at.isoformat(),
        key=key,
        line=b"" if reply.skip else whole,
        content=xxhash.xxh3_64_intdigest(whole + str(reply.skip).encode()) >> 1,
        words=words,
        bands=bands,
        linked=not reply.history and not reply.model,
        skip=reply.skip,
        detail=reply.skip_detail,
    )


def line_bytes(line: dict[str, object]) -> bytes:
    """A task line as JSON. Lone surrogates, which traces can hold and UTF-8 cannot, become `?`."""
    try:
        return orjson.dumps(line)
    except orjson.JSONEncodeError:
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
