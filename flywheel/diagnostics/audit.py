"""The ledger compared with the sources themselves: what is in them now, and whether it was told as it is.

Read-only on both sides, and beside a running daemon: what a source holds is read first and the ledger asked
afterwards, and what does not agree is looked at a second time before it counts. The task file has its own check
(`task_file_audit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flywheel.batch import Batch
from flywheel.config import Config
from flywheel.diagnostics.audit_findings import SourceAudit, TaskFileAudit
from flywheel.diagnostics.task_file_audit import compare_task_file
from flywheel.errors import SourceError
from flywheel.filtering.chain import redactor_of
from flywheel.filtering.pii import Redactor
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.jsonl.file import is_listed
from flywheel.sources.jsonl.reader import JsonlReader
from flywheel.sources.jsonl.task_ids import TaskIds
from flywheel.sources.jsonl_connector import with_ids
from flywheel.sources.studio.database import shown
from flywheel.sources.studio.full_scan import FullScan, Group
from flywheel.sources.studio.open_traces import digest_of
from flywheel.sources.studio.replies import extract
from flywheel.sources.studio_connector import StudioConnector
from flywheel.states import ReplyState
from flywheel.store import ledger, ledger_snapshot
from flywheel.store.database import Store
from flywheel.store.ledger_snapshot import LedgerSnapshot
from flywheel.trace import Checkpoint, Cursor, Selection


@dataclass(frozen=True, slots=True)
class DeepAudit:
    """What was found in the sources and in the task file."""

    sources: list[SourceAudit]
    task_file: TaskFileAudit

    @property
    def problems(self) -> list[str]:
        return [*(problem for source in self.sources for problem in source.problems), *self.task_file.problems]

    @property
    def lines(self) -> list[str]:
        return [*(source.line for source in self.sources), self.task_file.line]

    def as_json(self) -> dict[str, Any]:
        return {"sources": [source.as_json() for source in self.sources], "task_file": self.task_file.as_json()}


async def deep_audit(store: Store, config: Config) -> DeepAudit:
    """Compare everything with the ledger."""
    return DeepAudit(await compare_sources(store, config), await compare_task_file(store, config.task_file))


async def compare_sources(store: Store, config: Config) -> list[SourceAudit]:
    """Every source of the configuration with the ledger. What cannot be read is a problem of its own."""
    found = []
    ingestion = Ingestion(store, config)
    redact = redactor_of(config.filter.chain)
    try:
        for source in ingestion.sources():
            compared = SourceAudit(source.path, source.connector.type)
            try:
                if compared.type == "jsonl":
                    await _Lines(store, compared, redact).compare()
                elif isinstance(source.connector, StudioConnector):
                    await _Spans(store, source.connector.selection, compared).compare()
            except SourceError as error:
                compared.condition, compared.error = error.condition, str(error)
            found.append(compared)
    finally:
        await ingestion.close()
    return found


class _Spans:
    """A comparison with a database of spans."""

    def __init__(self, store: Store, selection: Selection, found: SourceAudit) -> None:
        self._store = store
        self._found = found
        self._selection = selection
        self._met: set[int] = set()

    async def compare(self) -> None:
        source = await self._store.read(ledger.known_source, str(self._found.path))
        before = await self._store.read(ledger_snapshot.numbers_of, source) if source is not None else set()
        with await asyncio.to_thread(FullScan, self._found.path) as scan:
            await asyncio.to_thread(scan.list_rows)
            groups = scan.groups()
            doubtful: set[str] = set()
            while (group := await asyncio.to_thread(next, groups, None)) is not None:
                doubtful |= await self._compare(scan, source, group, is_last_look=False)
            if doubtful:
                # They may have grown, or been read by a running daemon, in the meantime.
                await asyncio.to_thread(scan.list_rows)
                again = await asyncio.to_thread(scan.again, sorted(doubtful))
                await self._compare(scan, source, again, is_last_look=True)
        self._found.gone = len(before - self._met)

    async def _compare(self, scan: FullScan, source: int | None, group: Group, *, is_last_look: bool) -> set[str]:
        """Count what agrees; the traces with anything that does not, which count in the last look only."""
        doubtful: set[str] = set()
        told = await asyncio.to_thread(self._told, scan, group)
        spans = [span for replies in told.values() for span in replies] + [row.span_id for row in group.unnamed]
        if source is None:
            self._found.not_read_yet += len(spans)
            return doubtful
        held = await self._store.read(ledger_snapshot.snapshot, source, list(told), spans)
        is_followed = await asyncio.to_thread(_is_followed, scan, held.cursor)
        for trace_id, rows in group.traces.items():
            if not self._agrees(
                rows,
                told[trace_id],
                held,
                held.checkpoints.get(trace_id),
                is_followed=is_followed,
                is_last_look=is_last_look,
            ):
                doubtful.add(trace_id)
        for row in group.unnamed:
            reply = held.replies.get(row.span_id)
            if reply is not None:
                self._found.in_ledger += 1
                self._met.add(reply.number)
            elif not is_followed or row.rowid > held.cursor.rowid:
                self._found.not_read_yet += 1
            else:
                self._found.missing.append(row.span_id)
        return doubtful

    def _told(self, scan: FullScan, group: Group) -> dict[str, dict[str, int | None]]:
        """How each reply of each trace with rows reads now; None for a row that cannot be understood."""
        found: dict[str, dict[str, int | None]] = {trace_id: {} for trace_id in group.traces}
        raw = Batch(None, traces=tuple((rows, False) for rows in group.traces.values()))
        told = extract(raw, scan.schema.name, self._selection, str(self._found.path))
        # A row that could not be read names its trace as far as that can be shown.
        shown_as = {shown(trace.encode()): trace for trace in found}
        for row in told.dead:
            found[shown_as.get(row.trace_id, row.trace_id)][row.span_id] = None
        for entry in told.entries:
            found[entry.trace_id][entry.span_id] = entry.content
        return found

    def _agrees(
        self,
        rows: dict[int, bytes],
        told: dict[str, int | None],
        held: LedgerSnapshot,
        checkpoint: Checkpoint | None,
        *,
        is_followed: bool,
        is_last_look: bool,
    ) -> bool:
        is_open = checkpoint is not None and checkpoint.is_open
        is_settled = is_followed and max(rows) <= held.cursor.rowid and not is_open
        absent = [span for span in told if span not in held.replies]
        other = [
            span
            for span, content in told.items()
            if (reply := held.replies.get(span)) is not None and _differs(reply, content)
        ]
        if is_settled and (absent or other) and not is_last_look:
            return False
        self._found.in_ledger += len(told) - len(absent)
        self._met.update(held.replies[span].number for span in told if span in held.replies)
        if not is_settled:
            self._found.not_read_yet += len(absent)
            return True
        self._found.missing += absent
        if checkpoint is not None and digest_of(rows.values()) == checkpoint.digest:
            self._found.told_otherwise += len(other)
        elif checkpoint is None or len(rows) >= len(checkpoint.rowids):
            # With rows gone, what was told stays.
            self._found.changed += other
        return True


def _differs(reply: ledger_snapshot.StoredReply, content: int | None) -> bool:
    if content is None:
        return reply.state is not ReplyState.DEAD
    return reply.content is not None and reply.content != content


def _is_followed(scan: FullScan, cursor: Cursor) -> bool:
    """Whether the ledger's cursor is about this file as it is, or everything in it is still to be read again."""
    if (cursor.identity, cursor.fingerprint) != (scan.identity, scan.fingerprint):
        return False
    return not cursor.rowid or scan.id_at(cursor.rowid) == cursor.anchor


