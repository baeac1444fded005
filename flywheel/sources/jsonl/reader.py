"""Reads a JSONL file from a cursor on, in batches of tasks, each with the cursor to store.

The cursor counts bytes. It identifies the file by device and inode and, in its anchor, by fingerprints of the first
line and of the last one read, and by its time of change if all of it was read. A file that was rotated, truncated,
replaced or rewritten is read from its beginning; task ids prevent duplicates. A file that was moved away is read to
its end before the one that took its name. Bytes are read in blocks: neither a long file nor a very long line is ever
held whole.
"""

from __future__ import annotations

import contextlib
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
from flywheel.system.files import holds_lines
from flywheel.system.shortage import shortage_of
from flywheel.system.terminal import quantity

log = logging.getLogger(__name__)

MAX_LINE: Final = 16 << 20
"""Longest line in bytes that is parsed."""
_BLOCK: Final = 1 << 20
ENDS: Final = 4096
"""Bytes at the beginning and at the end that are held of what is too long to be held."""
UNWRITTEN_SECONDS: Final = 600.0
"""How long NULs must be unchanged until they count as never written."""
_COMPRESSED: Final = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"BZh91AY&SY": "compressed with bzip2",
    b"PK\x03\x04": "a zip archive",
}
"""First bytes of other formats. They are refused as a whole; otherwise each line would be a dead letter."""
_PACKED: Final = (".gz", ".zst", ".xz", ".bz2", ".zip")
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{")
PAGE_LINES: Final = 500
PAGE_BYTES: Final = 4 << 20
EXCERPT: Final = 2000
"""Characters of a line that a dead letter shows."""


@dataclass(frozen=True, slots=True)
class Line:
    """The bytes from `start` to `end`, including the line end unless the file ends first.

    If the line is longer than MAX_LINE, `whole` is false, `text` is its beginning and `tail` its end. NULs where a
    line would begin are a line of their own, of which `text` and `tail` are parts.
    """

    start: int
    end: int
    text: bytes
    tail: bytes
    whole: bool = True

    @property
    def written(self) -> bytes:
        """The text without NULs, which stand for what was not written: JSON has none."""
        return self.text.replace(b"\0", b"")

    @property
    def nulls(self) -> int:
        """The number of NULs."""
        return self.end - self.start if self.text.startswith(b"\0") else self.text.count(b"\0")


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
    """The files of a source path: the path itself, or a directory's files of lines, sorted by name.

    Raises SourceError if nothing exists at `path`, or if it cannot be listed.
    """
    try:
        if path.is_dir():
            return sorted(file for file in path.iterdir() if _is_read(file.name) and file.is_file())
        path.stat()
        return [path]
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_read(name: str) -> bool:
    """Whether files with this name are read. A name that is not UTF-8 cannot be stored."""
    return holds_lines(Path(name)) and _shown(name) == name


def _shown(name: str) -> str:
    """A file's name with bytes that are not UTF-8 as escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def is_folder(path: Path) -> bool:
    """Whether this is a directory; false where it may not be looked at, and reading it reports why."""
    try:
        return path.is_dir()
    except OSError:
        return False


def unread_in(path: Path) -> str:
    """What is in a directory and is not read, by kind and name. Other files, such as notes, count only where nothing
    is read. Empty for none, and for a directory that cannot be listed."""
    kinds: dict[str, list[str]] = {}
    is_read, others = False, []
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for each in sorted(entries, key=lambda entry: entry.name):
            name = _shown(each.name)
            if name.startswith("."):
                continue
            if each.is_dir():
                kinds.setdefault("subfolder", []).append(name)
            elif each.is_symlink() and not Path(each.path).exists():
                kinds.setdefault("link to nothing", []).append(name)
            elif _is_read(each.name):
                is_read = True
            elif holds_lines(Path(name)):
                kinds.setdefault("file whose name is not UTF-8", []).append(name)
            elif Path(name).suffix.lower() in _PACKED:
                kinds.setdefault("compressed file", []).append(name)
            else:
                others.append(name)
    if others and not is_read:
        kinds["file of another name"] = others
    several = {
        "file of another name": "files of other names",
        "file whose name is not UTF-8": "files whose names are not UTF-8",
        "link to nothing": "links to nothing",
    }
    counted = []
    for kind, names in kinds.items():
        some = ", ".join(names if len(names) <= 3 else [*names[:3], "…"])
        counted.append(f"{quantity(len(names), kind, several.get(kind, ''))} ({some})")
    only = "Only files named *.jsonl or *.ndjson in the folder itself are"
    return f"not read: {', '.join(counted)}. {only}" if counted else ""


class JsonlFile:
    """An open file. It remains the same file when another one takes its name. Raises SourceError."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
                f"read {path}",
                "it is no regular file",
                "Name a file, or a directory with *.jsonl or *.ndjson files in it.",
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
            error = SourceError(f"read {self.path}", f"it is {what}, not lines of JSON in UTF-8", hint)
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
        """Every complete line from byte `start` on, and NULs where one would begin. Raises SourceError."""
        self.unfinished = None
        held = bytearray()
        searched = 0
        while block := self._take(start + len(held), _BLOCK):
            held += block
            first = 0
            while first < len(held) and (held[first] == 0 or (stop := held.find(b"\n", max(first, searched))) >= 0):
                if held[first] == 0:
                    nulls = self._nulls(start + first)
                    yield nulls
                    first = nulls.end - start
                    continue
                text = bytes(held[first : stop + 1])
                yield Line(start + first, start + stop + 1, text, text[-ENDS:], len(text) <= MAX_LINE)
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
            self.unfinished = Line(start, start + len(text), text, text[-ENDS:])

    def _nulls(self, start: int) -> Line:
        """The NULs that begin at byte `start`: a hole may be longer than memory."""
        end = start
        while block := self._take(end, _BLOCK):
            rest = len(block.lstrip(b"\0"))
            end += len(block) - rest
            if rest:
                break
        ends = bytes(min(end - start, ENDS))
        return Line(start, end, ends, ends)

    def _long_line(self, start: int, held: bytes) -> Line:
        """The line that begins with `held`; what lies between its two ends is not kept."""
        at, tail = start + len(held), held[-ENDS:]
        while block := self._take(at, _BLOCK):
            stop = block.find(b"\n") + 1
            tail = (tail + (block[:stop] if stop else block))[-ENDS:]
            at += stop or len(block)
            if stop:
                break
        return Line(start, at, held[:ENDS], tail, whole=False)

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
            raise _unreadable(self.path, error) from error
        finally:
            self.longest_read_ms = max(self.longest_read_ms, (time.perf_counter() - began) * 1000)


def _unreadable(path: Path, error: OSError) -> SourceError:
    condition, hint = "failing", (shortage_of(error) or ("", "Check the disk and the system log."))[1]
    if isinstance(error, FileNotFoundError):
        condition, hint = "missing", "Correct the source's path, or wait until the file is written."
    elif isinstance(error, PermissionError):
        condition, hint = "denied", "Make it readable for this user."
    unreadable = SourceError(f"read {path}", error.strerror or str(error), hint, retryable=True)
    unreadable.condition = condition
    return unreadable


class WrittenLines:
    """The lines of files, up to NULs that may still be overwritten. A program that goes on at its old place after a
    truncation (`copytruncate`) leaves such a hole, as a network mount does while parts of a file are under way."""

    def __init__(self) -> None:
        self.warning = ""
        """Why the last pass stopped before the end of the file, if it did."""
        self._seen: tuple[tuple[str, int, int, int], float] | None = None

    def of(self, file: JsonlFile, start: int, *, is_closed: bool = False) -> Iterator[Line]:
        """The lines from byte `start` on. NULs that are in the file for good are counted in the log, as are all in a
        file that `is_closed`: nobody writes it any more."""
        self.warning = ""
        for line in file.lines(start):
            if b"\0" in line.text:
                where = f"{file.path}: {quantity(line.nulls, 'NUL byte')} in line {file.line_number(line.start)}"
                if not is_closed and self._may_change(file, line):
                    file.unfinished = None
                    self.warning = (
                        f"{where}: this part of the file is not written yet. Reading goes on when it is written, or "
                        f"a line behind it, and it has not changed for {UNWRITTEN_SECONDS / 60:g} minutes"
                    )
                    return
                log.warning("%s were left out: this part of the file was never written", where)
            yield line

    def _may_change(self, file: JsonlFile, line: Line) -> bool:
        if all(b"\0" in other.text for other in file.lines(line.end)):
            return True
        if not line.start and line.text.startswith(b"\0"):
            return False
        now = time.monotonic()
        mark = (file.identity, line.start, line.end, xxhash.xxh3_64_intdigest(line.text))
        if self._seen is None or self._seen[0] != mark:
            self._seen = mark, now
        return max(now - self._seen[1], time.time() - file.state[1] / 1e9) < UNWRITTEN_SECONDS


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
        self._lines = WrittenLines()
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
        for batch in self._pages(file, start, state):
            yield batch
            start = cursor = batch.cursor or start
        start = noted(start, state)
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
        is_closed, state = missing is None or file.is_deleted, file.state
        for batch in self._pages(file, resume(file, cursor), state, is_closed=is_closed):
            yield batch
            cursor = batch.cursor or cursor
        if is_closed:
            if file.unfinished is not None and file.unfinished.text.strip():
                # The file is not read again, so this line is a task or a dead letter as it is.
                yield self._batch([file.unfinished], resume(file, cursor), state)
            self.close()
        if missing is not None:
            raise missing

    def _pages(
        self, file: JsonlFile, cursor: Cursor, state: tuple[int, int], *, is_closed: bool = False
    ) -> Iterator[Batch]:
        lines = self._lines.of(file, cursor.rowid, is_closed=is_closed)
        while page := list(_page(lines)):
            batch = self._batch(page, cursor, state)
            yield batch
            cursor = batch.cursor or cursor
        if self._lines.warning:
            yield Batch(cursor, warnings=(self._lines.warning,))

    def _last_line(self, file: JsonlFile, cursor: Cursor, state: tuple[int, int], *, final: bool) -> Iterator[Batch]:
        """The unfinished last line: a batch if it is read, or a warning if it has not grown since the last pass."""
        line, before, self._unfinished, self._unchanged = file.unfinished, self._unfinished, None, None
        if line is None or not line.text.strip():
            return
        if final and _is_complete(line):
            yield self._batch([line], cursor, state)
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

    def _batch(self, page: list[Line], cursor: Cursor, state: tuple[int, int]) -> Batch:
        now = datetime.now(UTC)
        entries: list[Entry] = []
        dead: list[DeadRow] = []
        for line in page:
            try:
                if not line.whole:
                    raise LineError(f"it is longer than {MAX_LINE >> 20} MiB")
                if (text := line.written).strip():
                    entries.append(entry_of_line(text, self.path, now, self._models, self._private))
            except LineError as error:
                dead.append(self._dead(line, str(error)))
            except Exception as error:
                log.exception("%s: a line could not be read", self.path)
                dead.append(self._dead(line, f"{type(error).__name__}: {error}. This is a defect; please report it."))
        return Batch(after(cursor, page[0], page[-1], state), tuple(entries), tuple(dead))

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


def after(cursor: Cursor, first: Line, last: Line, state: tuple[int, int]) -> Cursor:
    """The cursor behind some lines. `state` is that of the file before they were read."""
    begins = cursor.anchor.partition(" ")[0] if first.start else fingerprint(first.text)
    anchor = f"{begins} {fingerprint(last.text if last.whole else last.tail)}"
    return noted(replace(cursor, rowid=last.end, anchor=anchor), state)


def noted(cursor: Cursor, state: tuple[int, int]) -> Cursor:
    """The cursor with the state of the file, if that was all there."""
    if not cursor.rowid or cursor.rowid != state[0]:
        return cursor
    return replace(cursor, anchor=f"{' '.join(cursor.anchor.split(' ')[:2])} {state[1]}")


def resume(file: JsonlFile, cursor: Cursor) -> Cursor:
    """Where to go on: at the cursor, or at the beginning of the file if the cursor does not match its content."""
    if cursor.identity == file.identity:
        if not cursor.rowid:
            return cursor
        first, last, *changed = cursor.anchor.split(" ")
        # With its size, and another time, it was filled anew with other lines.
        was_refilled = changed and file.state[0] == cursor.rowid and file.state[1] != int(changed[0])
        if not was_refilled and file.has_at(first) and file.has_at(last, end=cursor.rowid):
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
