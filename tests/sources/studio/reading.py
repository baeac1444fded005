"""What the tests do with a reader: whole passes, and a ledger that stores as the real one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flywheel.config.ingest import IngestSettings
from flywheel.records.exclusion import TrainedModels
from flywheel.records.states import SkipReason
from flywheel.records.task import Batch, RawTrace, task_line
from flywheel.records.trace import Checkpoint, Cursor, DeadRow, Reply, ReplySelection
from flywheel.sources.spans.replies import replies_of
from flywheel.sources.studio import extraction
from flywheel.sources.studio.extraction import TraceExtractor
from flywheel.sources.studio.reader import Step, StudioReader
from flywheel.sources.studio.schema import Schema
from tests.sources.studio.writer import DATA, NAMES, Studio

QUICK = IngestSettings(settle_seconds=0)
NOW = datetime(2026, 11, 21, 6, 0, tzinfo=UTC)
"""Later than every span of the fixtures by less than the patience with unfinished traces."""
MUCH_LATER = NOW + timedelta(days=1)


def read_all(
    path: Path,
    *,
    now: datetime = NOW,
    final: bool = True,
    settings: IngestSettings | None = None,
    selection: ReplySelection | None = None,
) -> tuple[list[Reply], list[DeadRow], list[Step]]:
    """One pass of a fresh reader from the beginning."""
    reader = StudioReader(path, settings or IngestSettings())
    ledger = Ledger(selection or ReplySelection())
    steps: list[Step] = []
    replies: list[Reply] = []
    try:
        for step in reader.read(Cursor(), ledger, now=now, final=final):
            steps.append(step)
            replies += ledger.store(step, reader)
    finally:
        reader.close()
    return replies, list(ledger.dead.values()), steps


def raw_traces(path: Path) -> tuple[Schema, list[RawTrace]]:
    """The schema of a database, and the rows of its traces as they are extracted."""
    reader, ledger = StudioReader(path, IngestSettings()), Ledger()
    ledger.pass_(reader, final=True)
    assert reader.schema is not None
    reader.close()
    return reader.schema, ledger.raw


def extracted(folder: Path, *spans: dict[str, Any], selection: ReplySelection | None = None) -> dict[str, Reply]:
    """The replies by id in a new database with these spans, all of which can be read."""
    studio = Studio(folder / "studio.sqlite")
    studio.write(*spans)
    replies, dead, _ = read_all(studio.path, selection=selection)
    assert dead == []
    return by_id(replies)


def by_id(replies: list[Reply]) -> dict[str, Reply]:
    found = {reply.span_id: reply for reply in replies}
    assert len(found) == len(replies), "a reply was extracted twice"
    return found


@dataclass
class Ledger:
    """Stores what steps bring like the real one. `changes` has what looked different when it was told again, `raw`
    all rows that were extracted, and `counts` how many traces at once. `calls` stands for a call log."""

    selection: ReplySelection = field(default_factory=ReplySelection)
    cursor: Cursor = field(default_factory=Cursor)
    stored: dict[str, Checkpoint] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)
    dead: dict[str, DeadRow] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    extractions: int = 0
    raw: list[RawTrace] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    calls: Any = None

    def open_checkpoints(self) -> Sequence[Checkpoint]:
        return [checkpoint for checkpoint in self.stored.values() if checkpoint.is_open]

    def __call__(self, trace_ids: Sequence[str] | None) -> Mapping[str, Checkpoint]:
        if trace_ids is None:
            return {checkpoint.trace_id: checkpoint for checkpoint in self.open_checkpoints()}
        return {trace: self.stored[trace] for trace in trace_ids if trace in self.stored}

    def store(self, step: Step, reader: StudioReader) -> list[Reply]:
        assert reader.schema is not None
        extractor = TraceExtractor(reader.database, reader.schema, self.selection, "/a", self.calls)
        found: list[Reply] = []
        dead = list(step.dead)
        self.stored |= {checkpoint.trace_id: checkpoint for checkpoint in step.checkpoints}

        def extract(traces: list[RawTrace], schema: Schema, selection: ReplySelection, *_: Any) -> Batch:
            self.raw += traces
            for rows, is_open in traces:
                replies, bad = replies_of(schema, rows, selection, is_open=is_open, kinds=Counter())
                found.extend(replies)
                dead.extend(bad)
            return Batch(None)

        left = step.traces
        while left:
            with patch.object(extraction, "extract", extract):
                done = extractor.extract(left)
            assert done.count
            left = left[done.count :]
            self.counts.append(done.count)
            reader.note(done.batch.checkpoints, done.missing)
            self.stored |= {checkpoint.trace_id: checkpoint for checkpoint in done.batch.checkpoints}
        for reply in found:
            self.extractions += 1
            known = self.replies.get(reply.span_id)
            if known is not None and known.skip is not SkipReason.UNFINISHED and known != reply:
                self.changes.append(reply.span_id)
            self.replies[reply.span_id] = reply
        self.dead |= {row.span_id: row for row in dead}
        if step.cursor is not None:
            assert (step.cursor.generation, step.cursor.rowid) >= (self.cursor.generation, self.cursor.rowid)
            self.cursor = step.cursor
        return found

    def keep(self, steps: Iterator[Step], reader: StudioReader) -> list[Step]:
        done = []
        for step in steps:
            self.store(step, reader)
            done.append(step)
        return done

    def pass_(self, reader: StudioReader, *, now: datetime = NOW, final: bool = False) -> list[Step]:
        return self.keep(reader.read(self.cursor, self, now=now, final=final), reader)

    def rescan(self, reader: StudioReader, *, now: datetime = NOW, last: int | None = None) -> list[Step]:
        return self.keep(reader.rescan(self, now=now, last=last), reader)


OURS = TrainedModels("my-agent", "/models/base")
FIXTURE = "agentscope_2_0_10"


@cache
def replies(name: str) -> dict[str, Reply]:
    folder = DATA if name in NAMES else DATA / "dialogues"
    told, dead, _ = read_all(folder / f"{name}.sqlite", now=MUCH_LATER, selection=ReplySelection(models=OURS))
    assert dead == []
    return by_id(told)


def line_of(reply: Reply) -> dict[str, Any]:
    return task_line(reply, "/a")
