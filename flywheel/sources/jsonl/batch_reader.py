"""Reads batches of OpenAI's interface: files with requests and files with responses, in one folder or in one file.

A file belongs to a batch if its first line does. The files of a folder are read together, as one source, because a
line says only half of a reply. What is kept between passes is in memory and without texts: where the line of each id
is. A new process reads the files again when one of them has changed; the ledger's keys prevent duplicates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import orjson
import xxhash
from msgspec.structs import replace

from flywheel.errors import SourceError
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.privacy import NOBODY, PrivateNames
from flywheel.records.states import SkipReason
from flywheel.records.task import Batch, TaskLine
from flywheel.records.trace import Cursor, DeadRow
from flywheel.sources.jsonl import batch_lines
from flywheel.sources.jsonl.reader import (
    MAX_LINE,
    PAGE_BYTES,
    PAGE_LINES,
    JsonlFile,
    Line,
    WrittenLines,
    after,
    dead_line,
    files_of,
    fingerprint,
    noted,
    resume,
)
from flywheel.sources.jsonl.record import (
    BatchEntry,
    LineError,
    batch_line,
    entry_of_request,
    entry_of_response,
    entry_without_request,
)

log = logging.getLogger(__name__)

AMBIGUOUS: Final = "several requests of the folder have its custom_id: one folder per batch"


class BatchFiles:
    """Which files belong to a batch. The first line of a file is read again when the file has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], bool]] = {}

    def __contains__(self, path: Path) -> bool:
        """Whether the first line of a file is one of a batch; false for what cannot be read."""
        try:
            status = path.stat()
        except OSError:
            return False
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if (known := self._known.get(path)) is None or known[0] != state:
            known = self._known[path] = state, _begins_with_batch(path)
        return known[1]


def _begins_with_batch(path: Path) -> bool:
    try:
        file = JsonlFile(path)
    except SourceError:
        return False  # reading it reports why
    try:
        first = next((line for line in file.lines(0) if line.written.strip()), None) or file.unfinished
        return first is not None and first.whole and bool(batch_line(first.written))
    except (SourceError, LineError):
        return False
    finally:
        file.close()


class _Place(NamedTuple):
    """Where a line is."""

    path: Path
    start: int
    end: int


class _Lines:
    """The lines of one `custom_id`, by their spans: equal ones are one."""

    __slots__ = ("requests", "responses")

    def __init__(self) -> None:
        self.requests: dict[str, _Place] = {}
        self.responses: dict[str, _Place] = {}


