"""What is handed on of traces: their rows, where these say anything new, and marks to remember them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flywheel.sources.studio.open_traces import Growing, looks_the_same
from flywheel.sources.studio.row import Row
from flywheel.sources.studio.scan import Scan
from flywheel.sources.studio.step import RawTrace
from flywheel.sources.studio.uncommitted import FreshMarks
from flywheel.trace import Mark

Fetch = Callable[[Iterable[int], set[str]], Iterable[Row]]
"""Rows by number, those of other traces left out."""


class Teller:
    """Of one source. Marks that it hands on are noted as `fresh`; rows that were let go of are fetched again."""

    def __init__(self, fetch: Fetch, fresh: FreshMarks) -> None:
        self._fetch = fetch
        self._fresh = fresh

    def tell(
        self, scan: Scan, done: Sequence[Growing], partial: Sequence[Growing], generation: int
    ) -> tuple[tuple[RawTrace, ...], tuple[Mark, ...]]:
        """The rows of traces that are done, or told as far as they are there, and their marks."""
        self._fetch_lacking([*done, *partial])
        traces: list[RawTrace] = []
        marks: list[Mark] = []
        for growing, is_open in [*((g, False) for g in done), *((g, True) for g in partial)]:
            known = growing.known
            rows, digest = growing.raw, growing.digest
            growing.let_go()
            mark = Mark(growing.trace_id, tuple(sorted(rows)), digest, generation, is_open)
            if rows and (known is None or not looks_the_same(mark, known)):
                traces.append(RawTrace(growing.trace_id, rows, is_open))
            if mark != known:
                marks.append(mark)
                self._fresh.add(mark)
            growing.known = mark
            if not is_open:
                scan.drop(growing)
        return tuple(traces), tuple(marks)

    def newly_open(self, scan: Scan, generation: int) -> tuple[Mark, ...]:
        """Marks of the traces that are waited for from now on, or have grown."""
        marks = []
        for growing in scan.take_grown():
            rowids, known = growing.rowids, growing.known
            if known is None or not known.is_open or known.rowids != rowids:
                mark = Mark(growing.trace_id, rowids, known.digest if known else 0, generation, True)
                growing.known = mark
                marks.append(mark)
                self._fresh.add(mark)
        return tuple(marks)

    def _fetch_lacking(self, traces: Sequence[Growing]) -> None:
        """Read again the rows of these traces that were let go of."""
        behind = [growing for growing in traces if len(growing.raw) < len(growing.ids)]
        if behind:
            lacking = {rowid for growing in behind for rowid in growing.ids.keys() - growing.raw.keys()}
            by_trace = {growing.trace_id.encode(): growing for growing in behind}
            for row in self._fetch(lacking, {growing.trace_id for growing in behind}):
                by_trace[row[2]].add_again(row)
