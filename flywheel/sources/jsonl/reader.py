"""Reads a JSONL file from a cursor on, in batches of tasks, each with the cursor to store.

The cursor counts bytes. It identifies the file by device and inode and, in its anchor, by fingerprints of the first
line and of the last one read. A file that was rotated, truncated, replaced or rewritten is read from its beginning;
task ids prevent duplicates. A file that was moved away is read to its end before the one that took its name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

import xxhash
from msgspec.structs import replace

from flywheel.errors import SourceError
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.task import Batch, Entry
from flywheel.records.trace import Cursor, DeadRow
from flywheel.sources.jsonl.file import FINGERPRINTED, MAX_LINE, JsonlFile, Line, fingerprint
from flywheel.sources.jsonl.record import LineError, entry_of_line

log = logging.getLogger(__name__)

PAGE_LINES: Final = 500
PAGE_BYTES: Final = 4 << 20
EXCERPT: Final = 2000
"""Characters of a line that a dead letter shows."""


class JsonlReader:
    """Reads one file, which is opened by the first read. Not thread-safe. `models` says whose tasks are trained
    on."""

    schema = "jsonl"

    def __init__(self, path: Path, models: TrainedModels = ANY_MODEL) -> None:
        self.path = path
        self._models = models
        self._file: JsonlFile | None = None
        self._longest_read_ms = 0.0
        self._unfinished: tuple[int, int] | None = None
        """Start and end of the unfinished last line that the last pass found."""
        self._unchanged: tuple[Cursor, tuple[int, int]] | None = None
        """Cursor and file state at which there is nothing to read but a long unfinished line."""

    @property
    def longest_read_ms(self) -> float:
        """The longest read so far. It delays no writer: reading a file takes no lock."""
        return max(self._longest_read_ms, self._file.longest_read_ms if self._file else 0.0)

    def close(self) -> None:
        if self._file is not None:
            self._longest_read_ms = self.longest_read_ms
            self._file.close()
            self._file = None

    def read(self, cursor: Cursor, *, final: bool = False) -> Iterator[Batch]:
        """One pass to the end of the file; no batch if nothing is new. Raises SourceError.

        Store each batch before the next one is requested. A last line without a line end is read when that is
        written; with `final`, if it is a complete object.
        """
        if self._file is not None:
            for batch in self._rest_of_moved(self._file, cursor):
                yield batch
                cursor = batch.cursor or cursor
        file = self._file = self._file or JsonlFile(self.path)
        start, state = _resume(file, cursor), file.state
        if not start.rowid:
            file.refuse_other_formats()
        if self._unchanged == (start, state):
            yield Batch(start, warnings=self._warnings(file))
            return
        for batch in self._pages(file, start):
            yield batch
            start = cursor = batch.cursor or start
        for batch in self._last_line(file, start, state, final=final):
            yield batch
            start = cursor = batch.cursor or start
        if start != cursor:
            yield Batch(start)

    def _rest_of_moved(self, file: JsonlFile, cursor: Cursor) -> Iterator[Batch]:
        """The rest of an open file that no longer has its name. It is closed unless its name may come back."""
        missing: SourceError | None = None
        try:
            if file.is_at(self.path):
                return
        except SourceError as error:
            missing = error
        for batch in self._pages(file, _resume(file, cursor)):
            yield batch
            cursor = batch.cursor or cursor
        if missing is None or file.is_deleted:
            if file.unfinished is not None and file.unfinished.text.strip():
                # The file is not read again, so this line is a task or a dead letter as it is.
                yield self._batch([file.unfinished], _resume(file, cursor))
            self.close()
        if missing is not None:
            raise missing

    def _pages(self, file: JsonlFile, cursor: Cursor) -> Iterator[Batch]:
        lines = file.lines(cursor.rowid)
        while page := list(_page(lines)):
            batch = self._batch(page, cursor)
            yield batch
            cursor = batch.cursor or cursor

    def _last_line(self, file: JsonlFile, cursor: Cursor, state: tuple[int, int], *, final: bool) -> Iterator[Batch]:
        """The unfinished last line: a batch if it is read, or a warning if it has not grown since the last pass."""
        line, before, self._unfinished, self._unchanged = file.unfinished, self._unfinished, None, None
        if line is None or not line.text.strip():
            return
        if final and _is_complete(line):
            yield self._batch([line], cursor)
            return
        self._unfinished = line.start, line.end
        if len(line.text) > MAX_LINE or not line.whole:
            # Searching the end of a line this long is expensive: not again before the file changes.
            self._unchanged = (cursor, state)
        if before == self._unfinished:
            yield Batch(cursor, warnings=self._warnings(file))

    def _warnings(self, file: JsonlFile) -> tuple[str, ...]:
        assert file.unfinished is not None
        where = f"{self.path}: line {file.line_number(file.unfinished.start)}"
        return (
            f"{where} is without a line end: it is read when that is written, or by `flywheel ingest` if it is whole",
        )

    def _batch(self, page: list[Line], cursor: Cursor) -> Batch:
        now = datetime.now(UTC)
        entries: list[Entry] = []
        dead: list[DeadRow] = []
        for line in page:
            try:
                if not line.whole:
                    raise LineError(f"it is longer than {MAX_LINE >> 20} MiB")
                if line.text.strip():
                    entries.append(entry_of_line(line.text, self.path, now, self._models))
            except LineError as error:
                dead.append(self._dead(line, str(error)))
            except Exception as error:
                log.exception("%s: a line could not be read", self.path)
                dead.append(self._dead(line, f"{type(error).__name__}: {error}. This is a defect; please report it."))
        first = cursor.anchor.partition(" ")[0] if page[0].start else fingerprint(page[0].text[:FINGERPRINTED])
        moved = replace(cursor, rowid=page[-1].end, anchor=f"{first} {fingerprint(page[-1].tail)}")
        return Batch(moved, tuple(entries), tuple(dead))

    def _dead(self, line: Line, error: str) -> DeadRow:
        assert self._file is not None
        # The hash tells it from a line at the same place of another file with this name.
        digest = xxhash.xxh3_64_hexdigest(line.text + line.tail)[:8]
        return DeadRow(
            rowid=line.start,
            span_id=f"line {self._file.line_number(line.start)} ({digest})",
            trace_id="",
            error=error,
            excerpt=line.text[:EXCERPT].decode("utf-8", "replace").rstrip("\n"),
        )


def _resume(file: JsonlFile, cursor: Cursor) -> Cursor:
    """Where to go on: at the cursor, or at the beginning of the file if the cursor does not match its content."""
    if cursor.identity == file.identity:
        first, _, last = cursor.anchor.partition(" ")
        if not cursor.rowid or (file.has_at(first) and file.has_at(last, end=cursor.rowid)):
            return cursor
    generation = cursor.generation + 1 if cursor.identity else cursor.generation
    return Cursor(identity=file.identity, generation=generation)


def _page(lines: Iterator[Line]) -> Iterator[Line]:
    size = 0
    for line in islice(lines, PAGE_LINES):
        yield line
        size += len(line.text)
        if size >= PAGE_BYTES:
            return


def _is_complete(line: Line) -> bool:
    """Whether a line without a line end can be parsed: no proper prefix of an object is an object."""
    try:
        entry_of_line(line.text, Path(), datetime.now(UTC))
    except LineError:
        return False
    return line.whole
