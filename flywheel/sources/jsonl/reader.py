"""Reads one file of lines from a cursor on: page by page, each page's tasks together with the cursor to store.

The cursor counts bytes, and knows the file by device and inode and, in its anchor, by the first line and the last one
that was read: a file that was rotated, truncated, replaced or rewritten in place is read from its beginning, and the
ledger's keys stop duplicates. A file that was moved away is read to its end before the one that took its name.
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

from flywheel.batch import Batch, Entry
from flywheel.errors import SourceError
from flywheel.exclusion import ANY_MODEL, TrainedModels
from flywheel.sources.jsonl.file import MAX_LINE, JsonlFile, Line
from flywheel.sources.jsonl.messages import LineError
from flywheel.sources.jsonl.record import entry_of_line
from flywheel.trace import Cursor, DeadRow

log = logging.getLogger(__name__)

PAGE_LINES: Final = 500
PAGE_BYTES: Final = 4 << 20
EXCERPT: Final = 2000


class JsonlReader:
    """One file. It is opened when it is first read; one thread at a time may use it."""

    schema = "jsonl"

    def __init__(self, path: Path, models: TrainedModels = ANY_MODEL) -> None:
        """`models` says whose tasks are trained on."""
        self.path = path
        self._models = models
        self._file: JsonlFile | None = None
        self._identity = ""
        self._longest_read_ms = 0.0
        self._waiting: tuple[int, int] | None = None
        self._still: tuple[Cursor, tuple[int, int]] | None = None

    @property
    def identity(self) -> str:
        """Device and inode of the file when it was last read; empty before."""
        return self._identity

    @property
    def longest_read_ms(self) -> float:
        """The longest read so far. Readers of a file keep no writer waiting."""
        return max(self._longest_read_ms, self._file.longest_read_ms if self._file else 0.0)

    def close(self) -> None:
        if self._file is not None:
            self._longest_read_ms = self.longest_read_ms
            self._file.close()
            self._file = None

    def read(self, cursor: Cursor, *, final: bool = False) -> Iterator[Batch]:
        """One pass to the end of the file; nothing if nothing is new. Raises SourceError.

        Ask for the next batch only when the last one is stored. A last line without a line end waits for it; `final`
        takes it if it is a whole object.
        """
        if self._file is not None:
            for batch in self._if_moved(self._file, cursor):
                yield batch
                cursor = batch.cursor or cursor
        file = self._file = self._file or JsonlFile(self.path)
        self._identity = file.identity
        begin, state = _resumed(file, cursor), file.state
        if not begin.rowid:
            file.refuse_other_formats()
        if self._still == (begin, state):
            yield Batch(begin, warnings=self._warnings(file))
            return
        for batch in self._pages(file, begin):
            yield batch
            begin = cursor = batch.cursor or begin
        for batch in self._open_line(file, begin, state, final=final):
            yield batch
            begin = cursor = batch.cursor or begin
        if begin != cursor:
            yield Batch(begin)

    def _if_moved(self, file: JsonlFile, cursor: Cursor) -> Iterator[Batch]:
        """What is left in a file that is no longer where it was; it is closed when it will not come back."""
        missing: SourceError | None = None
        try:
            if file.is_at(self.path):
                return
        except SourceError as error:
            missing = error
        for batch in self._pages(file, _resumed(file, cursor)):
            yield batch
            cursor = batch.cursor or cursor
        if missing is None or file.is_deleted:
            if file.unfinished is not None and file.unfinished.text.strip():
                # Nobody will end this line where it is looked for: it is a task or a dead row as it stands.
                yield self._batch([file.unfinished], _resumed(file, cursor))
            self.close()
        if missing is not None:
            raise missing

    def _pages(self, file: JsonlFile, cursor: Cursor) -> Iterator[Batch]:
        lines = file.lines(cursor.rowid)
        while page := list(_page(lines)):
            batch = self._batch(page, cursor)
            yield batch
            cursor = batch.cursor or cursor

    def _open_line(self, file: JsonlFile, cursor: Cursor, state: tuple[int, int], *, final: bool) -> Iterator[Batch]:
        """What lies behind the last line end."""
        line, waited, self._waiting, self._still = file.unfinished, self._waiting, None, None
        if line is None or not line.text.strip():
            return
        if final and _is_whole(line):
            yield self._batch([line], cursor)
            return
        self._waiting = line.start, line.end
        if len(line.text) > MAX_LINE or not line.whole:
            # Looking for the end of a line this long costs something: not again before the file changes.
            self._still = (cursor, state)
        if waited == (line.start, line.end):
            yield Batch(cursor, warnings=self._warnings(file))

    def _warnings(self, file: JsonlFile) -> tuple[str, ...]:
        assert file.unfinished is not None
        return (
            f"{self.path} ends at byte {file.unfinished.start} in a line without a line end: it is read when that is "
            "written, or by `flywheel ingest` if it is whole",
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
                dead.append(_dead(line, str(error)))
            except Exception as error:
                log.exception("%s: a line could not be read", self.path)
                dead.append(_dead(line, f"{type(error).__name__}: {error}. This is a defect; please report it."))
        first = page[0].head_mark if page[0].start == 0 else cursor.anchor.partition(" ")[0]
        moved = replace(cursor, rowid=page[-1].end, anchor=f"{first} {page[-1].tail_mark}")
        return Batch(moved, tuple(entries), tuple(dead))


def _resumed(file: JsonlFile, cursor: Cursor) -> Cursor:
    """Where to go on in this file: at the cursor, or at its beginning if the cursor is not about what it holds."""
    if cursor.identity == file.identity:
        first, _, last = cursor.anchor.partition(" ")
        if not cursor.rowid or (file.begins_so(first) and file.ends_so(cursor.rowid, last)):
            return cursor
    generation = cursor.generation + 1 if cursor.identity else cursor.generation
    return Cursor(identity=file.identity, generation=generation)


def _page(lines: Iterator[Line]) -> Iterator[Line]:
    held = 0
    for line in islice(lines, PAGE_LINES):
        yield line
        held += len(line.text)
        if held >= PAGE_BYTES:
            return


def _is_whole(line: Line) -> bool:
    """Whether a line without a line end can be read as it is: no beginning of an object is an object itself."""
    try:
        entry_of_line(line.text, Path(), datetime.now(UTC))
    except LineError:
        return False
    return line.whole


def _dead(line: Line, error: str) -> DeadRow:
    # The hash tells it from what another file of this name had at this place.
    what = xxhash.xxh3_64_hexdigest(line.text + line.tail)[:8]
    return DeadRow(
        rowid=line.start,
        span_id=f"line at byte {line.start} ({what})",
        trace_id="",
        error=f"line at byte {line.start}: {error}",
        excerpt=line.text[:EXCERPT].decode("utf-8", "replace").rstrip("\n"),
    )
