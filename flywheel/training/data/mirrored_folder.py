"""A round's directory in two places: the worker's, and that of a trainer on a node which does not have it.

Each side has a `MirroredFolder` and applies the changes of the other. The two sides write a file only one after the
other. A new file never arrives before what was written before it: a checkpoint comes after the rollouts that it was
trained on. Files that are appended to may be ahead of each other, which their readers expect of a worker that died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from flywheel.system.files import PRIVATE, make_private, write_atomic

TAIL: Final = 256
"""So many bytes before its end tell whether a file has only grown."""
LINES: Final = ".jsonl"
"""How the names of files end that are appended to."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a file has from the byte `offset` on; None if it is gone."""

    path: str
    offset: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A file as it was."""

    inode: int
    size: int
    modified: int
    tail: bytes


class MirroredFolder:
    """One of the two places. Hidden files are not mirrored."""

    def __init__(self, folder: Path, left_out: Collection[str] = ()) -> None:
        """`left_out` are names in the folder that are not mirrored."""
        self._folder, self._left_out = folder, frozenset(left_out)
        self._seen: dict[str, _Seen] = {}

    def changes(self) -> list[Change]:
        """What has changed since the last call, or since changes were applied, in the order in which the other side
        has to make it. May be called while the folder is written."""
        found = self._files()
        # Of files that are made meanwhile, a first walk may find the later one alone.
        while found.keys() != (again := self._files()).keys():
            found = again
        gone = [Change(path, 0, None) for path in self._seen.keys() - found.keys()]
        for each in gone:
            del self._seen[each.path]
        # Read now, files of lines have all that was written before the new ones.
        order = sorted(found, key=lambda path: (path not in self._seen, not path.endswith(LINES), found[path]))
        return [*gone, *(change for path in order for change in self._change(path))]

    def _change(self, path: str) -> list[Change]:
        before = self._seen.get(path)
        try:
            with (self._folder / path).open("rb") as file:
                stat = os.fstat(file.fileno())
                if before and (before.inode, before.size, before.modified) == _stamp(stat):
                    return []
                offset = before.size if before and path.endswith(LINES) and _has_grown(file, before, stat) else 0
                file.seek(offset)
                data = file.read()
                self._remember(path, file, (stat.st_ino, offset + len(data), stat.st_mtime_ns))
        except FileNotFoundError:
            return []
        return [Change(path, offset, data)]

    def apply(self, changes: Sequence[Change]) -> None:
        """Make the same changes here. Raises OSError."""
        for change in changes:
            path = self._folder / change.path
            if change.data is None:
                path.unlink(missing_ok=True)
                self._seen.pop(change.path, None)
                while (path := path.parent) != self._folder and not any(path.iterdir()):
                    path.rmdir()
                continue
            if change.offset:
                with path.open("r+b") as file:
                    file.seek(change.offset)
                    file.write(change.data)
                    file.truncate()
            else:
                make_private(path.parent)
                write_atomic(path, change.data, mode=PRIVATE)
            with path.open("rb") as written:
                self._remember(change.path, written, _stamp(os.fstat(written.fileno())))

    def _remember(self, path: str, file: BinaryIO, stamp: tuple[int, int, int]) -> None:
        file.seek(max(0, stamp[1] - TAIL))
        self._seen[path] = _Seen(*stamp, file.read(min(TAIL, stamp[1])))

    def _files(self) -> dict[str, int]:
        """When each file was last changed."""
        found = {}
        for place, folders, names in os.walk(self._folder):
            left_out = self._left_out if place == str(self._folder) else ()
            folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
            for name in names:
                if name not in left_out and not name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        path = Path(place, name)
                        found[str(path.relative_to(self._folder))] = path.stat().st_mtime_ns
        return found


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _has_grown(file: BinaryIO, before: _Seen, stat: os.stat_result) -> bool:
    """Whether a file of lines has what it had, and more lines behind that."""
    if stat.st_ino != before.inode or stat.st_size < before.size:
        return False
    file.seek(before.size - len(before.tail))
    return file.read(len(before.tail)) == before.tail
