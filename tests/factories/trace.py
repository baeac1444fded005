"""Replies as a reader extracts them from traces, batches of them, and lines of a file of tasks."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.states import Split
from flywheel.records.task import Batch, entry_of, split_of
from flywheel.records.trace import Cursor, Reply
from flywheel.store import ledger

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def reply(number: int, **values: Any) -> Reply:
    started = START + timedelta(seconds=number)
    defaults: dict[str, Any] = {
        "span_id": f"span{number:012d}",
        "trace_id": f"trace{number:027d}",
        "conversation_id": f"conversation-{number}",
        "agent": "Tutor",
        "query": f"What is {number} plus 1?",
        "answer": f"\\boxed{{{number + 1}}}",
        "started_at": started,
        "ended_at": started + timedelta(seconds=1),
        "history": ({"role": "system", "content": "You do sums."},),
    }
    return Reply(**{**defaults, **values})


def replies_on(split: Split, count: int, **values: Any) -> list[Reply]:
    """Replies whose conversations are all on one side of the default split."""
    chosen: list[Reply] = []
    number = 0
    while len(chosen) < count:
        candidate = reply(number, **values)
        number += 1
        if split_of(candidate.conversation_id, candidate.trace_id, train_ratio=0.7, seed=42) is split:
            chosen.append(candidate)
    return chosen


def on_both_sides(train: int, held_out: int, **values: Any) -> list[Reply]:
    return replies_on(Split.TRAIN, train, **values) + replies_on(Split.HELD_OUT, held_out, **values)


def batch(
    *replies: Reply, rowid: int = 1, source: str = "/a", models: TrainedModels = ANY_MODEL, **values: Any
) -> Batch:
    entries = tuple(entry_of(reply, source, models) for reply in replies)
    return Batch(cursor=Cursor(rowid=rowid, identity="1:2", fingerprint="f"), entries=entries, **values)


def record(
    conn: Connection, source: int, found: Batch, *, train_ratio: float = 0.7, split_seed: int = 42
) -> ledger.Recorded:
    """Store a batch."""
    return ledger.record_batch(conn, source, found, train_ratio=train_ratio, split_seed=split_seed)


def put_replies(
    conn: Connection,
    *replies: Reply,
    source: str = "/a",
    kind: str = "studio",
    train_ratio: float = 0.7,
    split_seed: int = 42,
    **values: Any,
) -> ledger.Recorded:
    """Record a batch of these replies. `values` are those of `batch`."""
    return record(
        conn,
        ledger.source_id(conn, source, kind),
        batch(*replies, source=source, **values),
        train_ratio=train_ratio,
        split_seed=split_seed,
    )


def write_lines(path: Path, *lines: Any) -> Path:
    """A file of JSON lines. A line that is a text is written as it is."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def put_numbered(conn: Connection, first: int, count: int) -> None:
    """Replies of these numbers."""
    put_replies(conn, *(reply(number) for number in range(first, first + count)))
