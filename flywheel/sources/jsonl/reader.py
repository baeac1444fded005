"""Reads a JSONL file from a cursor on, in batches of tasks, each with the cursor to store.

The cursor counts bytes. It identifies the file by device and inode and, in its anchor, by fingerprints of the first
line and of the last one read. A file that was rotated, truncated, replaced or rewritten is read from its beginning;
task ids prevent duplicates. A file that was moved away is read to its end before the one that took its name. Bytes
are read in blocks: neither a long file nor a very long line is ever held whole.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Final

import xxhash
from msgspec.structs import replace

from flywheel.errors import SourceError
from flywheel.records.exclusion import ANY_MODEL, TrainedModels
from flywheel.records.privacy import NOBODY, PrivateNames
from flywheel.records.task import Batch, Entry
from flywheel.records.trace import Cursor, DeadRow
from flywheel.sources.jsonl.record import LineError, entry_of_line, names_in_line

log = logging.getLogger(__name__)

MAX_LINE: Final = 16 << 20
"""Longest line in bytes that is parsed."""
_BLOCK: Final = 1 << 20
FINGERPRINTED: Final = 4096
"""Bytes at the beginning or end of a line that identify it."""
_COMPRESSED: Final = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"BZh91AY&SY": "compressed with bzip2",
    b"PK\x03\x04": "a zip archive",
}
"""First bytes of other formats. They are refused as a whole; otherwise each line would be a dead letter."""
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
PAGE_LINES: Final = 500
PAGE_BYTES: Final = 4 << 20
EXCERPT: Final = 2000
"""Characters of a line that a dead letter shows."""


@dataclass(frozen=True, slots=True)
class Line:
    """The bytes from `start` to `end`, including the line end unless the file ends first.

    If the line is longer than MAX_LINE, `whole` is false, `text` is its beginning and `tail` its end.
    """

    start: int
    end: int
    text: bytes
    tail: bytes
    whole: bool = True


def dead_trace(line: Line) -> str:
    """What stands for the trace of a line that cannot be read: the same wherever the line is."""
    return xxhash.xxh3_64_hexdigest(line.text + line.tail)


def named_by(line: Line) -> tuple[str, str]:
    """The conversation and the user that a line names which cannot be read; else empty."""
    return names_in_line(line.text if line.whole else line.text + line.tail)


def fingerprint(text: bytes) -> str:
    """Length and hash of some bytes, as LENGTH:HASH."""
    return f"{len(text)}:{xxhash.xxh3_64_hexdigest(text)}"


def files_of(path: Path) -> list[Path]:
    """The files of a source path: the path itself, or a directory's `*.jsonl` files, sorted by name.

    A directory is itself included if a file in it cannot be read; reading it reports why. Raises SourceError if
    nothing exists at `path`.
    """
    try:
        if not path.is_dir():
            path.stat()
            return [path]
        named, misnamed = _files_in(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return [*named, path] if misnamed else named


def is_folder(path: Path) -> bool:
    """Whether this is a directory; false where it may not be looked at, and reading it reports why."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_listed(path: Path) -> bool:
    """Whether this is a directory, whose files are sources of their own.

    Raises SourceError if it cannot be listed, or if the name of a file in it is not valid UTF-8.
    """
    try:
        if not path.is_dir():
            return False
        misnamed = _files_in(path)[1]
    except PermissionError as error:
        raise _unreadable(path, error) from error
    except OSError:
        return False  # opening it reports a better error
    if misnamed:
        raise SourceError(
            f"read {path}",
            f"the name of a file in it is not UTF-8: {os.fsencode(misnamed[0].name)!r}",
            "Rename it. The other files are read.",
        )
    return True


def _files_in(path: Path) -> tuple[list[Path], list[Path]]:
    """The JSONL files of a directory: those with a valid name, and those whose name is not UTF-8."""
    files = sorted(
        file for file in path.iterdir() if file.suffix == ".jsonl" and file.name[0] != "." and file.is_file()
    )
    misnamed = [file for file in files if any("\ud800" <= char <= "\udfff" for char in file.name)]
    return [file for file in files if file not in misnamed], misnamed


