"""One file of lines, opened for reading: which file it is, and its complete lines from any byte on.

Nothing here knows what a line means. Bytes are read in pieces: neither a long file nor a very long line is ever held
whole.
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
"""A line of more bytes than this is not looked into."""
_PIECE: Final = 1 << 20
_MARKED: Final = 4096
"""As much of a line is enough to know it again."""
_OTHERWISE: Final = {
    b"\x1f\x8b": ("packed with gzip", "Unpack it, under a name that ends in .jsonl."),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "Unpack it, under a name that ends in .jsonl."),
    b"\xfd7zXZ\x00": ("packed with xz", "Unpack it, under a name that ends in .jsonl."),
    b"BZh91AY&SY": ("packed with bzip2", "Unpack it, under a name that ends in .jsonl."),
    b"PK\x03\x04": ("a zip archive", "Unpack it, under a name that ends in .jsonl."),
    b"\xff\xfe": ("text in UTF-16", "Write it in UTF-8."),
    b"\xfe\xff": ("text in UTF-16", "Write it in UTF-8."),
}
"""What files begin with that hold no lines in UTF-8; thousands of dead letters would not say it better."""


@dataclass(frozen=True, slots=True)
class Line:
    """The bytes from `start` up to `end`, with the line end unless the file ends first.

    Of a line that is longer than MAX_LINE, `text` is only the beginning and `tail` the end; `whole` is false.
    """

    start: int
    end: int
    text: bytes
    tail: bytes
    whole: bool = True

    @property
    def head_mark(self) -> str:
        return _mark(self.text[:_MARKED])

    @property
    def tail_mark(self) -> str:
        return _mark(self.tail)


def _mark(text: bytes) -> str:
    return f"{len(text)}:{xxhash.xxh3_64_hexdigest(text)}"


def files_of(path: Path) -> list[Path]:
    """The files that a path stands for: itself, or a directory's `*.jsonl` in the order of their names.

    A directory is itself among them when something in it cannot be read; reading it says what. Raises SourceError
    when there is nothing at `path`.
    """
    try:
        if not path.is_dir():
            path.stat()
            return [path]
        named, misnamed = _files_in(path)
    except OSError as error:
        raise _unreachable(path, error) from error
    return [*named, path] if misnamed else named


def is_listed(path: Path) -> bool:
    """Whether this is a directory, whose files are sources of their own.

    Raises SourceError if it cannot be seen, or a file in it not be named.
    """
    try:
        if not path.is_dir():
            return False
        misnamed = _files_in(path)[1]
    except PermissionError as error:
        raise _unreachable(path, error) from error
    except OSError:
        return False  # reading says it better
    if misnamed:
        raise SourceError(
            f"read {path}",
            f"the name of a file in it is not UTF-8: {os.fsencode(misnamed[0].name)!r}",
            "Rename it. The other files are read.",
        )
    return True


def _files_in(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of lines in a directory, and those of a name that is no text."""
    found = sorted(
        file for file in path.iterdir() if file.suffix == ".jsonl" and file.name[0] != "." and file.is_file()
    )
    misnamed = [file for file in found if any("\ud800" <= char <= "\udfff" for char in file.name)]
    return [file for file in found if file not in misnamed], misnamed


class JsonlFile:
    """An open file. It stays the same one when its name is given to another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.longest_read_ms = 0.0
        self.unfinished: Line | None = None
        """What the last pass over `lines` found behind the last line end."""
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _unreachable(path, error) from error
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
        """Raises SourceError if it begins as no file of lines does."""
        beginning = self._take(0, max(map(len, _OTHERWISE)))
        for mark, (what, hint) in _OTHERWISE.items():
            if beginning.startswith(mark):
                error = SourceError(f"read {self._path}", f"it is {what}, not lines of JSON in UTF-8", hint)
                error.condition = "not lines"
                raise error

    def is_at(self, path: Path) -> bool:
        """Whether `path` still leads to this file. Raises SourceError if it leads nowhere."""
        try:
            found = path.stat()
        except OSError as error:
            raise _unreachable(path, error) from error
        return self.identity == f"{found.st_dev}:{found.st_ino}"

    @property
    def is_deleted(self) -> bool:
        """Whether no name leads to this file any more."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def state(self) -> tuple[int, int]:
        """Size and time of the last change."""
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def ends_so(self, end: int, mark: str) -> bool:
        """Whether the bytes before `end` still are those of `mark`."""
        length = int(mark.partition(":")[0])
        return _mark(self._take(end - length, length)) == mark

    def begins_so(self, mark: str) -> bool:
        """Whether the first bytes still are those of `mark`."""
        return _mark(self._take(0, int(mark.partition(":")[0]))) == mark

    def lines(self, start: int) -> Iterator[Line]:
        """Every complete line from `start` on. Raises SourceError."""
        self.unfinished = None
        held = bytearray()
        searched = 0
        while piece := self._take(start + len(held), _PIECE):
            held += piece
            first = 0
            while (stop := held.find(b"\n", max(first, searched))) >= 0:
                text = bytes(held[first : stop + 1])
                yield Line(start + first, start + stop + 1, text, text[-_MARKED:], len(text) <= MAX_LINE)
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
            self.unfinished = Line(start, start + len(text), text, text[-_MARKED:])

    def _long_line(self, start: int, held: bytes) -> Line:
        """The line of which `held` is the beginning, without keeping what lies between its ends."""
        at, tail = start + len(held), held[-_MARKED:]
        while piece := self._take(at, _PIECE):
            stop = piece.find(b"\n") + 1
            tail = (tail + (piece[:stop] if stop else piece))[-_MARKED:]
            at += stop or len(piece)
            if stop:
                break
        return Line(start, at, held[:_MARKED], tail, whole=False)

    def _take(self, at: int, length: int) -> bytes:
        began = time.perf_counter()
        try:
            return os.pread(self._fd, length, at)
        except OSError as error:
            raise _unreachable(self._path, error) from error
        finally:
            self.longest_read_ms = max(self.longest_read_ms, (time.perf_counter() - began) * 1000)


def _unreachable(path: Path, error: OSError) -> SourceError:
    hints: dict[type[OSError], str] = {
        FileNotFoundError: "Correct the source's path, or wait until the file is written.",
        PermissionError: "Make it readable for this user.",
    }
    hint = hints.get(type(error), "Check the disk and the system log.")
    found = SourceError(f"read {path}", error.strerror or str(error), hint, retryable=True)
    found.condition = {FileNotFoundError: "missing", PermissionError: "denied"}.get(type(error), "failing")
    return found
