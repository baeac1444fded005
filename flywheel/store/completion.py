"""What the state knows of a reply and its trace does not tell: which version of the alias answered, and whether an
earlier turn of its conversation was sent a message that no trace shows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import orjson
from msgspec.structs import replace
from sqlalchemy import Connection, literal_column, select

from flywheel import exclusion
from flywheel.batch import Entry, line_bytes
from flywheel.exclusion import Exclusion
from flywheel.store import deployments
from flywheel.store.bulk import Lookup
from flywheel.store.schema import tasks
from flywheel.task import NO_CONVERSATION

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
