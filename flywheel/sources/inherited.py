"""Replies that stand in a task file which AgentJet began: they were judged there, and are not judged again."""

from __future__ import annotations

import threading
from pathlib import Path

import orjson
from msgspec.structs import replace

from flywheel.batch import Batch, Entry
from flywheel.states import SkipReason
from flywheel.store.agentjet_file import QaHashes, hashes_in


class Inherited:
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
