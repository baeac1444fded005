"""Task files that AgentJet wrote: their replies were judged there and are not judged again."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace

from flywheel.batch import Batch, Entry
from flywheel.errors import StoreError
from flywheel.states import SkipReason


class AgentJetTasks:
    """What such a file at the task file's place holds. It is read once, when the first replies come. Thread-safe."""

    def __init__(self, task_file: Path) -> None:
        self._path = task_file
        self._reading = threading.Lock()
        self._hashes: QaHashes | None = None

    def skipped(self, batch: Batch) -> Batch:
        """The batch in which no reply that the file holds becomes a task. The hashes of contents stay: they only
        notice changes."""
        with self._reading:
            if self._hashes is None:
                self._hashes = hashes_in(self._path)
        if not self._hashes:
            return batch
        return replace(batch, entries=tuple(self._entry(entry, self._hashes) for entry in batch.entries))

    def _entry(self, entry: Entry, hashes: QaHashes) -> Entry:
        if not entry.line or orjson.loads(entry.line)["metadata"]["qa_hash"] not in hashes:
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


class QaHashes:
    """SHA-256 of question, newline and answer, of which 64 bits are kept: a file can have a million."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._known)

    def __contains__(self, qa_hash: object) -> bool:
        return _short(qa_hash) in self._known

    def add(self, qa_hash: object) -> None:
        if (short := _short(qa_hash)) is not None:
            self._known.add(short)


def _short(qa_hash: object) -> int | None:
    try:
        return int(qa_hash[:16], 16) if isinstance(qa_hash, str) else None
    except ValueError:
        return None


def hashes_in(task_file: Path) -> QaHashes:
    """What stands in a file of AgentJet's at this place, and in those that were set aside from there.

    Raises StoreError (retryable) when one cannot be read.
    """
    found = QaHashes()
    try:
        # One after the other: whoever sets the first one aside meanwhile has given it a number.
        for path in filter(is_agentjets, itertools.chain([task_file], numbered(task_file))):
            with path.open("rb") as file:
                for line in file:
                    found.add(_metadata(line).get("qa_hash"))
    except OSError as error:
        raise StoreError(
            f"read {error.filename or task_file}, which AgentJet wrote",
            error.strerror or str(error),
            "Check its permissions: what is in it is not judged again.",
            retryable=True,
        ) from error
    return found


def is_agentjets(path: Path) -> bool:
    """Whether the first line is a task as AgentJet writes it, and not as Flywheel does. Raises OSError."""
    try:
        with path.open("rb") as file:
            metadata = _metadata(file.readline())
    except (FileNotFoundError, IsADirectoryError):
        return False
    return "qa_hash" in metadata and "split" not in metadata


def numbered(path: Path) -> Iterator[Path]:
    """The names `tasks-1.jsonl`, `tasks-2.jsonl`, … beside a task file, as far as there are files of them."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return itertools.takewhile(os.path.lexists, names)


def _metadata(line: bytes) -> dict[str, Any]:
    try:
        metadata = orjson.loads(line)["metadata"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
