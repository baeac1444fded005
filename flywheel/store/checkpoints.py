"""Checkpoints of traces: which rows of a source were extracted, and a digest by which changes are found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, select, update

from flywheel.records.trace import Checkpoint
from flywheel.store import placed_calls
from flywheel.store.kernel.bulk import Lookup, chunks, insert_many
from flywheel.store.kernel.schema import traces

_OF_TRACES: Final = Lookup(select(traces).where(traces.c.source_id == bindparam("source")), traces.c.trace_id)
_COLUMNS: Final = ("source_id", "trace_id", "rowids", "digest", "generation", "is_open")


def checkpoints_of(conn: Connection, source: int, trace_ids: Sequence[str] | None) -> dict[str, Checkpoint]:
    """The checkpoints of these traces, as far as there are any, or (None) of all open ones."""
    rows: Iterable[Row[Any]]
    if trace_ids is None:
        rows = conn.execute(select(traces).where(traces.c.source_id == source, traces.c.is_open))
    else:
        rows = _OF_TRACES.rows(conn, trace_ids, source)
    return {
        row.trace_id: Checkpoint(
            row.trace_id, parse_ranges(row.rowids), row.digest, row.generation, bool(row.is_open)
        )
        for row in rows
    }


def store_checkpoints(conn: Connection, source: int, checkpoints: Iterable[Checkpoint]) -> None:
    """Store checkpoints in place of the stored ones; of several of one trace, the last."""
    latest = {each.trace_id: each for each in checkpoints}
    rows = [
        (source, each.trace_id, format_ranges(each.rowids), each.digest, each.generation, each.is_open)
        for each in latest.values()
    ]
    insert_many(conn, traces, _COLUMNS, rows, replace=True)


def reopen(conn: Connection, source: int, trace_ids: Sequence[str]) -> int:
    """Have traces read again in the next pass; 0 if none of them is known."""
    found = placed_calls.hand_on(conn, trace_ids, due_ns=0)
    for some in chunks(trace_ids):
        wanted = update(traces).where(traces.c.source_id == source, traces.c.trace_id.in_(some))
        found += conn.execute(wanted.values(is_open=True, digest=0)).rowcount
    return found


def format_ranges(rowids: Sequence[int]) -> str:
    """Ascending numbers as ranges: `7-9,12`."""
    if not rowids:
        return ""
    if rowids[-1] - rowids[0] == len(rowids) - 1:
        # True of nearly all traces: their rows are written one after the other.
        return f"{rowids[0]}-{rowids[-1]}" if len(rowids) > 1 else str(rowids[0])
    gaps = [(before, after) for before, after in pairwise(rowids) if after != before + 1]
    starts = [rowids[0], *(after for _, after in gaps)]
    ends = [*(before for before, _ in gaps), rowids[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def parse_ranges(text: str) -> tuple[int, ...]:
    """The numbers that `format_ranges` wrote."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
