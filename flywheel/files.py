"""Files that appear whole: atomic writes, fsynced JSONL appends, tree hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

NAME_BYTES: Final = 255
PATH_BYTES: Final = 4096
PRIVATE: Final = 0o600
"""For the user of this process alone: what users said, and what was made of it, is in such files."""


def make_private(directory: Path) -> None:
    """Make a directory, and what is missing above it, for this user alone, whatever the umask says.

    One that is there stays as it is.
    """
    for each in reversed([directory, *directory.parents]):
        each.mkdir(mode=0o700, exist_ok=True)


def private(path: str | Path, flags: int) -> int:
    """An opener for `open`: a file that it makes is for this user alone."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE)


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that appears whole: write beside, fsync, rename. A reader sees the old one or the new one.

    A new file has `mode` as far as the umask lets; one that is replaced keeps its permissions, and a link its place.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        before = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        before = None
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode if before is None else before)
    try:
        with os.fdopen(fd, "wb") as file:
            if before is not None:
                os.fchmod(fd, before)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    with whole_file(path, mode=mode) as file:
        file.write(data)


def write_json(path: Path, value: Any, *, mode: int = 0o666) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n", mode=mode)


def expanded(path: Path) -> Path:
    """A path with `~` expanded. Raises ValueError, with the reason, for one that no file can have."""
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError(f"nobody knows the home directory of `{path.parts[0]}`: write the whole path") from None
    if "\0" in str(path):
        raise ValueError("a NUL character is in it")
    if any(len(os.fsencode(part)) > NAME_BYTES for part in path.parts) or len(os.fsencode(path)) >= PATH_BYTES:
        raise ValueError(f"it is too long: {str(path)[:40]}…")
    return path


def tidied(path: Path) -> Path:
    """An absolute path without `..`, if it leads to the same place without them: behind a link it need not."""
    if ".." not in path.parts:
        return path
    plain = Path(os.path.normpath(path))
    return plain if os.path.realpath(plain) == os.path.realpath(path) else path


def sync_directory(path: Path) -> None:
    """Make a rename or a new name in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def json_line(value: Any) -> bytes:
    """One line of JSONL. Lone surrogates, which traces can hold and UTF-8 cannot, become `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def append_jsonl(path: Path, values: Iterable[Any]) -> int:
    """Append one line per value and fsync; the number of lines written."""
    return append_lines(path, [json_line(value) for value in values])


def append_lines(path: Path, lines: Sequence[bytes], *, mode: int = 0o666) -> int:
    """Append lines, each with its end, and fsync; their number. A new file has `mode` as far as the umask lets."""
    if not lines:
        return 0
    created = not path.exists()
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, mode)) as file:
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())
    if created:
        sync_directory(path.parent)
    return len(lines)


def last_lines(file: BinaryIO, count: int) -> Iterator[bytes]:
    """The last lines of a file that have their end, at most `count`, one at a time; nothing before them is kept."""
    begin = file.seek(0, os.SEEK_END)
    ends = 0
    block = b""
    while begin > 0 and ends <= count:
        start = max(0, begin - _BLOCK)
        file.seek(start)
        block = file.read(begin - start)
        begin = start
        ends += block.count(b"\n")
    place = -1
    for _ in range(ends - count):
        # The lines before are in the block that was read last: without it there were not enough.
        place = block.find(b"\n", place + 1)
    file.seek(begin + place + 1)
    for _ in range(min(ends, count)):
        yield file.readline()


_BLOCK: Final = 1 << 20


def torn_line(file: BinaryIO) -> bytes:
    """The unfinished last line of a file, empty if its last line has its end."""
    file.seek(_end_of_lines(file))
    return file.read()


def cut_torn_line(path: Path) -> int:
    """Cut an unfinished last line, which a crash in the middle of an append leaves; the number of bytes cut.

    Whose line it is, and whether it may be cut, the caller knows.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_lines(file)
        if end < size:
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())
        return size - end


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last line that has its end ends."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def tree_sha256(directory: Path) -> str:
    """A hash of every file's relative path and content below `directory`: it changes if anything does."""
    digest = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        digest.update(path.relative_to(directory).as_posix().encode() + b"\0")
        digest.update(path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


SHIPPED_FOLDERS: Final = ("configs", "filters", "rubrics", "systemd")
"""Folders that users edit; `flywheel init` copies them."""


def shipped_folder() -> Path:
    """The folder of the files that come with Flywheel: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def documentation_pages() -> dict[str, Path]:
    """The pages of the documentation by name, as `flywheel docs` takes them."""
    return {path.stem: path for path in sorted((shipped_folder() / "docs").glob("*.md"))}