class JsonlFile:
    """An open file. It remains the same file when another one takes its name. Raises SourceError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.longest_read_ms = 0.0
        self._counted = (0, 1)
        """A byte at which a line begins, and that line's number."""
        self.unfinished: Line | None = None
        """The line without a line end that the last pass over `lines` found at the end of the file."""
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreadable(path, error) from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise SourceError(
                f"read {path}", "it is no regular file", "Name a file, or a directory with *.jsonl files in it."
            )
        self.identity = f"{status.st_dev}:{status.st_ino}"

    def close(self) -> None:
        os.close(self._fd)

    def refuse_other_formats(self) -> None:
        """Raise SourceError if the first bytes are those of a compressed file or of UTF-16 text."""
        first = self._take(0, 16)
        what = next((what for mark, what in _COMPRESSED.items() if first.startswith(mark)), "")
        hint = "Unpack it, under a name that ends in .jsonl."
        if first.startswith(_UTF_16):
            what, hint = "text in UTF-16", "Write it in UTF-8."
        if what:
            error = SourceError(f"read {self._path}", f"it is {what}, not lines of JSON in UTF-8", hint)
            error.condition = "not lines"
            raise error

    def is_at(self, path: Path) -> bool:
        """Whether `path` still names this file. Raises SourceError if nothing exists there."""
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        return self.identity == f"{status.st_dev}:{status.st_ino}"

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def state(self) -> tuple[int, int]:
        """Size in bytes and time of the last change in nanoseconds."""
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def has_at(self, mark: str, *, end: int | None = None) -> bool:
        """Whether the bytes before `end`, or the first bytes of the file, have the fingerprint `mark`."""
        length = int(mark.partition(":")[0])
        return fingerprint(self._take(0 if end is None else end - length, length)) == mark

    def lines(self, start: int) -> Iterator[Line]:
        """Every complete line from byte `start` on. Raises SourceError."""
        self.unfinished = None
        held = bytearray()
        searched = 0
        while block := self._take(start + len(held), _BLOCK):
            held += block
            first = 0
            while (stop := held.find(b"\n", max(first, searched))) >= 0:
                text = bytes(held[first : stop + 1])
                yield Line(start + first, start + stop + 1, text, text[-FINGERPRINTED:], len(text) <= MAX_LINE)
                first = stop + 1
            del held[:first]
            start += first
            searched = len(held)
            if searched > MAX_LINE:
                long = self._long_line(start, bytes(held))
                if not long.tail.endswith(b"\n"):
                    self.unfinished = long
                    return
                yield long
                held.clear()
                start, searched = long.end, 0
        if held:
            text = bytes(held)
            self.unfinished = Line(start, start + len(text), text, text[-FINGERPRINTED:])

    def _long_line(self, start: int, held: bytes) -> Line:
        """The line that begins with `held`; what lies between its two ends is not kept."""
        at, tail = start + len(held), held[-FINGERPRINTED:]
        while block := self._take(at, _BLOCK):
            stop = block.find(b"\n") + 1
            tail = (tail + (block[:stop] if stop else block))[-FINGERPRINTED:]
            at += stop or len(block)
            if stop:
                break
        return Line(start, at, held[:FINGERPRINTED], tail, whole=False)

    def text(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, as far as they are there. Raises SourceError."""
        return self._take(start, end - start)

    def line_number(self, at: int) -> int:
        """The number of the line that begins at byte `at`, counted from 1. Raises SourceError."""
        counted, number = self._counted if self._counted[0] <= at else (0, 1)
        while counted < at and (block := self._take(counted, min(_BLOCK, at - counted))):
            counted, number = counted + len(block), number + block.count(b"\n")
        self._counted = counted, number
        return number

    def _take(self, at: int, length: int) -> bytes:
        began = time.perf_counter()
        try:
            return os.pread(self._fd, length, at)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        finally:
            self.longest_read_ms = max(self.longest_read_ms, (time.perf_counter() - began) * 1000)


def _unreadable(path: Path, error: OSError) -> SourceError:
    condition, hint = "failing", "Check the disk and the system log."
    if isinstance(error, FileNotFoundError):
        condition, hint = "missing", "Correct the source's path, or wait until the file is written."
    elif isinstance(error, PermissionError):
        condition, hint = "denied", "Make it readable for this user."
    unreadable = SourceError(f"read {path}", error.strerror or str(error), hint, retryable=True)
    unreadable.condition = condition
    return unreadable


class JsonlReader:
    """Reads one file, which is opened by the first read. Not thread-safe. `models` says whose tasks are trained
    on."""

    schema = "jsonl"

    def __init__(self, path: Path, models: TrainedModels = ANY_MODEL, private: PrivateNames = NOBODY) -> None:
        self.path = path
        self._models = models
        self._private = private
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
        start, state = resume(file, cursor), file.state
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
        for batch in self._pages(file, resume(file, cursor)):
            yield batch
            cursor = batch.cursor or cursor
        if missing is None or file.is_deleted:
            if file.unfinished is not None and file.unfinished.text.strip():
                # The file is not read again, so this line is a task or a dead letter as it is.
                yield self._batch([file.unfinished], resume(file, cursor))
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
                    entries.append(entry_of_line(line.text, self.path, now, self._models, self._private))
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
        return dead_line(line, f"line {self._file.line_number(line.start)}", error, self._private)


def dead_line(line: Line, place: str, error: str, private: PrivateNames) -> DeadRow:
    """A line that cannot be read. `place` says for people where it is."""
    # The hash tells it from a line at the same place of another file with this name.
    digest, (conversation, user) = dead_trace(line), named_by(line)
    is_private = private.cover(users=(user,), conversations=(conversation,), agents=())
    return DeadRow(
        rowid=line.start,
        span_id=f"{place} ({digest[:8]})",
        trace_id=digest,
        error="it cannot be read, and is private" if is_private else error,
        excerpt="" if is_private else line.text[:EXCERPT].decode("utf-8", "replace").rstrip("\n"),
        conversation_id="" if is_private else conversation,
        user="" if is_private else user,
    )


def resume(file: JsonlFile, cursor: Cursor) -> Cursor:
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
