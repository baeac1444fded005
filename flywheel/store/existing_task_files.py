"""Existing task files: those of AgentJet are renamed, torn lines cut, other files refused.

A file of AgentJet becomes `tasks-1.jsonl`, or the next free number. Nothing is renamed or cut
before the file is known to contain tasks, so that a wrong path in the configuration loses nothing. Replies that
AgentJet has judged are not judged again.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
from msgspec.structs import replace

from flywheel.errors import StoreError
from flywheel.records.batch import Batch, Entry
from flywheel.records.states import SkipReason
from flywheel.system.files import append_lines, cut_torn_line, sync_directory, torn_line

log = logging.getLogger(__name__)

_KEY: Final = b'{"task_id":"'
_BEGINNING: Final = re.compile(re.escape(_KEY) + rb'(?:[^"\\]|\\.|\\\Z)*+(?P<rest>.*)', re.DOTALL)
_REST: Final = b'","main_query":"'


def prepare(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    """Make a file ready to be appended to: set it aside if AgentJet wrote it, and complete its last line.

    Returns the ids of the tasks in it; `lines_of` chooses the lines to look at. Raises StoreError, and leaves the
    file as it is, if it is not a task file.
    """
    try:
        if is_of_agentjet(path):
            _set_aside(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _mended(path, lines_of) if path.exists() else set()
    except OSError as error:
        raise unwritable(path, error) from error


def _mended(path: Path, lines_of: Callable[[BinaryIO], Iterable[bytes]]) -> set[str]:
    """The ids of the tasks in a file, whose last line is whole afterwards."""
    if not path.is_file():
        raise _foreign(path, "it is no regular file")
    with path.open("rb") as file:
        if file.read(1) not in (b"{", b""):
            raise _foreign(path, "it does not begin with a task")
        file.seek(0)
        found = {_id(path, line) for line in lines_of(file)}
        torn = torn_line(file)
    if torn and _is_json(torn):
        # Whole except for its end. Cutting it could lose a task that is marked as exported.
        found.add(_id(path, torn))
        append_lines(path, [b"\n"])
    elif torn:
        if not _begins_a_task(torn):
            raise _foreign(path, f"its last line is unfinished and no task: {_excerpt(torn)}")
        cut_torn_line(path)
    return found


def _set_aside(path: Path) -> None:
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    path.rename(free := next(name for name in names if not os.path.lexists(name)))
    sync_directory(path.parent)
    log.info("%s was written by AgentJet: it is %s now, and a new one begins", path, free.name)


def numbered(path: Path) -> Iterator[Path]:
    """The files `tasks-1.jsonl`, `tasks-2.jsonl`, … beside a task file, by their numbers."""
    name = re.compile(rf"{re.escape(path.stem)}-([1-9][0-9]*){re.escape(path.suffix)}")
    try:
        found = [(int(number[1]), each) for each in path.parent.iterdir() if (number := name.fullmatch(each.name))]
    except FileNotFoundError:
        return
    yield from (each for _, each in sorted(found))


def is_of_agentjet(path: Path) -> bool:
    """Whether AgentJet wrote a file, by its first line. Raises OSError."""
    try:
        with path.open("rb") as file:
            metadata = metadata_of(file.readline())
    except (FileNotFoundError, IsADirectoryError):
        return False
    return "qa_hash" in metadata and "split" not in metadata


def metadata_of(line: bytes) -> dict[str, Any]:
    """The metadata of a task line; empty if it is none."""
    try:
        metadata = orjson.loads(line)["metadata"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _id(path: Path, line: bytes) -> str:
    try:
        return str(orjson.loads(line)["task_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise _foreign(path, f"it has a line that is not a task: {_excerpt(line)}") from error


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def _begins_a_task(torn: bytes) -> bool:
    """Whether an unfinished line is, byte for byte, the beginning of a line that Flywheel writes."""
    if len(torn) < len(_KEY):
        return _KEY.startswith(torn)
    beginning = _BEGINNING.match(torn)
    return beginning is not None and beginning["rest"][: len(_REST)] == _REST[: len(beginning["rest"])]


def _excerpt(line: bytes) -> str:
    return line[:60].decode(errors="replace").rstrip()


def _foreign(path: Path, why: str) -> StoreError:
    return StoreError(
        f"append to the task file {path}",
        why,
        "Move the file away, or name another with --out or ingest.output; Flywheel writes only to files of its own.",
    )


def unwritable(path: Path, error: OSError) -> StoreError:
    """The error of a task file that cannot be written."""
    return StoreError(
        f"append to the task file {path}",
        error.strerror or str(error),
        "Nothing is lost: the tasks are in the state database and follow when the file can be written.",
        retryable=True,
    )


@dataclass(slots=True)
class AgentJetTasks:
    """The tasks of AgentJet at the place of the task file, read once, when the first replies come. Thread-safe."""

    _path: Path
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _hashes: set[int] | None = None

    def skipped(self, batch: Batch) -> Batch:
        """The batch, in which replies that AgentJet has judged are skipped. Their content hashes stay."""
        with self._reading:
            if self._hashes is None:
                self._hashes = self._read()
        if not self._hashes:
            return batch
        return replace(batch, entries=tuple(self._entry(entry, self._hashes) for entry in batch.entries))

    def _entry(self, entry: Entry, hashes: set[int]) -> Entry:
        if not entry.line or _short(orjson.loads(entry.line)["metadata"]["qa_hash"]) not in hashes:
            return entry
        return replace(
            entry,
            line=b"",
            beginning=0,
            words=(),
            bands=(),
            excluded="",
            skip=SkipReason.IN_TASK_FILE,
            detail=f"its question and answer stand in the file that AgentJet wrote at {self._path}",
        )

    def _read(self) -> set[int]:
        """The hashes in the file of AgentJet at this place, and in those that were set aside from there.

        Raises StoreError (retryable) when one cannot be read.
        """
        found: set[int | None] = set()
        try:
            # The numbered files are listed after the first one was read: it may be set aside meanwhile.
            for path in itertools.chain([self._path], numbered(self._path)):
                if not is_of_agentjet(path):
                    continue
                with path.open("rb") as file:
                    found.update(_short(metadata_of(line).get("qa_hash")) for line in file)
        except OSError as error:
            raise StoreError(
                f"read {error.filename or self._path}, which AgentJet wrote",
                error.strerror or str(error),
                "Check its permissions: what is in it is not judged again.",
                retryable=True,
            ) from error
        return {each for each in found if each is not None}


def _short(qa_hash: object) -> int | None:
    """64 bits of the SHA-256 of question, newline and answer: a file can have a million. None if it is no hash."""
    try:
        return int(qa_hash[:16], 16) if isinstance(qa_hash, str) else None
    except ValueError:
        return None
