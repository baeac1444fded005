"""Files: atomic writes, fsynced JSONL appends, private permissions, tree hashes."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
import select
import shutil
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from flywheel.system.heartbeat import beat

NAME_BYTES: Final = 255
PATH_BYTES: Final = 4096
MAX_GIVEN_BYTES: Final = 4 << 20
"""Maximum size of a configuration, a rubric and the like, which people copy from others."""
MAX_GIVEN_DATA_BYTES: Final = 1 << 30
"""Maximum size of a file of labels or annotations."""
PIPE_SECONDS: Final = 10.0
"""Within this time, whoever writes a pipe must have written all of it."""
PRIVATE: Final = 0o600
"""Readable by this user only: such files hold what users said."""
_BLOCK: Final = 1 << 20
SHIPPED_FOLDERS: Final = ("configs", "filters", "rubrics", "systemd")
"""Folders that users edit; `flywheel init` copies them."""
DOCUMENTATION_KINDS: Final = ("start", "connect", "judge", "train", "operate", "understand", "reference", ".")
"""Folders of pages below `docs/`, in the order in which `flywheel docs` lists them."""


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents for this user only, whatever the umask is.

    Existing directories keep their permissions.
    """
    for each in reversed([directory, *directory.parents]):
        each.mkdir(mode=0o700, exist_ok=True)


def private(path: str | Path, flags: int) -> int:
    """An opener for `open`: a file that it creates is readable by this user only."""
    return os.open(path, flags | os.O_CLOEXEC, PRIVATE)


def make_private_database(path: Path) -> None:
    """Create an empty file, and its directory, for an SQLite database that only this user can read, if there is none.
    SQLite gives its side files the same permissions.

    An existing file is not opened: closing it would release the locks of all connections that this process has to it.
    """
    make_private(path.parent)
    with contextlib.suppress(FileExistsError):
        os.close(private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))


def looked_up(path: Path, query: str, *values: object) -> list[Any]:
    """The rows of a query of an SQLite database, for a look beside the process that writes it. None, if there is no
    such file or it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()
    except sqlite3.Error:
        return []


_piped: Final[dict[tuple[str, int, int], bytes]] = {}
"""What was read from pipes, by path, device and inode: a pipe ends once, and commands read a file more than once."""


def read_given(path: Path, most: int = MAX_GIVEN_BYTES) -> bytes:
    """The content of a file that a person names, of at most so many bytes. It may be a pipe, which must be written to
    its end within PIPE_SECONDS. Raises OSError, whose `strerror` is for people, also for a device or a socket."""
    # A FIFO without a writer would not open.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        key = (str(path), found.st_dev, found.st_ino)
        if stat.S_ISFIFO(found.st_mode):
            data = _piped[key] if key in _piped else _piped.setdefault(key, _read_to_end(fd, most))
        elif stat.S_ISREG(found.st_mode):
            data = _read_to_end(fd, most)
        else:
            what = os.strerror(errno.EISDIR) if stat.S_ISDIR(found.st_mode) else "it is neither a file nor a pipe"
            raise OSError(errno.EINVAL, what)
    finally:
        os.close(fd)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MB")
    return data


def _read_to_end(fd: int, most: int) -> bytes:
    data, deadline, waiting = bytearray(), time.monotonic() + PIPE_SECONDS, select.poll()
    waiting.register(fd, select.POLLIN)  # which a file always has
    while len(data) <= most:
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise OSError(errno.ETIMEDOUT, f"it is a pipe, and nobody wrote it to its end within {PIPE_SECONDS:g} s")
        with contextlib.suppress(BlockingIOError):
            if not (block := os.read(fd, 1 << 20)):
                break
            data += block
    return bytes(data)


def holds_lines(path: Path) -> bool:
    """Whether a file has the name of lines of JSON, in capitals or not, and is not hidden."""
    return path.suffix.lower() in (".jsonl", ".ndjson") and not path.name.startswith(".")


def file_identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, by which a file is recognised as the same one; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def temporary_of(name: str) -> str:
    """The name of the file that `whole_file` writes under this temporary name; empty for any other name."""
    own, _, random = name.rpartition(".")
    is_temporary = own[:1] == "." and len(random) == 8 and all(each in "0123456789abcdef" for each in random)
    return own[1:] if is_temporary else ""


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, unless another process has. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def size_of(path: Path) -> int:
    """Bytes in a file or below a folder, without following links, as far as they can be seen."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(map(size_of, path.iterdir()))
    return 0


def remove_temporary(folder: Path, names: Callable[[str], object] = lambda name: True) -> int:
    """Remove what `whole_file` left in a folder when its process was killed, of files with these names; how many
    files that were. Nobody may be writing them."""
    left = [path for path in folder.iterdir() if (name := temporary_of(path.name)) and names(name)]
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


@contextlib.contextmanager
def whole_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file atomically: write a temporary file, fsync, rename. Readers see the old content or the new.

    A new file gets `mode`, limited by the umask. A replaced file keeps its permissions; a symbolic link stays.
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
    sync(path.parent)


