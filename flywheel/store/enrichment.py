"""What the state knows of a reply and its trace does not tell: which version of the alias answered, and whether an
earlier turn of its conversation was sent a message that no trace shows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection, LargeBinary, cast, literal_column, select

from flywheel import exclusion
from flywheel.batch import Entry, line_bytes
from flywheel.exclusion import Exclusion
from flywheel.states import Split, TaskState
from flywheel.store import deployments
from flywheel.store.bulk import Lookup
from flywheel.store.schema import tasks
from flywheel.task import NO_CONVERSATION
from flywheel.trace import ChatMessage

_HIDING: Final = Lookup(
    select(tasks.c.conversation_id, tasks.c.agent, tasks.c.started_at).where(
        tasks.c.excluded.like(literal_column(f"'%{Exclusion.HIDDEN.value}%'"))
    ),
    tasks.c.conversation_id,
)


def completed(conn: Connection, entries: Sequence[Entry]) -> list[Entry]:
    """The entries of a batch, with that in their lines and beside them. Their `content` stays: it is of the trace."""
    hiding = _first_hiding(conn, entries)
    periods: dict[str, list[deployments.Period]] = {}
    done = []
    for entry in entries:
        changes: dict[str, Any] = {}
        line: dict[str, Any] | None = None
        if entry.line and entry.asked_alias:
            if entry.asked_alias not in periods:
                periods[entry.asked_alias] = deployments.periods(conn, entry.asked_alias)
            if of_alias := periods[entry.asked_alias]:
                line = orjson.loads(entry.line)
                about = line["metadata"]
                times = (datetime.fromisoformat(about[name]) for name in ("started_at", "ended_at"))
                if (adapter := deployments.answering(of_alias, *times)) is not None:
                    changes["adapter"] = about["adapter"] = adapter
                    about["adapter_source"] = "history"
        if entry.line and entry.follows and _follows_one(entry, hiding):
            line = line or orjson.loads(entry.line)
            line["metadata"] |= {"prompt_exact": False, "prompt_reason": exclusion.HIDDEN_EARLIER}
            changes["excluded"] = exclusion.column({*exclusion.parsed(entry.excluded), Exclusion.HIDDEN})
        done.append(replace(entry, line=line_bytes(line), **changes) if changes and line else entry)
    return done


def _first_hiding(conn: Connection, entries: Sequence[Entry]) -> dict[tuple[str, str], str]:
    """When the first reply began that was sent a hidden message, by conversation and agent of those that follow."""
    wanted = {entry.conversation_id for entry in entries if entry.follows} - NO_CONVERSATION
    if not wanted:
        return {}
    found = [(row.conversation_id, row.agent, row.started_at) for row in _HIDING.rows(conn, sorted(wanted))]
    found += [
        (entry.conversation_id, entry.agent, entry.started_at)
        for entry in entries
        if Exclusion.HIDDEN in exclusion.parsed(entry.excluded)
    ]
    return {(conversation, agent): began for conversation, agent, began in sorted(found, reverse=True)}


def _follows_one(entry: Entry, hiding: dict[tuple[str, str], str]) -> bool:
    began = hiding.get((entry.conversation_id, entry.agent))
    return began is not None and began < entry.started_at


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
