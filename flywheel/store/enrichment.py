"""Enrichment: what the state knows of a reply and its trace does not show.

That is the version of the alias that answered, whether an earlier turn contained a message that no trace shows, and
the earlier turns of its conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection, LargeBinary, cast, literal_column, select

from flywheel.records import exclusion
from flywheel.records.batch import Entry, line_bytes
from flywheel.records.exclusion import Exclusion
from flywheel.records.states import TaskState
from flywheel.records.task import NO_CONVERSATION
from flywheel.store import deployments
from flywheel.store.kernel.bulk import Lookup
from flywheel.store.kernel.schema import tasks

TURNS: Final = 50
"""Earlier turns that a task shows, at most: the last ones."""
_HIDING: Final = Lookup(
    select(tasks.c.conversation_id, tasks.c.agent, tasks.c.started_at).where(
        tasks.c.excluded.like(literal_column(f"'%{Exclusion.HIDDEN.value}%'"))
    ),
    tasks.c.conversation_id,
)


class _Turn(Struct):
    """What a later turn shows of a stored line. The rest, with its long history, is not decoded."""

    main_query: str
    answer: str


_TURN: Final = msgspec.json.Decoder(_Turn)


def enriched(conn: Connection, entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries of a batch with what the state knows, in their lines and fields. Their content hashes stay.

    Only entries with `asked_alias` or `follows` can change.
    """
    hiding = _first_hiding(conn, entries)
    periods: dict[str, list[deployments.Period]] = {}
    return [_enriched(conn, entry, hiding, periods) if entry.line else entry for entry in entries]


def _enriched(
    conn: Connection,
    entry: Entry,
    hiding: dict[tuple[str, str], str],
    periods: dict[str, list[deployments.Period]],
) -> Entry:
    changes: dict[str, Any] = {}
    line: dict[str, Any] = {}
    if alias := entry.asked_alias:
        if alias not in periods:
            periods[alias] = deployments.periods(conn, alias)
        if periods[alias]:
            line = orjson.loads(entry.line)
            metadata = line["metadata"]
            times = (datetime.fromisoformat(metadata[name]) for name in ("started_at", "ended_at"))
            if (adapter := deployments.answering(periods[alias], *times)) is not None:
                changes["adapter"] = metadata["adapter"] = adapter
                metadata["adapter_source"] = "history"
    first_hidden = hiding.get((entry.conversation_id, entry.agent))
    if entry.follows and first_hidden is not None and first_hidden < entry.started_at:
        line = line or orjson.loads(entry.line)
        line["metadata"] |= {"prompt_exact": False, "prompt_reason": exclusion.HIDDEN_EARLIER}
        changes["excluded"] = exclusion.column({*exclusion.parsed(entry.excluded), Exclusion.HIDDEN})
    return replace(entry, line=line_bytes(line), **changes) if changes else entry


def _first_hiding(conn: Connection, entries: Sequence[Entry]) -> dict[tuple[str, str], str]:
    """The start of the first reply with a hidden message by conversation and agent, if entries may follow it."""
    wanted = {entry.conversation_id for entry in entries if entry.follows} - NO_CONVERSATION
    if not wanted:
        return {}
    found = [(row.conversation_id, row.agent, row.started_at) for row in _HIDING.rows(conn, sorted(wanted))]
    found += [
        (entry.conversation_id, entry.agent, entry.started_at)
        for entry in entries
        if Exclusion.HIDDEN in exclusion.parsed(entry.excluded)
    ]
    return {(conversation, agent): start for conversation, agent, start in sorted(found, reverse=True)}


def earlier_turns(conn: Connection, entry: Entry) -> list[tuple[str, str]]:
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
        .limit(TURNS)
    ).scalars()
    turns = [_TURN.decode(line) for line in rows]
    return [(turn.main_query, turn.answer) for turn in reversed(turns)]