def rewrite_lines(path: Path, left: Callable[[bytes], bytes]) -> int:
    """Rewrite a file with what is `left` of each of its lines, atomically; how many lines change. If none does, the
    file stays as it is."""
    with path.open("rb") as file:
        if changing := sum(left(line) != line for line in file):
            file.seek(0)
            with whole_file(path) as rest:
                rest.writelines(map(left, file))
    return changing


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    beat()
    with whole_file(path, mode=mode) as file:
        file.write(data)


def write_json(path: Path, value: Any, *, mode: int = 0o666) -> None:
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n", mode=mode)


def expanded(path: Path) -> Path:
    """A path with `~` expanded. Raises ValueError, with the reason, for a path that no file can have."""
    try:
        path = path.expanduser()
    except RuntimeError:
        raise ValueError(f"the home directory is unknown: `{path.parts[0]}`. Write the whole path") from None
    if "\0" in str(path):
        raise ValueError("a NUL character is in it")
    if any(len(os.fsencode(part)) > NAME_BYTES for part in path.parts) or len(os.fsencode(path)) >= PATH_BYTES:
        raise ValueError(f"it is too long: {str(path)[:40]}…")
    return path


def tidied(path: Path) -> Path:
    """An absolute path without `..`, unless that would lead elsewhere, as behind a symbolic link."""
    plain = Path(os.path.normpath(path))
    return plain if os.path.realpath(plain) == os.path.realpath(path) else path


def sync(path: Path) -> None:
    """Make the content of a file durable, or a rename or a new name in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def json_line(value: Any) -> bytes:
    """One line of JSONL. Lone surrogates, which traces can hold and UTF-8 cannot, become `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


def json_problem(error: json.JSONDecodeError) -> str:
    """What is wrong with a line that is not JSON. Parsers would call it line 1, which it is not in its file."""
    return f"not JSON: {error.msg} at column {error.colno}"


def append_jsonl(path: Path, values: Iterable[Any]) -> int:
    """Append one line per value and fsync; the number of lines written."""
    return append_lines(path, [json_line(value) for value in values])


def append_lines(path: Path, lines: Sequence[bytes], *, mode: int | None = None) -> int:
    """Append lines, which end in a newline, and fsync; returns their number. A new file gets `mode`, without one what
    the umask allows."""
    if not lines:
        return 0
    created, initial = not path.exists(), 0o666 if mode is None else PRIVATE
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, initial)) as file:
        if created and mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())
    if created:
        sync(path.parent)
    return len(lines)


def last_lines(file: BinaryIO, count: int) -> Iterator[bytes]:
    """Yield the last complete lines of a file, at most `count`, without reading all of it."""
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
        # Surplus lines are in the block that was read last.
        place = block.find(b"\n", place + 1)
    file.seek(begin + place + 1)
    for _ in range(min(ends, count)):
        yield file.readline()


def torn_line(file: BinaryIO) -> bytes:
    """The incomplete last line of a file; empty if the file ends with a newline."""
    file.seek(_end_of_lines(file))
    return file.read()


def cut_torn_line(path: Path) -> int:
    """Remove an incomplete last line, left by a crash during an append; returns the number of bytes removed.

    The caller must know that it owns the line.
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
    """The offset after the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_bytes(directory: Path) -> Iterator[bytes]:
    """Every file below `directory`, in pieces of at most 1 MiB: its relative path, a NUL, its size in 8 bytes, and
    its content."""
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        yield path.relative_to(directory).as_posix().encode() + b"\0" + path.stat().st_size.to_bytes(8, "big")
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                yield block


def tree_sha256(directory: Path) -> str:
    """A hash of the relative path and the content of every file below `directory`."""
    digest = hashlib.sha256()
    for piece in tree_bytes(directory):
        digest.update(piece)
    return digest.hexdigest()


def remembered_tree_sha256(directory: Path) -> str:
    """`tree_sha256`, computed once for the same files by path, inode, size and time of the last change."""
    found = sorted((str(path), path.stat()) for path in directory.rglob("*") if path.is_file())
    return _remembered(directory, tuple((path, it.st_ino, it.st_size, it.st_mtime_ns) for path, it in found))


@functools.lru_cache(maxsize=64)
def _remembered(directory: Path, _files: tuple[tuple[str, int, int, int], ...]) -> str:
    return tree_sha256(directory)


def shipped_folder() -> Path:
    """The folder of the files that come with Flywheel: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def documentation_pages() -> dict[str, Path]:
    """The pages of the documentation by name, as `flywheel docs` takes them; with a folder where two share a name."""
    docs = shipped_folder() / "docs"
    found = [path for kind in DOCUMENTATION_KINDS for path in sorted((docs / kind).glob("*.md"))]
    times = Counter(path.stem for path in found)
    return {path.stem if times[path.stem] == 1 else f"{path.parent.name}/{path.stem}": path for path in found}
