"""What is remembered of the traces of each source, so that rows are told once and changes are noticed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, select, update

from flywheel.store.bulk import Lookup, chunks, insert_many
from flywheel.store.schema import traces
from flywheel.trace import Checkpoint

_OF_TRACES: Final = Lookup(select(traces).where(traces.c.source_id == bindparam("source")), traces.c.trace_id)


def checkpoints_of(conn: Connection, source: int, trace_ids: Sequence[str]) -> dict[str, Checkpoint]:
    """The marks of these traces, as far as there are any."""
    return {row.trace_id: _mark(row) for row in _OF_TRACES.rows(conn, trace_ids, source)}


def has_checkpoints(conn: Connection, source: int) -> bool:
    """Whether anything is remembered of this source."""
    return conn.execute(select(traces.c.trace_id).where(traces.c.source_id == source).limit(1)).first() is not None


def open_checkpoints(conn: Connection, source: int) -> list[Checkpoint]:
    """The marks of the traces that are waited for."""
    rows = conn.execute(select(traces).where(traces.c.source_id == source, traces.c.is_open))
    return [_mark(row) for row in rows]


def remember(conn: Connection, source: int, marks: Iterable[Checkpoint]) -> None:
    """Store marks in place of those there were; of several of one trace, the last."""
    latest = {mark.trace_id: mark for mark in marks}
    insert_many(
        conn,
        traces,
        ("source_id", "trace_id", "rowids", "digest", "generation", "is_open"),
        [
            (source, mark.trace_id, spelled(mark.rowids), mark.digest, mark.generation, mark.is_open)
            for mark in latest.values()
        ],
        replace=True,
    )


def reopen(conn: Connection, source: int, trace_ids: Sequence[str]) -> int:
    """Have traces looked at again at the next pass; how many of them are remembered."""
    return sum(
        conn.execute(
            update(traces)
            .where(traces.c.source_id == source, traces.c.trace_id.in_(some))
            .values(is_open=True, digest=0)
        ).rowcount
        for some in chunks(trace_ids)
    )


def _mark(row: Row[Any]) -> Checkpoint:
    return Checkpoint(row.trace_id, parsed(row.rowids), row.digest, row.generation, bool(row.is_open))


def spelled(rowids: Sequence[int]) -> str:
    """Ascending numbers as ranges: `7-9,12`."""
    if not rowids:
        return ""
    if rowids[-1] - rowids[0] == len(rowids) - 1:
        # As nearly all are: a trace's rows are written one after the other.
        return f"{rowids[0]}-{rowids[-1]}" if len(rowids) > 1 else str(rowids[0])
    starts = [rowids[0], *(after for before, after in pairwise(rowids) if after != before + 1)]
    ends = [*(before for before, after in pairwise(rowids) if after != before + 1), rowids[-1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def parsed(text: str) -> tuple[int, ...]:
    """The numbers that `spelled` wrote."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
