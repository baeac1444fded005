"""Tasks of the ledger: each is stored with its line, in the split of its conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import Connection, LargeBinary, Text, cast, delete, literal_column, select, type_coerce, update

from flywheel.records import exclusion
from flywheel.records.exclusion import Exclusion
from flywheel.records.selection import TaskClass
from flywheel.records.states import ABSENT, Split, TaskState
from flywheel.records.task import NO_CONVERSATION, Entry, line_bytes
from flywheel.store import deduplication, deployments
from flywheel.store.kernel.bulk import Lookup, first_free, insert_many
from flywheel.store.kernel.schema import labels, tasks, verdicts
from flywheel.store.kernel.transitions import move, record, utcnow
from flywheel.store.splits import Splits

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
    periods: dict[str, list[deployments.AliasVersion]] = {}
    return [_enriched(conn, entry, hiding, periods) if entry.line else entry for entry in entries]


def _enriched(
    conn: Connection,
    entry: Entry,
    hiding: dict[tuple[str, str], str],
    periods: dict[str, list[deployments.AliasVersion]],
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
            tasks.c.state.not_in(ABSENT),
            tasks.c.key != entry.key,
        )
        .order_by(tasks.c.started_at.desc(), tasks.c.id.desc())
        .limit(TURNS)
    ).scalars()
    turns = [_TURN.decode(line) for line in rows]
    return [(turn.main_query, turn.answer) for turn in reversed(turns)]


_KNOWN: Final = Lookup(select(tasks.c.key, tasks.c.id, tasks.c.state), tasks.c.key)
_COLUMNS: Final = (
    "id", "key", "conversation_id", "agent", "adapter", "started_at", "split", "state", "excluded", "model",
    "target", "structure", "beginning", "payload", "created_at",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class TaskRecords:
    """Stores the tasks of one batch; `new` counts those that were not known."""

    _conn: Connection
    _splits: Splits
    new: int = 0

    def store(self, entries: Sequence[Entry]) -> dict[str, int]:
        """The numbers of the entries' tasks by key. Tasks that are not known are stored, withdrawn ones are renewed.

        A task can be known from another source, which is a copy.
        """
        wanted = {entry.key: entry for entry in entries}
        numbers: dict[str, int] = {}
        for row in _KNOWN.rows(self._conn, list(wanted)):
            numbers[row.key] = row.id
            if row.state == TaskState.WITHDRAWN:
                self.renew(wanted[row.key], None)
        unknown = [entry for key, entry in wanted.items() if key not in numbers]
        return numbers | self._add(unknown) if unknown else numbers

    def _add(self, entries: Sequence[Entry]) -> dict[str, int]:
        now = utcnow()
        first = number = first_free(self._conn, tasks.c.id)
        numbers: dict[str, int] = {}
        # A later turn shows the earlier ones, so linked entries are stored one by one, in the order of their start.
        linked = sorted((entry for entry in entries if entry.linked), key=lambda entry: entry.started_at)
        for some in ([entry for entry in entries if not entry.linked], *([entry] for entry in linked)):
            rows: list[tuple[object, ...]] = []
            for entry in some:
                turns = earlier_turns(self._conn, entry) if entry.linked else []
                begun = _begun(entry, turns)
                split = self._splits.of(begun)
                numbers[entry.key] = number
                rows.append(
                    (
                        number,
                        entry.key,
                        entry.conversation_id,
                        entry.agent,
                        entry.adapter,
                        entry.started_at,
                        split.value,
                        TaskState.PENDING.value,
                        entry.excluded,
                        entry.model,
                        entry.target,
                        _structure(entry, turns),
                        _beginning(begun, split),
                        _line(entry, split, turns),
                        now,
                    )
                )
                number += 1
            insert_many(self._conn, tasks, _COLUMNS, rows)
        record(self._conn, tasks.name, map(str, range(first, number)), None, TaskState.PENDING)
        self.new += number - first
        return numbers

    def renew(self, entry: Entry, task: int | None) -> int | None:
        """The number of the entry's task, None if there is none.

        It is written anew if it is the reply's own `task`, or was withdrawn. Its split stays.
        """
        query = select(tasks.c.id, tasks.c.state, tasks.c.split).where(tasks.c.key == entry.key)
        found = self._conn.execute(query).one_or_none()
        if found is None:
            return None
        if found.id == task or found.state == TaskState.WITHDRAWN:
            make_due(self._conn, found.id)
            turns, split = earlier_turns(self._conn, entry) if entry.linked else [], Split(found.split)
            begun = _begun(entry, turns)
            self._splits.of(begun, split)
            self._conn.execute(
                update(tasks)
                .where(tasks.c.id == found.id, tasks.c.state == TaskState.PENDING.value)
                .values(
                    payload=type_coerce(_line(entry, split, turns).decode(), Text),
                    conversation_id=entry.conversation_id,
                    agent=entry.agent,
                    adapter=entry.adapter,
                    started_at=entry.started_at,
                    model=entry.model,
                    target=entry.target,
                    structure=_structure(entry, turns),
                    excluded=entry.excluded,
                    beginning=_beginning(begun, split),
                )
            )
        return int(found.id)


def make_due(conn: Connection, task: int) -> None:
    """Delete what was found out about a task without cost: its reply has changed, and it is pending again."""
    state = TaskState(conn.execute(select(tasks.c.state).where(tasks.c.id == task)).scalar_one())
    if state is not TaskState.PENDING:
        why = "its reply changed, and nothing was paid for it"
        move(conn, task, state, TaskState.PENDING, why, retry_at=None, verdict_id=None)
        # What people said of it stays, without the verdict that they may have seen.
        conn.execute(update(labels).where(labels.c.task_id == task).values(verdict_id=None))
        conn.execute(delete(verdicts).where(verdicts.c.task_id == task))
    deduplication.forget(conn, task)


def _structure(entry: Entry, turns: Sequence[tuple[str, str]]) -> str:
    """The class of an entry's task with these earlier turns before it."""
    return TaskClass.SEVERAL_TURNS.value if turns else entry.structure


def _begun(entry: Entry, turns: Sequence[tuple[str, str]]) -> Entry:
    """The entry without how its conversation begins, if these turns were before it: it does not show that."""
    return replace(entry, beginning=0, words=b"") if turns else entry


def _beginning(begun: Entry, split: Split) -> int | None:
    """The column `beginning`, of held-out tasks alone."""
    return begun.beginning or None if split is Split.HELD_OUT else None


_ENDS: Final = {split: f'"split":"{split.value}"}}}}'.encode() for split in Split}
"""How a line in each split ends."""


def _line(entry: Entry, split: Split, turns: Sequence[tuple[str, str]]) -> bytes:
    """The task line of an entry in a split, with the earlier turns (question, answer) before it."""
    line = entry.line
    if turns:
        # Unlike orjson, it keeps integers beyond 64 bits exact.
        task = msgspec.json.decode(line)
        for query, answer in turns:
            task["init_messages"] += ({"role": "user", "content": query}, {"role": "assistant", "content": answer})
        task["prompt"] = [*task["init_messages"], task["prompt"][-1]]
        task["metadata"]["turn"] = len(turns)
        line = line_bytes(task)
    return line.removesuffix(_ENDS[Split.TRAIN]) + _ENDS[split]
