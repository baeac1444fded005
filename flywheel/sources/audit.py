"""The ledger compared with the current content of the sources.

Read-only on all sides, and beside a running daemon: a source is read first and the ledger afterwards, and differences
are checked a second time before they count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flywheel.config.file import Config
from flywheel.errors import CallLogError, SourceError
from flywheel.records.exclusion import TrainedModels
from flywheel.records.states import ReplyState
from flywheel.records.task import Batch
from flywheel.records.trace import Checkpoint, Cursor, DeadRow
from flywheel.sources.call_puller import CallLogCopy
from flywheel.sources.calls_connector import CallsConnector
from flywheel.sources.ingestion import Ingestion
from flywheel.sources.jsonl_connector import JsonlConnector, RowIds, with_ids
from flywheel.sources.studio.database import shown
from flywheel.sources.studio_connector import StudioConnector
from flywheel.store import ledger, placed_calls
from flywheel.store.checkpoints import reopen, store_checkpoints
from flywheel.store.kernel.database import Store
from flywheel.store.ledger import LedgerSnapshot, StoredReply
from flywheel.store.reply_names import named
from flywheel.store.task_file_audit import TaskFileAudit, compare_task_file, first_names, with_counts
from flywheel.system.terminal import quantity


@dataclass(slots=True)
class SourceAudit:
    """The comparison of one source. `agent_spans` is the sum of `in_ledger`, `missing` and `not_read_yet`.

    `changed` replies are in the ledger and their rows have changed since. Those of `extracted_differently` have
    unchanged rows, but would be extracted differently today, with other settings or by another version. `gone` ones
    are in the ledger and no longer in the source.
    """

    path: Path
    type: str
    condition: str = "ok"
    error: str = ""
    in_ledger: int = 0
    not_read_yet: int = 0
    gone: int = 0
    extracted_differently: int = 0
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def agent_spans(self) -> int:
        return self.in_ledger + len(self.missing) + self.not_read_yet

    @property
    def problems(self) -> list[str]:
        found = [self.error] if self.error else []
        if self.missing:
            spans = quantity(len(self.missing), "agent span")
            found.append(f"{spans} of {self.path} not in the ledger: {first_names(self.missing)}")
        if self.changed:
            replies = quantity(len(self.changed), "reply", "replies")
            found.append(
                f"{replies} of {self.path} with rows that have changed: {first_names(self.changed)}. "
                "`flywheel ingest --sweep` extracts them again."
            )
        return found

    @property
    def line(self) -> str:
        """The result in one line."""
        spans = quantity(self.agent_spans, "agent span")
        return with_counts(
            f"{self.path} ({self.condition}): {spans}, {self.in_ledger:,} in the ledger",
            {
                "missing": len(self.missing),
                "changed": len(self.changed),
                "not read yet": self.not_read_yet,
                "in the ledger and gone from the source": self.gone,
                "that would be extracted differently today": self.extracted_differently,
            },
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "type": self.type,
            "condition": self.condition,
            "agent_spans": self.agent_spans,
            "in_ledger": self.in_ledger,
            **{name: len(getattr(self, name)) for name in ("missing", "changed")},
            **{name: getattr(self, name) for name in ("gone", "not_read_yet", "extracted_differently")},
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class DeepAudit:
    """The comparison of all sources and of the task file with the ledger."""

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
    """Compare all sources and the task file with the ledger."""
    return DeepAudit(await compare_sources(store, config), await compare_task_file(store, config.task_file))


async def compare_sources(store: Store, config: Config) -> list[SourceAudit]:
    """Compare every configured source with the ledger. A source that cannot be read is reported as a problem."""
    audits = []
    ingestion = Ingestion(store, config)
    try:
        for source in ingestion.sources():
            audit = SourceAudit(source.path, source.connector.type)
            number = await store.read(ledger.known_source, str(source.path))
            before = await store.read(ledger.reply_numbers, number) if number is not None else set()
            try:
                if isinstance(source.connector, StudioConnector):
                    selection = source.connector.selection
                    comparison = _DatabaseComparison(store, audit, number, config, selection.models)
                    met = await comparison.run(_call_log_copy(ingestion))
                elif isinstance(source.connector, CallsConnector):
                    met = await _compare_calls(store, source.connector, audit, number)
                else:
                    met = await _compare_file(store, source.connector, audit, number)
                audit.gone = len(before - met)
            except (SourceError, CallLogError) as error:
                audit.condition = error.condition if isinstance(error, SourceError) else "failing"
                audit.error = str(error)
            audits.append(audit)
    finally:
        await ingestion.close()
    return audits


class _DatabaseComparison:
    """The comparison of a span database, trace by trace. `source` is its number in the ledger, if it has one.

    The database is read as for an empty ledger, which remembers checkpoints alone.
    """

    def __init__(
        self, store: Store, audit: SourceAudit, source: int | None, config: Config, models: TrainedModels
    ) -> None:
        self._store = store
        self._audit = audit
        self._source = source
        self._config = config
        self._models = models
        self._met: set[int] = set()
        self._unread: set[str] = set()
        self._doubtful: set[str] = set()
        """Traces with differences, which may have grown, or which a running daemon may have read meanwhile."""

    async def run(self, call_log: CallLogCopy | None) -> set[int]:
        """Compare all traces; returns the numbers of the replies in the ledger that were found in the source. Raises
        SourceError and CallLogError."""
        empty = await Store.empty()
        connector = StudioConnector(
            self._audit.path, self._config, empty, kind=self._audit.type, models=self._models, call_log=call_log
        )
        try:
            number = await empty.write(ledger.source_id, str(self._audit.path), self._audit.type)
            cursor = Cursor()
            for is_last in (False, True):
                async for batch in connector.read(number, cursor, final=True):
                    await empty.write(store_checkpoints, number, batch.checkpoints)
                    cursor = batch.cursor or cursor
                    await self._compare(connector, batch, is_last=is_last)
                if not self._doubtful:
                    break
                await empty.write(reopen, number, sorted(self._doubtful))
                connector.forget()
        finally:
            await connector.close()
            await empty.close()
            self._audit.in_ledger = len(self._met)
            self._audit.not_read_yet = len(self._unread)
        return self._met

    async def _compare(self, connector: StudioConnector, batch: Batch, *, is_last: bool) -> None:
        """Compare the traces of a batch. Differences are counted if this `is_last`, when others than the doubtful
        traces are passed over; else their traces are doubtful."""
        if self._source is None:
            self._unread.update(_names_in(batch))
            return
        batch = await self._store.read(named, self._source, batch)
        now = {checkpoint.trace_id: checkpoint for checkpoint in batch.checkpoints}
        # A dead row names its trace in printable form.
        printable = {shown(trace.encode()): trace for trace in now}
        found: defaultdict[str, dict[str, int | None]] = defaultdict(dict)
        unnamed: list[DeadRow] = []
        for row in batch.dead:
            if (trace_id := printable.get(row.trace_id)) is not None:
                found[trace_id][row.span_id] = None
            else:
                unnamed.append(row)
        for entry in batch.entries:
            found[entry.trace_id][entry.span_id] = entry.content
        held = await self._store.read(ledger.snapshot, self._source, list(found), _names_in(batch))
        await self._restore_pruned(batch, found, held)
        is_current = await connector.in_thread(partial(connector.reader.belongs, held.cursor))
        read_to = held.cursor.rowid if is_current else -1
        for row in unnamed:
            self._agrees(Checkpoint("", (row.rowid,)), {row.span_id: None}, held, read_to, is_last=True)
        for trace_id, extracted in found.items():
            if is_last and trace_id not in self._doubtful:
                continue
            if not self._agrees(now[trace_id], extracted, held, read_to, is_last=is_last):
                self._doubtful.add(trace_id)

    async def _restore_pruned(
        self, batch: Batch, found: Mapping[str, dict[str, int | None]], held: LedgerSnapshot
    ) -> None:
        """Give replies whose calls have been pruned since the content that they had with them."""
        missing = {entry.span_id: entry for entry in batch.entries if entry.missing}
        numbers = {span: held.replies[span].number for span in missing if span in held.replies}
        if not numbers:
            return
        stored_calls = await self._store.read(ledger.found_calls, list(numbers.values()))
        for span, number in numbers.items():
            if stored_calls.get(number, set()).intersection(missing[span].missing):
                found[missing[span].trace_id][span] = held.replies[span].content

    def _agrees(
        self,
        now: Checkpoint,
        extracted: Mapping[str, int | None],
        held: LedgerSnapshot,
        read_to: int,
        *,
        is_last: bool,
    ) -> bool:
        """Count the replies of a trace; false, without counting, if there are differences to compare once more."""
        then = held.checkpoints.get(now.trace_id)
        is_read = bool(now.rowids) and now.rowids[-1] <= read_to and not (then is not None and then.is_open)
        absent = [span for span in extracted if span not in held.replies]
        differing = [
            span
            for span, content in extracted.items()
            if span in held.replies and _differs(held.replies[span], content)
        ]
        if is_read and (absent or differing) and not is_last:
            return False
        self._met.update(held.replies[span].number for span in extracted if span in held.replies)
        if not is_read:
            self._unread.update(absent)
            return True
        self._audit.missing += absent
        if then is not None and now.digest == then.digest:
            self._audit.extracted_differently += len(differing)
        elif then is None or len(now.rowids) >= len(then.rowids):
            # A reply whose rows were deleted stays as it is.
            self._audit.changed += differing
        return True


def _names_in(batch: Batch) -> dict[str, tuple[str, str]]:
    """The names of replies and dead rows, each with its trace and its start, as `ledger.snapshot` has them."""
    dead = {row.span_id: (row.trace_id, "") for row in batch.dead}
    return dead | {entry.span_id: (entry.trace_id, entry.started_at) for entry in batch.entries}


def _call_log_copy(ingestion: Ingestion) -> CallLogCopy | None:
    """The calls that were pulled, if there are any."""
    calls = ingestion.calls
    return calls.call_log_copy if calls is not None and calls.call_log_copy.path.exists() else None


def _differs(reply: StoredReply, content: int | None) -> bool:
    if content is None:
        return reply.state not in (ReplyState.DEAD, ReplyState.ERASED)
    return reply.content is not None and reply.content != content


async def _compare_calls(store: Store, connector: CallsConnector, audit: SourceAudit, source: int | None) -> set[int]:
    """Compare the replies that were found in recorded calls, as far as their calls are still there; returns the
    numbers of those in the ledger."""
    audit.not_read_yet = await store.read(placed_calls.count_waiting)
    met: set[int] = set()
    if source is None:
        return met
    async with aclosing(connector.rescan(source, whole=True)) as batches:
        async for extracted in batches:
            batch = await store.read(named, source, extracted)
            contents: dict[str, int | None] = {row.span_id: None for row in batch.dead}
            contents |= {entry.span_id: entry.content for entry in batch.entries}
            held = (await store.read(ledger.snapshot, source, [], _names_in(batch))).replies
            audit.missing += [span for span in contents if span not in held]
            audit.extracted_differently += sum(
                _differs(held[span], contents[span]) for span in contents.keys() & held.keys()
            )
            met |= {held[span].number for span in contents.keys() & held.keys()}
    audit.in_ledger = len(met)
    return met


async def _compare_file(store: Store, connector: JsonlConnector, audit: SourceAudit, source: int | None) -> set[int]:
    """Compare a JSONL file; returns the numbers of the replies in the ledger that were found in the file."""
    if connector.is_copy and not audit.path.exists():
        # The connector would write it.
        attempted, hint = f"read {audit.path}", "`flywheel ingest` writes it."
        raise SourceError(attempted, "there is no copy of the data set yet", hint)
    rows = await _read_file(store, connector, source, Cursor())
    if source is None:
        audit.not_read_yet = len(rows.contents.keys() - rows.completed.keys())
        return set()
    named = [*rows.contents, *(before for before, _ in rows.edited)]
    held = await store.read(ledger.snapshot, source, [], dict.fromkeys(named, ("", "")))
    for before, row in rows.completed.items():
        rows.contents.pop(row if before in held.replies else before, None)
    for before, row in rows.edited:
        is_gone = before in held.replies and before not in rows.contents
        if is_gone and row in rows.contents and row not in held.replies:
            rows.contents[before], rows.names[before] = rows.contents.pop(row), rows.names[row]
    found = {row: reply for row, reply in held.replies.items() if row in rows.contents}
    unread = (await _read_file(store, connector, source, held.cursor)).contents
    audit.missing = [rows.names[row] for row in rows.contents if row not in found and row not in unread]
    audit.in_ledger = len(found)
    audit.not_read_yet = len(rows.contents) - audit.in_ledger - len(audit.missing)
    audit.changed = [
        rows.names[row] for row, reply in found.items() if row not in unread and _differs(reply, rows.contents[row])
    ]
    return {reply.number for reply in found.values()}


@dataclass(slots=True)
class _Rows:
    """What a pass over a file would store, by row: content hashes (None for a dead line), and the ids for people.
    Rows may have been `edited`: what the ledger has under the same id is not in the file, and comes first. Those that
    are `completed` by a later row are one reply with it."""

    contents: dict[str, int | None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    edited: list[tuple[str, str]] = field(default_factory=list)
    completed: dict[str, str] = field(default_factory=dict)


async def _read_file(store: Store, connector: JsonlConnector, source: int | None, cursor: Cursor) -> _Rows:
    """The rows from the cursor on."""
    read, ids = _Rows(), RowIds()
    connector.forget()
    async with aclosing(connector.read(source or 0, cursor, final=True)) as batches:
        async for batch in batches:
            for dead in batch.dead:
                read.contents[dead.span_id], read.names[dead.span_id] = None, dead.span_id
            for entry in await store.read(with_ids, source or 0, ids, batch.entries):
                if entry:
                    read.contents[entry.span_id] = entry.content
                    read.names[entry.span_id] = entry.own_id or entry.span_id
    read.completed = ids.completed
    for row in read.contents:
        gone = ids.rows.get(read.names[row], set()) - read.contents.keys()
        read.edited += ((before, row) for before in sorted(gone))
    return read
