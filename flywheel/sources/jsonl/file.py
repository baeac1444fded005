"""An open JSONL file: its identity, and its complete lines from any byte on.

Nothing here interprets a line. Bytes are read in blocks: neither a long file nor a very long line is ever held whole.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from flywheel.errors import SourceError

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
    found = sorted(
        file for file in path.iterdir() if file.suffix == ".jsonl" and file.name[0] != "." and file.is_file()
    )
    misnamed = [file for file in found if any("\ud800" <= char <= "\udfff" for char in file.name)]
    return [file for file in found if file not in misnamed], misnamed


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
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise SourceError(
                f"read {path}", "it is no regular file", "Name a file, or a directory with *.jsonl files in it."
            )
        self.identity = f"{found.st_dev}:{found.st_ino}"

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
            found = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        return self.identity == f"{found.st_dev}:{found.st_ino}"

    @property
    def is_deleted(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def state(self) -> tuple[int, int]:
        """Size in bytes and time of the last change in nanoseconds."""
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

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

    def line_number(self, at: int) -> int:
        """The number of the line that begins at byte `at`, counted from 1. Raises SourceError."""
        known, number = self._counted if self._counted[0] <= at else (0, 1)
        while known < at and (block := self._take(known, min(_BLOCK, at - known))):
            known, number = known + len(block), number + block.count(b"\n")
        self._counted = known, number
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
    found = SourceError(f"read {path}", error.strerror or str(error), hint, retryable=True)
    found.condition = condition
    return found