class _Lines:
    """A comparison with a file of lines."""

    def __init__(self, store: Store, found: SourceAudit, redact: Redactor | None) -> None:
        self._store = store
        self._found = found
        self._redact = redact

    async def compare(self) -> None:
        found = self._found
        if await asyncio.to_thread(is_listed, found.path):
            return
        source = await self._store.read(ledger.known_source, str(found.path))
        before = await self._store.read(ledger_snapshot.numbers_of, source) if source is not None else set()
        lines, renamed = await self._lines(source, Cursor())
        if source is None:
            found.not_read_yet = len(lines)
            return
        held = await self._store.read(ledger_snapshot.snapshot, source, [], [*lines, *renamed.values()])
        for name, own in renamed.items():
            if name not in held.replies and own not in lines:
                # Nobody else has its id now: it is the line that was told by it, and says something else.
                lines[own] = lines.pop(name)
        held = replace(held, replies={name: reply for name, reply in held.replies.items() if name in lines})
        unread, _ = await self._lines(source, held.cursor)
        absent = [name for name in lines if name not in held.replies and name not in unread]
        found.in_ledger = sum(name in held.replies for name in lines)
        found.not_read_yet = len(lines) - found.in_ledger - len(absent)
        found.missing = absent
        found.changed = [
            name for name, reply in held.replies.items() if name not in unread and _differs(reply, lines[name])
        ]
        found.gone = len(before - {reply.number for reply in held.replies.values()})

    async def _lines(self, source: int | None, cursor: Cursor) -> tuple[dict[str, int | None], dict[str, str]]:
        """What a pass from the cursor on would bring: how each task reads, None for a line that is none.

        And the own ids of those that go by another name.
        """
        found: dict[str, int | None] = {}
        renamed: dict[str, str] = {}
        names = TaskIds(self._redact)
        reader = JsonlReader(self._found.path)
        try:
            batches: Iterator[Batch] = reader.read(cursor, final=True)
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                found |= {row.span_id: None for row in batch.dead}
                entries = await self._store.read(with_ids, source or 0, names, batch.entries)
                found |= {entry.span_id: entry.content for entry in entries if entry}
                renamed |= {
                    entry.key: own.key
                    for entry, own in zip(entries, batch.entries, strict=True)
                    if entry and entry.key != own.key
                }
        finally:
            reader.close()
        return found, renamed