class BatchReader:
    """Reads the batch files of a folder, or one file. Not thread-safe. `models` and `private` as for other files."""

    def __init__(
        self,
        path: Path,
        models: TrainedModels = ANY_MODEL,
        private: PrivateNames = NOBODY,
        files: BatchFiles | None = None,
    ) -> None:
        self.path = path
        self.longest_read_ms = 0.0
        self._models = models
        self._private = private
        self._batch_files = BatchFiles() if files is None else files
        self._written: dict[Path, WrittenLines] = {}
        self.forget()

    def forget(self) -> None:
        """Read the files anew at the next pass: something that was read was not stored."""
        self._read_to: dict[Path, Cursor] = {}
        self._lines: dict[str, _Lines] = {}
        self._new: dict[str, None] = {}
        """Ids with new lines, which are not stored yet."""
        self._unfinished: dict[Path, tuple[int, int]] = {}
        self._stored = ""
        """The anchor of the cursor up to which all is in memory and stored."""

    def read(self, cursor: Cursor, *, final: bool = False) -> Iterator[Batch]:
        """One pass over the files; the cursor comes with its last batch. Raises SourceError.

        Store each batch before the next one is requested. A last line without a line end is read if it is whole.
        """
        files: dict[Path, JsonlFile] = {}
        try:
            for path in files_of(self.path):
                if path in self._batch_files:
                    files[path] = JsonlFile(path)
            yield from self._read(files, cursor, is_final=final)
        finally:
            for file in files.values():
                self.longest_read_ms = max(self.longest_read_ms, file.longest_read_ms)
                file.close()

    def _read(self, files: dict[Path, JsonlFile], cursor: Cursor, *, is_final: bool) -> Iterator[Batch]:
        if not files and not cursor.rowid:
            return
        state = fingerprint(repr([(str(path), file.identity, *file.state) for path, file in files.items()]).encode())
        if not cursor.rowid or cursor.anchor != self._stored or not self._goes_on(files):
            self.forget()
            if cursor.rowid and cursor.anchor == state:
                return
        warnings: list[str] = []
        for path, file in files.items():
            yield from self._scan(path, file, warnings, is_final=is_final)
        now = datetime.now(UTC)
        page: list[BatchEntry] = []
        size = 0
        for own in self._new:
            for entry in self._entries(own, files, now):
                page.append(entry)
                size += len(entry.line)
            if len(page) >= PAGE_LINES or size >= PAGE_BYTES:
                yield Batch(None, tuple(page))
                page, size = [], 0
        total = sum(each.rowid for each in self._read_to.values())
        done = Cursor(rowid=max(total, 1), generation=cursor.generation, anchor=state)
        if page or warnings or done != cursor:
            yield Batch(done, tuple(page), warnings=tuple(warnings))
        self._new.clear()
        self._stored = state

    def _goes_on(self, files: dict[Path, JsonlFile]) -> bool:
        """Whether what was read of the files is still there."""
        return all(path in files and resume(files[path], before) == before for path, before in self._read_to.items())

    def _scan(self, path: Path, file: JsonlFile, warnings: list[str], *, is_final: bool) -> Iterator[Batch]:
        """Note where the new lines of a file are; a batch for those that cannot be read."""
        at = self._read_to.get(path, Cursor(identity=file.identity))
        dead: list[DeadRow] = []
        state, lines = file.state, self._written.setdefault(path, WrittenLines())
        for line in lines.of(file, at.rowid):
            self._note(path, file, line, dead)
            at = after(at, line, line, state)
        if lines.warning:
            warnings.append(lines.warning)
        if (rest := file.unfinished) is not None and rest.text.strip():
            if rest.whole and _is_whole(rest.text):
                self._note(path, file, rest, dead)
                at = after(at, rest, rest, state)
            elif is_final or self._unfinished.get(path) == (rest.start, rest.end):
                warnings.append(
                    f"{path}: line {file.line_number(rest.start)} is incomplete: it is read once complete"
                )
            self._unfinished[path] = rest.start, rest.end
        self._read_to[path] = noted(at, state)
        if dead:
            yield Batch(None, dead=tuple(dead))

    def _note(self, path: Path, file: JsonlFile, line: Line, dead: list[DeadRow]) -> None:
        text = line.written
        if line.whole and not text.strip():
            return
        try:
            if not line.whole:
                raise LineError(f"it is longer than {MAX_LINE >> 20} MiB")
            said = batch_line(text)
            own = batch_lines.id_of(said)
            lines = self._lines.setdefault(own, _Lines())
            place = _Place(path, line.start, line.end)
            if batch_lines.is_request(said):
                lines.requests.setdefault(_span([own, said["url"], said["body"]]), place)
            else:
                lines.responses.setdefault(_span(said), place)
            self._new[own] = None
        except LineError as error:
            name = "" if path == self.path else f"{path.name} "
            dead.append(dead_line(line, f"{name}line {file.line_number(line.start)}", str(error), self._private))

    def _entries(self, own: str, files: dict[Path, JsonlFile], now: datetime) -> Iterator[BatchEntry]:
        """The entries of an id, as they are now."""
        lines = self._lines[own]

        def line_at(place: _Place) -> TaskLine:
            return batch_line(files[place.path].text(place.start, place.end).replace(b"\0", b""))

        try:
            if not lines.responses:
                for span, place in lines.requests.items():
                    yield entry_of_request(line_at(place), span, now, self._private)
                return
            asked = list(lines.requests)
            is_ambiguous = len(asked) > 1
            request = line_at(lines.requests[asked[0]]) if len(asked) == 1 else None
            for number, (span, place) in enumerate(lines.responses.items()):
                response = line_at(place)
                why = batch_lines.failure_of(response)
                skip = (SkipReason.ERROR, why) if why else (SkipReason.AMBIGUOUS, AMBIGUOUS) if is_ambiguous else None
                if skip is None and request is None:
                    yield entry_without_request(span, now)
                    continue
                spans = span, asked[0] if request is not None else ""
                entry = entry_of_response(request, response, spans, self.path, now, self._models, self._private, skip)
                # A request of which nobody knows the response waits no longer than for any of them.
                yield replace(entry, request=asked[number]) if is_ambiguous and number < len(asked) else entry
        except LineError:
            # It was rewritten since it was noted: the next pass reads it again.
            log.warning("%s: a line has changed while it was read", self.path)


def _is_whole(text: bytes) -> bool:
    """Whether a line without a line end is whole: no proper prefix of an object is an object."""
    try:
        batch_line(text)
    except LineError:
        return False
    return True


def _span(value: object) -> str:
    """The span of a line: the same wherever it is."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        raise LineError("it is nested too deep") from None
    return f"batch-{xxhash.xxh3_128_hexdigest(text)}"
