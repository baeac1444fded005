"""Earlier turns of a conversation for replies whose own spans do not show them, found by conversation id and time."""

from __future__ import annotations

from typing import Final

import msgspec
import orjson
from msgspec import Struct
from sqlalchemy import Connection, LargeBinary, cast, select

from flywheel.batch import Entry, line_bytes
from flywheel.states import Split, TaskState
from flywheel.store.schema import tasks
from flywheel.task import NO_CONVERSATION
from flywheel.trace import ChatMessage

MOST: Final = 50
"""Earlier turns that are shown, at most: the last ones."""
_TRAIN: Final = b'"split":"train"}}'
_HELD_OUT: Final = b'"split":"held-out"}}'
"""How lines end, since a task's split is the last of its metadata and they are the last of the task."""


class _Turn(Struct):
    """What a later turn is shown of a line; the rest, its own history above all, is passed over."""

    main_query: str
    answer: str


_TURN: Final = msgspec.json.Decoder(_Turn)


def before(conn: Connection, entry: Entry) -> list[tuple[str, str]]:
    """Question and answer of the same agent's earlier turns in the conversation, oldest first."""
    if entry.conversation_id in NO_CONVERSATION:
        return []
    rows = conn.execute(
        select(cast(tasks.c.payload, LargeBinary))
        .where(
            tasks.c.conversation_id == entry.conversation_id,
            tasks.c.agent == entry.agent,
            tasks.c.started_at < entry.started_at,
            tasks.c.state != TaskState.WITHDRAWN.value,
            tasks.c.key != entry.key,
        )
        .order_by(tasks.c.started_at.desc(), tasks.c.id.desc())
        .limit(MOST)
    ).scalars()
    turns = [_TURN.decode(line) for line in rows]
    return [(turn.main_query, turn.answer) for turn in reversed(turns)]


def line(entry: Entry, side: Split, earlier: list[tuple[str, str]]) -> bytes:
    """The entry's task line on its side, with the earlier turns before it."""
    if not earlier and (side is Split.TRAIN or entry.line.endswith(_TRAIN)):
        return entry.line if side is Split.TRAIN else entry.line.removesuffix(_TRAIN) + _HELD_OUT
    task = orjson.loads(entry.line)
    task["metadata"]["split"] = side.value
    if earlier:
        messages: list[ChatMessage] = [
            message
            for query, answer in earlier
            for message in ({"role": "user", "content": query}, {"role": "assistant", "content": answer})
        ]
        task["init_messages"] = [*task["init_messages"], *messages]
        task["prompt"] = [*task["init_messages"], task["prompt"][-1]]
        task["metadata"]["turn"] = len(earlier)
    return line_bytes(task)
